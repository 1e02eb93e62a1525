"""Draining, failing and running ahead while the device is still at work.

A gate stops a stream, so that the host's order is known: the host's actions before the gate is
opened come before the work behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine import run as executor
from swpipe._engine.run import Run
from swpipe.device import AcceleratorDevice
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, extremes, filled, wrong
from tests.support import unguarded

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs a device with gates")

DEPTH = 3


class Gates:
    """A gate on the current stream at one iteration."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._gate: backend.Gate | None = None

    def pass_through(self, i: int) -> None:
        """Put the gate before work that is submitted to the current stream from here on."""
        if i == self._at:
            self._gate = backend.gate(DEVICE)

    @property
    def closed(self) -> bool:
        """Whether a stream is waiting at the gate."""
        return self._gate is not None

    def open(self) -> None:
        """Open the gate."""
        if self._gate is not None:
            self._gate.open()
            self._gate = None


# ------------------------------------------------------------------------------------ draining


def made_behind(gates: Gates, group: str) -> PipelinePlan:
    """Return a plan of three stages whose sink makes a tensor on stream "side"."""

    def make(ctx: IterContext) -> None:
        gates.pass_through(ctx.iter_idx)
        ctx.x = filled(ctx.iter_idx + 1)

    return PipelinePlan(
        {
            PipelineTask("make", make): TaskSchedule(0, "side", group),
            PipelineTask("end", lambda ctx: None): TaskSchedule(2),
        },
        pipeline_depth=DEPTH,
    )


def drained(group: str, *, caller_waits: bool = True) -> list[int]:
    """Drain; return the iterations whose values the caller's stream read wrong."""
    gates, seen, data = Gates(at=2), dict[int, Tensor](), iter(range(12))
    with SWPipeline(made_behind(gates, group), device=DEVICE) as pipe:
        contexts = [pipe.progress(data), *pipe.drain()]
        assert gates.closed  # the host has not waited for the device
        assert pipe.in_flight == 0
        for ctx in contexts:
            seen[ctx.iter_idx] = extremes(ctx.x)
        del ctx, contexts
        if not caller_waits:
            torch.accelerator.current_stream().synchronize()
        gates.open()
        more = {ctx.iter_idx: extremes(ctx.x) for ctx in pipe.iterate(data)}
    assert sorted(seen | more) == list(range(12))
    return wrong(seen | more)


@pytest.mark.parametrize("group", ["default", "io"])
def test_drain_hands_out_what_the_device_is_still_at(group: str) -> None:
    """The caller's stream waits, not the host; and the same iterator goes on."""
    assert drained(group) == []


def test_without_waits_for_sinks_drained_values_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream reads what is still behind the gate."""
    monkeypatch.setattr(executor, "wait_for_events", lambda *args: lambda i: None)
    with backend.misbehaving(poison=True):
        assert drained("default", caller_waits=False) != []


# ------------------------------------------------------------------------------- running ahead


class Asked:
    """An event that calls ``in_vain`` if the host queries it before it is reached."""

    def __init__(self, event: Any, in_vain: Callable[[], None]) -> None:
        self._event, self._in_vain = event, in_vain

    def record(self, stream: Any) -> None:
        self._event.record(stream)

    def wait(self, stream: Any) -> None:
        self._event.wait(stream)

    def query(self) -> bool:
        if self._event.query():
            return True
        self._in_vain()
        return False


class Telling(AcceleratorDevice):
    """A device whose events call ``in_vain`` if the host queries them too early."""

    def __init__(self, in_vain: Callable[[], None]) -> None:
        self._in_vain = in_vain
        super().__init__(DEVICE)

    def new_event(self, *, timing: bool = False) -> Any:
        return Asked(super().new_event(timing=timing), self._in_vain)


def pulled_before_waiting(depth: int, group: str, run_ahead: int | None = None) -> int:
    """Return how many batches are pulled while iteration 0 waits at a gate on stream "side"."""
    gates, pulled = Gates(at=0), [0]
    first_wait: list[int] = []

    def in_vain() -> None:
        first_wait.append(pulled[0])
        gates.open()

    def make(ctx: IterContext) -> None:
        gates.pass_through(ctx.iter_idx)
        ctx.x = filled(ctx.iter_idx + 1)

    def batches() -> Iterator[int]:
        for i in range(20):
            pulled[0] += 1
            yield i
        gates.open()  # at the latest

    plan = PipelinePlan(
        {PipelineTask("make", make): TaskSchedule(0, "side", group)},
        pipeline_depth=depth,
        run_ahead=run_ahead,
    )
    with SWPipeline(plan, device=Telling(in_vain)) as pipe:
        pipe.run(batches())
    return first_wait[0] if first_wait else pulled[0]


@pytest.mark.parametrize(
    ("depth", "run_ahead", "group"), [(1, 0, "default"), (2, 2, "io"), (5, None, "io")]
)
def test_the_host_runs_ahead_by_so_many_iterations(
    depth: int, run_ahead: int | None, group: str
) -> None:
    """No fewer and no more: the next batch is pulled when the device has finished the first."""
    ahead = 1 if run_ahead is None else run_ahead
    assert pulled_before_waiting(depth, group, run_ahead) == depth + ahead


def test_without_back_pressure_the_host_runs_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches are pulled before the device has finished the first iteration."""
    unguarded.back_pressure(monkeypatch)
    assert pulled_before_waiting(2, "default") == 20


