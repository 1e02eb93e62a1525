"""The lower bound on a step on two ranks, from what its parts take and the link's latency.

    ids                  START ~ sizes ~ WAIT ~ ids ~ PREFETCH ─┐
    tables   ┌────────────────────────────────────────────── EMBED ~ embeddings ~┐
             │                                        bottom forward ─────── top forward ─ LOSS
             └─ EMBED_BACK ~ gradients ~ top backward ──────────────────────────────────────┘
                                              └─ bottom backward ~ FINALIZE ─ STEP ─> next bottom

Exchanges (``~``) take the link's latency and no core; any number can be in flight. All other parts
run on the rank's one thread. So no plan has an interval below the sum of the parts, nor below the
longer of two cycles: from one look-up over both exchanges of embeddings to the next (with one batch
of staleness, half of that), and from one dense forward over the all-reduce to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Bounds, lower_bounds
from swpipe.plans.torchrec.sparse_dist import (
    COPY,
    DENSE,
    DENSE_BACK,
    EMBED,
    EMBED_BACK,
    FINALIZE,
    LOSS,
    PREFETCH,
    START,
    STEP,
    WAIT,
)

BOTTOM, TOP = f"{DENSE} (1)", f"{DENSE} (2)"
TOP_BACK, BOTTOM_BACK = f"{DENSE_BACK} (1)", f"{DENSE_BACK} (2)"
FIRST_TABLES, LAST_TABLES = f"{EMBED_BACK} (1)", f"{EMBED_BACK} (2)"
SIZES, IDS, EMBEDDINGS, GRADIENTS = "sizes", "ids", "embeddings", "gradients"
REDUCED = "all-reduce"

WORK = (
    COPY, START, WAIT, PREFETCH, EMBED, BOTTOM, TOP, LOSS, TOP_BACK, BOTTOM_BACK, FIRST_TABLES,
    LAST_TABLES, FINALIZE, STEP,
)  # fmt: skip
EXCHANGES = (SIZES, IDS, EMBEDDINGS, GRADIENTS, REDUCED)

NEEDS = (
    (START, COPY), (SIZES, START), (WAIT, SIZES), (IDS, WAIT), (PREFETCH, IDS), (EMBED, PREFETCH),
    (EMBEDDINGS, EMBED), (BOTTOM, COPY), (TOP, BOTTOM), (TOP, EMBEDDINGS), (LOSS, TOP),
    (TOP_BACK, LOSS), (BOTTOM_BACK, TOP_BACK), (GRADIENTS, TOP_BACK), (FIRST_TABLES, TOP_BACK),
    (LAST_TABLES, GRADIENTS), (LAST_TABLES, FIRST_TABLES), (REDUCED, BOTTOM_BACK),
    (FINALIZE, REDUCED), (STEP, FINALIZE),
)  # fmt: skip
"""Pairs (consumer, producer) within an iteration."""


def step_on_paper(staleness: int = 0) -> PipelinePlan:
    """Return the parts of a step as a plan in which the tables are ``staleness`` batches behind."""
    schedule = {name: TaskSchedule() for name in WORK}
    links = {name: TaskSchedule(thread_group=f"link: {name}") for name in EXCHANGES}
    return PipelinePlan(
        schedule={**schedule, **links},
        deps=NEEDS,
        cross_iter_deps=[(EMBED, LAST_TABLES, 1 + staleness), (BOTTOM, STEP)],
        pipeline_depth=8,
    )


def bounds(parts_ms: Mapping[str, float], latency_ms: float, staleness: int = 0) -> Bounds:
    """Return the lower bounds on the interval of any plan."""
    costs = {name: TaskCost(1e3 * parts_ms[name]) for name in WORK}
    costs |= {name: TaskCost(1e3 * latency_ms) for name in EXCHANGES}
    return lower_bounds(step_on_paper(staleness), CostModel(costs), streams=False)
