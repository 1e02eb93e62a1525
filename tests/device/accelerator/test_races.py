"""Races are found in prefetchers in the style of other libraries, and in no correct one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor

from swpipe._engine.observers import Observers
from swpipe.device.trace_callbacks import trace_callbacks
from swpipe.testing import Race, find_races
from tests.device.accelerator.prefetchers import FAULTS, streams
from tests.device.accelerator.work import DEVICE

PLANTED = [(name, fault) for name, (_, faults) in FAULTS.items() for fault in faults]


def races(name: str, fault: str = "") -> tuple[Race, ...]:
    prefetcher, _ = FAULTS[name]
    return find_races(lambda: prefetcher(fault))


@pytest.mark.parametrize("name", FAULTS)
def test_a_right_prefetcher_has_no_race(name: str) -> None:
    """No wait is missing, so none is reported."""
    assert [str(race) for race in races(name)] == []


@pytest.mark.parametrize(("name", "fault"), PLANTED)
def test_each_planted_race_is_found(name: str, fault: str) -> None:
    """Both places are lines of the prefetcher, on two streams, or one is on the host."""
    found = races(name, fault)
    assert found
    for race in found:
        assert race.first.stream != race.second.stream
        assert race.first.writes or race.second.writes
        assert race.first.place.startswith("prefetchers.py:")
        assert race.second.place.startswith("prefetchers.py:")
    assert any(race.reused for race in found) == ("record" in fault or fault == "the scale changes")


def test_a_race_of_a_plan_names_tasks_streams_and_iterations() -> None:
    """What the missing dependence would order is in the report."""
    (race,) = races("swpipe_plan", "no dependence on the step before")
    first, second = race.first, race.second
    assert (first.task, first.iteration, first.stream, first.writes) == (
        "step",
        0,
        "default stream",
        False,
    )
    assert (second.task, second.iteration, second.stream, second.writes) == (
        "copy",
        1,
        "memcpy",
        True,
    )
    assert race.count == 11
    assert "memcpy waits for an event recorded on default stream" in str(race)


def test_a_loop_that_fails_leaves_nothing_behind() -> None:
    """Its error is raised, and later loops are not watched."""

    def fails() -> Iterator[Tensor]:
        yield torch.ones(3, device=DEVICE)
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        find_races(fails)
    assert Observers.everywhere == ()
    assert threading.getprofile() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    registries = vars(trace_callbacks(DEVICE.type)).values()
    assert all(not getattr(each, "callback_list", ()) for each in registries)


def test_as_many_iterations_as_asked_for_run() -> None:
    """The loop is closed after them."""
    closed = list[int]()

    def endless() -> Iterator[int]:
        try:
            yield from count()
        finally:
            closed.append(1)

    assert find_races(endless, iterations=3) == ()
    assert closed == [1]


def test_views_that_share_no_byte_do_not_race() -> None:
    """Halves of one allocation are written on two streams at once; overlapping parts race."""

    def write(first: slice, second: slice) -> Iterator[None]:
        main, side = streams()
        buffer = torch.zeros(8, device=DEVICE)
        side.wait_stream(main)
        buffer[first].add_(1)
        with side:
            buffer[second].add_(1)
        yield

    assert find_races(lambda: write(slice(0, 4), slice(4, 8))) == ()
    (race,) = find_races(lambda: write(slice(0, 5), slice(4, 8)))
    assert race.memory == "float32 [4]"


def test_autograd_is_watched_on_its_own_thread() -> None:
    """Backward reads a weight that another stream writes meanwhile."""

    def loop() -> Iterator[None]:
        main, side = streams()
        weight = torch.ones(4, 4, device=DEVICE, requires_grad=True)
        x = torch.ones(4, 4, device=DEVICE, requires_grad=True)
        side.wait_stream(main)
        loss = (x @ weight).sum()
        side.wait_stream(main)
        loss.backward()
        with side, torch.no_grad():
            weight.data.mul_(2)
        yield

    (race,) = find_races(loop)
    assert (race.first.operator, race.second.operator) == ("aten::mm", "aten::mul_")