# ------------------------------------------------------------------------------------- failing


def read_after_a_failure() -> list[int]:
    """Let a task fail while a gate delays a read; return the iterations that were read wrong."""
    gates, seen, side = Gates(at=0), dict[int, Tensor](), torch.Stream(device=DEVICE)

    def make(ctx: IterContext) -> None:
        ctx.x = filled(ctx.iter_idx + 1)

    def read(ctx: IterContext) -> None:
        gates.pass_through(ctx.iter_idx)
        seen[ctx.iter_idx] = extremes(ctx.x)

    def fail(ctx: IterContext) -> None:
        raise ValueError("as planned")

    plan = PipelinePlan(
        {
            PipelineTask("make", make): TaskSchedule(0, side),
            PipelineTask("read", read): TaskSchedule(1, "late"),
            PipelineTask("fail", fail): TaskSchedule(2),
        },
        deps=[("read", "make"), ("fail", "read")],
    )
    with SWPipeline(plan, device=DEVICE) as pipe:
        with pytest.raises(ValueError, match="as planned"):
            pipe.run(range(9))
        assert gates.closed  # the failure did not wait for the device
    side.synchronize()  # it has overwritten what was freed
    gates.open()
    assert 0 in seen
    return wrong(seen)


def test_a_failure_keeps_the_memory_of_what_is_still_read() -> None:
    """Iterations in flight are dropped, and their memory stays until the streams are past it."""
    with backend.misbehaving(poison=True):
        assert read_after_a_failure() == []


def test_without_the_hold_it_would_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the gate reads freed memory."""
    monkeypatch.setattr(Run, "_abandon", lambda run: None)
    with backend.misbehaving(poison=True):
        assert read_after_a_failure() != []


def seen_after_a_failure(*, caller_waits: bool = True) -> float:
    """Return the caller's view, after a failure, of a state that a stream is changing."""
    gates, state = Gates(at=0), torch.zeros(4, device=DEVICE)

    def change(ctx: IterContext) -> None:
        gates.pass_through(ctx.iter_idx)
        state.add_(1.0)

    def fail(ctx: IterContext) -> None:
        raise ValueError("as planned")

    plan = PipelinePlan(
        {
            PipelineTask("change", change): TaskSchedule(0, "side"),
            PipelineTask("fail", fail): TaskSchedule(0, "other"),
        },
        deps=[("fail", "change")],
    )
    with SWPipeline(plan, device=DEVICE) as pipe, pytest.raises(ValueError, match="as planned"):
        pipe.run(range(9))
    copied = state.clone()
    if not caller_waits:
        torch.accelerator.current_stream().synchronize()
    gates.open()
    return copied.sum().item()


def test_after_a_failure_the_caller_comes_after_what_was_submitted() -> None:
    """The caller's stream waits for the streams of the run that failed."""
    assert seen_after_a_failure() == 4.0


def test_without_the_join_the_caller_comes_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the previous values."""
    monkeypatch.setattr(Run, "_abandon", lambda run: None)
    assert seen_after_a_failure(caller_waits=False) == 0.0


@pytest.mark.parametrize("place", ["a task", "a worker's task", "the iterator", "the caller"])
def test_after_any_failure_the_next_run_is_right(place: str) -> None:
    """The failure is raised unchanged while a stream is held; the next run is right."""
    gates, failing, seen = Gates(at=1), threading.Event(), dict[int, Tensor]()
    failing.set()

    def maybe_fail(here: str, i: int) -> None:
        if here == place and failing.is_set() and i == 4:
            raise ValueError("as planned")

    def make(ctx: IterContext) -> None:
        maybe_fail("a worker's task", ctx.batch)
        gates.pass_through(ctx.iter_idx)
        ctx.x = filled(ctx.batch + 1)

    def read(ctx: IterContext) -> None:
        maybe_fail("a task", ctx.batch)
        seen[ctx.batch] = extremes(ctx.x)

    def batches() -> Iterator[int]:
        for i in range(8):
            maybe_fail("the iterator", i)
            yield i

    def drive(pipe: SWPipeline) -> None:
        for ctx in pipe.iterate(batches()):
            maybe_fail("the caller", ctx.batch)

    plan = PipelinePlan(
        {
            PipelineTask("make", make): TaskSchedule(0, "side", "io"),
            PipelineTask("read", read): TaskSchedule(1, "late"),
        },
        deps=[("read", "make")],
        pipeline_depth=8,
    )
    with SWPipeline(plan, device=DEVICE) as pipe:
        with pytest.raises(ValueError, match="as planned"):
            drive(pipe)
        pipe.drain()  # where the caller failed, the run is in good order
        failing.clear()
        gates.open()
        seen.clear()
        report = pipe.run(batches())
    assert report.iterations == 8
    assert wrong(seen) == []
