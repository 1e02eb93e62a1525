"""The benchmarks run, at sizes too small to tell anything; what they compute is right."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

from bench import (
    ahead,
    data_bound,
    dispatch,
    extras,
    gains,
    gpu,
    interval,
    layer_overlap,
    loader,
    make,
    memory,
    pipeline_parallel,
    predict,
    profiler,
    serial,
    step_times,
    streams,
    v_schedule,
    workers,
)
from bench.measure import Row, Spread, interleaved, ratios, table
from bench.standin import GroupQueues, TaskQueues
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.support.ranks import Ranks


def sums(*, carried: bool = True) -> PipelinePlan:
    """Two groups and the caller; ``carried``: dependences of one and two iterations."""
    seen: list[int] = []

    def square(ctx: IterContext) -> None:
        ctx.square = ctx.batch**2

    def total(ctx: IterContext) -> None:
        seen.append((seen[-1] if seen else 0) + ctx.square)
        ctx.total = seen[-1]

    def label(ctx: IterContext) -> None:
        ctx.label = f"{ctx.iter_idx}: {ctx.total}"

    return PipelinePlan(
        schedule={
            PipelineTask("square", square): TaskSchedule(0, thread_group="a"),
            PipelineTask("total", total): TaskSchedule(1, thread_group="b"),
            PipelineTask("label", label): TaskSchedule(1 if carried else 2),
        },
        deps=[("total", "square"), ("label", "total")],
        cross_iter_deps=[("total", "total"), ("label", "label", 2)] if carried else [],
        pipeline_depth=4,
    )


def labels(engine: dispatch.Engine, iterations: int) -> list[str]:
    """What the engine hands out, up to the end of the data."""
    data = iter(range(iterations))
    found = []
    while True:
        try:
            found.append(engine.progress(data).label)
        except StopIteration:
            return found


BOTH = pytest.mark.parametrize("stand_in", [TaskQueues, GroupQueues])


@BOTH
@pytest.mark.parametrize("iterations", [0, 1, 3, 4, 50])
def test_a_stand_in_runs_the_same_plan_to_the_same_end(
    stand_in: dispatch.StandIn, iterations: int
) -> None:
    """Stand-in and swpipe hand out the same contexts in the same order, short data included."""
    mine, other = (sums(carried=stand_in is TaskQueues) for _ in range(2))
    with SWPipeline(mine, device="cpu") as ours, stand_in(other, other.tasks) as theirs:
        assert labels(theirs, iterations) == labels(ours, iterations)


@BOTH
def test_a_stand_in_runs_one_iterator_after_another(stand_in: dispatch.StandIn) -> None:
    """A drained stand-in starts anew."""
    plan = sums(carried=stand_in is TaskQueues)
    with stand_in(plan, plan.tasks) as engine:
        assert labels(engine, 2) == ["0: 0", "1: 1"]
        assert labels(engine, 2) == ["0: 1", "1: 2"]


@BOTH
def test_a_stand_in_raises_what_a_task_raised(stand_in: dispatch.StandIn) -> None:
    """A failing task reaches the caller, and the workers end."""

    def fail(ctx: IterContext) -> None:
        raise ValueError("as planned")

    plan = PipelinePlan(
        {
            PipelineTask("fail", fail): TaskSchedule(thread_group="a"),
            PipelineTask("after", dispatch.nothing): TaskSchedule(1),
        },
        deps=[("after", "fail")],
    )
    with stand_in(plan, plan.tasks) as engine, pytest.raises(ValueError, match="as planned"):
        engine.progress(iter(range(3)))


def test_a_stand_in_refuses_what_it_cannot_run() -> None:
    """Plans that would not be comparable are refused."""
    plan = PipelinePlan({PipelineTask("a", dispatch.nothing): TaskSchedule(globally_ordered=True)})
    with pytest.raises(ValueError, match="deps and cross_iter_deps only"):
        TaskQueues(plan, plan.tasks)
    mixed = dispatch.plan(dispatch.THREE * 4, depth=5)
    with pytest.raises(ValueError, match="one thread group per stage"):
        GroupQueues(mixed, mixed.tasks)
    carried = sums()
    with pytest.raises(ValueError, match="one thread group per stage"):
        GroupQueues(carried, carried.tasks)


@pytest.mark.parametrize(
    ("case", "by_hand_ms"), list(zip(interval.CASES, (14.0, 14.0, 12.0, 14.0), strict=True))
)
def test_lower_bounds_are_those_worked_out_by_hand(case: interval.Case, by_hand_ms: float) -> None:
    """The busiest group, or the heaviest cycle over its distance."""
    assert interval.bound_ms(case.plan, case.ms) == pytest.approx(by_hand_ms, abs=1e-4)


def test_dispatch_runs() -> None:
    """Each row names its bar."""
    rows = dispatch.rows(rounds=1, iterations=3)
    assert [row.bar for row in rows] == [0.2, 0.5, None, None, None, None, None]


def test_making_a_pipeline_is_timed() -> None:
    """A thousand tasks have a bar."""
    assert [row.bar for row in make.rows(rounds=1)] == [None, 1.0]


def test_the_generator_of_schedules_is_measured() -> None:
    """Against its bar in seconds, and beside torch's class."""
    rows = v_schedule.rows(rounds=1, n=2, m=4)
    assert [(row.bar, row.missed) for row in rows] == [(1.0, False), (None, False)]
    assert "torch's ZBV" in rows[1].beside


