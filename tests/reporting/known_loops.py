"""Loops whose truth is known by construction: the step, what bounds it, and the first advice.

They run on a virtual clock in the tests, and on a real one in ``python -m bench verdicts``. In half
of them batches differ, as in practice: lengths, kinds, bursts, work in every so many steps, files
that are read in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, TaskSchedule
from tests.reporting.loops import Clock, lock_of, take

Ms: TypeAlias = float | Callable[[int], float]
"""Milliseconds on the CPU, or off it if negative; or one number for each batch."""


class Case(NamedTuple):
    """A loop, and the truth about it.

    Attributes:
        tasks: The time of each; "train" and "log" have a state each, "evaluate" that of "train",
            the others are pure.
        loader: Whether it works ahead, the milliseconds of a batch, and if they count those of the
            start of a pass, and the batches of a pass; "calls", with the milliseconds of each call;
            None if batches cost nothing.
        step: The milliseconds of a step.
        first: The beginning of the advice.
        saves: Milliseconds that it saves; None if that is not of interest.
        ahead: Tasks on a separate thread, a stage ahead.
        ceiling: Milliseconds that any plan can save at most; None if that is not of interest.
        batches: The number of batches in a pass.
        cores: The number of cores of the machine.
        locked: Tasks that hold one undeclared lock.
    """

    tasks: Mapping[str, Ms]
    loader: tuple[Any, ...] | None
    step: float
    bound: str
    first: str
    saves: float | None = None
    ahead: tuple[str, ...] = ()
    ceiling: float | None = None
    batches: int = 8
    cores: int = 2
    locked: tuple[str, ...] = ()


def every(period: int, ms: float, otherwise: float = 0.0) -> Callable[[int], float]:
    """Return a function with ``ms`` for the last of every ``period`` batches."""
    return lambda number: ms if number % period == period - 1 else otherwise


def length(number: int) -> float:
    """Return the length of a sequence, from 0 to 1: many short and few long ones, in no order."""
    return (number * 0.6180339887 % 1) ** 2


NO_LOCK = nullcontext()
LOADER_THREAD = "Call the loader on a thread of its own"
CASES = {
    "nothing to overlap": Case({"train": 30}, None, 30, "compute-bound", "Make train take half"),
    "a decode": Case({"decode": 15, "train": 25}, None, 40, "compute-bound", "Run", 15),
    "a long decode": Case({"decode": 30, "train": 10}, None, 40, "input-bound", "Run", 10),
    "two that feed": Case(
        {"read": -10, "decode": 10, "train": 30}, None, 50, "compute-bound", "Run", 20
    ),
    "a task that waits": Case({"train": 10, "log": -30}, None, 40, "host-bound", "Run", 10),
    "a loader in turn": Case(
        {"train": 30}, ("in turn", 20), 50, "compute-bound", LOADER_THREAD, 20
    ),
    "a slow loader in turn": Case(
        {"train": 20}, ("in turn", 60), 80, "input-bound", LOADER_THREAD, 20
    ),
    "a loader in turn and a decode": Case(
        {"decode": 10, "train": 30}, ("in turn", 15), 55, "compute-bound", "Run", 25
    ),
    "a fast loader that works ahead": Case(
        {"train": 30}, ("ahead", 20), 30, "compute-bound", "Make train take half"
    ),
    "one as fast as the step": Case(
        {"train": 30}, ("ahead", 28), 30, "compute-bound", "Overlap can gain nothing more"
    ),
    "one a little slower": Case({"train": 30}, ("ahead", 36), 36, "input-bound", "Make a batch", 6),
    "a slow one": Case({"train": 30}, ("ahead", 60), 60, "input-bound", "Make a batch", 30),
    "a very slow one": Case({"train": 15}, ("ahead", 100), 100, "input-bound", "Make a batch", 85),
    "a slow one and a decode": Case(
        {"decode": 20, "train": 20}, ("ahead", 60), 60, "input-bound", "Make a batch", 20
    ),
    "a fast one and a decode": Case(
        {"decode": 15, "train": 25}, ("ahead", 10), 40, "compute-bound", "Run decode", 15
    ),
    "slow passes": Case(
        {"train": 20}, ("ahead", 1, 1000, 20), 70, "input-bound", "Make the start of a pass", 50
    ),
    "passes that begin a little slowly": Case(
        {"train": 30}, ("ahead", 10, 100, 20), 35, "compute-bound", "Make the start of a", 5
    ),
    "a loader that is slow in both ways": Case(
        {"train": 20}, ("ahead", 40, 400, 20), 60, "input-bound", "Make", 20
    ),
    "a plan that hides a decode": Case(
        {"decode": 20, "train": 30}, None, 30, "compute-bound", "Make train", None, ("decode",)
    ),
    "a plan whose decode is too slow": Case(
        {"decode": 40, "train": 30}, None, 40, "input-bound", "Make decode", None, ("decode",)
    ),
    "a plan with two busy threads": Case(
        {"decode": 30, "train": 30}, None, 30, "balanced", "", None, ("decode",)
    ),
    "a plan over a slow loader": Case(
        {"decode": 20, "train": 30}, ("ahead", 60), 60, "input-bound", "Make a batch", None,
        ("decode",),
    ),
    # Batches differ.
    "two kinds of batches": Case(
        {"read": every(2, -22, -2), "train": 12}, None, 24, "input-bound", "Run read", 12,
        ceiling=12,
    ),
    "two tasks that take turns": Case(
        {"augment": every(2, 20), "train": lambda b: 0 if b % 2 else 20}, None, 20, "input-bound",
        "Run augment", 10, ceiling=10,
    ),
    "bursts": Case(
        {"decode": lambda b: -27 if b % 20 < 5 else -1, "train": 6.25}, None, 13.75, "input-bound",
        "Run decode", None, ceiling=7.5, batches=40,
    ),
    "evaluation in every tenth step": Case(
        {"train": 10, "evaluate": every(10, 60)}, None, 16, "compute-bound", "Make train", 5,
        ceiling=0, batches=40,
    ),
    "a checkpoint in every tenth step": Case(
        {"train": 11, "log": every(10, -50)}, None, 16, "compute-bound", "Run", 5, ceiling=5,
        batches=40,
    ),
    "logs in every fourth step": Case(
        {"train": 10, "log": every(4, -20)}, None, 15, "compute-bound", "Run", 5, ceiling=5,
        batches=40,
    ),
    "lengths that grow": Case(
        {"decode": 5, "train": lambda b: 7 + b / 2}, None, 21.75, "compute-bound", "Run decode", 5,
        ceiling=5, batches=40,
    ),
    "lengths of which few are long": Case(
        {"decode": lambda b: 2 + 10 * length(b), "train": lambda b: 4 + 20 * length(b)}, None,
        6 + 30 * sum(map(length, range(40))) / 40, "compute-bound", "Run decode", None,
        ceiling=2 + 10 * sum(map(length, range(40))) / 40, batches=40,
    ),
    "reads that jitter": Case(
        {"read": lambda b: -math.log(1 - (b + 1) * 0.6180339887 % 1) * -8, "train": 9}, None,
        9 + sum(-math.log(1 - (b + 1) * 0.6180339887 % 1) * 8 for b in range(40)) / 40,
        "compute-bound", "Run read", None, batches=40,
    ),
    "two of three batches are cached": Case(
        {"fetch": every(3, -30), "train": 8}, None, 18, "input-bound", "Run fetch", 10, ceiling=10,
        batches=39,
    ),
    "a cold cache at the beginning": Case(
        {"read": lambda b: -42 if b < 10 else -2, "train": 10}, None, 22, "input-bound", "Run read",
        None, batches=40,
    ),
    "a loader that reads sixteen batches at once": Case(
        {"train": -10}, ("calls", every(16, 96), 48), 16, "host-bound", LOADER_THREAD, 6, ceiling=6,
        batches=40,
    ),
    "a loader of two kinds of files": Case(
        {"train": 12}, ("calls", every(2, 16, 2), 40), 21, "compute-bound", LOADER_THREAD, 9,
        ceiling=9, batches=40,
    ),
    "a pass whose batches are sorted by length": Case(
        {"decode": lambda b: 1 + b / 4, "train": lambda b: 4 + b / 2}, None, 19.625,
        "compute-bound", "Run decode", 5.875, ceiling=5.875, batches=40,
    ),
    "a plan that is too shallow for two kinds of batches": Case(
        {"read": every(2, -22, -2), "train": 12}, None, 17, "input-bound", "Have up to", 5,
        ("read",), ceiling=5,
    ),
    "a fetch that is slower than the body": Case(
        {"fetch": -80, "train": 20}, None, 100, "input-bound", "Run fetch on", None, ceiling=80,
    ),
    "a decode that has cores to spare": Case(
        {"decode": 30, "train": 10}, None, 40, "input-bound", "Run decode on 3 threads", 30,
        ceiling=30, cores=4,
    ),
    "a task that hides another one": Case(
        {"read": -60, "train": 120}, None, 120, "compute-bound", "Make train take half", 60,
        ("read",), ceiling=0,
    ),
    "a lock of the user's own": Case(
        {"read": -15, "train": -15}, None, 30, "input-bound", "Make", None, ceiling=0,
        locked=("read", "train"),
    ),
    "code that holds the interpreter lock": Case(
        {"decode": 15, "train": 15}, None, 30, "input-bound", "Make", None, ceiling=0,
        locked=("decode", "train"),
    ),
}  # fmt: skip


def tasks_of(
    host: Clock, tasks_ms: Mapping[str, Ms], locked: tuple[str, ...] = ()
) -> list[PipelineTask]:
    """Return tasks that each read the previous one's result, and take their time for the batch."""
    found: list[PipelineTask] = []
    clock = ref(host)
    lock = lock_of(host)  # no task has the clock for its state
    for name, ms in tasks_ms.items():

        def run(
            ctx: IterContext,
            name: str = name,
            ms: Ms = ms,
            held: Any = lock if name in locked else NO_LOCK,
            before: Any = found[-1:],
        ) -> None:
            for one in before:
                getattr(ctx, one.name)
            now_ms = ms(ctx.batch) if callable(ms) else ms
            with held:
                take(clock(), computes_ms=max(0, now_ms), waits_ms=max(0, -now_ms))
            setattr(ctx, name, 1)

        said: dict[str, Any] = {"pure": True}
        if name in ("train", "log", "evaluate"):
            state = "train" if name == "evaluate" else name
            said = {"io": [DeclaredIO(state=state, mode="rw", others="")]}
        found.append(PipelineTask(name, run, **said))
    return found


def plan_of(case: Case) -> PipelinePlan | None:
    if not case.ahead:
        return None
    names = list(case.tasks)
    schedule = {
        name: TaskSchedule(0, thread_group="io") if name in case.ahead else TaskSchedule(1)
        for name in names
    }
    return PipelinePlan(
        schedule,
        deps=list(zip(names[1:], names, strict=False)),
        cross_iter_deps=[("train", "train", 1)],
    )
