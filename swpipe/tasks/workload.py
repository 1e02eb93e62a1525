"""Workloads and jobs: training loops that the command line can train, profile and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask

T = TypeVar("T")

Plans: TypeAlias = Mapping[str, Callable[[], PipelinePlan]]

DEFAULT = "images"
"""The workload of a command that names none."""

MOST_COUNT = 2**31 - 1
"""The greatest value of an option that is a count, for example of steps."""


class InputError(ValueError):
    """The error of user input that cannot be used; its message is one line."""


class TrainingFailedError(RuntimeError):
    """The error of a training that cannot continue; its message is one line."""


class Job:
    """A training loop with its model and data, ready to run.

    A subclass defines ``epoch_steps``, ``tasks`` and ``batches``, and overrides other methods as
    needed.

    Attributes:
        context: The class of the iterations' contexts; None for ``IterContext``.
        device: The device of the pipeline; see ``SWPipeline``.
        modules: The modules that are trained, and whose parameters are compared between runs.
    """

    context: type[IterContext] | None = None
    device: str | None = None
    modules: Sequence[nn.Module] = ()

    @property
    def epoch_steps(self) -> int:
        """The number of steps in one epoch."""
        raise NotImplementedError

    def tasks(self) -> Iterable[PipelineTask]:
        """Return the tasks in serial order."""
        raise NotImplementedError

    def batches(self, steps: int | None = None, /) -> Iterator[Any]:
        """Return an iterator over the first ``steps`` batches, which starts anew with each call.

        Args:
            steps: The number of batches; None for one epoch.
        """
        raise NotImplementedError

    def over_ranks(self, value: T, /) -> list[T]:
        """Return the values of all ranks, in the order of the ranks; this is a collective."""
        # A job on one rank; jobs on several ranks override this.
        return [value]

    def retired(self, ctx: Any, /) -> float | torch.Tensor | None:
        """Return the loss of a trained step from its context, or None if the step has no loss.

        This is called once for the context of each trained step.
        """
        # Not ``hasattr(ctx, "loss")``: for an attribute that ``keep`` has dropped, a context raises
        # RuntimeError, which hasattr does not catch.
        there = "loss" in vars(ctx) or hasattr(type(ctx), "loss")
        loss = ctx.loss if there else None
        # Detached: a kept loss would keep the graph of its step. A tensor of several elements under
        # this name is not a loss.
        if isinstance(loss, torch.Tensor):
            return loss.detach() if loss.numel() == 1 else None
        return loss if isinstance(loss, float) else None

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A training loop that the command line can train, profile and plan.

    Attributes:
        name: The name at the command line.
        plans: Functions that return the ready-made plans, by the plans' names.
        usual_plan: The name of the plan that is used if the user names none.
        open_job: Makes a job for a device in torch's words, or None. Raises ``InputError``.
    """

    name: str
    plans: Plans
    usual_plan: str
    open_job: Callable[[str | None], Job]
