"""The function that a lane calls at each instruction, composed once, before the first batch.

    apply the caller's settings             worker lanes only
      make the stream current               devices with streams only, as are the next two
      make it wait for events               if there are some
        get the random generators           tasks with ``random=True`` only
          call the observers                only if there are some
                the task's function, or its shortcut
      record the task's event               if a task waits for it
      keep what the task removed            plans with several streams only

Each layer is a function of the iteration that calls the layer below; a task has only the layers
that it needs. A task's stream stays current after the task, because the next task often uses the
same stream: each task makes its own stream current first, and the caller's stream becomes current
again on the caller's thread at the end of the period. Numbers in ``_with_stream`` refer to this
list of guards:

    (1) event wait: work on another stream that this task reads must be done first;
    (2) hold: another stream may still read a value that the task deleted or overwrote, and the
        allocator would give its memory to the stream that the value was made on; the value is kept
        until the iteration retires;
    (3) record: after the task's work, and before the lane's progress is published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from swpipe._engine.iterations import InFlightIterations, TaskCheck
from swpipe._engine.torch_state import ThreadTorchState
from swpipe.core.task import PipelineTask
from swpipe.device import Stream
from swpipe.program import SOURCES, Instruction

Step: TypeAlias = Callable[[int], None]
"""A function that runs one instruction on one iteration, counted from 0 within the run."""

_MISSING = object()


def build_step(
    iterations: InFlightIterations,
    ins: Instruction,
    task: PipelineTask,
    in_turn: Callable[[], None],
    *,
    observed: bool,
) -> Step:
    """Compose the function that a lane calls at a task's instruction.

    ``in_turn`` waits until the earlier iterations have passed the lane, if it has several workers.
    """
    # From the inside out, in the order of the module's list: the check and the observers see the
    # task alone, and the seed and the stream are in place around them.
    step = _call(iterations, task, in_turn)
    if iterations.check is not None:
        step = _checked(iterations, iterations.check, task, step)
    if observed:
        step = observe(iterations, ins, step)
    if task.random:
        step = _with_seed(iterations, task, step)
    if iterations.engine.device.has_streams:
        step = _with_stream(iterations, ins, step)
    return step


def _call(iterations: InFlightIterations, task: PipelineTask, in_turn: Callable[[], None]) -> Step:
    slots = iterations.slots
    depth = iterations.depth
    shortcuts = iterations.engine.shortcuts
    shortcut_names = shortcuts.names
    run_shortcut = shortcuts.run
    name = task.name
    fn = task.fn

    # The closures here and below read local variables only, because they run for every task and
    # batch.
    def call(i: int) -> None:
        ctx = slots[i % depth].ctx
        if name in shortcut_names:
            run_shortcut(task, ctx, in_turn)
        else:
            fn(ctx)

    return call


def _checked(
    iterations: InFlightIterations, check: TaskCheck, task: PipelineTask, step: Step
) -> Step:
    slots = iterations.slots
    depth = iterations.depth
    until = check.until(task) - iterations.first
    # The check watches the first iterations of the pipeline, which may lie before this run.
    if until <= 0:
        return step

    def checked(i: int) -> None:
        if i < until:
            with check.watching(task, slots[i % depth].ctx):
                step(i)
        else:
            step(i)

    return checked


def observe(iterations: InFlightIterations, ins: Instruction, step: Step) -> Step:
    """Return a step that calls the observers when ``step`` starts and stops."""
    first = iterations.first
    engine = iterations.engine

    def observed(i: int) -> None:
        # Read once per task: an observer added meanwhile would be stopped without having been
        # started.
        observers = engine.observers()
        for observer in observers:
            observer.start(ins, first + i)
        try:
            step(i)
        finally:
            for observer in reversed(observers):
                observer.stop(ins, first + i, i < iterations.total)

    return observed


def _with_seed(iterations: InFlightIterations, task: PipelineTask, step: Step) -> Step:
    generators = iterations.generators
    first = iterations.first
    name = task.name

    def seeded(i: int) -> None:
        with generators.seeded(name, first + i):
            step(i)

    return seeded


def with_torch_state(iterations: InFlightIterations, thread: ThreadTorchState, step: Step) -> Step:
    """Return a step that runs under the caller's torch settings and context variables."""
    slots = iterations.slots
    depth = iterations.depth

    def with_state(i: int) -> None:
        iteration = slots[i % depth]
        if iteration.state is not thread.applied:
            thread.apply(iteration.state)
        # Run in a copy: Python allows only one thread at a time in a ``Context``.
        iteration.variables.copy().run(step, i)

    return with_state


def wait_for_events(iterations: InFlightIterations, ins: Instruction, stream: Stream) -> Step:
    """Return a step that makes ``stream`` wait for the instruction's events."""
    slots = iterations.slots
    depth = iterations.depth
    ring = iterations.ring
    waits = tuple(
        (iterations.events[wait.producer], wait.distance)
        for wait in ins.event_waits
        if wait.producer not in SOURCES
    )
    reads_batch = any(wait.producer in SOURCES for wait in ins.event_waits)

    def wait(i: int) -> None:
        if reads_batch and (source := slots[i % depth].source) is not None:
            source.wait(stream)
        for events, distance in waits:
            if 0 <= i - distance < iterations.total:
                events[(i - distance) % ring].wait(stream)

    return wait


def _with_stream(iterations: InFlightIterations, ins: Instruction, step: Step) -> Step:
    engine = iterations.engine
    if ins.on_host:
        # The task launches no work, so any stream may be current. A stream may still use a value
        # that the task removes.
        return _with_hold(iterations, step) if engine.streams else step
    stream = iterations.caller_stream if ins.stream is None else engine.streams[ins.stream]
    ring = iterations.ring
    make_current = engine.device.make_current
    wait = wait_for_events(iterations, ins, stream) if ins.event_waits else None
    events = iterations.events.get(ins.task)

    def streamed(i: int) -> None:
        make_current(stream)
        if wait is not None:
            wait(i)  # (1)
        step(i)
        if events is not None:
            events[i % ring].record(stream)  # (3)

    # If all work is on one stream, freed memory is reused in the order of that stream: nothing to
    # hold.
    return _with_hold(iterations, streamed) if engine.streams else streamed


def _with_hold(iterations: InFlightIterations, step: Step) -> Step:
    slots = iterations.slots
    depth = iterations.depth

    def holding(i: int) -> None:
        iteration = slots[i % depth]
        # Compare by identity before and after: a shallow copy of the attributes keeps removed
        # values alive.
        before = vars(iteration.ctx).copy()
        try:
            step(i)
        finally:
            after = vars(iteration.ctx)
            for key, value in before.items():
                if after.get(key, _MISSING) is not value:
                    iteration.held.append(value)  # (2)

    return holding
