"""Ready-made plans of the recommender's training step (``swpipe.tasks.sparse_dist``), by name.

All of them run on the caller's thread: what overlaps is the device's streams and the exchanges that
are under way, so nothing runs between two calls of ``progress()``, and a model may be detached,
evaluated or saved there. A thread of its own for a task is one field away: everything that launches
collectives is globally ordered.

One period, from left to right, with the iteration each task is on (i is the one handed out)::

    serial       copy start wait prefetch embed dense loss backward  ...  all on i

    sparse_dist  start copy prefetch embed dense wait loss dense' embed' finalize step
                 i+1   i+2  i        i     i     i+1  i    i      i      i        i

    prefetch     start copy embed dense wait prefetch loss dense' embed' finalize step
                 i+2   i+3  i     i     i+2  i+1      i    i      i      i        i

    split        dense prefetch loss dense' start copy embed' embed wait finalize step
                 i     i+1      i    i      i+2   i+3  i      i+1   i+2  i        i

    semi_sync    dense loss dense' start copy prefetch embed embed' wait finalize step
                 i     i    i      i+2   i+3  i+1      i+1   i      i+2  i        i

Each exchange so has the work of the tasks between to hide behind: of sizes from "start" to "wait",
of ids from "wait" to "prefetch", of embeddings from "embed" to "dense", and of their gradients,
under the split forward, from the middle of "dense'" to "embed'".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise


__all__ = ["PLANS", "TASKS", "prefetch", "semi_sync", "serial", "sparse_dist", "split"]
from swpipe.core.plan import PipelinePlan, StreamSpec, TaskSchedule

COPY, START, WAIT, PREFETCH = (
    "H2DAndShuffle",
    "EmbInputDistStart",
    "EmbInputDistWait",
    "EmbPrefetch",
)
EMBED, DENSE, LOSS = "EmbForward", "DenseForward", "LossPostprocess"
DENSE_BACK, EMBED_BACK = "DenseBackward", "EmbBackward"
FINALIZE, STEP = "FinalizeGrads", "OptimStep"

TASKS = (
    COPY, START, WAIT, PREFETCH, EMBED, DENSE, LOSS, DENSE_BACK, EMBED_BACK, FINALIZE, STEP,
)  # fmt: skip
"""The eleven tasks, in serial order."""

ORDERED = frozenset(TASKS) - {PREFETCH}
"""Tasks that may launch collectives."""

STREAMS = {COPY: "memcpy", START: "data_dist", WAIT: "data_dist"}


def serial() -> PipelinePlan:
    """One task after the other on the caller's thread and stream."""
    return _plan(dict.fromkeys(TASKS, 0), TASKS, streams={})


def sparse_dist() -> PipelinePlan:
    """Three stages: copy, exchange of ids, compute. What TorchRec's sparse-dist pipeline does."""
    stages = dict.fromkeys(TASKS, 2) | {COPY: 0, START: 1, WAIT: 1}
    order = (
        START,
        COPY,
        PREFETCH,
        EMBED,
        DENSE,
        WAIT,
        LOSS,
        DENSE_BACK,
        EMBED_BACK,
        FINALIZE,
        STEP,
    )
    return _plan(stages, order, streams=STREAMS)


def prefetch() -> PipelinePlan:
    """Four stages: copy, exchange of ids, prefetch, compute.

    Within a period the next batch's prefetch comes after this batch's forward, which unlocks the
    cache lines that it used, and before its backward, behind which it hides.
    """
    stages = dict.fromkeys(TASKS, 3) | {COPY: 0, START: 1, WAIT: 1, PREFETCH: 2}
    order = (
        START,
        COPY,
        EMBED,
        DENSE,
        WAIT,
        PREFETCH,
        LOSS,
        DENSE_BACK,
        EMBED_BACK,
        FINALIZE,
        STEP,
    )
    return _plan(
        stages,
        order,
        same_period=((PREFETCH, DENSE), (DENSE_BACK, PREFETCH)),
        streams={**STREAMS, PREFETCH: "prefetch"},
    )


def split(*, tables_in_step: bool = True) -> PipelinePlan:
    """Four stages; the next batch's embeddings are looked up as soon as the tables are up to date.

    From one batch to the next the tables ask for two exchanges, one after the other: of embeddings,
    and of their gradients. While one is under way, what does not depend on it is done. Gradients
    travel during the last part of the dense half's backward, and while a later batch is copied and
    its sizes go out; embeddings, while those sizes come in, the optimizers step, and the dense half
    does what it can without them. Needs the split forward.

    Args:
        tables_in_step: Some tables are updated by ``OptimStep`` rather than inside backward
            (data-parallel ones are); the next look-up then comes after that.
    """
    stages = dict.fromkeys(TASKS, 3) | {COPY: 0, START: 1, WAIT: 1, PREFETCH: 2, EMBED: 2}
    head = (DENSE, PREFETCH, LOSS, DENSE_BACK, START, COPY, EMBED_BACK)
    tail = (FINALIZE, STEP, EMBED, WAIT) if tables_in_step else (EMBED, WAIT, FINALIZE, STEP)
    carried = [(EMBED, EMBED_BACK), *([(EMBED, STEP)] if tables_in_step else [])]
    return _plan(
        stages,
        (*head, *tail),
        carried=carried,
        same_period=((PREFETCH, DENSE), (DENSE_BACK, PREFETCH)),
        streams={**STREAMS, PREFETCH: "prefetch"},
    )


def semi_sync() -> PipelinePlan:
    """As split, but the next batch is looked up before this one has updated the tables.

    Its embeddings are one batch behind; they and this batch's gradients travel at the same time.
    Not the serial run's numbers, hence asked for by name. Needs the split forward.
    """
    stages = dict.fromkeys(TASKS, 3) | {COPY: 0, START: 1, WAIT: 1, PREFETCH: 2, EMBED: 2}
    order = (
        DENSE,
        LOSS,
        DENSE_BACK,
        START,
        COPY,
        PREFETCH,
        EMBED,
        EMBED_BACK,
        WAIT,
        FINALIZE,
        STEP,
    )
    return _plan(stages, order, carried=(), streams=STREAMS, stale={"tables": 1})


def _plan(
    stages: Mapping[str, int],
    order: Sequence[str],
    *,
    streams: Mapping[str, str],
    carried: Sequence[tuple[str, str]] = ((EMBED, EMBED_BACK), (EMBED, STEP)),
    same_period: Sequence[tuple[str, str]] = (),
    stale: Mapping[str, int] | None = None,
) -> PipelinePlan:
    """The plan in which each iteration's tasks keep their serial order."""
    return PipelinePlan(
        schedule={
            name: TaskSchedule(
                stage=stages[name], stream=streams.get(name), globally_ordered=name in ORDERED
            )
            for name in TASKS
        },
        deps=[(after, before) for before, after in pairwise(TASKS)],
        # The state that iterations share: parameters, gradients, and the caches' bookkeeping.
        cross_iter_deps=[*carried, (DENSE, STEP), (PREFETCH, EMBED)],
        same_period_deps=same_period,
        order=order,
        streams=dict.fromkeys(streams.values(), StreamSpec(priority=-1)),
        stale=stale,
    )


PLANS: dict[str, Callable[[], PipelinePlan]] = {
    "serial": serial,
    "sparse_dist": sparse_dist,
    "prefetch": prefetch,
    "split": split,
    "semi_sync": semi_sync,
}
