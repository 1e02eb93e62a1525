"""The engine's guards, and functions that remove each of them.

``GUARDS``, at the end, is the list: the guard in the engine, the function that removes it during a
test, and the violation that is found then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from swpipe import PipelinePlan, TaskSchedule, pipeline
from swpipe._engine import run as executor
from swpipe._engine.release import WaitingMemory
from swpipe._engine.run import LaneRunner, Run
from swpipe.analysis import last_readers
from swpipe.analysis.verification import VerifiedPlan
from swpipe.core.resolved import resolve_plan
from swpipe.program import ADMIT, RETIRE, Instruction, Program
from swpipe.program import compiled as compiler
from tests.device import virtual
from tests.device.virtual import (
    EventReused,
    Race,
    RanAhead,
    UseAfterFree,
    WaitBeforeRecord,
    clocks,
)
from tests.device.virtual.harness import Finding, break_any, run_any
from tests.device.virtual.machine import OutOfTurn
from tests.support import unguarded
from tests.support.strategies import (
    Case,
    StateUse,
    TaskSpec,
    Workload,
    keeping_case,
    random_case,
    worked_case,
)


def early_end(seed: int) -> Case:
    """Return a case in which another lane waits for a lane that has done all its tasks.

    The forward pass waits only for the third lane's turn, which comes after the producer's turn.
    Real threads are nearly always in time, so an exploring host interleaves them.
    """
    tasks = (
        TaskSpec("decode", reads=("batch",), sets=("x",)),
        TaskSpec("ids", reads=("batch",), sets=("x",)),
        TaskSpec("forward", reads=("x",), sets=("y",)),
    )
    stage = {"ids": 2, "decode": 0, "forward": 2}
    group = {"ids": "a", "decode": "b", "forward": "default"}
    plan = PipelinePlan(
        schedule={
            t.name: TaskSchedule(stage[t.name], t.name, group[t.name], globally_ordered=True)
            for t in tasks
        },
        deps=[("ids", "decode"), ("forward", "ids")],
        order=["ids", "decode", "forward"],
    )
    return Case(Workload(tasks, {}), plan, (1, 2, 3, 4), frozenset(), seed)


def two_readers(seed: int) -> Case:
    """Return a case in which two streams read a value that is then released and made again."""
    tasks = (
        TaskSpec("make", reads=("batch",), sets=("x",), known=True),
        TaskSpec("one", reads=("x",), sets=("y",), known=True),
        TaskSpec("other", reads=("x",), sets=("z",), known=True),
        TaskSpec("last", reads=("z",), sets=("w",), known=True),
    )
    plan = PipelinePlan(
        schedule={
            "make": TaskSchedule(0, "make"),
            "one": TaskSchedule(1, "one"),
            "other": TaskSchedule(1, "other"),
            "last": TaskSchedule(3),
        },
        deps=[("one", "make"), ("other", "make"), ("last", "other")],
        keep=["w", "y"],
    )
    return Case(Workload(tasks, {}), plan, tuple(range(12)), frozenset(), seed)


def on_one_stream(seed: int) -> Case:
    """Return a case in which the caller's stream reads a value that another stream has made."""
    task = TaskSpec("read", reads=("batch",), sets=("y",), known=True)
    then = TaskSpec("then", reads=("y",), known=True)
    plan = PipelinePlan({"read": TaskSchedule(0), "then": TaskSchedule(1)}, keep=["y"])
    return Case(Workload((task, then), {}), plan, tuple(range(12)), frozenset(), seed)


def far_ahead(seed: int) -> Case:
    """Return a case with readers a whole depth ahead of the place where the batch is released."""
    tasks = (
        TaskSpec("one", reads=("batch",), sets=("y",), known=True),
        TaskSpec("other", reads=("batch",), sets=("z",), known=True),
        TaskSpec("last", reads=("y", "z"), sets=("w",), known=True),
    )
    plan = PipelinePlan(
        schedule={
            "one": TaskSchedule(0, "one", thread_group="one"),
            "other": TaskSchedule(0, "other", thread_group="other"),
            "last": TaskSchedule(3),
        },
        deps=[("last", "one"), ("last", "other")],
        keep=["w"],
    )
    return Case(Workload(tasks, {}), plan, tuple(range(12)), frozenset(), seed)


