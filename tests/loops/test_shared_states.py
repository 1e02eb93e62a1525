"""Random programs in which tasks, loader and body share states, and say it, or say nothing.

    a task      says nothing, names its states (and how others touch them), or is pure
    the loader  a list, or a generator that may touch states
    the body    may touch states

What is said is true, and nothing else is known. A program is run in each way that is accepted, and
has to give the numbers of the plain loop; how many are refused is looked at, too.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import swpipe
from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis import verify
from swpipe.core.effects import Declared
from swpipe.errors import PlanError
from swpipe.inference.comparison import needed

BATCHES = 7

OF_A_THREAD = {"a context variable"}
"""States that each thread has for itself: no declaration can name them, as the guide says."""


class State(NamedTuple):
    """A state: functions to read it as a number, and to write it with the iteration's number."""

    read: Callable[[], float]
    write: Callable[[int], object]


def appended(folder: Path) -> State:
    values: list[float] = [1.0]
    return State(lambda: sum(values), lambda number: values.append(number))


def tensor(folder: Path) -> State:
    value = torch.ones(2)
    return State(lambda: float(value.sum()), lambda number: value.add_(number + 1))


def through_numpy(folder: Path) -> State:
    value = torch.ones(1)
    array = value.numpy()
    return State(lambda: float(value), lambda number: array.__setitem__(0, number + 2.0))


def rate(folder: Path) -> State:
    optimizer = SGD([nn.Parameter(torch.ones(4))], lr=0.1)
    schedule = StepLR(optimizer, 1, 0.5)
    return State(lambda: float(optimizer.param_groups[0]["lr"]), lambda number: schedule.step())


def file(folder: Path) -> State:
    path = folder / "state"
    path.write_text("1", encoding="utf-8")
    return State(
        lambda: float(path.read_text(encoding="utf-8")),
        lambda number: path.write_text(f"{number + 2}", encoding="utf-8"),
    )


def context_variable(folder: Path) -> State:
    value = ContextVar("value", default=1.0)
    return State(value.get, lambda number: value.set(number + 2.0))


def drawn(draw: Callable[[], float]) -> Callable[[Path], State]:
    return lambda folder: State(draw, lambda number: draw())


KINDS: dict[str, tuple[Callable[[Path], State], bool]] = {
    "a list": (appended, False),
    "a tensor": (tensor, False),
    "a tensor through numpy": (through_numpy, False),
    "an optimizer's rate": (rate, False),
    "a file": (file, False),
    "a context variable": (context_variable, False),
    "Python's generator": (drawn(random.random), True),
    "numpy's generator": (drawn(lambda: float(np.random.rand())), True),
    "torch's generator": (drawn(lambda: float(torch.rand(()))), True),
}
"""States, and whether a read changes them. Their contents do not matter: nothing reads them."""


class Touch(NamedTuple):
    """The use of a state by a part of the program."""

    reads: bool
    writes: bool


class Program:
    """A random program; ``fresh`` restarts it."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = self._rng = random.Random(seed)
        self._folder = folder
        self.names = [f"t{n}" for n in range(rng.randint(2, 4))]
        self.says = {name: rng.choice(["nothing", "states", "pure"]) for name in self.names}
        self.kinds = rng.sample([*KINDS], rng.randint(1, 3))
        self.others: dict[str, Any] = {
            kind: "rw" if kind in OF_A_THREAD else rng.choice(["rw", "rw", "r", ""])
            for kind in self.kinds
        }
        self.is_list = rng.random() < 0.5
        self.touches = {
            (part, kind): self._touch(part, kind)
            for part in (*self.names, "loader", "body")
            for kind in self.kinds
        }
        self.sources = {
            name: rng.sample(self.names[:n], min(n, rng.randint(0, 2)))
            for n, name in enumerate(self.names)
        }
        self.slow = {name: rng.choice([0, 0, 3e-4]) for name in (*self.names, "body")}

    def _touch(self, part: str, kind: str) -> Touch:
        rng, others = self._rng, self.others[kind]
        touch = Touch(rng.random() < 0.5, rng.random() < 0.35)
        if KINDS[kind][1] and touch.reads:
            touch = Touch(True, True)
        says = self.says.get(part)
        if says == "pure" or (part == "loader" and self.is_list):
            return Touch(False, False)
        if says == "states":  # it names what it touches
            return Touch(False, False) if kind in OF_A_THREAD else touch
        named = any(self.says[name] == "states" for name in self.names)
        allowed = others if named else "rw"
        if KINDS[kind][1] and allowed != "rw":
            return Touch(False, False)
        return Touch(touch.reads and "r" in allowed, touch.writes and "w" in allowed)

    def fresh(self) -> None:
        """Make new states, and tasks that use them."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.states = {kind: KINDS[kind][0](self._folder) for kind in self.kinds}
        self.seen: list[Any] = []
        self.loader: Iterable[Any] = [1.0 * i for i in range(BATCHES)]
        if not self.is_list:
            self.loader = self._generated(list(self.loader))
        self.tasks = [self._task(name) for name in self.names]

    def _use(self, part: str, number: int) -> float:
        """Use the part's states, and return what it read."""
        time.sleep(self.slow.get(part, 0))
        found = 0.0
        for kind, state in self.states.items():
            touch = self.touches[part, kind]
            if touch.reads:
                found += float(state.read())
            if touch.writes and not (touch.reads and KINDS[kind][1]):
                state.write(number)
        return found

    def _generated(self, values: list[float]) -> Iterator[float]:
        for number, value in enumerate(values):
            yield value + self._use("loader", number)

    def _task(self, name: str) -> PipelineTask:
        def run(ctx: Any) -> None:
            read = self._use(name, ctx.iter_idx)
            given = sum(getattr(ctx, source) for source in self.sources[name])
            setattr(ctx, name, ctx.batch + 2 * given + read)

        io = [
            DeclaredIO(state=kind, mode="r" * touch.reads + "w" * touch.writes, others=others)  # type: ignore[arg-type]
            for kind, others in self.others.items()
            if self.says[name] == "states" and any(touch := self.touches[name, kind])
        ]
        if self.says[name] == "states" and not io:
            io = [DeclaredIO(state=f"{name}'s own", others="")]
        return PipelineTask(name, run, io=io, pure=self.says[name] == "pure")

    def body(self, ctx: Any) -> None:
        """Run the part of the loop after the tasks."""
        self.seen.append([getattr(ctx, name) for name in self.names])
        self.seen.append(self._use("body", ctx.iter_idx))

    def result(self, contexts: Iterable[Any]) -> list[Any]:
        """Run the body over contexts; return what it saw, and the final states."""
        for ctx in contexts:
            self.body(ctx)
        return [*self.seen, *(str(s.read()) for s in self.states.values())]

    def plain(self) -> Iterator[Any]:
        """Yield the contexts of the plain loop."""
        for number, batch in enumerate(self.loader):
            ctx = IterContext(batch, number)
            for task in self.tasks:
                task(ctx)
            yield ctx

    def has_body(self) -> bool:
        """Return whether the caller uses any state; it reads those of its own thread in the end."""
        own = not OF_A_THREAD.isdisjoint(self.kinds)
        return own or any(any(self.touches["body", kind]) for kind in self.kinds)

    def plan(self) -> PipelinePlan:
        """Return a random plan, often with the dependences that the declarations need."""
        rng = self._rng
        stage, schedule = 0, {}
        for name in self.names:
            stage += rng.random() < 0.4
            schedule[name] = TaskSchedule(stage, thread_group=rng.choice(["default", "io", "w"]))
        deps = {(name, source) for name in self.names for source in self.sources[name]}
        across = set()
        if rng.random() < 0.8:
            for one in needed(Declared.by(self.tasks).effects):
                (across if one.distance else deps).add(one[:2])
        depth = rng.choice([None, None, stage + 2, stage + 3])
        pull = rng.choice([None, None, "io"])
        plan = PipelinePlan(schedule, deps=[*deps], cross_iter_deps=[*across], pull_group=pull)
        return plan if pull else swpipe_with(plan, depth)