@pytest.mark.parametrize("name", data_bound.OTHERS)
def test_the_data_bound_loop_gives_the_same_losses_everywhere(name: str, tmp_path: Path) -> None:
    """Each way to run the loop trains on the same batches in the same order."""
    if data_bound.absent(name):
        pytest.skip(f"{name} is not installed")
    paths = data_bound.files(tmp_path, count=5, rows=64)
    ours, theirs = (
        [ctx.loss.item() for ctx in run(data_bound.loop(), paths)]
        for run in (data_bound.run_swpipe, data_bound.OTHERS[name])
    )
    assert ours == theirs
    assert len(ours) == 5


def test_an_absent_package_is_named_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows are measured all the same."""
    monkeypatch.setattr(data_bound, "absent", lambda name: name != "plain loop")
    rows = data_bound.rows(rounds=1, batches=4)
    assert [row.ratio is None for row in rows] == [False, True, True]
    assert all("make bench installs it" in row.ours for row in rows[1:])


def test_interval_runs() -> None:
    """Each plan is held against its bound."""
    row = interval.row(interval.CASES[0], rounds=1, periods=5)
    assert row.bar == interval.BAR
    assert row.ratio is not None


def test_the_profilers_truth_runs() -> None:
    """Exposed times, then the lock; each row with its bar."""
    rows = profiler.rows(rounds=1, measure=2)
    bars = [profiler.EXPOSED_BAR] * 2 + [profiler.PYTHON_BAR, profiler.KERNEL_BAR]
    assert [row.bar for row in rows] == bars


@pytest.mark.slow
def test_predictions_run(tmp_path: Path) -> None:
    """A row for tasks that block, and one for real work, each with its bar."""
    blocking = next(predict.blocking())
    assert predict.row(blocking, rounds=1, periods=3).bar == predict.BLOCKING_BAR
    with predict.streaming() as streams_of_three:
        assert predict.row(streams_of_three, rounds=1, periods=3).bar == predict.BLOCKING_BAR
    loop = predict.data_bound(tmp_path, pipelined=True)
    assert predict.row(loop, rounds=1, periods=3).bar == predict.REAL_BAR


def test_serial_runs() -> None:
    """One row beside the bare loop."""
    assert [row.bar for row in serial.rows(rounds=1, iterations=2)] == [1.02]


def test_step_times_are_measured() -> None:
    """On tasks that take time, as a ratio; on empty ones, in microseconds."""
    assert [row.bar for row in step_times.rows(rounds=1, iterations=2)] == [1.02, 1.0]


def test_memory_stays_flat() -> None:
    """Two hundred iterations leave nothing behind."""
    assert memory.growth(200).python_kib < memory.PYTHON_KIB


def test_a_kept_context_shows_in_the_memory_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is below what one context too many holds."""
    kept: list[IterContext] = []
    progress = SWPipeline.progress
    monkeypatch.setattr(
        SWPipeline, "progress", lambda pipe, data: kept.append(progress(pipe, data))
    )
    assert memory.growth(20).python_kib > memory.PYTHON_KIB


def test_streams_run() -> None:
    """Two rows, which inform."""
    assert [row.bar for row in streams.rows(rounds=1, periods=1)] == [None, None]