def drained(seed: int) -> Case:
    """Return a case of many runs that end while a stream still reads released values."""
    plan = PipelinePlan({"read": TaskSchedule(0, "late")}, pipeline_depth=3, keep=["y"])
    task = TaskSpec("read", reads=("batch",), sets=("y",), known=True)
    drains = frozenset(range(1, 12, 2))
    return Case(Workload((task,), {}), plan, tuple(range(12)), drains, seed)


def saved(seed: int) -> Case:
    """Return a case in which a released value is also kept outside the context, and read late."""
    tasks = (
        TaskSpec("make", reads=("batch",), sets=("x",), known=True),
        TaskSpec("save", reads=("x",), sets=("y",), saves="x", known=True),
        TaskSpec("take", sets=("z",), takes="save", known=True),
    )
    plan = PipelinePlan(
        schedule={
            "make": TaskSchedule(0, "make"),
            "save": TaskSchedule(1, "one"),
            "take": TaskSchedule(2, "other"),
        },
        deps=[("save", "make"), ("take", "save")],
        keep=["y", "z"],
    )
    return Case(Workload(tasks, {}), plan, tuple(range(12)), frozenset(), seed)


def by_workers(seed: int) -> Case:
    """Return a case in which three workers change a state alternately."""
    tasks = (
        TaskSpec("make", reads=("batch",), sets=("x",), known=True),
        TaskSpec("use", ("x",), ("y",), states=(StateUse("s", True),), known=True),
    )
    plan = PipelinePlan(
        schedule={
            "make": TaskSchedule(0, "make", "io", workers=3),
            "use": TaskSchedule(0, "one", "io", workers=3),
        },
        deps=[("use", "make")],
        cross_iter_deps=[("use", "use", 1), ("make", "make", 3)],
        keep=["y"],
    )
    return Case(Workload(tasks, {"s": 1}), plan, tuple(range(12)), frozenset(), seed)


@dataclass(frozen=True)
class Guard:
    """A guard of the engine.

    Attributes:
        name: The name of the guard.
        remove: Takes it away.
        found: The kinds of violations, or of errors, that show its absence.
        cases: Makes the case of a seed.
        breaks: Cases are broken off, and do not run to their end.
        shows_on: The kinds of devices on which results are wrong without it.
    """

    name: str
    remove: Callable[[pytest.MonkeyPatch], None]
    found: tuple[type[Exception], ...]
    cases: Callable[[int], Case] = random_case
    breaks: bool = False
    shows_on: tuple[str, ...] = ("virtual",)

    def run(self, seed: int) -> Finding:
        """Return what the virtual device finds wrong in the case of a seed."""
        return (break_any if self.breaks else run_any)(self.cases(seed))

    def shows(self, seed: int) -> bool:
        """Return whether the virtual device finds the violation that the guard prevents."""
        return self.run(seed).shows(self.found)


# ------------------------------------------------------------------- changes to the program


