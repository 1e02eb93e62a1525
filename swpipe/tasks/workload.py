"""Workloads: loops that the command line can train, profile and plan, by name.

A module ``NAME_workload`` in ``swpipe/tasks`` or in a folder of it calls ``register`` when it is
imported; ``workloads`` imports all of these modules. So that this costs nothing and always
succeeds, such a module imports the libraries of its tasks inside functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

import swpipe.tasks
from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import DeclaredIO, Others, PipelineTask

T = TypeVar("T")

Plans: TypeAlias = Mapping[str, Callable[[], PipelinePlan]]

DEFAULT = "images"
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
        kind: ``int``, ``str``, ``bool`` or ``Path``.
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


class Job:
    """A workload at work. A subclass has tasks and batches, and says what else it has to say.

    Attributes:
        context: The class of its contexts; None for ``IterContext``.
        modules: What is trained, and compared between runs.
    """

    context: type[IterContext] | None = None
    modules: Sequence[nn.Module] = ()

    @property
    def epoch_steps(self) -> int:
        """How many steps once through the data takes."""
        raise NotImplementedError

    def tasks(self) -> Iterable[PipelineTask]:
        """In serial order."""
        raise NotImplementedError

    def batches(self, steps: int | None = None, /) -> Iterator[Any]:
        """The first ones, from the beginning at each call; None for once through the data."""
        raise NotImplementedError

    def over_ranks(self, value: T, /) -> list[T]:
        """The values of all ranks. A collective."""
        return [value]

    def retired(self, ctx: Any, /) -> float | torch.Tensor | None:
        """Called with the context of each step that was trained; returns its loss, if any."""
        there = "loss" in vars(ctx) or hasattr(type(ctx), "loss")  # it may have gone by keep
        loss = ctx.loss if there else None
        if isinstance(loss, torch.Tensor):
            return loss.detach() if loss.numel() == 1 else None
        return loss if isinstance(loss, float) else None

    def results(self) -> dict[str, str]:
        """Further columns of the table of runs. A collective."""
        return {}

    def close(self) -> None:
        """Release resources."""


def gradients_of(modules: Sequence[nn.Module], state: str, others: Others = "rw") -> DeclaredIO:
    """The gradients of modules as a declared state of this name."""
    parameters = [parameter for module in modules for parameter in module.parameters()]

    def restore(gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def capture() -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in parameters]

    return DeclaredIO(capture, restore, state, others=others)


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
    """

    name: str
    plans: Plans
    usual_plan: str
    configure: Callable[[Mapping[str, Any]], Any]
    open_job: Callable[[Any], Job]
    options: tuple[Option, ...] = ()


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
    for folder in map(Path, swpipe.tasks.__path__):
        for file in sorted(folder.rglob("*_workload.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            importlib.import_module(".".join(("swpipe.tasks", *parts)))
    return MappingProxyType(_registered)
