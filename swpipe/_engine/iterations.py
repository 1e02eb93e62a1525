"""State that the lanes of a pipeline share: the engine, and the iterations of a run in flight."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from swpipe._engine.observers import Observer
from swpipe._engine.randomness import GeneratorAccess, TaskSeeds
from swpipe._engine.torch_state import TorchState
from swpipe._engine.waiting import Cancelled, Host
from swpipe.core.context import TypedContext
from swpipe.core.plan import PipelinePlan, StreamSpec, streams_of
from swpipe.core.releases import Releases
from swpipe.core.task import PipelineTask
from swpipe.device import Device, Event, Stream
from swpipe.errors import add_note
from swpipe.program import SOURCES, Program
from swpipe.shortcut import Shortcuts

FOREVER = sys.maxsize


class TaskCheck(Protocol):
    """The interface of a check of the memory that tasks touch."""

    def until(self, task: PipelineTask) -> int:
        """Return the first iteration from which on a task is not watched any more."""

    def watching(self, task: PipelineTask, ctx: Any) -> AbstractContextManager[None]:
        """Watch a task that runs within the block."""


class PullCheck(Protocol):
    """The interface of a check of an iterator, made before its first pull."""

    def after_pull(self) -> None:
        """Raise an error if the iterator must not be used."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The configuration and the services that all runs of a pipeline share.

    Attributes:
        program: The compiled plan.
        tasks: The tasks by name, in serial order.
        device: The device, or its twin on the CPU.
        streams: The plan's streams, by their names in the plan.
        host: The source of threads and counters.
        shortcuts: The tasks whose cached outputs are replayed.
        seeds: Seeds the random generators of tasks.
        context: Makes the context of an iteration from a batch and a number.
        observers: Returns the observers that are active now.
        mode: Returns a value that must not change while iterations are in flight, such as
            ``model.training``; "" for none.
        check: Begins a check of the memory that the tasks of one run touch, given the number of its
            first iteration; it may return None. None for no check.
        pull_check: Begins a check of the iterator of one run; None for no check.
        releases: The attributes that are released, by task; None if all stay.
        ends: Events at the ends of the last iterations' device work, by ``end_slot``; kept from one
            run to the next, so that short runs wait for the device as well. Empty without a launch
            limit.
    """

    program: Program
    tasks: dict[str, PipelineTask]
    device: Device
    streams: dict[Any, Stream]
    host: Host
    shortcuts: Shortcuts
    seeds: TaskSeeds
    context: Callable[[Any, int], TypedContext]
    observers: Callable[[], tuple[Observer, ...]]
    mode: Callable[[], object]
    check: Callable[[int], TaskCheck | None] | None = None
    pull_check: Callable[[Iterator[Any]], PullCheck] | None = None
    releases: Releases | None = None
    ends: dict[int, Event] = field(default_factory=dict)

    def end_slot(self, iteration: int) -> int:
        """Return the key of an iteration's end in ``ends``, until ``<admit>`` has waited for it."""
        # ``<admit>`` of iteration i waits for iteration i - depth - limit, whose slot iteration i
        # then reuses. So an event is never overwritten before the wait for it.
        return iteration % (self.program.depth + (self.program.launch_limit or 0))


@dataclass(slots=True)
class InFlight:
    """One iteration in flight.

    Attributes:
        ctx: The context, which carries the iteration's values.
        state: The caller's torch settings at the admission; None if the plan has no worker threads.
        variables: The caller's context variables at the admission; None likewise.
        source: Event after which other streams may read the batch; None if it is on the host.
        held: Values that tasks removed from the context, kept until the iteration retires.
    """

    ctx: TypedContext
    state: TorchState | None
    variables: Context | None
    source: Event | None
    held: list[object] = field(default_factory=list)


