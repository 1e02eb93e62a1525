"""What only shows while the device is behind: which tasks wait for it, and what their work takes.

    thread    read  forward  step  item ...........|    ``.item()`` waits for all that was launched
    device    ...##### forward ######## step ######|    before it on its stream

A task that only launches takes as long on its thread whether the device is behind or not. One that
blocks takes longer when the device is behind, and always returns when the device has nothing left.
And only if the device begins a task's work after the task has returned, the time between the events
before and after that work has no idle time in it.

So serial iterations run twice: with the device idle before each task, and back to back. Where the
device is never behind, neither can be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median
from typing import Any, NamedTuple

from swpipe._engine.program import Instruction
from swpipe.device import Device
from swpipe.profiler.host import HostObserver
from swpipe.profiler.measure import WindowTimer
from swpipe.trace.recorder import timed_event

_LOOKS = 50
"""An idle device reaches a new event while one looks so often."""

_LEAST_S = 20e-6
"""Differences of host times from here on count."""


class DeviceBehind(NamedTuple):
    """What was seen; in seconds.

    Attributes:
        blocking_s: Each task that blocks, with its time on its thread if the device is idle before.
        device_s: Task to the time of its work on the device, where that is known without idle time.
    """

    blocking_s: dict[str, float]
    device_s: dict[str, float]


def device_behind(timer: WindowTimer) -> DeviceBehind:
    """Run serial iterations, and see."""
    if timed_event(timer.pipe.device) is None:
        return DeviceBehind({}, {})
    alone, behind = _watch(timer, idle=True), _watch(timer, idle=False)
    blocking_s, device_s = {}, {}
    for name, runs in alone.runs.items():
        took_s = [run.wall_s for run in runs[timer.warmup :]]
        late = [
            (run.wall_s, work)
            for run, work in zip(behind.runs[name], behind.work[name], strict=True)
            if work.begins_late
        ]
        least_s = median(took_s) + _LEAST_S
        if late and all(wall_s > least_s and not work.is_left for wall_s, work in late):
            blocking_s[name] = fmean(took_s)
        if exact_s := [work.device_s for _, work in late if work.is_all_late]:
            device_s[name] = fmean(exact_s)
    return DeviceBehind(blocking_s, device_s)


def _watch(timer: WindowTimer, *, idle: bool) -> _Watch:
    """Watch serial iterations, one right after the other."""
    pipe = timer.pipe
    watch = _Watch((task.name for task in pipe.tasks), pipe.device, idle=idle)
    first = pipe.next_iteration
    with pipe.observe(watch):
        for number in range(first, first + timer.warmup + timer.measure):
            batch = timer.batch if timer.copy is None else timer.copy(timer.batch)
            pipe.run_one_serial_iter(batch, number)
    pipe.device.synchronize()
    return watch


class _Work(NamedTuple):
    """What a task gave its stream.

    Attributes:
        before: The event before it.
        after: The event after it.
        begins_late: Whether the stream had not come to it when the task began.
        is_all_late: The same when the task returned.
        is_left: Whether any was left when the task returned.
    """

    before: Any
    after: Any
    begins_late: bool
    is_all_late: bool
    is_left: bool

    @property
    def device_s(self) -> float:
        """From one event to the other."""
        between_ms: float = self.before.elapsed_time(self.after)
        return between_ms / 1e3


class _Watch(HostObserver):
    """Observes serial iterations; the device is idle before each task if ``idle``."""

    def __init__(self, tasks: Iterable[str], device: Device, *, idle: bool) -> None:
        super().__init__(tasks)
        self.work: dict[str, list[_Work]] = {name: [] for name in self.runs}
        self._device, self._idle = device, idle
        self._before: tuple[Any, bool] | None = None

    def start(self, ins: Instruction, iteration: int) -> None:
        if self._idle:
            self._device.synchronize()
        self._before = self._mark()
        super().start(ins, iteration)

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        super().stop(ins, iteration, exists)
        if ins.task in self.work and self._before is not None:
            before, late = self._before
            is_all_late = not before.query()
            after, left = self._mark()
            self.work[ins.task].append(_Work(before, after, late, is_all_late, left))

    def _mark(self) -> tuple[Any, bool]:
        """A new event on the stream, and whether there is work before it."""
        event: Any = self._device.new_event(timing=True)
        event.record(self._device.current_stream())
        return event, not any(event.query() for _ in range(_LOOKS))
