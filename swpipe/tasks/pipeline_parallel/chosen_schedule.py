"""The schedule that a name stands for, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args

import torch.distributed as dist

from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    plan_v_schedule,
    torch_schedule,
)
from swpipe.plans.pipeline_parallel.torch_orders import TorchOrder

T = TypeVar("T")

OURS = "ours"
"""A V, planned for measured costs."""

ORDERS: tuple[TorchOrder, ...] = get_args(TorchOrder)
"""Orders of torch's."""

SEARCH_S = 2.0
"""How long a schedule is searched for."""


def choose_schedule(
    name: str,
    n_micro: int,
    measure: Callable[[], PipelineCosts],
    group: dist.ProcessGroup | None = None,
) -> PipelineSchedule:
    """Make, or read, a schedule for the ranks of a group. A collective.

    Args:
        name: ``ours``, an order of torch's, or a CSV file, which only rank 0 reads.
        n_micro: The number of microbatches.
        measure: Gives the costs of a V's stages, on all ranks; called for ``ours``.
        group: The ranks; None for the default group.

    Raises:
        ScheduleError: There is no such schedule for these ranks and microbatches; raised on all
            of them.
    """
    n_ranks = dist.get_world_size(group)
    if name == OURS:
        costs = measure()
        # Ranks that search for a limited time may find different ones. No collective joins the
        # ranks between steps.
        return from_first_rank(
            lambda: (
                plan_v_schedule(
                    n_ranks, n_micro, costs, objective="bubble", seconds=SEARCH_S
                ).schedule
            ),
            group,
        )
    for order in ORDERS:
        if name == order:
            return torch_schedule(order, n_ranks, n_micro)
    return from_first_rank(lambda: _read(Path(name), n_ranks, n_micro), group)


def from_first_rank(make: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``make`` gives on rank 0 of a group, on all ranks.

    Raises:
        ScheduleError: As on rank 0.
    """
    told: list[tuple[T | None, str]] = [(None, "")]
    if dist.get_rank(group) == 0:
        try:
            told = [(make(), "")]
        except ScheduleError as error:
            told = [(None, str(error))]
    dist.broadcast_object_list(told, group=group, group_src=0)
    ((made, problem),) = told
    if problem or made is None:
        raise ScheduleError(problem)
    return made


def _read(path: Path, n_ranks: int, n_micro: int) -> PipelineSchedule:
    try:
        return PipelineSchedule.from_csv(path, n_ranks=n_ranks, n_micro=n_micro)
    except ScheduleError:
        raise
    except OSError as error:
        names = ", ".join((OURS, *ORDERS))
        why = error.strerror or error
        raise ScheduleError(f"{why}; name a CSV file, or one of {names}") from error
    except ValueError as error:  # bytes that are no text
        raise ScheduleError(str(error)) from error
