"""HSTU's pipeline trains and reports what a synchronous loop does, bit for bit."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.support.ranks import Ranks
from tests.tasks.torchrec.hstu.training import Case, by_hand, by_pipeline

CASES = (
    Case("default", True, 3, True),
    Case("by_stream", True, 2),
    Case("io_prefetch_compute", True, 1, True),
    Case("io_data_dist_compute", False, 1),
    Case("io_data_dist_prefetch_compute", True, 1, wrapper="megatron"),
    Case("by_stream", False, 2, True, wrapper="plain"),
)
"""Each preset; the last model has no sharded modules, and is within DDP."""


def _differences(cases: tuple[Case, ...], steps: int) -> dict[Case, list[str]]:
    """For each case that differs from the synchronous loop, where it does."""
    wanted: dict[Any, Any] = {}
    found = {}
    for case in cases:
        loop = (case.balanced, case.wrapper)
        if loop not in wanted:
            wanted[loop] = by_hand(steps, *loop)
        if where := by_pipeline(case, steps).differences(wanted[loop]):
            found[case] = where
    return found


def test_each_preset_trains_the_loops_numbers(two_ranks: Ranks) -> None:
    """(loss, tokens, output) and parameters, however late each task is on each rank.

    Other combinations of options are proved by what the tasks declare: test_hstu_schedule.
    """
    assert two_ranks.run(_differences, CASES, 6, deadline_s=200) == [{}, {}]


def _one_rank_exchanges_late() -> list[str]:
    """A thread for each task; on rank 0 the exchange of ids begins long after all else."""
    rank = dist.get_rank()
    outcome = by_pipeline(
        Case("per_task"), 6, lambda name: 0.1 * (name == "start_input_dist" and rank == 0)
    )
    return outcome.differences(by_hand(6))


def test_a_forwards_exchange_keeps_its_place_among_the_collectives(two_ranks: Ranks) -> None:
    """Also where each task has a thread, and on one rank another exchange could come after it."""
    assert two_ranks.run(_one_rank_exchanges_late) == [[], []]


def test_no_process_group_is_needed_for_a_plain_model() -> None:
    """In this process."""
    assert _differences((Case(wrapper="plain"),), 6) == {}
