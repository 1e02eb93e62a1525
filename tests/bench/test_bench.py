"""The benchmarks run, at sizes too small to tell anything; what they compute is right."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
        ctx.label = f"{ctx.total}"

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


def totals(engine: dispatch.Engine, iterations: int) -> list[int]:
    """What the engine hands out, up to the end of the data."""
    data = iter(range(iterations))
    found = []
    while True:
        try:
            found.append(int(engine.progress(data).label))
        except StopIteration:
            return found


@pytest.mark.parametrize("stand_in", [TaskQueues, GroupQueues])
def test_a_stand_in_runs_the_same_plan_to_the_same_end(stand_in: dispatch.StandIn) -> None:
    """Stand-in and swpipe hand out the same contexts in the same order, and the same error."""

    def fail(ctx: IterContext) -> None:
        raise ValueError("as planned")

    mine, other = (sums(carried=stand_in is TaskQueues) for _ in range(2))
    with SWPipeline(mine, device="cpu") as ours, stand_in(other, other.tasks) as theirs:
        for iterations in (0, 1, 3, 4, 50, 2):  # one iterator after the other
            assert totals(theirs, iterations) == totals(ours, iterations)
    fails = [PipelineTask(task.name, fail) for task in other.tasks]
    with stand_in(other, fails) as engine, pytest.raises(ValueError, match="as planned"):
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


def predictions(folder: Path) -> Iterator[Row]:
    """Of tasks that block, in threads and on streams, and of real work."""
    yield predict.row(next(predict.blocking()), rounds=1, periods=3)
    with predict.streaming() as streams_of_three:
        yield predict.row(streams_of_three, rounds=1, periods=3)
    yield predict.row(predict.data_bound(folder, pipelined=True), rounds=1, periods=3)


SLOW = {"predict", "pipeline_parallel", "workers"}
SECTIONS: dict[str, tuple[Callable[[Path], Iterable[Row]], list[float | None]]] = {
    "dispatch": (lambda _: dispatch.rows(rounds=1, iterations=3), [0.2, 0.5, *[None] * 5]),
    "make": (lambda _: make.rows(rounds=1), [None, 1.0]),
    "v_schedule": (lambda _: v_schedule.rows(rounds=1, n=2, m=4), [1.0, None]),
    "interval": (lambda _: [interval.row(interval.CASES[0], 1, periods=5)], [interval.BAR]),
    "profiler": (
        lambda _: profiler.rows(rounds=1, measure=2),
        [*[profiler.EXPOSED_BAR] * 2, profiler.PYTHON_BAR, profiler.KERNEL_BAR],
    ),
    "predict": (predictions, [*[predict.BLOCKING_BAR] * 2, predict.REAL_BAR]),
    "serial": (lambda _: serial.rows(rounds=1, iterations=2), [1.02]),
    "step_times": (lambda _: step_times.rows(rounds=1, iterations=2), [1.02, 1.0]),
    "streams": (lambda _: streams.rows(rounds=1, periods=1), [None, None]),
    "extras": (lambda _: extras.rows(rounds=1, iterations=3), [None] * 4),
    "pipeline_parallel": (
        lambda _: pipeline_parallel.rows(rounds=1, scale=0.05, effort=0.02),
        [0.9, 1.05, None, None, None],
    ),
    "gains": (lambda folder: [gains.one_model("images", 9, 3, folder)], [None]),
    "workers": (
        lambda _: workers.rows(rounds=1, batches=3, read_s=0.002)[:8], [workers.WAITING_MOST] * 8
    ),
}  # fmt: skip
"""Each at a size too small to tell anything, with the bars of its rows."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SECTIONS],
)
def test_a_section_runs_and_its_rows_have_their_bars(name: str, tmp_path: Path) -> None:
    """Each row with a bar has a ratio to hold against it."""
    measure, bars = SECTIONS[name]
    rows = [*measure(tmp_path)]
    assert [row.bar for row in rows] == bars
    assert all(row.ratio is not None for row in rows if row.bar is not None)


def test_an_absent_package_is_named_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows are measured all the same."""
    monkeypatch.setattr(data_bound, "absent", lambda name: name != "plain loop")
    rows = data_bound.rows(rounds=1, batches=4)
    assert [row.ratio is None for row in rows] == [False, True, True]
    assert all("make bench installs it" in row.ours for row in rows[1:])


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


def test_rounds_turn_round_and_ratios_are_taken_in_each() -> None:
    """A round that was slow for both changes nothing; the verdict is that of the median."""
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
    """Its thread, which waits to put a batch, ends with it; what it hands out is the loader's."""
    before = threading.active_count()
    batches = loader.pulled_by_hand(itertools.count(), most=2)
    assert [*itertools.islice(batches, 3)] == [0, 1, 2]
    batches.close()
    assert threading.active_count() == before
    assert [*loader.pulled_by_hand(range(4))] == [0, 1, 2, 3]


OTHERS = [(one, name) for one in (data_bound.OTHERS, ahead.WAYS, workers.OTHERS) for name in one]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of torch
@pytest.mark.parametrize(
    ("ways", "name"), OTHERS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_each_other_way_does_the_same(ways: Mapping[str, Any], name: str, tmp_path: Path) -> None:
    """The losses of the loop; a loader's batches in order; all files, decoded."""
    if data_bound.absent(name):
        pytest.skip("not installed")
    if ways is ahead.WAYS:
        assert [*ways[name](batch for batch in range(7))] == [*range(7)]
    elif ways is data_bound.OTHERS:
        paths = data_bound.files(tmp_path, count=5, rows=64)
        ours, theirs = (
            [ctx.loss.item() for ctx in run(data_bound.loop(), paths)]
            for run in (data_bound.run_swpipe, ways[name])
        )
        assert ours == theirs
        assert len(ours) == 5
    else:
        for decode, data in workers.files().values():
            found = [*ways[name](data, decode, 2)]
            ours = workers.by_swpipe(data, decode, 2)
            for one, own, file in zip(found, ours, data, strict=True):
                assert torch.equal(one, decode(file))
                assert torch.equal(one, own)
