"""The headroom is what is left without the loader, and without all that may overlap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from swpipe import DeclaredIO, IterContext, PipelineTask
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.effects import declared_effects
from swpipe.doctor import Headroom, diagnose
from swpipe.doctor.headroom import staying
from swpipe.profiler.spread import Estimate
from tests.profiler.sleepers import sleeper, sleepers
from tests.support.ranks import Ranks
from tests.support.virtual_clock import TimedHost, tell_time


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
    """A step of 10 ms is 7 with cached batches, and 5 where all that may overlap is free."""
    found = diagnose(training(host), Loader(host)).headroom
    assert found is not None
    assert found.step.value_s == pytest.approx(10e-3)
    assert found.cached is not None
    assert found.cached.value_s == pytest.approx(3e-3, rel=1e-3)
    assert found.free is not None
    assert found.free.value_s == pytest.approx(5e-3, rel=1e-3)
    assert found.overlappable == ("<pull>", "decode")
    assert found.stays == ("forward", "step")
    assert found.ceiling == pytest.approx(0.5, rel=1e-3)
    assert "with the loader's batches cached: 7.000 ms" in str(found)


def test_batches_that_are_there_cost_nothing(host: TimedHost) -> None:
    """Over a list there is no loader whose batches could be cached."""
    found = diagnose(training(host), [0, 1, 2]).headroom
    assert found is not None
    assert found.cached is None
    assert found.overlappable == ("decode",)
    assert found.ceiling == pytest.approx(2 / 7, rel=1e-3)


def test_where_nothing_may_overlap_there_is_none(host: TimedHost) -> None:
    """Tasks of which nothing is said, over a list, have to stay in turn."""
    found = diagnose(training(host)[1:], [0]).headroom
    assert found is not None
    assert (found.cached, found.free, found.ceiling) == (None, None, 0.0)


def test_a_gain_that_is_not_told_apart_from_none_is_none() -> None:
    """The ceiling is 0 where its interval contains 0."""
    found = Headroom(Estimate(10e-3, 1e-3), None, Estimate(2e-3, 3e-3), ("decode",), ("train",))
    assert found.ceiling == 0.0
    assert "not told apart" in str(found)


def test_ranks_agree_on_what_stays(two_ranks: Ranks) -> None:
    """Whichever task is longer on a rank: all replay the same one, or they would hang."""
    assert two_ranks.run(stays_on_ranks, 1) == [("on 0",), ("on 0",)]


def stays_on_ranks(number: int) -> tuple[str, ...]:
    """What stays of two tasks; each is the longer one on its rank."""
    host = TimedHost()
    tasks = [
        PipelineTask(f"on {rank}", sleeper(host, 5 if dist.get_rank() == rank else 1), pure=True)
        for rank in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch:
        tell_time(patch, host)
        found = diagnose(tasks, [0]).headroom
    assert found is not None
    return found.stays


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


def test_what_cannot_be_replayed_is_told(host: TimedHost) -> None:
    """Of a task that no shortcut can replace there is a note, and no figure."""

    def make(ctx: IterContext) -> None:
        ctx.rows = iter([1, 2])

    tasks = [PipelineTask("make", make, pure=True), PipelineTask("use", sleeper(host, 5))]
    found = diagnose(tasks, [0]).headroom
    assert found is not None
    assert found.free is None
    assert "not measured" in str(found)
