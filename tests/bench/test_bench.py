"""The benchmarks run at sizes too small to be meaningful; what they compute is right."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from bench import (
    ahead,
    behind,
    data_bound,
    dispatch,
    extras,
    gains,
    gpu,
    interval,
    layer_overlap,
    loader,
    memory,
    pipeline_parallel,
    predicted_schedules,
    profiler,
    serial,
    sharded_stages,
    v_schedule,
    workers,
)
from bench.measure import Row, Spread, interleaved, ratios, table
from bench.pipeline_parallel import COSTS_MS
from bench.standin import GroupQueues, TaskQueues
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.support.ranks import Ranks

PLAN = PipelinePlan(
    {
        "square": TaskSchedule(0, thread_group="a"),
        "total": TaskSchedule(1, thread_group="b"),
        "label": TaskSchedule(2),
    },
    deps=[("total", "square"), ("label", "total")],
    pipeline_depth=4,
)


def sums() -> list[PipelineTask]:
    """Return tasks in which each iteration adds to the sum of the earlier ones."""
    seen = [0]

    def square(ctx: IterContext) -> None:
        ctx.square = ctx.batch**2

    def total(ctx: IterContext) -> None:
        seen.append(seen[-1] + ctx.square)
        ctx.total = seen[-1]

    def label(ctx: IterContext) -> None:
        ctx.label = f"{ctx.total}"

    return [PipelineTask(fn.__name__, fn) for fn in (square, total, label)]


def totals(engine: dispatch.Engine, iterations: int) -> list[int]:
    """Return the labels that the engine returns, up to the end of the data."""
    data = iter(range(iterations))
    found = []
    while True:
        try:
            found.append(int(engine.progress(data).label))
        except StopIteration:
            return found


@pytest.mark.parametrize("stand_in", [TaskQueues, GroupQueues])
def test_a_stand_in_runs_the_same_plan_to_the_same_end(stand_in: dispatch.StandIn) -> None:
    """The stand-in and swpipe return the same contexts in the same order, and the same error."""

    def fail(ctx: IterContext) -> None:
        raise ValueError("as planned")

    with SWPipeline(PLAN, sums(), device="cpu") as ours, stand_in(PLAN, sums()) as theirs:
        for iterations in (0, 1, 3, 4, 50, 2):  # one iterator after the other
            assert totals(theirs, iterations) == totals(ours, iterations)
    fails = [PipelineTask(name, fail) for name in PLAN.schedule]
    with stand_in(PLAN, fails) as engine, pytest.raises(ValueError, match="as planned"):
        engine.progress(iter(range(3)))


def intervals(folder: Path) -> list[Row]:
    """Measure the intervals of tasks that block, and of real work."""
    case = interval.CASES[0]
    tasks = data_bound.loop_tasks()
    return [
        interval.row(case, 1, periods=5),
        interval.predicted_row("loop", data_bound.PLAN, tasks, data_bound.files(folder), 1, 3),
    ]


SECTIONS: dict[str, tuple[Callable[[Path], Iterable[Row]], list[float | None]]] = {
    "dispatch": (lambda _: dispatch.rows(rounds=1, iterations=3), [0.2, 0.5, *[None] * 5]),
    "v_schedule": (lambda _: v_schedule.rows(rounds=1, n=2, m=4), [1.0, None]),
    "interval": (intervals, [interval.BAR, interval.REAL_BAR]),
    "profiler": (lambda _: profiler.rows(rounds=1), [profiler.PYTHON_BAR, profiler.KERNEL_BAR]),
    "serial": (lambda _: serial.rows(rounds=1, iterations=2), [1.02]),
    "extras": (lambda _: extras.rows(rounds=1, iterations=3), [1.0, None, 1.0, 1.02]),
    "gains": (lambda folder: [gains.one_model("images", 9, 3, folder)], [None]),
    "workers": (
        lambda _: workers.rows(rounds=1, batches=3, read_s=0.002)[:8], [workers.WAITING_MOST] * 8
    ),
    "behind": (lambda _: behind.rows(rounds=1, batches=3, scale=0.05), [behind.MOST] * 3),
}  # fmt: skip
"""The sections, at sizes too small for a verdict, with the bars of their rows."""


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_runs_and_its_rows_have_their_bars(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row with a bar has a ratio that is compared with it."""
    # On a busy machine a hand-over between threads takes 10 to 50 ms instead of 10 us.
    for module in (dispatch, extras, workers):
        monkeypatch.setattr(module, "WARM_UP", 1)
    measure, bars = SECTIONS[name]
    rows = [*measure(tmp_path)]
    assert [row.bar for row in rows] == bars
    assert all(row.ratio is not None for row in rows if row.bar is not None)