class InFlightIterations:
    """The iterations of one run that are in flight, and the events of their tasks.

    Attributes:
        engine: The engine of the pipeline.
        first: The pipeline's number of the run's first iteration; lanes count from 0.
        total: How many iterations the run has; ``FOREVER`` until its data has ended.
        depth: How many iterations may be in flight.
        ring: The number of iterations for which events are kept.
        slots: The iterations in flight, by number modulo depth; None in a free slot.
        check: The check of the memory that tasks touch; None for no check.
        generators: The run's access to the random number generators.
        caller_stream: The stream that was current for the caller when the run began.
        events: The events of each recorded task, by name and by iteration modulo ring.
        waiting: Memory that was released and waits for the device, by place and worker.
    """

    def __init__(self, engine: Engine, first: int) -> None:
        self.engine = engine
        self.first = first
        self.total = FOREVER
        self.depth = engine.program.depth
        self.ring = engine.program.ring
        # A slot and an event are reused without a lock: the program's waits keep iteration i +
        # depth from its slot until iteration i is retired.
        self.slots: list[Any] = [None] * self.depth
        self.check = None if engine.check is None else engine.check(first)
        self.generators = GeneratorAccess(engine.seeds, engine.host.counter())
        self.caller_stream = engine.device.current_stream()
        self.events: dict[str, list[Event]] = {
            name: [engine.device.new_event() for _ in range(self.ring)]
            for name, ins in engine.program.instructions.items()
            # The event of a batch is made by the admission, only for batches with device work.
            if ins.record and name not in SOURCES
        }
        self.waiting: dict[tuple[int, int], Any] = {}

    @property
    def all_streams(self) -> tuple[Stream, ...]:
        """All streams that tasks submit work to."""
        return (self.caller_stream, *self.engine.streams.values())

    def await_device(self, event: Event) -> None:
        """Keep the host waiting until the device has reached an event.

        Raises:
            Cancelled: The run stops.
        """
        pause_s = 20e-6
        while not event.query():
            if self.generators.cancelled:  # as all waits of a run that stops
                raise Cancelled
            # Polling, and not a blocking synchronisation: only so can ``stop`` end the wait. The
            # pause doubles up to 0.5 ms.
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 500e-6)

    def hold_waiting(self) -> None:
        """Hold the memory that waits for the device on all streams, and wait no longer."""
        for memory in self.waiting.values():
            memory.hold()

    def clear(self) -> None:
        """Drop all iterations."""
        self.slots[:] = [None] * self.depth


class PushedBatches:
    """An iterator over the batches given to ``SWPipeline.push``, one at a time."""

    batches: tuple[Any, ...] = ()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        (batch,), self.batches = self.batches, ()
        return batch


def make_streams(plan: PipelinePlan, device: Device) -> dict[Any, Stream]:
    """Return the streams that the plan's tasks use, by their names in the plan."""
    return {
        ref: device.new_stream(
            ref if isinstance(ref, torch.Stream) else plan.streams.get(str(ref), StreamSpec())
        )
        for ref in streams_of(plan.schedule.values())
    }


def reset_states(tasks: Iterable[PipelineTask], failure: BaseException | None) -> None:
    """Call every ``DeclaredIO.reset``, even if one of them raises.

    Args:
        tasks: The tasks whose iterations are dropped.
        failure: The reason for the drop, which gets a note of each error of a reset; None if there
            is no failure.

    Raises:
        Exception: The error of the first reset that failed, if ``failure`` is None.
    """
    # Go on after an error: each task has to forget its iterations, or the next run would mix them
    # with its own. The first error is raised at the end.
    first: Exception | None = None
    for task in tasks:
        for index, io in enumerate(task.io):
            if io.reset is None:
                continue
            try:
                io.reset()
            except Exception as error:  # noqa: BLE001 - noted or raised below
                text = f"in the reset of io[{index}] of task {task.name!r}"
                if failure is not None:
                    add_note(failure, f"swpipe: {type(error).__name__} {text}: {error}")
                elif first is None:
                    add_note(error, f"swpipe: {text}")
                    first = error
    if first is not None:
        raise first
