"""A plan in which two successive batches exchange between them only the rows they share (PEC).

One period from left to right, with the iteration of each task; iteration i is returned::

    embed prefetch overlap wait copy dense late early loss dense' start embed' finalize step
    i     i+1      i+1     i+2  i+3  i     i    i+1   i    i      i+3   i      i        i

"early" looks up the rows of batch i + 1 that batch i does not use. "embed" looks up all other rows,
after batch i has updated them. "dense'" sends the gradients of rows that batch i + 1 uses; it knows
the ids of batch i + 1, which a serial run would not know yet. "embed" of i + 1 sends the other
gradients, and "late" of i + 1 applies them. So between two steps only shared rows are exchanged, in
both directions.
"""

from __future__ import annotations

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.sparse_dist import (
    COPY,
    DENSE,
    DENSE_BACK,
    EMBED,
    EMBED_BACK,
    LAST,
    LOSS,
    PREFETCH,
    START,
    STEP,
    WAIT,
    step_plan,
)

__all__ = ["TASKS", "pec"]

OVERLAP = "EmbOverlap"
EARLY = "EmbEarly"
LATE = "EmbLate"

TASKS = (COPY, START, WAIT, PREFETCH, OVERLAP, EARLY, EMBED, DENSE, LATE, *LAST)
"""The fourteen tasks, in serial order."""


def pec() -> PipelinePlan:
    """Return a plan of four stages: copy, exchange of ids, early look-up, compute."""
    stages = dict.fromkeys(TASKS, 3) | dict.fromkeys((PREFETCH, OVERLAP, EARLY), 2)
    stages |= {COPY: 0, START: 0, WAIT: 1}
    dense = (DENSE, LATE, EARLY, LOSS, DENSE_BACK, START)
    return step_plan(
        stages,
        (EMBED, PREFETCH, OVERLAP, WAIT, COPY, *dense, *LAST[2:]),
        # EARLY of i + 1 comes after LATE of i, which updates rows of batch i - 1 that EARLY may
        # read. OVERLAP of i + 1 comes after EARLY of i, which completes the masks of batch i.
        carried=((EMBED, EMBED_BACK), (EMBED, STEP), (EARLY, LATE), (OVERLAP, EARLY)),
        same_period=((DENSE_BACK, EARLY), (DENSE_BACK, PREFETCH)),
        # By design: the early look-up reads tables before the last update (of rows that it does not
        # use), and the backward knows the overlap of one batch more than in a serial run.
        stale={"tables": 1},
        newer={"overlap": 1},
    )
