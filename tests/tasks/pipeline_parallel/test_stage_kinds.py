"""Stages of many kinds, under all schedules: gradients, buffers, hooks are those of one process."""

from __future__ import annotations

import os
from itertools import product

import pytest

from swpipe.plans.pipeline_parallel import PipelineSchedule, torch_schedule
from tests.support.ranks import WELL_BEFORE_S, Ranks
from tests.tasks.pipeline_parallel.small_gpt import random_schedule
from tests.tasks.pipeline_parallel.stage_kinds import KINDS, Outcome, outcomes

ORDERS = ("1f1b", "gpipe", "zbv", "dualpipev", "interleaved", "interleaved_zb")

FACTOR = float(os.environ.get("SWPIPE_EXAMPLES_FACTOR", "1"))

NOT_IN_ORDER = {
    "reentrant checkpoint": "cannot be split",
    "adds to grad": "cannot be split",
    "adds to grad unseen": "cannot be split",
    "running means": "which a pass may change",
}
"""Stages that are refused where F or I are not in the order of the microbatches, with the error."""

NEVER = {
    "sparse": "a tensor (sparse_coo) cannot be handed on",
    "a function": "a function cannot be handed on",
    "changing shapes": "varying_shapes=True",
    "raises in forward": "planted in a forward pass",
    "raises in backward": "planted in a backward pass",
}
"""Stages that cannot run under any schedule, with the error."""

Case = tuple[str, PipelineSchedule | None]


def orders(n_ranks: int) -> dict[str, PipelineSchedule]:
    """Return the schedules, each with as many microbatches as the largest one needs."""
    return {name: torch_schedule(name, n_ranks, max(4, 2 * n_ranks)) for name in ORDERS}  # type: ignore[arg-type]


def run(ranks: Ranks, cases: list[Case], varying_shapes: bool = False) -> list[list[Outcome]]:
    """Return the outcomes of each case on all ranks."""
    told = ranks.run(outcomes, cases, varying_shapes, deadline_s=500.0)
    return [list(one) for one in zip(*told, strict=True)]


def check(kind: str, outcome: list[Outcome], words: str | None) -> None:
    """Check that a case is equal on all ranks or, if ``words`` are given, refused with them."""
    if words is None:
        assert outcome == [Outcome([])] * len(outcome), (kind, outcome)
        return
    for one in outcome:
        assert words in one.refused, (kind, outcome)
        if kind in NEVER:
            assert "rank " in one.refused, (kind, outcome)
            assert "stage " in one.refused, (kind, outcome)
    times = [one.when_s for one in outcome]
    assert max(times) - min(times) < WELL_BEFORE_S  # and not the time-out of the group


def test_stages_of_any_kind_give_the_numbers_of_one_process(two_ranks: Ranks) -> None:
    """There are two steps, the second of which adds to gradients; each kind has one schedule."""
    schedules = list(orders(2).values())
    cases: list[Case] = [
        (kind, schedules[place % len(schedules)]) for place, kind in enumerate(KINDS)
    ]
    for (kind, _), outcome in zip(cases, run(two_ranks, cases), strict=True):
        check(kind, outcome, NEVER.get(kind))


def test_stages_that_need_an_order_are_refused_in_another(one_rank: Ranks) -> None:
    """A rank has four stages, whose passes come in a random order."""
    schedule = random_schedule((0, 0, 0, 0), 4, 1)
    cases: list[Case] = [(kind, schedule) for kind in KINDS if kind not in NEVER]
    for (kind, _), outcome in zip(cases, run(one_rank, cases), strict=True):
        check(kind, outcome, NOT_IN_ORDER.get(kind))


def test_the_serial_runtime_is_a_plain_loop(one_rank: Ranks) -> None:
    """The other runtimes are compared with it."""
    cases: list[Case] = [(kind, None) for kind in KINDS if not kind.startswith("raises")]
    for (kind, _), outcome in zip(cases, run(one_rank, cases), strict=True):
        check(kind, outcome, None)


def test_what_stages_hand_on_may_vary_if_said(two_ranks: Ranks) -> None:
    """Each microbatch then has its own header; other schedules run as before."""
    schedules = orders(2)
    kinds = ("changing shapes", "a dict", "output transposed")
    cases: list[Case] = [(kind, schedules[name]) for kind, name in product(kinds, ("1f1b", "zbv"))]
    for (kind, _), outcome in zip(cases, run(two_ranks, cases, True), strict=True):
        check(kind, outcome, None)


@pytest.mark.slow
@pytest.mark.skipif(FACTOR <= 1, reason="SWPIPE_EXAMPLES_FACTOR above 1 runs every combination")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_every_kind_runs_under_every_schedule(
    order: str, n_ranks: int, two_ranks: Ranks, four_ranks: Ranks
) -> None:
    """On 2 and on 4 ranks, the bits are equal, or all ranks refuse."""
    ranks = two_ranks if n_ranks == 2 else four_ranks
    schedule = orders(n_ranks)[order]
    kinds = list(KINDS)
    for kind, outcome in zip(kinds, run(ranks, [(k, schedule) for k in kinds]), strict=True):
        check(kind, outcome, NEVER.get(kind))
