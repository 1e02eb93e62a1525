"""HSTU's pipeline trains and reports what a synchronous loop does, bit for bit."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from swpipe.plans.torchrec.hstu_schedule import HSTU_THREAD_MAPS
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.hstu.training import Case, by_hand, by_pipeline

VALUES = (HSTU_THREAD_MAPS, (False, True), (1, 2, 3), (False, True))
PAIRS = [Case(*values) for values in pairwise_cases(*VALUES)]
WRAPPERS = [
    Case("io_data_dist_prefetch_compute", wrapper="megatron"),
    Case("by_stream", False, 2, True, wrapper="plain"),
]
"""A model without sharded modules within DDP, and a sharded one within Megatron's."""


def _differences(cases: list[Case], steps: int) -> dict[Case, list[str]]:
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


def test_each_pair_of_options_trains_the_loops_numbers(two_ranks: Ranks) -> None:
    """(loss, tokens, output) and parameters, however late each task is on each rank."""
    assert two_ranks.run(_differences, [*PAIRS, *WRAPPERS], 6, deadline_s=200) == [{}, {}]


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
    """Twenty batches, in this process."""
    assert _differences([Case(wrapper="plain")], 20) == {}
