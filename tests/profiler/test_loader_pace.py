"""The pace of a loader that works ahead is that of the long run, not that of ready batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from swpipe import PipelinePlan, SWPipeline, TaskProfiler
from swpipe.profiler import ProfileResult
from swpipe.profiler.figures import LoaderPace
from swpipe.profiler.measure import Pulls
from tests.profiler.results import of_step, tasks_of
from tests.profiler.sleepers import Ahead, InTurn, sleepers
from tests.profiler.test_result import RESULT
from tests.reporting.loops import Calls
from tests.support.virtual_clock import TimedHost


def profiled(host: TimedHost, loader: Ahead, **tasks_ms: float) -> ProfileResult:
    tasks = sleepers(host, **tasks_ms)
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        return TaskProfiler(pipe, loader=loader).profile(None)


@pytest.mark.parametrize(
    ("rate", "step", "saved"),
    [(60, 60, {"<pull>": 30, "read": 0, "train": 0}), (20, 30, {"<pull>": 0, "train": 10})],
)
def test_a_step_takes_as_long_as_a_batch_in_the_long_run(
    host: TimedHost, rate: float, step: float, saved: dict[str, float]
) -> None:
    """This holds for any number of ready batches; without the other tasks, too."""
    result = profiled(host, Ahead(host, rate), read=10, train=20)
    assert result.baseline_s == pytest.approx(step / 1e3, rel=1e-3)
    for name, ms in saved.items():
        assert result.exposed_s[name] == pytest.approx(ms / 1e3, abs=1e-3), name
    assert result.loader is not None
    assert result.loader.rate_s == pytest.approx(rate / 1e3, rel=1e-3)
    assert result.loader.works_ahead
    assert result.limited_by_loader == (rate > 30)


@pytest.mark.parametrize(("rate_s", "limits"), [(0.0293, False), (0.0305, True)])
def test_a_loader_limits_what_the_rest_would_do_sooner(rate_s: float, limits: bool) -> None:
    """On a real clock, a loader as fast as the tasks causes short waits, and clearly."""
    result = replace(
        of_step(RESULT, 0.0311),
        tasks=tasks_of(raw_s={"<pull>": 0.0007}, spread_s={"<pull>": 0.0003}),
        loader=LoaderPace(rate_s, 0.0, works_ahead=True, workers=2),
    )
    assert result.exposed("<pull>").is_clear  # type: ignore[union-attr]
    assert result.limited_by_loader is limits


def test_a_slow_loader_and_a_slow_start_of_passes_are_advice(host: TimedHost) -> None:
    """A second for 20 steps is 50 ms for each."""
    slow = profiled(host, Ahead(host, 60), read=10, train=20).advice[0]
    assert slow.change.startswith("make a batch in 30.0 ms instead of 60.0")
    assert slow.saved_s == pytest.approx(30e-3)
    starts = profiled(host, Ahead(host, 1, starts_ms=1000, length=20), train=20).advice[0]
    assert starts.change == "make the start of a pass of the loader take less time"
    assert starts.saved_s == pytest.approx(50e-3)


def test_a_loader_that_does_not_work_ahead_is_not_called_in_vain(host: TimedHost) -> None:
    """After some checks whether a batch is ready, it is called once per iteration."""
    pulls = Pulls(InTurn(host, 5))
    pulls.measure()
    assert pulls.rate_s == pytest.approx(5e-3)
    for _ in range(3):
        host.sleep(4e-3)
        pulls.settle(1)
    begin_s = host.perf_counter()
    pulls.settle(1)
    assert host.perf_counter() == begin_s
    assert not pulls.works_ahead


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there are fewer cores
def test_a_visit_is_as_long_as_the_turns_of_workers() -> None:
    """They finish batches together: a part of a turn would have too many of these, or none."""
    pulls = Pulls(DataLoader(range(8), num_workers=4))
    assert [pulls.in_turns(count) for count in (1, 4, 5)] == [4, 4, 8]
    assert Pulls([1, 2]).in_turns(5) == 5


def test_no_pass_ends_within_a_visit(host: TimedHost) -> None:
    """If a pass is as long as a visit, another one begins before."""
    loader = Ahead(host, 1, length=10)
    pulls = Pulls(loader)
    for _ in range(7):
        pulls()
    pulls.settle(5)
    assert loader.passes == 2
    for _ in range(5):
        pulls()
    assert loader.passes == 2


@pytest.mark.parametrize("chunk", [4, 10, 12, 16])
def test_a_loader_that_reads_chunks_does_not_work_ahead(host: TimedHost, chunk: int) -> None:
    """Most of its calls take no time, also without waits; its first one is like some others."""
    pulls = Pulls(Calls(host, lambda number: 0.0 if number % chunk else 6.0 * chunk, 4 * chunk))
    pulls.measure()
    assert pulls.rate_s == pytest.approx(6e-3)
    assert not pulls.works_ahead
    assert pulls.start_s == 0.0
