"""A stop from outside ends all ranks' loops after the same whole step, and the jobs go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.loops import ResumableLoop, StopRequest, saved_state, stop_request
from tests.loops.ordinary_loops import Rows
from tests.loops.stop_jobs import Stopped, stop_at_random
from tests.support.ranks import Ranks
from tests.support.scripts import Script, Scripts, as_torchrun

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "stop_and_resume.py"
TASKS = [PipelineTask("decode", lambda ctx: None, pure=True)]


def sent(number: int = signal.SIGTERM) -> None:
    """This process gets a signal."""
    os.kill(os.getpid(), number)


def pipeline() -> SWPipeline[Any]:
    """One that has no threads to end."""
    return SWPipeline(PipelinePlan.serial(TASKS), TASKS, device="cpu")


ITERABLES: dict[str, Callable[[SWPipeline[Any]], Iterable[Any]]] = {
    "a list": lambda pipe: [*range(6)],
    "a generator": lambda pipe: (k for k in range(6)),
    "a DataLoader": lambda pipe: DataLoader(range(6)),
    "a pipeline": lambda pipe: pipe.iterate(range(6)),
    "an overlapped loop": lambda pipe: swpipe.overlap(range(6), TASKS, device="cpu"),
    "a loop over a pipeline": lambda pipe: ResumableLoop(pipe, range(6)),
}


@pytest.mark.parametrize("name", ITERABLES)
def test_a_loop_ends_after_the_step_in_which_the_signal_came(name: str) -> None:
    """The step is whole; a later pass has no step."""
    before, done = signal.getsignal(signal.SIGTERM), 0
    with pipeline() as pipe, StopRequest() as stop:
        for _ in stop.watch(ITERABLES[name](pipe)):
            if done == 2:
                sent()
            assert not stop.requested
            done += 1
        assert (done, stop.requested, stop.reason) == (3, True, "SIGTERM")
        assert [*stop.watch(ITERABLES[name](pipe))] == []
        sent()  # another one changes nothing
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_watched_loop_is_as_the_loop() -> None:
    """Each pass, which begins at ``iter``, its length, and what it raises; after a stop, nothing.

    It ends after whole accumulations, here of three steps, whoever asks: also another thread.
    """
    begun = []

    class Loop:
        def __iter__(self) -> Iterator[int]:
            begun.append(1)
            return iter([1, 2])

        def __len__(self) -> int:
            return 2

    with pytest.raises(RuntimeError, match="is not entered"):
        next(iter(StopRequest().watch("abc")))
    with StopRequest(signals=()) as stop:
        watched = stop.watch(Loop())
        iterator = iter(watched)
        assert (len(watched), begun) == (2, [1])
        assert [*iterator, *watched] == [1, 2, 1, 2]
        with pytest.raises(ZeroDivisionError) as raised:
            next(iter(stop.watch(1 / k for k in range(2))))
        assert not hasattr(raised.value, "__notes__")
        assert not stop.requested
        for k in stop.watch(range(9), every=3):
            if k == 1:
                thread = threading.Thread(target=stop.request, args=("spot",))
                thread.start()
                thread.join()
        assert (k, stop.reason) == (2, "spot")
        assert [*watched] == []
    assert begun == [1, 1]


def enter() -> None:
    """Twice, without signals first."""
    with StopRequest(signals=()):
        pass
    StopRequest().__enter__()


def test_wrong_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another thread, before the process group; a second Ctrl-C is as ever."""
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="only the main thread may handle signals"):
            pool.submit(enter).result()
    with StopRequest(["SIGINT"]) as stop:
        sent(signal.SIGINT)
        assert [*stop.watch("abc")] == []
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(stop_request, "is_alone", lambda: False)
        with pytest.raises(RuntimeError, match="after init_process_group"):
            next(iter(stop.watch("abc")))