def test_layers_overlap_in_both_ways_to_run_them(two_ranks: Ranks) -> None:
    """The same bits; and the bound is that of a forward, periods of both, and a backward."""
    for measured in two_ranks.run(layer_overlap.on_rank, ("dense", "moe"), 1, 16, 1):
        assert measured.same
        assert len(measured.serial_ms) == len(measured.overlapped_ms) == 1
    work_ms = {"f": 10.0, "b": 20.0, "dw": 5.0}
    made = layer_overlap.Measured(1, 4, [], [], work_ms, same=True)
    assert made.serial_bound_ms == 8 * (10 + 20 + 60 + 40)
    assert made.bound_ms == (10 + 60) + 7 * (10 + 60) + (20 - 5 + 40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_bench_says_that_it_skips(capsys: pytest.CaptureFixture[str]) -> None:
    """Without CUDA it is no failure, and no silence either."""
    assert gpu.main() == 0
    assert "skipped" in capsys.readouterr().out


def test_what_only_informs_runs() -> None:
    """Rows without a bar can not be missed."""
    assert not any(row.missed for row in extras.rows(rounds=1, iterations=3))


def test_interleaved_rounds_turn_round() -> None:
    """Every second round goes backwards, and each measure keeps its own results."""
    called: list[str] = []

    def measure(name: str, value: float) -> float:
        called.append(name)
        return value

    results = interleaved(2, lambda: measure("a", 1.0), lambda: measure("b", 2.0))
    assert called == ["a", "b", "b", "a"]
    assert results == [[1.0, 1.0], [2.0, 2.0]]


def test_ratios_are_taken_round_by_round() -> None:
    """A round that was slow for both changes nothing."""
    assert ratios([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("ratio", "bar", "verdict"), [(1.0, 1.0, "PASS"), (1.01, 1.0, "MISS"), (9.0, None, "")]
)
def test_the_verdict_is_that_of_the_median(ratio: float, bar: float | None, verdict: str) -> None:
    """At the bar passes; above it misses; without a bar there is no verdict."""
    row = Row("what", "ours", "theirs", Spread(ratio, 0.0, 99.0), bar)
    assert row.verdict == verdict
    assert table([row]).splitlines()[-1].endswith(verdict)


@pytest.mark.slow
def test_pipeline_schedules_are_compared() -> None:
    """Two ratios with bars, and a prediction of each contender."""
    rows = pipeline_parallel.rows(rounds=1, scale=0.05, effort=0.02)
    assert [row.bar for row in rows] == [0.9, 1.05, None, None, None]


def test_gains_are_measured_on_the_models_of_the_command_line(tmp_path: Path) -> None:
    """The image model, serially and under its plan, in turns."""
    row = gains.one_model("images", 9, 3, tmp_path)
    assert row.what.startswith("image model")
    assert row.ratio is not None
    assert row.bar is None


def test_a_loop_over_a_thread_and_queue_may_be_left_early() -> None:
    """Its thread, which waits to put a batch, ends with it; what it hands out is the loader's."""
    before = threading.active_count()
    batches = loader.pulled_by_hand(itertools.count(), most=2)
    assert [*itertools.islice(batches, 3)] == [0, 1, 2]
    batches.close()
    assert threading.active_count() == before
    assert [*loader.pulled_by_hand(range(4))] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of torch
@pytest.mark.parametrize("name", [*ahead.WAYS])
def test_each_way_to_pull_ahead_hands_out_the_same(name: str) -> None:
    """All batches of a loader without a length, in order, and no more."""
    if data_bound.absent(name):
        pytest.skip("not installed")
    assert [*ahead.WAYS[name](batch for batch in range(7))] == [*range(7)]


@pytest.mark.parametrize("name", [*workers.OTHERS])
def test_each_way_to_decode_on_several_threads_hands_out_the_same(name: str) -> None:
    """All files, in order."""
    if data_bound.absent(name):
        pytest.skip("not installed")
    for decode, data in workers.files().values():
        found = [*workers.OTHERS[name](data, decode, 2)]
        assert all(torch.equal(a, decode(b)) for a, b in zip(found, data, strict=True))
        ours = workers.by_swpipe(data, decode, 2)
        assert all(torch.equal(a, b) for a, b in zip(ours, found, strict=True))


@pytest.mark.slow
def test_several_threads_are_held_against_the_least_and_the_best_other() -> None:
    """Eight numbers of threads, and one bar for each kind of file."""
    rows = workers.rows(rounds=1, batches=3, read_s=0.002)
    assert [row.bar for row in rows[:8]] == [workers.WAITING_MOST] * 8
    bars = [row.bar for row in rows[8:] if row.bar is not None]
    assert len(bars) == len(workers.files())
