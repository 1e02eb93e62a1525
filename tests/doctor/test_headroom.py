"""The headroom is what is left without the loader, and without all that may overlap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swpipe import DeclaredIO, IterContext, PipelineTask
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import declared_effects
from swpipe.doctor import Headroom, diagnose
from swpipe.doctor.headroom import staying
from swpipe.profiler.spread import Estimate
from tests.profiler.sleepers import Ahead, sleeper, sleepers
from tests.support.virtual_clock import TimedHost


class Loader:
    """A loader of this process, whose batches take 3 ms."""

    def __init__(self, host: TimedHost) -> None:
        self._host = host

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            self._host.sleep(3e-3)
            yield number


def training(host: TimedHost) -> list[PipelineTask]:
    """A pure task of 2 ms, and two of which nothing is said, of 5 ms together."""
    rest = [PipelineTask(name, sleeper(host, ms)) for name, ms in (("forward", 4), ("step", 1))]
    return [*sleepers(host, decode=2), *rest]


def test_the_loader_and_pure_tasks_are_the_headroom(host: TimedHost) -> None:
    """A step of 10 ms is 5 where all that may overlap is hidden."""
    found = diagnose(training(host), Loader(host)).headroom
    assert found is not None
    assert found.step.value_s == pytest.approx(10e-3)
    assert found.left_s == pytest.approx(5e-3, rel=1e-3)
    assert found.overlappable == ("<pull>", "decode")
    assert found.stays == ("forward", "step")
    assert found.ceiling == pytest.approx(0.5, rel=1e-3)
    assert "with all that may overlap hidden (<pull>, decode): 5.000 ms, -50%" in str(found)


def test_a_loader_that_works_ahead_limits_the_headroom(host: TimedHost) -> None:
    """Its batches of 8 ms come no faster, whatever overlaps the 5 ms that stay."""
    found = diagnose(training(host), Ahead(host, 8)).headroom
    assert found is not None
    assert found.step.value_s == pytest.approx(8e-3, rel=1e-2)
    assert found.left_s == pytest.approx(8e-3, rel=1e-2)


def test_batches_that_are_there_cost_nothing(host: TimedHost) -> None:
    """Over a list there is no loader whose batches could be cached."""
    found = diagnose(training(host), [0, 1, 2]).headroom
    assert found is not None
    assert found.loader is None
    assert found.overlappable == ("decode",)
    assert found.ceiling == pytest.approx(2 / 7, rel=1e-3)


def test_where_nothing_may_overlap_there_is_none(host: TimedHost) -> None:
    """Tasks of which nothing is said, over a list, have to stay in turn."""
    found = diagnose(training(host)[1:], [0]).headroom
    assert found is not None
    assert (found.overlappable, found.ceiling) == ((), 0.0)


def test_a_gain_that_is_not_told_apart_from_none_is_none() -> None:
    """The ceiling is 0 where its interval contains 0."""
    found = Headroom(Estimate(10e-3, 3e-3), 8e-3, ("decode",), ("train",))
    assert found.ceiling == 0.0
    assert "not told apart" in str(found)


def io(state: str, mode: str) -> list[DeclaredIO]:
    return [DeclaredIO(state=state, mode=mode)]


def test_the_longest_cycle_stays() -> None:
    """Of two groups that share a state each, the longer one stays, and pure tasks never do."""

    def nothing(ctx: IterContext) -> None:
        return

    tasks = [
        PipelineTask("decode", nothing, pure=True),
        PipelineTask("prefetch", nothing, io=io("cache", "rw")),
        PipelineTask("forward", nothing, io=io("model", "r")),
        PipelineTask("step", nothing, io=io("model", "rw")),
    ]
    costs = {"decode": 90.0, "prefetch": 50.0, "forward": 40.0, "step": 60.0}
    model = CostModel({name: TaskCost(us) for name, us in costs.items()})
    assert staying(declared_effects(tasks), model) == ("forward", "step")