def test_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many seconds of the block."""
    now = 100.0
    monkeypatch.setattr(stop_request, "time", SimpleNamespace(monotonic=lambda: now))
    request = StopRequest(after_s=30)
    now = 200.0
    done = []
    with request as stop:
        for k in stop.watch(range(6)):
            done.append(k)
            now += 10
    assert (done, stop.reason) == ([0, 1, 2], "after_s=30 s")


def test_an_evaluation_within_a_step_ends_and_so_does_the_step() -> None:
    """First the inner loop, then the outer one."""
    done = []
    with StopRequest() as stop:
        for k in stop.watch(range(4)):
            for inner in stop.watch("abc"):
                done.append(f"{k}{inner}")
                if done[-1] == "1b":
                    sent()
            done.append(f"{k}")
    assert done == ["0a", "0b", "0c", "0", "1a", "1b", "1"]


@pytest.mark.parametrize("stop_after", [0, 5, 17])
def test_the_state_after_the_loop_is_that_of_the_last_step(stop_after: int) -> None:
    """Also of the last batch of a pass: the epoch that is saved is the one that was ended."""

    def numbers(state: Any, number: int | None) -> tuple[list[float], Any]:
        got: list[float] = []
        torch.manual_seed(0 if state is None else 9)
        loader = DataLoader(Rows(), 4, shuffle=True)
        first = 0
        with (
            swpipe.overlap(loader, TASKS, pull_ahead=True, device="cpu") as loop,
            StopRequest() as stop,
        ):
            if state is not None:
                loop.load_state_dict(state["loop"])
                first = state["epoch"]
            for epoch in range(first, 3):
                for ctx in stop.watch(loop):
                    got.append(float(ctx.batch.sum()))
                    if ctx.iter_idx == number:
                        sent()
                if stop.requested:
                    return got, {"loop": loop.state_dict(), "epoch": epoch}
        return got, None

    expected, _ = numbers(None, None)
    begun, state = numbers(None, stop_after)
    rest, _ = numbers(state, None)
    assert len(begun) == stop_after + 1
    assert begun + rest == expected


# ------------------------------------------------------------------------- other processes


def test_a_forked_process_ends_by_the_signal() -> None:
    """As it would have ended by itself."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    with StopRequest():
        child = fork.Process(target=there.recv)
        child.start()
        child.terminate()
        child.join(20)
    child.kill()  # where it has not ended
    here.close()
    assert child.exitcode == -signal.SIGTERM


def test_it_is_said_why_a_loader_may_have_failed() -> None:
    """The signal has come to this process, and may have come to the loader's workers."""

    def batches() -> Iterator[int]:
        yield 0
        raise RuntimeError("DataLoader worker is killed by signal: Terminated.")

    with StopRequest() as stop:
        rest = iter(stop.watch(batches(), every=2))
        next(rest)
        sent()
        with pytest.raises(RuntimeError, match="killed by signal") as raised:
            next(rest)
    assert "SIGTERM had come before" in raised.value.__notes__[-1]
    assert "a function that calls os.setpgrp()" in raised.value.__notes__[-1]


# ------------------------------------------------------------------------- another number of ranks


