"""Workloads: loops that the command line can train, profile and plan, by name.

A module ``swpipe/tasks/NAME_workload.py`` calls ``register`` when it is imported; ``workloads``
imports all of these modules. So that this costs nothing and always succeeds, such a module imports
the libraries of its tasks inside functions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeAlias

import swpipe.tasks
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.pipeline import SWPipeline

Plans: TypeAlias = Mapping[str, Callable[[], PipelinePlan]]

DEFAULT = "clicks"
"""The workload of a command that names none."""

MOST_COUNT = 2**31 - 1
"""The greatest number of steps, rows and the like."""

MOST_SEED = 2**63 - 1
"""The greatest seed; seeds are 0 or more."""


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line."""


class TrainingFailedError(RuntimeError):
    """Training cannot go on; the message is one line."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a workload at the command line.

    Attributes:
        name: As in Python: ``batch_size`` is ``--batch-size``.
        kind: ``int``, ``str``, ``bool``, ``Path``, or ``list`` for several paths in a row.
        default: The value where none is given.
        help: One line.
        minimum: The least value of an ``int``.
        maximum: The greatest.
    """

    name: str
    kind: type
    default: Any
    help: str
    minimum: int | None = None
    maximum: int | None = MOST_COUNT


SEED = Option("seed", int, 0, "Of the model, and of generated data.", minimum=0, maximum=MOST_SEED)
"""The seed of a job; workloads that have one declare it alike."""


class Job(Protocol):
    """A workload at work.

    ``tasks`` are in serial order. ``batches`` are the first ones, from the beginning at each call.
    ``over_ranks`` returns the values of all ranks; a collective. ``close`` releases resources.
    """

    def tasks(self) -> Iterable[PipelineTask]: ...
    def batches(self, steps: int | None = None, /) -> Iterator[Any]: ...
    def over_ranks(self, value: Any, /) -> list[Any]: ...
    def close(self) -> None: ...


class Run(Protocol):
    """A job in training under one plan; a context manager.

    Attributes:
        name: What the plan is called.
        steps: How many there are in all.
        pipe: The pipeline that runs the job.
    """

    name: str
    steps: int
    pipe: SWPipeline[Any]

    @property
    def steps_per_s(self) -> float:
        """Steps per second: the median over the turns that are timed."""

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train on the next batches; ``on_step`` is called after each."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *failure: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Training:
    """How `swpipe train` trains a workload.

    Attributes:
        open_run: Opens a run of (plan name, configuration, plan, steps); None is once through the
            data.
        report: What came out of the runs, as text.
    """

    open_run: Callable[[str, Any, PipelinePlan, int | None], Run]
    report: Callable[[Sequence[Any]], str]


@dataclass(frozen=True, slots=True)
class Workload:
    """A loop that the command line can work on.

    Attributes:
        name: As the user gives it.
        plans: The ready-made plans.
        usual_plan: The one that is used where the user names none.
        configure: Option values to a frozen dataclass with a field ``device``. The values have a
            ``device`` too: torch's words, or None. Raises ``InputError``.
        open_job: A job of that configuration. Raises ``InputError``.
        options: The workload's own options.
        training: For `swpipe train`; None where the workload cannot be trained by it.
        on_ranks: The workload under torchrun, which has the same options; None where it has no
            such form.
    """

    name: str
    plans: Plans
    usual_plan: str
    configure: Callable[[Mapping[str, Any]], Any]
    open_job: Callable[[Any], Job]
    options: tuple[Option, ...] = ()
    training: Training | None = None
    on_ranks: Workload | None = None


_registered: dict[str, Workload] = {}


def register(workload: Workload) -> None:
    """Make a workload known by its name.

    Raises:
        ValueError: Another workload has its name.
    """
    if _registered.setdefault(workload.name, workload) is not workload:
        raise ValueError(f"workload {workload.name!r} is registered already: give another name")


def workloads() -> Mapping[str, Workload]:
    """All workloads by name."""
    for module in pkgutil.iter_modules(swpipe.tasks.__path__, "swpipe.tasks."):
        if module.name.endswith("_workload"):
            importlib.import_module(module.name)
    return MappingProxyType(_registered)


def alternate(
    runs: Sequence[Run],
    steps: int,
    *,
    chunk: int = 50,
    warm_up: int = 10,
    on_step: Callable[[], object] | None = None,
) -> None:
    """Advance several runs by ``steps`` each, in turns.

    Turns are short and alternate their order, so that a machine that slows down does so for all
    runs alike. Each turn fills its pipeline and drains it; that counts.

    Args:
        runs: Their plans may differ.
        steps: How many for each.
        chunk: Steps in a turn.
        warm_up: Steps of the first turn, which is not timed.
        on_step: Called after each step of each run.
    """
    for run in runs:
        run.advance(min(warm_up, steps), on_step, timed=False)
    for turn, done in enumerate(range(warm_up, steps, chunk)):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.advance(min(chunk, steps - done), on_step)
