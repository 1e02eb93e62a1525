"""Tasks run on the streams that the plan names, on any device with streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, StreamSpec, TaskSchedule
from swpipe.device import Device
from tests.device.kinds import pipeline


def test_work_on_the_callers_stream_stays_there(device: Device) -> None:
    """Stream None is the stream on which the caller fills, for worker groups as well."""
    seen: dict[str, Any] = {}

    def look(name: str) -> PipelineTask:
        return PipelineTask(name, lambda ctx: seen.update({name: device.current_stream()}))

    plan = PipelinePlan(
        {look("inline"): TaskSchedule(0), look("worker"): TaskSchedule(0, None, "io")}
    )
    mine = device.new_stream(StreamSpec())
    with device.on(mine), pipeline(plan, device) as pipe:
        pipe.run(range(2))
    assert seen == {"inline": mine, "worker": mine}


class Streams:
    """The numbers of the streams that were current, by observer."""

    def __init__(self, device: Device) -> None:
        self.seen: dict[str, set[int]] = defaultdict(set)
        self._device = device

    def note(self, name: str) -> None:
        self.seen[name].add(number_of(self._device.current_stream()))

    def task(self, name: str, astray: Any = None) -> PipelineTask:
        """Return a task that records its stream, and may leave another stream current."""

        def fn(ctx: IterContext) -> None:
            self.note(name)
            if astray is not None:
                self._device.make_current(astray)

        return PipelineTask(name, fn)


def number_of(stream: Any) -> int:
    """Return torch's number of a stream, which distinguishes streams with several objects."""
    return getattr(stream, "stream_id", id(stream))


def test_tasks_run_on_the_stream_that_the_plan_names(device: Device) -> None:
    """One name is one stream, in every iteration and from every thread; two names are two."""
    streams = Streams(device)
    plan = PipelinePlan(
        {
            streams.task("a"): TaskSchedule(0, "one", "io"),
            streams.task("b"): TaskSchedule(0, "one"),
            streams.task("c"): TaskSchedule(0, "two", "io"),
            streams.task("d"): TaskSchedule(0),
        }
    )
    before = device.current_stream()
    with pipeline(plan, device) as pipe:
        pipe.run(range(5))
    assert device.current_stream() == before
    seen = streams.seen
    assert all(len(numbers) == 1 for numbers in seen.values())
    assert seen["a"] == seen["b"]
    assert len(seen["a"] | seen["c"] | seen["d"]) == 3
    assert seen["d"] == {number_of(before)}


@pytest.mark.parametrize("group", ["default", "io"])
def test_a_task_that_leaves_another_stream_current_misleads_nobody(
    device: Device, group: str
) -> None:
    """It misleads neither the next tasks, nor the user's iterator, nor the caller."""
    mine, astray = device.current_stream(), device.new_stream(StreamSpec())
    streams = Streams(device)

    def batches() -> Iterator[int]:
        for batch in range(6):
            streams.note("iterator")
            yield batch

    plan = PipelinePlan(
        {
            streams.task("a", astray): TaskSchedule(0, "side", group),
            streams.task("b", astray): TaskSchedule(0, None, group),
            streams.task("c", astray): TaskSchedule(1, "side", group),
            streams.task("d", astray): TaskSchedule(1),
        },
        order=("d", "a", "b", "c"),
    )
    with pipeline(plan, device) as pipe:
        for _ in pipe.iterate(batches()):
            assert device.current_stream() == mine
    (side,) = streams.seen["a"]
    assert side not in (number_of(mine), number_of(astray))
    expected = {"a": side, "b": number_of(mine), "c": side, "d": number_of(mine)}
    expected["iterator"] = number_of(mine)
    assert streams.seen == {name: {stream} for name, stream in expected.items()}


def test_another_current_stream_in_mid_flight_is_refused(device: Device) -> None:
    """Retirement joins the stream on which the pipeline was filled."""
    plan = PipelinePlan({PipelineTask("a", lambda ctx: None): TaskSchedule(0, "side")})
    data = iter(range(4))
    with pipeline(plan, device) as pipe:
        pipe.progress(data)
        with (
            device.on(device.new_stream(StreamSpec())),
            pytest.raises(RuntimeError, match="the current stream is not the one"),
        ):
            pipe.progress(data)
        pipe.drain()