def _instructions(
    change: Callable[[Instruction], Instruction],
) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a function that changes every instruction of every program."""

    def changed(compiled: Program) -> Program:
        lanes = [
            replace(x, instructions=tuple(map(change, x.instructions))) for x in compiled.lanes
        ]
        return replace(compiled, lanes=tuple(lanes))

    return _program(changed)


def _program(change: Callable[[Program], Program]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: _run_instead(lambda plan: change(plan.program), patch)


def _run_instead(program_of: Callable[[VerifiedPlan], Program], patch: pytest.MonkeyPatch) -> None:
    """Run another program than the one that was verified."""
    verify_for_run = pipeline.verify_for_run

    def changed(*args: Any, **named: Any) -> VerifiedPlan:
        verified = verify_for_run(*args, **named)
        return replace(verified, program=program_of(verified))

    patch.setattr(pipeline, "verify_for_run", changed)


def _host_waits(ins: Instruction) -> Instruction:
    """Remove all host waits except those for admission, without which no context exists."""
    kept = () if ins.task in (ADMIT, RETIRE) else [w for w in ins.host_waits if w.producer == ADMIT]
    return replace(ins, host_waits=tuple(kept))


def _event_waits(ins: Instruction) -> Instruction:
    kept = ins.event_waits if ins.task == RETIRE else _of_admission(ins)
    return replace(ins, event_waits=tuple(kept))


def _of_admission(ins: Instruction) -> list[Any]:
    return [wait for wait in ins.event_waits if wait.producer == ADMIT]


def _batch_wait(ins: Instruction) -> Instruction:
    kept = [wait for wait in ins.event_waits if wait.producer != ADMIT]
    return replace(ins, event_waits=tuple(kept))


def _one_event(compiled: Program) -> Program:
    return replace(compiled, ring=1)


def _sink_waits(ins: Instruction) -> Instruction:
    return replace(ins, event_waits=()) if ins.task == RETIRE else ins


def _tickets(patch: pytest.MonkeyPatch) -> None:
    def without(plan: PipelinePlan) -> PipelinePlan:
        entries = {n: replace(e, globally_ordered=False) for n, e in plan.schedule.items()}
        return replace(plan, schedule=entries)

    _plan(without, patch)


def _plan(change: Callable[[PipelinePlan], PipelinePlan], patch: pytest.MonkeyPatch) -> None:
    """Compile another plan than the one that was given."""

    def compiled(verified: VerifiedPlan) -> Program:
        resolved = resolve_plan(change(verified.plan))
        found = compiler.compile_plan(resolved, streams=verified.before.streams)
        releases = verified.releases
        return found if releases is None else last_readers._recording(found, releases)

    _run_instead(compiled, patch)


def _stream_order(patch: pytest.MonkeyPatch) -> None:
    host_waits = compiler._host_waits
    patch.setattr(
        compiler,
        "_host_waits",
        lambda layout: host_waits(replace(layout, queue=[0] * len(layout.queue))),
    )


# ------------------------------------------------------------------------ changes to the run


def _back_pressure_between_runs(patch: pytest.MonkeyPatch) -> None:
    begin = Run.__init__

    def forgetful(run: Run, engine: executor.Engine, *args: Any) -> None:
        engine.ends.clear()
        begin(run, engine, *args)

    patch.setattr(Run, "__init__", forgetful)


def _begin_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "_order_streams_after_the_callers", lambda run: None)


def _record_before_publish(patch: pytest.MonkeyPatch) -> None:
    """Let each thread record events only after it has published its progress."""
    late = threading.local()
    record, advance = virtual.VirtualEvent.record, clocks.ClockedCounter.advance

    def record_later(event: virtual.VirtualEvent, stream: virtual.VirtualStream) -> None:
        late.records = [*getattr(late, "records", ()), (event, stream)]

    def advance_first(counter: clocks.ClockedCounter, count: int) -> None:
        advance(counter, count)
        records, late.records = getattr(late, "records", ()), ()
        for event, stream in records:
            record(event, stream)

    patch.setattr(virtual.VirtualEvent, "record", record_later)
    patch.setattr(clocks.ClockedCounter, "advance", advance_first)


def _lanes_to_the_end(patch: pytest.MonkeyPatch) -> None:
    """End a lane after its own last task, although other lanes may still wait for it."""
    turn = Run._run_period

    def hasty(run: Run, lane: LaneRunner, period: int) -> None:
        turn(run, lane, period)
        last_stage = max(ins.stage for ins in lane.instructions)
        if lane is not run.lanes[0] and period + 1 - last_stage >= run.iterations.total:
            lane.progress.advance(executor.FOREVER)

    patch.setattr(Run, "_run_period", hasty)


def _joined_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "_abandon", lambda run: None)


# ------------------------------------------------------------------- what a plan does not keep


def _after_the_last_user(patch: pytest.MonkeyPatch) -> None:
    """Release a value after the last task of the period that uses it, ignoring concurrent tasks."""

    def last(places: Any, users: tuple[str, ...]) -> Any:
        ordered = [task for task in places._by_turn if task in users]
        return last_readers.ReleasePlace(ordered[-1], True) if ordered else after(places, users)

    after = last_readers.ReleasePlaces.after
    patch.setattr(last_readers.ReleasePlaces, "after", last)


def _behind_one_task(patch: pytest.MonkeyPatch) -> None:
    """Let a release wait for the last one of the tasks only."""
    behind = last_readers.ReleasePlaces.behind
    patch.setattr(last_readers.ReleasePlaces, "behind", lambda own, place: behind(own, place)[-1:])


def _no_hold_on_one_stream(patch: pytest.MonkeyPatch) -> None:
    add = WaitingMemory.add

    def careless(waiting: WaitingMemory, i: int, values: list[Any]) -> None:
        if not waiting._events:
            values.clear()
        add(waiting, i, values)

    patch.setattr(WaitingMemory, "add", careless)


def _no_hold_at_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingMemory, "hold", lambda waiting: waiting._waiting.clear())


def _no_more_events(patch: pytest.MonkeyPatch) -> None:
    recording = last_readers._recording
    patch.setattr(
        last_readers, "_recording", lambda p, found: replace(recording(p, found), ring=p.ring)
    )


# ------------------------------------------------------------------------- several workers


def _between_workers(compiled: Program) -> Program:
    """Remove the waits between workers of a group."""
    lanes = [
        replace(
            lane,
            instructions=tuple(
                replace(ins, host_waits=tuple([w for w in ins.host_waits if w.lane != ins.lane]))
                for ins in lane.instructions
            ),
        )
        for lane in compiled.lanes
    ]
    return replace(compiled, lanes=tuple(lanes))


def _any_worker(patch: pytest.MonkeyPatch) -> None:
    """Let those who wait for a group wait for the worker before the right one."""
    wait = Run._wait_for_turn
    patch.setattr(
        Run,
        "_wait_for_turn",
        lambda run, lane, count: wait(run, lane, count - run.groups[lane][0].size),
    )


def _one_waiting_memory(patch: pytest.MonkeyPatch) -> None:
    with_releases = executor.with_releases
    patch.setattr(
        executor, "with_releases", lambda run, ins, step, worker: with_releases(run, ins, step, 0)
    )


STREAMS = ("virtual", "accelerator")

GUARDS = (
    Guard(
        "host waits",
        _instructions(_host_waits),
        (Race, WaitBeforeRecord),
        shows_on=("cpu", "virtual"),
    ),
    Guard("event waits", _instructions(_event_waits), (Race,), shows_on=STREAMS),
    Guard("event wait for a batch on the device", _instructions(_batch_wait), (Race,)),
    Guard("sink waits at retirement", _instructions(_sink_waits), (Race,), shows_on=STREAMS),
    Guard(
        "hold on deleted and overwritten attributes",
        unguarded.hold_on_dropped,
        (UseAfterFree,),
        shows_on=STREAMS,
    ),
    Guard("hold at retirement", unguarded.hold_at_retirement, (UseAfterFree,), shows_on=STREAMS),
    Guard("back-pressure", unguarded.back_pressure, (RanAhead,)),
    Guard("back-pressure from one run to the next", _back_pressure_between_runs, (RanAhead,)),
    Guard("record before publish", _record_before_publish, (WaitBeforeRecord, EventReused)),
    Guard("as many events as iterations can ask for", _program(_one_event), (EventReused,)),
    Guard("streams begin after the caller's", _begin_event, (Race,)),
    Guard("one order of submission per stream", _stream_order, (Race,)),
    Guard("turns of globally ordered tasks", _tickets, (OutOfTurn,)),
    Guard(
        "lanes wait to the last period of a run",
        _lanes_to_the_end,
        (Race, WaitBeforeRecord),
        early_end,
    ),
    Guard("what a broken run left is joined", _joined_streams, (Race, RanAhead), breaks=True),
    Guard("attributes go after all users", _after_the_last_user, (RuntimeError,), far_ahead),
    Guard(
        "memory that went waits for the device",
        unguarded.waiting,
        (UseAfterFree,),
        keeping_case,
        shows_on=STREAMS,
    ),
    Guard("it waits for all tasks before", _behind_one_task, (UseAfterFree,), two_readers),
    Guard("hold on what others refer to", unguarded.hold_on_shared, (UseAfterFree,), saved),
    Guard("hold on what goes at once", _no_hold_on_one_stream, (UseAfterFree,), on_one_stream),
    Guard("hold on what waits at the end", _no_hold_at_end, (UseAfterFree,), drained),
    Guard("events until the next iteration asks", _no_more_events, (EventReused,), far_ahead),
    Guard("waits between workers", _program(_between_workers), (Race, OutOfTurn), by_workers),
    Guard(
        "waits for the worker whose turn it is", _any_worker, (Race, WaitBeforeRecord), by_workers
    ),
    Guard(
        "memory of each worker waits for itself",
        _one_waiting_memory,
        (WaitBeforeRecord, UseAfterFree),
        worked_case,
    ),
)