def test_a_state_of_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, unless told otherwise."""
    with swpipe.overlap(range(6), TASKS, device="cpu") as loop:
        states = [loop.state_dict() for _ in loop]
        assert states[2]["ranks"] == 1
        monkeypatch.setattr(saved_state, "rank_count", lambda: 4)
        with pytest.raises(ValueError, match="saved on 1 rank, and this job has 4.*check=False"):
            loop.load_state_dict(states[2])
        loop.load_state_dict(states[2], check=False)
        assert [ctx.batch for ctx in loop] == [3, 4, 5]


# ------------------------------------------------------------------------- ranks


def _look_often() -> None:
    stop_request.LOOK_S = 0.01


def _agreed(stop: StopRequest) -> None:
    """The ranks have agreed where to stop."""
    assert stop._ranks is not None
    stop._ranks._thread.join(60)


def _one_is_asked(asked: int) -> tuple[int, str]:
    _look_often()
    done = 0
    with StopRequest() as stop:
        for k in stop.watch(range(10**6)):
            total = torch.tensor(1.0)
            dist.all_reduce(total)  # a rank that stops alone would be missed
            done += 1
            if k == 3 and dist.get_rank() == asked:
                sent()
        return done, stop.reason


@pytest.mark.parametrize("asked", [1, 3])
def test_all_ranks_stop_where_one_is_asked(four_ranks: Ranks, asked: int) -> None:
    """After the same step, though each step needs all ranks."""
    ends = four_ranks.run(_one_is_asked, asked)
    assert len({*ends}) == 1
    assert ends[0][0] > 3
    assert ends[0][1] == f"SIGTERM on rank {asked}"


def _one_has_ended() -> tuple[int, bool]:
    """Rank 0 has left; rank 1 is asked in the last step."""
    _look_often()
    done = 0
    with StopRequest() as stop:
        for k in stop.watch(range(3)):
            done += 1
            if dist.get_rank() == 1 and k == 2:
                dist.barrier()
                sent()
                _agreed(stop)
    if dist.get_rank() == 0:
        dist.barrier()
    return done, stop.requested


def test_no_rank_stops_where_another_one_has_ended(two_ranks: Ranks) -> None:
    """It would save, and the other one would not."""
    assert two_ranks.run(_one_has_ended) == [(3, False), (3, False)]


def _uneven() -> list[int]:
    """Rank 0 has less data, and waits between its passes when rank 1 is asked."""
    _look_often()
    rank, done = dist.get_rank(), []
    with StopRequest() as stop:
        for length in ((2, 4)[rank], 5):
            for k in stop.watch(range(length)):
                done.append(k)
                if rank == 1 and k == 2:
                    dist.barrier()
                    sent()
                    _agreed(stop)
            if rank == 0 and not stop.requested:
                dist.barrier()
            dist.barrier()
            if stop.requested:
                break
        else:
            done.append(-1)
    return done


def test_ranks_whose_data_ends_earlier_wait_for_nobody(two_ranks: Ranks) -> None:
    """The others finish the pass; all stop before the next one."""
    assert two_ranks.run(_uneven) == [[0, 1], [0, 1, 2, 3]]


def _none_answers(seconds: float) -> str:
    """Rank 1 has no request."""
    _look_often()
    stop_request.ANSWER_S = seconds
    told = ""
    if dist.get_rank() == 0:
        try:
            with StopRequest() as stop:
                for k in stop.watch(range(3)):
                    if k == 1:
                        sent()
                        _agreed(stop)
        except RuntimeError as error:
            told = str(error)
    else:
        next(stop_request._numbers)
    stop_request.ANSWER_S = 60.0
    dist.barrier()
    return told


def test_a_rank_that_does_not_answer_is_an_error(two_ranks: Ranks) -> None:
    """It is said which, and what to do."""
    told, _ = two_ranks.run(_none_answers, 0.3)
    assert "is to stop (SIGTERM), and the ranks could not agree where: rank 1 did not" in told
    assert "each rank enters as many" in told


@pytest.mark.parametrize(
    ("ranks", "kind"), [("one_rank", "prefetched"), ("two_ranks", "overlapped")]
)
def test_a_job_that_is_stopped_goes_on_bit_for_bit(
    request: pytest.FixtureRequest, ranks: str, kind: str
) -> None:
    """At random moments, one or all ranks being asked: the same losses and parameters."""
    group: Ranks = request.getfixturevalue(ranks)
    by_rank: list[Stopped] = group.run(stop_at_random, kind, 3, 0.4, deadline_s=360.0)
    assert all(one.same for one in by_rank)
    assert len({tuple(one.after) for one in by_rank}) == 1
    assert by_rank[0].stops >= 3


# ------------------------------------------------------------------------- under torchrun


def _as_under_torchrun(scripts: Scripts, folder: Path) -> list[str]:
    """The last losses that two ranks print, without the launcher, and without workers."""
    job = Script(path=str(folder / "job.py"), folder=str(folder))
    ranks = [{**told, "WORKERS": "0", "WAITS_S": "0"} for told in as_torchrun(2)]
    ended = scripts.run_together([replace(job, environment=told) for told in ranks])
    said = "".join(one.stdout for one in ended)
    return sorted(line for line in said.splitlines() if "last loss" in line)


def _torchrun(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    told = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{EXAMPLE.parents[2]}"}
    return subprocess.Popen(
        [*command, "--nproc-per-node=2", "job.py"],
        cwd=folder,
        # So that the signal comes in the first pass, most often: each pass begins a worker.
        env={**os.environ, **told, "WORKERS": "1", "WAITS_S": "0.2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# CPython 3.11 can hang in a child that is forked beside other threads.
OF_WORKERS = """
        num_workers=(workers := int(os.environ["WORKERS"])),
        multiprocessing_context="spawn" if workers else None"""
WAITS = "threading.Event().wait(float(os.environ['WAITS_S'])); loss = ctx.loss.item()"


@pytest.mark.slow
def test_torchrun_stops_the_job_of_the_guide(scripts: Scripts, tmp_path: Path) -> None:
    """SIGTERM to the launcher, which sends it to ranks and workers; started again it goes on.

    Rows have no noise: what workers draw would need a worker in each run, and is tested elsewhere.
    """
    code = EXAMPLE.read_text(encoding="utf-8")
    for old, new in {
        "import os\n": "import os\nimport threading\n",
        " + torch.rand(4) / 10": "",
        "num_workers=1": OF_WORKERS,
        "EPOCHS, CHECKPOINT = 3,": "EPOCHS, CHECKPOINT = 2,",
        "loss = ctx.loss.item()": f'{WAITS}; Path(f"epoch-{{epoch}}").touch()',
    }.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "job.py").write_text(code)
    expected = _as_under_torchrun(scripts, tmp_path)
    for file in tmp_path.glob("epoch-*"):
        file.unlink()

    job, pause = _torchrun(tmp_path), threading.Event()
    while not (tmp_path / "epoch-0").exists():
        assert job.poll() is None
        pause.wait(1e-3)
    job.terminate()
    said, _ = job.communicate(timeout=180)
    assert said.count("(SIGTERM on rank ") == 2, said
    assert (tmp_path / "checkpoint.pt").exists()
    assert _as_under_torchrun(scripts, tmp_path) == expected
    assert len(expected) == 2
