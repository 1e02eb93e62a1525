"""The recommender's plans: their stages, the order of their periods, their promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from swpipe.core.resolved import resolve_plan
from swpipe.plans.torchrec.sparse_dist import (
    COPY,
    DENSE,
    DENSE_BACK,
    EMBED,
    EMBED_BACK,
    ORDERED,
    PLANS,
    POSTPROC,
    PREFETCH,
    START,
    STEP,
    TASKS,
    WAIT,
    split,
    with_postproc,
)


def before(order: Sequence[str], *names: str) -> bool:
    """Whether names come in this order."""
    places = [order.index(name) for name in names]
    return places == sorted(places)


MEMORY_LATE = {
    "copy_ahead": (EMBED_BACK, COPY),
    "sparse_dist": (PREFETCH, START, COPY),
    "prefetch": (COPY, DENSE, START),
    "split": (PREFETCH, EMBED, START, COPY),
    "semi_sync": (START, EMBED_BACK, COPY),
}
"""Tasks of lean plans, as they come in a period."""

LEAN: dict[str, Any] = {
    "copy_ahead": 2,
    "sparse_dist": 3,
    "prefetch": 3,
    "split": 3,
    "semi_sync": 4,
}


@pytest.mark.parametrize("name", LEAN)
def test_lean_plans_have_no_more_in_flight_than_torchrecs(name: str) -> None:
    """And the serial order within an iteration, and the same tasks take turns."""
    make: Any = PLANS[name]
    plan = make(lean=True)
    assert plan.depth == LEAN[name]
    assert before(plan.order, *MEMORY_LATE[name])
    assert resolve_plan(plan, TASKS).serial_order == tuple(TASKS)
    assert {n for n, entry in plan.schedule.items() if entry.globally_ordered} == ORDERED


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_keeps_the_serial_order_within_an_iteration(name: str) -> None:
    """The eleven tasks, as they are numbered."""
    assert resolve_plan(PLANS[name](), TASKS).serial_order == tuple(TASKS)


@pytest.mark.parametrize("name", PLANS)
def test_what_launches_collectives_is_globally_ordered(name: str) -> None:
    """All but the prefetch, whichever thread a task goes to; all are on the caller's here."""
    plan = PLANS[name]()
    assert {n for n, entry in plan.schedule.items() if entry.globally_ordered} == ORDERED
    assert {entry.thread_group for entry in plan.schedule.values()} == {"default"}


@pytest.mark.parametrize("name", ["sparse_dist", "prefetch"])
def test_exchanges_of_sizes_overlap_with_forward(name: str) -> None:
    """Sizes are sent before this batch's forward and awaited after it, before its backward."""
    assert before(list(resolve_plan(PLANS[name]()).period_order), START, DENSE, WAIT, DENSE_BACK)


@pytest.mark.parametrize("after_step", [True, False])
def test_exchanges_of_embeddings_overlap_with_other_work(after_step: bool) -> None:
    """Sizes are sent during the exchange of gradients and received during that of embeddings."""
    order = list(resolve_plan(split(after_step=after_step)).period_order)
    assert before(order, DENSE, DENSE_BACK, START, EMBED_BACK)
    assert before(order, EMBED, WAIT, DENSE) if after_step else before(order, EMBED, WAIT, STEP)


@pytest.mark.parametrize("name", ["prefetch", "split"])
def test_the_next_prefetch_comes_after_this_forward_and_before_its_backward(name: str) -> None:
    """Earlier, cache lines of two batches would be locked at once; later, it would not overlap."""
    plan = PLANS[name]()
    assert plan.schedule[PREFETCH].stage == plan.schedule[DENSE].stage - 1
    assert before(list(resolve_plan(plan).period_order), DENSE, PREFETCH, DENSE_BACK)


def test_the_next_look_up_comes_after_the_tables_are_updated() -> None:
    """After backward where they update themselves there, or else after the optimizers.

    Then it waits for the next call: the loop may have changed tables and learning rates.
    """
    early, late = split(after_step=False), split(after_step=True)
    assert early.schedule[EMBED].stage == early.schedule[EMBED_BACK].stage - 1
    assert before(list(resolve_plan(early).period_order), EMBED_BACK, EMBED, STEP)
    assert late.schedule[EMBED].stage == late.schedule[EMBED_BACK].stage
    assert before(list(resolve_plan(late).period_order), EMBED, EMBED_BACK, STEP)


def test_semi_sync_sends_everything_a_period_before_it_waits() -> None:
    """Only the gradients of embeddings are sent and awaited in the same period.

    Then the next embeddings are on their way, too.
    """
    plan = PLANS["semi_sync"]()
    lags = {
        (a, b): plan.schedule[b].stage - plan.schedule[a].stage
        for a, b in ((START, WAIT), (WAIT, PREFETCH), (EMBED, DENSE), (DENSE_BACK, EMBED_BACK))
    }
    assert list(lags.values()) == [1, 1, 1, 0]
    order = list(resolve_plan(plan).period_order)
    assert before(order, DENSE_BACK, PREFETCH, EMBED, WAIT, START, EMBED_BACK, STEP)


@pytest.mark.parametrize("name", PLANS)
def test_inputs_are_computed_directly_before_their_exchange(name: str) -> None:
    """In the same stage, on the same stream; the rest of the plan is as it was."""
    plain = PLANS[name]()
    plan = with_postproc(plain)
    twelve = (COPY, POSTPROC, *TASKS[1:])
    assert tuple(plan.schedule) == twelve
    assert plan.schedule[POSTPROC] == plain.schedule[START]
    resolved = resolve_plan(plan, twelve)
    assert resolved.serial_order == twelve
    order = list(resolved.period_order)
    assert order.index(START) == order.index(POSTPROC) + 1
    order.remove(POSTPROC)
    assert order == list(resolve_plan(plain, TASKS).period_order)
