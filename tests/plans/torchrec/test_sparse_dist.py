"""The recommender's plans: their stages, the order of their periods, their promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import pytest

from swpipe import PipelinePlan
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
    copy_ahead,
    prefetch,
    semi_sync,
    sparse_dist,
    split,
    with_postproc,
)

LEAN = {
    "copy_ahead, lean": (partial(copy_ahead, lean=True), 2),
    "sparse_dist, lean": (partial(sparse_dist, lean=True), 3),
    "prefetch, lean": (partial(prefetch, lean=True), 3),
    "split, lean": (partial(split, lean=True), 3),
    "semi_sync, lean": (partial(semi_sync, lean=True), 4),
}
"""Plans with their iterations in flight, no more than TorchRec's pipelines have."""

Make: TypeAlias = Callable[[], PipelinePlan]

ALL: dict[str, Make] = {**PLANS, **{name: make for name, (make, _) in LEAN.items()}}

EARLY_SPLIT = partial(split, after_step=False)

IN_A_PERIOD: list[tuple[Make, tuple[str, ...]]] = [
    # Sizes are sent before this batch's forward and awaited after it, before its backward.
    (sparse_dist, (START, DENSE, WAIT, DENSE_BACK)),
    (prefetch, (START, DENSE, WAIT, DENSE_BACK)),
    # The next prefetch: earlier, cache lines of two batches would be locked at once; later, it
    # would not overlap.
    (prefetch, (DENSE, PREFETCH, DENSE_BACK)),
    # Under the split it fills the exchange of gradients, and leaves the way from one exchange to
    # the other free; a table that is updated in the dense backward is prefetched after it.
    (split, (DENSE, DENSE_BACK, PREFETCH, EMBED_BACK)),
    (EARLY_SPLIT, (DENSE_BACK, PREFETCH, EMBED_BACK, EMBED)),
    # Sizes are sent during the exchange of gradients and received during that of embeddings.
    (split, (DENSE, DENSE_BACK, START, EMBED_BACK)),
    (split, (EMBED, WAIT, DENSE)),
    (EARLY_SPLIT, (EMBED, WAIT, STEP)),
    # A look-up comes after the tables' update: in the backward, or else by the optimizers, after
    # which it waits for the next call. The loop may have changed tables and learning rates.
    (EARLY_SPLIT, (EMBED_BACK, EMBED, STEP)),
    (split, (EMBED, EMBED_BACK, STEP)),
    # All is sent a period before it is awaited but the gradients, when embeddings are under way.
    (semi_sync, (DENSE_BACK, PREFETCH, EMBED, WAIT, START, EMBED_BACK, STEP)),
    # Later batches get memory late.
    (LEAN["copy_ahead, lean"][0], (EMBED_BACK, COPY)),
    (LEAN["sparse_dist, lean"][0], (PREFETCH, START, COPY)),
    (LEAN["prefetch, lean"][0], (COPY, DENSE, START)),
    (LEAN["split, lean"][0], (PREFETCH, EMBED, START, COPY)),
    (LEAN["semi_sync, lean"][0], (START, EMBED_BACK, COPY)),
]
"""A plan, and tasks in the order of a period."""

AHEAD: list[tuple[Make, dict[str, str], int]] = [
    (prefetch, {PREFETCH: DENSE}, 1),
    (split, {PREFETCH: DENSE}, 1),
    (split, {EMBED: EMBED_BACK}, 0),
    (EARLY_SPLIT, {EMBED: EMBED_BACK}, 1),
    (semi_sync, {START: WAIT, WAIT: PREFETCH, EMBED: DENSE}, 1),
    (semi_sync, {DENSE_BACK: EMBED_BACK}, 0),
]
"""A plan; tasks, each with a later one; and by how many stages that is later."""


@pytest.mark.parametrize("name", ALL)
def test_every_plan_keeps_the_serial_order_within_an_iteration(name: str) -> None:
    """Tasks that may launch collectives are globally ordered, on the caller's thread."""
    plan = ALL[name]()
    assert resolve_plan(plan, TASKS).serial_order == tuple(TASKS)
    assert {n for n, entry in plan.schedule.items() if entry.globally_ordered} == ORDERED
    assert {entry.thread_group for entry in plan.schedule.values()} == {"default"}
    assert name not in LEAN or plan.depth == LEAN[name][1]


def test_exchanges_overlap_with_other_work() -> None:
    """They do so by the order of a period, and by the stages of the tasks."""
    for make, names in IN_A_PERIOD:
        order = resolve_plan(make(), TASKS).period_order
        assert tuple(name for name in order if name in names) == names
    for make, later, ahead in AHEAD:
        schedule = make().schedule
        assert {schedule[b].stage - schedule[a].stage for a, b in later.items()} == {ahead}


@pytest.mark.parametrize(("one_backward", "last"), [(False, DENSE), (True, DENSE_BACK)])
def test_a_prefetch_waits_for_what_updates_tables(one_backward: bool, last: str) -> None:
    """It may fill their caches on any stream; their own backward waits for it."""
    plan = split(one_backward=one_backward)
    assert {*plan.same_period_deps} == {(PREFETCH, last), (EMBED_BACK, PREFETCH)}


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("semi_sync")])
def test_a_look_up_waits_for_what_the_batch_before_updates(name: str) -> None:
    """Its backward and its step, by dependences, so that no other order of a planner's differs."""
    waits = {(EMBED, EMBED_BACK, 1), (EMBED, STEP, 1)}
    assert waits <= {*ALL[name]().cross_iter_deps}


@pytest.mark.parametrize("name", PLANS)
def test_inputs_are_computed_directly_before_their_exchange(name: str) -> None:
    """They are in the same stage, on the same stream; the rest of the plan does not change."""
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
