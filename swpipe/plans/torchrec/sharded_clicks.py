"""Ready-made plans of the click job on several ranks (``swpipe.tasks.clicks.sharded``), by name.

The plans of ``swpipe.plans.torchrec.sparse_dist``, with reading, decoding and hashing before them
and the running AUC after them. Except in the serial plan, these three have a thread group of their
own and run one stage ahead: they keep the host busy, and launch no collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.plans.torchrec import sparse_dist

__all__ = ["PLANS", "fed", "serial"]

FEED = ("read", "decode", "hash")
"""Tasks that bring a batch from the file to tensors on the host."""

AUC = "auc"

TASKS = (*FEED, *sparse_dist.TASKS, AUC)
"""All tasks, in serial order."""


def fed(step: PipelinePlan, *, group: str = "io") -> PipelinePlan:
    """A plan of the eleven tasks, with the feed one stage ahead on its own thread.

    One more iteration in flight than the stages need evens out batches that take longer to read.
    """
    ahead = {name: TaskSchedule(stage=0, thread_group=group) for name in FEED}
    later = {name: replace(entry, stage=entry.stage + 1) for name, entry in step.schedule.items()}
    return _joined(step, {**ahead, **later}, depth=step.depth + 2)


def serial() -> PipelinePlan:
    """One task after the other on the caller's thread and stream."""
    step = sparse_dist.serial()
    return _joined(step, {**dict.fromkeys(FEED, TaskSchedule()), **step.schedule}, depth=1)


def _joined(step: PipelinePlan, schedule: dict[str, TaskSchedule], *, depth: int) -> PipelinePlan:
    feed = [(after, before) for before, after in pairwise((*FEED, sparse_dist.COPY))]
    last = TaskSchedule(stage=schedule[sparse_dist.STEP].stage)
    return replace(
        step,
        schedule={**schedule, AUC: last},
        deps=[*step.deps, *feed, (AUC, sparse_dist.STEP)],
        order=[*FEED, *step.order, AUC],
        pipeline_depth=depth,
    )


PLANS: dict[str, Callable[[], PipelinePlan]] = {
    "serial": serial,
    "sparse_dist": lambda: fed(sparse_dist.sparse_dist()),
    "prefetch": lambda: fed(sparse_dist.prefetch()),
    # Its tables update themselves inside backward.
    "split": lambda: fed(sparse_dist.split(after_step=False)),
    "semi_sync": lambda: fed(sparse_dist.semi_sync()),
}
