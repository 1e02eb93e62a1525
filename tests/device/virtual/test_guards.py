"""The latest possible device finds no violation in runs that fail or are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests.device.virtual.harness import break_any
from tests.device.virtual.stream_queues import VirtualStream
from tests.device.virtual.virtual_device import VirtualDevice
from tests.support.strategies import keeping_case, random_case


def broken_off(cases: Callable[[int], Any], seeds: Iterable[int]) -> dict[int, object]:
    """Return the faults, by seed, of runs that fail or are closed."""
    return {seed: wrong for seed in seeds if (wrong := break_any(cases(seed)))}


@pytest.mark.parametrize("cases", [random_case, keeping_case])
def test_failing_and_closing_break_no_rule_of_the_device(cases: Callable[[int], Any]) -> None:
    """What a failed run leaves on the device is ordered before the next work."""
    assert broken_off(cases, range(10)) == {}


class NotingDevice(VirtualDevice):
    """A device that records what it is asked to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def hold(self, values: Iterable[Any], streams: Iterable[VirtualStream]) -> None:
        given = list(values)
        self.held += given
        super().hold(given, streams)


def test_what_a_failing_task_drops_is_held() -> None:
    """The stream on which the value was made may still use it."""
    device = NotingDevice()
    made = []

    def make(ctx: IterContext) -> None:
        ctx.value = device.launch(lambda: 1)
        made.append(ctx.value)

    def drop(ctx: IterContext) -> None:
        del ctx.value
        raise ValueError("after the value was dropped")

    tasks = [PipelineTask("make", make), PipelineTask("drop", drop)]
    schedule = {"make": TaskSchedule(stream="side"), "drop": TaskSchedule()}
    plan = PipelinePlan(schedule=schedule, deps=[("drop", "make")])
    with SWPipeline(plan, tasks, device=device) as pipe:
        with pytest.raises(ValueError, match="after the value was dropped"):
            pipe.progress(iter([0]))
        assert any(value is made[0] for value in device.held)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [random_case, keeping_case])
def test_failing_and_closing_break_no_rule_in_many_plans(cases: Callable[[int], Any]) -> None:
    """The previous test runs on more plans."""
    assert broken_off(cases, range(10, 40)) == {}
