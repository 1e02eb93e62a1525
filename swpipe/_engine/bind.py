"""What a lane does at one instruction: small functions, put together once, before the first batch.

    wear the caller's settings              worker lanes only
      make the stream current               devices with streams only, as are the next two
        let it wait for events
          wait for a turn to draw           tasks that draw only
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

from collections.abc import Callable
from typing import TypeAlias

from swpipe._engine.iterations import Flights
from swpipe._engine.program import ADMIT, Instruction
from swpipe._engine.torch_state import Wardrobe
from swpipe.core.task import PipelineTask
from swpipe.device.device import Stream

Step: TypeAlias = Callable[[int], None]
"""Runs one instruction on one iteration, counted from 0 within the run."""

_GONE = object()


def build_step(flights: Flights, ins: Instruction, task: PipelineTask, *, observed: bool) -> Step:
    """Put together what a lane does at a task's instruction."""
    step = _call(flights, task)
    if observed:
        step = observe(flights, ins, step)
    if task.random:
        step = _with_seed(flights, task, step)
    if flights.engine.device.has_streams:
        step = _with_stream(flights, ins, step)
    return step


def _call(flights: Flights, task: PipelineTask) -> Step:
    slots, depth = flights.slots, flights.depth
    shortcuts = flights.engine.shortcuts
    shortcut_names, run_shortcut = shortcuts.names, shortcuts.run
    name, fn = task.name, task.fn

    def call(i: int) -> None:
        ctx = slots[i % depth].ctx
        if name in shortcut_names:
            run_shortcut(task, ctx)
        else:
            fn(ctx)

    return call


def observe(flights: Flights, ins: Instruction, step: Step) -> Step:
    """Tell the observers when ``step`` starts and stops."""
    first = flights.first_iteration
    engine = flights.engine

    def observed(i: int) -> None:
        observers = engine.observers()
        for observer in observers:
            observer.start(ins, first + i)
        try:
            step(i)
        finally:
            for observer in reversed(observers):
                observer.stop(ins, first + i, i < flights.total)

    return observed


def _with_seed(flights: Flights, task: PipelineTask, step: Step) -> Step:
    turns, first, name = flights.turns, flights.first_iteration, task.name

    def seeded(i: int) -> None:
        with turns.of(name, first + i):
            step(i)

    return seeded


def dress(flights: Flights, wardrobe: Wardrobe, step: Step) -> Step:
    """Run ``step`` on a worker thread under the caller's torch settings and context variables."""
    slots, depth = flights.slots, flights.depth

    def dressed(i: int) -> None:
        flight = slots[i % depth]
        if flight.state is not wardrobe.worn:
            wardrobe.wear(flight.state)
        # A copy, since only one thread at a time may be within a set of context variables.
        flight.variables.copy().run(step, i)

    return dressed


def wait_for_events(flights: Flights, ins: Instruction, stream: Stream) -> Step:
    """Make ``stream`` wait for the instruction's events, where their iterations exist."""
    slots, depth, ring = flights.slots, flights.depth, flights.ring
    waits = tuple(
        (flights.events[wait.producer], wait.distance)
        for wait in ins.event_waits
        if wait.producer != ADMIT
    )
    reads_batch = any(wait.producer == ADMIT for wait in ins.event_waits)

    def wait(i: int) -> None:
        if reads_batch and (source := slots[i % depth].source) is not None:
            source.wait(stream)
        for events, distance in waits:
            if 0 <= i - distance < flights.total:
                events[(i - distance) % ring].wait(stream)

    return wait


def _with_stream(flights: Flights, ins: Instruction, step: Step) -> Step:
    device, stream = flights.engine.device, flights.stream_of(ins)
    slots, depth, ring = flights.slots, flights.depth, flights.ring
    wait = wait_for_events(flights, ins, stream)
    events = flights.events.get(ins.task)
    on_stream = device.on

    def streamed(i: int) -> None:
        flight = slots[i % depth]
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
