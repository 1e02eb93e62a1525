"""A request to stop ends the loops of all ranks after the same step, and jobs can be resumed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import swpipe
from swpipe import PipelineTask
from swpipe.loops import StopRequest, saved_state, stop_request
from tests.loops.ordinary_loops import Rows
from tests.support.ranks import Ranks
from tests.support.scripts import ROOT, Script, Scripts, as_torchrun

EXAMPLE = ROOT / "docs" / "examples" / "stop_and_resume.py"
TASKS = [PipelineTask("decode", lambda ctx: None, pure=True)]


def sent(number: int = signal.SIGTERM) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


def a_generator() -> Iterator[int]:
    """Yield six steps."""
    yield from range(6)


def overlapped() -> Iterable[Any]:
    """Return the same steps from an overlapped loop."""
    return swpipe.overlap(range(6), TASKS, device="cpu")


@pytest.mark.parametrize("make", [a_generator, overlapped])
def test_a_loop_ends_after_the_step_in_which_the_signal_came(
    make: Callable[[], Iterable[Any]],
) -> None:
    """The step is whole; a later pass has no step."""
    before, done = signal.getsignal(signal.SIGTERM), 0
    with StopRequest() as stop:
        for _ in stop.watch(make()):
            if done == 2:
                sent()
            assert not stop.requested
            done += 1
        assert (done, stop.requested, stop.reason) == (3, True, "SIGTERM")
        assert [*stop.watch(make())] == []
        sent()  # another one changes nothing
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_watched_loop_is_as_the_loop() -> None:
    """It has the loop's passes, length and errors; after a stop, it yields nothing.

    It ends after whole accumulations, here of three steps. Another thread may request it, too.
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
    """Enter twice, first without signals."""
    with StopRequest(signals=()):
        pass
    StopRequest().__enter__()


def test_wrong_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are another thread, and no process group; a second Ctrl-C is as usual."""
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
    """It is over after a number of seconds of the block."""
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
    """First the inner loop ends, then the outer one."""
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
    """This includes the last batch of a pass: the saved epoch is the one that has ended."""

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
    """It ends as it would without the request."""
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
    """The signal came to this process, and may have come to the loader's workers."""

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
    """The error says so, unless the user allows it."""
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
    """Wait until the ranks have agreed where to stop."""
    assert stop._ranks is not None
    stop._ranks._thread.join(60)


def _some_are_asked(asked: dict[int, int]) -> tuple[int, str]:
    """Ask some ranks to stop, in given steps."""
    _look_often()
    done = 0
    with StopRequest() as stop:
        for k in stop.watch(range(10**6)):
            total = torch.tensor(1.0)
            dist.all_reduce(total)  # a rank that stops alone would be missed
            done += 1
            if k == asked.get(dist.get_rank()):
                sent()
        return done, stop.reason


@pytest.mark.parametrize("asked", [{0: 0}, {3: 7}, {1: 2, 2: 2}])
def test_all_ranks_stop_where_some_are_asked(four_ranks: Ranks, asked: dict[int, int]) -> None:
    """They stop after the same step, though each step needs all ranks."""
    ends = four_ranks.run(_some_are_asked, asked)
    assert len({*ends}) == 1
    assert ends[0][0] > max(asked.values())
    assert ends[0][1] in [f"SIGTERM on rank {rank}" for rank in asked]


def _one_has_ended() -> tuple[int, bool]:
    """Ask rank 1 in its last step, when rank 0 has left."""
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
    """It would save a state, and the other rank would not."""
    assert two_ranks.run(_one_has_ended) == [(3, False), (3, False)]


def _uneven() -> list[int]:
    """Ask rank 1 while rank 0, which has less data, waits between its passes."""
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
    """Run with a request on rank 0 only."""
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
    """The error says which rank, and what to do."""
    told, _ = two_ranks.run(_none_answers, 0.3)
    assert "is to stop (SIGTERM), and the ranks could not agree where: rank 1 did not" in told
    assert "each rank enters as many" in told


# ------------------------------------------------------------------------- under torchrun


ASKS = """
def asks_launcher(stop, rank):
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    while not stop._asked:
        threading.Event().wait(1e-3)
"""
IN_STEP = 'if "ASKS" in os.environ and ctx.iter_idx == 3: asks_launcher(stop, rank)'
# CPython 3.11 can hang in a child that is forked while other threads run.
OF_RANK_0 = """
        num_workers=(workers := int(rank == 0 and "ASKS" in os.environ)),
        multiprocessing_context="spawn" if workers else None"""


@pytest.mark.slow
def test_torchrun_stops_the_job_of_the_guide(scripts: Scripts, tmp_path: Path) -> None:
    """SIGTERM reaches the launcher, then ranks and a worker; the restarted job goes on.

    Rows have no noise: the draws of workers would need a worker in each run, and are tested
    elsewhere.
    """
    code = EXAMPLE.read_text(encoding="utf-8")
    for old, new in {
        "import os\n": "import os\nimport signal\nimport threading\n",
        " + torch.rand(4) / 10": "",
        "[decode, step])": "[decode, step], pull_ahead=True)",  # as much where there is no worker
        "num_workers=1": OF_RANK_0,
        "EPOCHS, CHECKPOINT = 3,": f"{ASKS}\nEPOCHS, CHECKPOINT = 2,",
        "loss = ctx.loss.item()": f"loss = ctx.loss.item()\n                {IN_STEP}",
    }.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    job = tmp_path / "job.py"
    job.write_text(code)

    def last_losses() -> list[str]:
        ranks = [Script(path=f"{job}", folder=f"{tmp_path}", environment=e) for e in as_torchrun(2)]
        ended = scripts.run_together(ranks)
        return sorted(one.stdout for one in ended)

    expected = last_losses()
    told = {"ASKS": "", "PYTHONPATH": f"{ROOT}"}
    launch = ("--standalone", "--nproc-per-node=2", f"{job}")
    launcher = Script(
        module="torch.distributed.run", args=launch, folder=f"{tmp_path}", environment=told
    )
    said = "".join(scripts.run(launcher, deadline_s=240)[1:])
    assert said.count("(SIGTERM on rank ") == 2, said
    assert (tmp_path / "checkpoint.pt").exists()
    assert last_losses() == expected
    assert "".join(expected).count("the last loss is") == 2