def test_memory_stays_flat_unless_a_context_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is less than the size of one leaked context."""
    assert memory.growth(100).python_kib < memory.PYTHON_KIB
    kept: list[IterContext] = []
    progress = SWPipeline.progress
    monkeypatch.setattr(
        SWPipeline, "progress", lambda pipe, data: kept.append(progress(pipe, data))
    )
    assert memory.growth(20).python_kib > memory.PYTHON_KIB


def test_layers_overlap_in_both_ways_to_run_them(two_ranks: Ranks) -> None:
    """The bits are equal; the bound is that of a forward, periods of both, and a backward."""
    for measured in two_ranks.run(layer_overlap.on_rank, ("dense", "moe"), 1, 16, 1):
        assert measured.same
        assert len(measured.serial_ms) == len(measured.overlapped_ms) == 1
    work_ms = {"f": 10.0, "b": 20.0, "dw": 5.0}
    made = layer_overlap.Measured(1, 4, [], [], work_ms, same=True)
    assert made.serial_bound_ms == 8 * (10 + 20 + 60 + 40)
    assert made.bound_ms == (10 + 60) + 7 * (10 + 60) + (20 - 5 + 40)


def test_schedules_run_on_ranks(two_ranks: Ranks) -> None:
    """Each contender has its times and a prediction."""
    for times, predicted_ms, _ in two_ranks.run(pipeline_parallel.on_rank, 1, 0.05, 0.02):
        assert times.keys() == predicted_ms.keys() == {"ours", *pipeline_parallel.BARS}
        assert all(len(each) == 1 for each in times.values())


def test_sharded_stages_run_on_both_runtimes(four_ranks: Ranks) -> None:
    """The gradients are equal; no prediction is below the passes of a rank."""
    scale = 0.05
    asleep_ms = scale * sum(sharded_stages.COSTS_MS) * 2 * sharded_stages.STAGES_OF_A_RANK
    runs = four_ranks.run(sharded_stages.on_rank, 2, 1, scale, deadline_s=240.0)
    for times, predicted_ms in runs:
        assert [*times] == ["ours", "torch's cells", "torch's runtime"]
        assert predicted_ms >= asleep_ms
    for times in four_ranks.run(sharded_stages.computing_on_rank, 2, 1, 16, deadline_s=240.0):
        assert [len(each) for each in times.values()] == [1, 1, 1]


def test_predictions_are_made_of_each_schedule(two_ranks: Ranks) -> None:
    """They are made from measured costs: none is below the time in which a rank's passes sleep."""
    scale = 0.05
    for found in two_ranks.run(predicted_schedules.on_rank, 1, scale):
        assert [*found] == ["1F1B", "ZBV", "V-Min", "DualPipe-V"]
        assert [len(times) for _, times in found.values()] == [1] * 4
        asleep_ms = 2 * predicted_schedules.MICROBATCHES * sum(COSTS_MS) * scale
        assert min(predicted for predicted, _ in found.values()) >= asleep_ms


def test_a_measured_step_is_drawn_as_the_predicted_one(two_ranks: Ranks) -> None:
    """It has the same passes on each rank, in the same order."""
    for rank, (report, spans) in enumerate(two_ranks.run(predicted_schedules.traced, "ZBV", 0.05)):
        ran = [(s.task, s.iteration) for s in sorted(spans, key=lambda span: span.start_ns)]
        planned = [(f"{a.stage}{a.op}", a.micro) for a in report.schedule.actions[rank]]
        # Stage 0 runs its whole backward pass in W: its I then shows where W begins.
        if rank == 0:
            ran = [one for one in ran if one[0] != "0I"]
            planned = [one for one in planned if one[0] != "0I"]
        assert ran == planned


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_bench_says_that_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    """Without CUDA it neither fails nor stays silent."""
    assert gpu.main() == 0
    assert "skipped" in capsys.readouterr().out


def test_rounds_turn_round_and_ratios_are_taken_in_each() -> None:
    """A round that was slow for both changes nothing; the verdict is the median's."""
    called: list[str] = []

    def measure(name: str, value: float) -> float:
        called.append(name)
        return value

    results = interleaved(2, lambda: measure("a", 1.0), lambda: measure("b", 2.0))
    assert called == ["a", "b", "b", "a"]
    assert results == [[1.0, 1.0], [2.0, 2.0]]
    assert ratios([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == Spread(0.5, 0.5, 0.5)
    for ratio, bar, verdict in ((1.0, 1.0, "PASS"), (1.01, 1.0, "MISS"), (9.0, None, "")):
        row = Row("what", "ours", "theirs", Spread(ratio, 0.0, 99.0), bar)
        assert row.verdict == verdict
        assert table([row]).splitlines()[-1].endswith(verdict)


def test_a_loop_over_a_thread_and_queue_may_be_left_early() -> None:
    """Its thread, which waits to put a batch, ends with the loop."""
    before = threading.active_count()
    batches = loader.pulled_by_hand(itertools.count(), most=2)
    assert [*itertools.islice(batches, 3)] == [0, 1, 2]
    batches.close()
    assert threading.active_count() == before


def test_each_other_way_does_the_same(tmp_path: Path) -> None:
    """They yield a loader's batches in order, all files decoded, and the losses of the loop."""
    for name, way in ahead.WAYS.items():
        if not data_bound.absent(name):
            assert [*way(batch for batch in range(7))] == [*range(7)]
    for decode, data in workers.files().values():
        for name, other in {**workers.OTHERS, "plain loop": workers.by_swpipe}.items():
            if not data_bound.absent(name):
                for one, file in zip(other(data, decode, 2), data, strict=True):
                    assert torch.equal(one, decode(file))
    paths = data_bound.files(tmp_path, count=5, rows=64)
    runs = loader.overlapped, *(run for run, _ in loader.OTHERS.values())
    ours, *others = ([ctx.loss.item() for ctx in run(loader.Loop(paths))] for run in runs)
    assert others == [ours] * len(others)
    assert len(ours) == 5
