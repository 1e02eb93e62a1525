"""What a lane does at one instruction: small functions, put together once, before the first batch.

    wear the caller's torch settings        worker lanes only
      make the stream current               devices with streams only, as are the next two
        let it wait for events
          hold the lock of the generators   tasks that draw only
            tell the observers              only while somebody observes
              the task's function, or its shortcut
        keep what the task dropped
        record the task's event

Each layer is a function of the iteration that calls the one below; a layer that a task does not
need is not there. Numbers in ``with_stream`` refer to this list of guards:

    (1) event wait: work on another stream that this task reads must be done first;
    (2) hold: a value that the task deleted or overwrote may still be read by another stream, and
        its memory would go back to the stream that it was made on; it is kept until the iteration
        retires;
    (3) record: after the task's work, and before the lane's progress is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from swpipe.context import IterContext
from swpipe.device import Event, Stream
from swpipe.program import ADMIT, Instruction
from swpipe.task import PipelineTask
from swpipe.torch_state import TorchState, Wardrobe

if TYPE_CHECKING:
    from swpipe.executor import Run

Step: TypeAlias = Callable[[int], None]
"""Runs one instruction on one iteration, counted from 0 within the run."""

_GONE = object()


class Observer(Protocol):
    """Told of every task that runs, on the thread that runs it."""

    def arrive(self, ins: Instruction, iteration: int) -> None:
        """The lane has come to the instruction and may have to wait."""

    def start(self, ins: Instruction, iteration: int) -> None:
        """The task starts; its stream is current."""

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        """The task has returned or raised; its stream is still current.

        ``exists`` is False where ``<admit>`` found that the data had ended: there is no such
        iteration.
        """


class Flight:
    """One iteration under way.

    Attributes:
        ctx: Its context.
        state: The caller's torch settings when it was admitted.
        source: Event after which the batch may be read on other streams; None where the batch is on
            the host.
        held: Values that tasks dropped from the context.
    """

    __slots__ = ("ctx", "held", "source", "state")

    def __init__(self, ctx: IterContext, state: TorchState | None, source: Event | None) -> None:
        self.ctx = ctx
        self.state = state
        self.source = source
        self.held: list[object] = []


def build_step(run: Run, ins: Instruction, task: PipelineTask, *, observed: bool) -> Step:
    """Put together what a lane does at a task's instruction."""
    step = _call(run, task)
    if observed:
        step = observe(run, ins, step)
    if task.random:
        step = _with_seed(run, task, step)
    if run.engine.device.has_streams:
        step = _with_stream(run, ins, step)
    return step


def _call(run: Run, task: PipelineTask) -> Step:
    flights, depth = run.flights, run.engine.program.depth
    shortcuts = run.engine.shortcuts
    shortcut_names, run_shortcut = shortcuts.names, shortcuts.run
    name, fn = task.name, task.fn

    def call(i: int) -> None:
        ctx = flights[i % depth].ctx
        if name in shortcut_names:
            run_shortcut(task, ctx)
        else:
            fn(ctx)

    return call


def observe(run: Run, ins: Instruction, step: Step) -> Step:
    """Tell the observers when ``step`` starts and stops."""
    first = run.first_iteration
    engine = run.engine

    def observed(i: int) -> None:
        observers = engine.observers()
        for observer in observers:
            observer.start(ins, first + i)
        try:
            step(i)
        finally:
            for observer in reversed(observers):
                observer.stop(ins, first + i, i < run.total)

    return observed


@contextmanager
def told(observers: Sequence[Observer], ins: Instruction, iteration: int) -> Iterator[None]:
    """Tell the observers of a task that runs within the block, outside any lane."""
    for observer in observers:
        observer.arrive(ins, iteration)
        observer.start(ins, iteration)
    try:
        yield
    finally:
        for observer in reversed(observers):
            observer.stop(ins, iteration)


def _with_seed(run: Run, task: PipelineTask, step: Step) -> Step:
    draws, first, name = run.engine.draws, run.first_iteration, task.name

    def seeded(i: int) -> None:
        with draws.of(name, first + i):
            step(i)

    return seeded


def dress(run: Run, wardrobe: Wardrobe, step: Step) -> Step:
    """Put the caller's torch settings on a worker thread ahead of ``step``."""
    flights, depth = run.flights, run.engine.program.depth

    def dressed(i: int) -> None:
        state = flights[i % depth].state
        if state is not None:
            wardrobe.wear(state)
        step(i)

    return dressed


def wait_for_events(run: Run, ins: Instruction, stream: Stream) -> Step:
    """Make ``stream`` wait for the instruction's events, where their iterations exist."""
    flights, depth, ring = run.flights, run.engine.program.depth, run.engine.program.ring
    waits = tuple(
        (run.events[wait.producer], wait.distance)
        for wait in ins.event_waits
        if wait.producer != ADMIT
    )
    reads_batch = any(wait.producer == ADMIT for wait in ins.event_waits)

    def wait(i: int) -> None:
        if reads_batch and (source := flights[i % depth].source) is not None:
            source.wait(stream)
        for events, distance in waits:
            if 0 <= i - distance < run.total:
                events[(i - distance) % ring].wait(stream)

    return wait


def _with_stream(run: Run, ins: Instruction, step: Step) -> Step:
    device, stream = run.engine.device, run.stream_of(ins)
    flights, depth, ring = run.flights, run.engine.program.depth, run.engine.program.ring
    wait = wait_for_events(run, ins, stream)
    events = run.events.get(ins.task)
    on_stream = device.on

    def streamed(i: int) -> None:
        flight = flights[i % depth]
        before = dict(vars(flight.ctx))
        try:
            with on_stream(stream):
                wait(i)  # (1)
                step(i)
                if events is not None:
                    events[i % ring].record(stream)  # (3)
        finally:
            after = vars(flight.ctx)
            for key, value in before.items():
                if after.get(key, _GONE) is not value:
                    flight.held.append(value)  # (2)

    return streamed