def swpipe_with(plan: PipelinePlan, depth: int | None) -> PipelinePlan:
    """Return the plan with this depth."""
    return PipelinePlan(
        plan.schedule, deps=plan.deps, cross_iter_deps=plan.cross_iter_deps, pipeline_depth=depth
    )


def iterated(program: Program, plan: PipelinePlan) -> list[Any]:
    with SWPipeline(plan, program.tasks, device="cpu", check_effects=False) as pipe:
        return program.result(pipe.iterate(program.loader))


def run(program: Program, plan: PipelinePlan) -> list[Any]:
    """Run without a body: the last task keeps the contexts, which are read in the end."""
    kept: list[Any] = []
    last = program.names[-1]
    tasks = [
        PipelineTask(t.name, keeping(t.fn, kept) if t.name == last else t.fn, t.io, pure=t.pure)
        for t in program.tasks
    ]
    with SWPipeline(plan, tasks, device="cpu", check_effects=False) as pipe:
        pipe.run(program.loader)
    return program.result(sorted(kept, key=lambda ctx: ctx.iter_idx))


def keeping(fn: Callable[[Any], None], kept: list[Any]) -> Callable[[Any], None]:
    """Return the function, which also keeps its context."""

    def also(ctx: Any) -> None:
        fn(ctx)
        kept.append(ctx)

    return also


def overlapped(program: Program, plan: PipelinePlan) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = swpipe.overlap(program.loader, program.tasks, device="cpu")
    with loop:
        return program.result(loop)


WAYS: dict[str, Callable[[Program, PipelinePlan], list[Any]]] = {
    "iterate": iterated,
    "run": run,
    "overlap": overlapped,
}


def outcomes(seeds: Iterable[int], folder: Path) -> tuple[Counter[str], list[str]]:
    """Count how the programs ended, and return those that differ from the plain loop."""
    counts, differ = Counter[str](), list[str]()
    for seed in seeds:
        program = Program(seed, folder)
        program.fresh()
        plan = program.plan()
        for way, run_so in WAYS.items():
            if way == "run" and program.has_body():
                continue
            program.fresh()
            expected = program.result(program.plain())
            program.fresh()
            try:
                if way != "overlap":
                    body = way != "run"
                    verify(plan, program.tasks, streams=False, loader=program.loader, body=body)
                found = run_so(program, plan)
            except PlanError:
                counts[f"{way}: refused"] += 1
                continue
            counts[f"{way}: ran"] += 1
            if found != expected:
                differ.append(f"{seed} {way}: {program.says} {plan}")
    return counts, differ


pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
"""Ignored because a program may step a scheduler before any optimizer."""


PROGRAMS = 40


@pytest.mark.slow
def test_what_is_accepted_has_the_numbers_of_the_plain_loop(tmp_path: Path) -> None:
    """At least a tenth of the random plans is accepted, so that not all are refused."""
    counts, differ = outcomes(range(PROGRAMS), tmp_path)
    assert differ == []
    assert counts["overlap: ran"] == PROGRAMS
    for way in ("iterate", "run"):
        assert counts[f"{way}: ran"] >= 0.1 * counts[f"{way}: refused"] > 0
