"""Ready-made plans of the recommender's training step (``swpipe.tasks.torchrec``), by name.

All tasks run on the caller's thread; streams and pending exchanges overlap. Nothing runs between
two calls of ``progress()``, so the model may be detached, evaluated or saved there. Tasks that
launch collectives are globally ordered, so any task may also be moved to a worker thread.

One period from left to right, with the iteration of each task; iteration i is returned::

    serial       copy start wait prefetch embed dense loss backward  ...  all on i

    copy_ahead   start wait prefetch embed dense copy loss backward  ...  copy on i+1

    sparse_dist  start copy prefetch embed dense wait loss dense' embed' finalize step
                 i+1   i+2  i        i     i     i+1  i    i      i      i        i

    prefetch     start copy embed dense wait prefetch loss dense' embed' finalize step
                 i+2   i+3  i     i     i+2  i+1      i    i      i      i        i

    split        embed wait copy dense loss dense' start prefetch embed' finalize step
                 i     i+1  i+2  i     i    i      i+2   i+1      i      i        i

    semi_sync    copy dense loss dense' prefetch embed wait start embed' finalize step
                 i+3  i     i    i      i+1      i+1   i+2  i+3   i      i        i

Exchanges are overlapped by the tasks between their start and their end. The exchange of sizes runs
from "start" to "wait", of ids from "wait" to "prefetch", and of embeddings from "embed" to "dense".
Under the split forward, the exchange of the embeddings' gradients runs from the middle of "dense'"
to "embed'". DDP's reductions run from there to "finalize".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from swpipe.core.plan import PipelinePlan, StreamSpec, TaskSchedule

__all__ = [
    "PLANS",
    "TASKS",
    "copy_ahead",
    "prefetch",
    "semi_sync",
    "serial",
    "sparse_dist",
    "split",
    "with_postproc",
]

COPY = "H2DAndShuffle"
START = "EmbInputDistStart"
WAIT = "EmbInputDistWait"
PREFETCH = "EmbPrefetch"
EMBED = "EmbForward"
DENSE = "DenseForward"
LOSS = "LossPostprocess"
DENSE_BACK = "DenseBackward"
EMBED_BACK = "EmbBackward"
FINALIZE = "FinalizeGrads"
STEP = "OptimStep"

LAST = (LOSS, DENSE_BACK, EMBED_BACK, FINALIZE, STEP)
"""The tasks after the forward, in serial order."""

TASKS = (COPY, START, WAIT, PREFETCH, EMBED, DENSE, *LAST)
"""The eleven tasks, in serial order."""

ORDERED = frozenset(TASKS) - {PREFETCH}
"""The tasks that may launch collectives."""

POSTPROC = "InputPostproc"
"""A twelfth task, between the first two: see ``with_postproc``."""

STREAMS = {COPY: "memcpy", START: "data_dist", WAIT: "data_dist"}
WITH_PREFETCH = {**STREAMS, PREFETCH: "prefetch"}
"""The streams of tasks that run ahead, without and with the prefetch."""


def serial() -> PipelinePlan:
    """Return the plan that runs all tasks serially on the caller's thread and stream."""
    return step_plan(dict.fromkeys(TASKS, 0), TASKS)


def copy_ahead(*, lean: bool = False) -> PipelinePlan:
    """Return the plan of TorchRec's base pipeline, in two stages: copy, and everything else.

    Args:
        lean: Whether the copy comes after the backward, when the activations are freed.
    """
    stages = dict.fromkeys(TASKS, 1) | {COPY: 0}
    middle = (LOSS, DENSE_BACK, EMBED_BACK, COPY) if lean else (COPY, LOSS, DENSE_BACK, EMBED_BACK)
    order = (*TASKS[1:4], EMBED, DENSE, *middle, FINALIZE, STEP)
    return step_plan(stages, order)


def sparse_dist(*, lean: bool = False) -> PipelinePlan:
    """Return the plan of TorchRec's sparse-dist pipeline: copy, exchange of ids, compute.

    Args:
        lean: Whether this batch's ids are waited for before later batches get memory.
    """
    stages = dict.fromkeys(TASKS, 2) | {COPY: 0, START: 1, WAIT: 1}
    # Lean: the exchange of this batch's ids ends, and its buffers are freed, before later batches
    # allocate theirs.
    order = (PREFETCH, START, COPY) if lean else (START, COPY, PREFETCH)
    same_period = ((START, PREFETCH), (COPY, PREFETCH)) if lean else ()
    return step_plan(stages, (*order, EMBED, DENSE, WAIT, *LAST), same_period=same_period)


def prefetch(*, lean: bool = False) -> PipelinePlan:
    """Return a plan of four stages: copy, exchange of ids, prefetch, compute.

    The prefetch of the next batch comes after this batch's forward, which releases its cache lines,
    and before this batch's backward, which overlaps the prefetch.

    Args:
        lean: Whether one batch less is in flight. The exchange of sizes then starts at the end of
            the period of the copy.
    """
    stages = dict.fromkeys(TASKS, 3) | {COPY: 0, START: 1, WAIT: 1, PREFETCH: 2}
    order: tuple[str, ...] = (START, COPY, EMBED, DENSE, WAIT, PREFETCH, *LAST)
    if lean:
        stages = dict.fromkeys(TASKS, 2) | {COPY: 0, START: 0, WAIT: 1, PREFETCH: 1}
        order = (COPY, WAIT, EMBED, DENSE, PREFETCH, *LAST, START)
    # Within a period, the prefetch stands between the forward and the backward of the batch before.
    return step_plan(stages, order, same_period=((PREFETCH, DENSE), (DENSE_BACK, PREFETCH)))


def split(
    *, after_step: bool = True, one_backward: bool = False, lean: bool = False
) -> PipelinePlan:
    """Return a plan of three stages that looks up directly after the batch before updates tables.

    Each batch needs two exchanges in sequence: of embeddings and of their gradients. Work that does
    not depend on an exchange overlaps it. Gradients are exchanged during the end of the dense
    backward, the start of a later batch's input exchange and the prefetch of the next batch.
    Embeddings are exchanged during the wait for that exchange, the copy of a later batch and the
    start of the dense forward. It needs the split forward.

    Args:
        after_step: Whether the look-up comes after ``OptimStep`` of the batch before, which updates
            tables (data-parallel ones, for example) or the learning rate of fused ones. It then
            comes in the period of its batch, so that it also sees what the loop has changed.
            Otherwise it comes before ``OptimStep``, which overlaps the exchange of embeddings too.
        one_backward: Whether ``DenseBackward`` updates tables. The prefetch, which may fill their
            caches on another stream, then waits for it.
        lean: Whether the look-up comes in the period of its batch, before later batches get memory.
            The exchange of gradients then overlaps nothing.
    """
    if lean:
        stages = dict.fromkeys(TASKS, 2) | {COPY: 0, START: 1, WAIT: 1}
        early = (PREFETCH, EMBED, START, COPY, DENSE, WAIT, *LAST)
        return step_plan(stages, early, same_period=((START, EMBED), (COPY, EMBED)))
    stages = dict.fromkeys(TASKS, 2) | {COPY: 0, START: 0, WAIT: 1, PREFETCH: 1}
    # The prefetch is between two exchanges on no path: after DENSE_BACK it delays neither of them.
    order = (EMBED, WAIT, COPY, DENSE, LOSS, DENSE_BACK, START, PREFETCH, EMBED_BACK)
    if not after_step:
        # The look-up of the next batch moves from the beginning of a period to the end of the one
        # before, between EmbBackward and OptimStep.
        stages |= {WAIT: 0, EMBED: 1}
        order = (*order[2:], EMBED, WAIT)
    return step_plan(
        stages,
        (*order, FINALIZE, STEP),
        # EMBED depends on STEP only if STEP changes what a look-up reads.
        carried=[(EMBED, EMBED_BACK), *([(EMBED, STEP)] if after_step else [])],
        same_period=((PREFETCH, DENSE_BACK if one_backward else DENSE), (EMBED_BACK, PREFETCH)),
    )


def semi_sync(*, one_backward: bool = False, lean: bool = False) -> PipelinePlan:
    """Return a plan of four stages that looks up the next batch before this one updates the tables.

    Table reads, and learning rates of fused tables, are one batch stale, so the results differ from
    those of a serial run. All exchanges overlap: a period waits only for the gradients of
    embeddings, and the exchanges of sizes, ids and embeddings have time until the next period. It
    needs the split forward.

    Args:
        one_backward: Whether ``DenseBackward`` updates the tables, and so comes after the next
            look-up.
        lean: Whether later batches get memory after the backward only. Less then overlaps the
            exchange of gradients.
    """
    stages = dict.fromkeys(TASKS, 3) | {COPY: 0, START: 0, WAIT: 1, PREFETCH: 2, EMBED: 2}
    look_up = (PREFETCH, EMBED)
    middle = (*look_up, DENSE_BACK) if one_backward else (DENSE_BACK, *look_up)
    order = (COPY, DENSE, LOSS, *middle, WAIT, START, EMBED_BACK, FINALIZE, STEP)
    if lean:
        stages[START] = 1
        order = (START, DENSE, LOSS, *middle, WAIT, EMBED_BACK, COPY, FINALIZE, STEP)
    # No dependence of the look-up on earlier updates: the stale reads are allowed by name instead.
    # The prefetch has no stream of its own, since it directly precedes the look-up.
    return step_plan(
        stages, order, carried=(), streams=STREAMS, stale={"tables": 1, "optimizer": 1}
    )


def with_postproc(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with ``InputPostproc`` directly before ``EmbInputDistStart``.

    ``InputPostproc`` computes the inputs of sharded modules that modules of the model compute. It
    has the stage, stream and thread group of ``EmbInputDistStart``.
    """
    schedule: dict[str, TaskSchedule] = {}
    for name, entry in plan.schedule.items():
        schedule |= {POSTPROC: entry, name: entry} if name == START else {name: entry}
    order = [
        task for name in plan.order for task in ([POSTPROC, name] if name == START else [name])
    ]
    deps = [*plan.deps, (POSTPROC, COPY), (START, POSTPROC)]
    return replace(plan, schedule=schedule, deps=deps, order=order)


def step_plan(
    stages: Mapping[str, int],
    order: Sequence[str],
    *,
    streams: Mapping[str, str] = WITH_PREFETCH,
    carried: Sequence[tuple[str, str]] = ((EMBED, EMBED_BACK), (EMBED, STEP)),
    same_period: Sequence[tuple[str, str]] = (),
    stale: Mapping[str, int] | None = None,
    newer: Mapping[str, int] | None = None,
) -> PipelinePlan:
    """Return a plan in which the tasks of each iteration keep their serial order.

    Args:
        stages: Task to its stage, in serial order.
        order: The order of a period.
        streams: Task to its stream, if it runs before the last stage.
        carried: The dependences of tables and their masks between iterations.
        same_period: The plan's ``same_period_deps``.
        stale: As for ``PipelinePlan``.
        newer: As for ``PipelinePlan``.
    """
    ahead = {name: stream for name, stream in streams.items() if stages[name] < stages[STEP]}
    return PipelinePlan(
        schedule={
            # EmbPrefetch waits for exchanges and launches none.
            name: TaskSchedule(stage, ahead.get(name), globally_ordered=name != PREFETCH)
            for name, stage in stages.items()
        },
        deps=[(after, before) for before, after in pairwise(stages)],
        # The dependences between iterations, through states that they share: parameters, gradients
        # and caches. For example, DENSE reads the parameters that STEP of the batch before wrote.
        cross_iter_deps=[*carried, (DENSE, STEP), (PREFETCH, EMBED)],
        same_period_deps=same_period,
        order=order,
        # High priority: short copies and exchanges should not queue behind the dense part's
        # kernels.
        streams=dict.fromkeys(ahead.values(), StreamSpec(priority=-1)),
        stale=stale,
        newer=newer,
    )


PLANS: dict[str, Callable[[], PipelinePlan]] = {
    "serial": serial,
    "copy_ahead": copy_ahead,
    "sparse_dist": sparse_dist,
    "prefetch": prefetch,
    "split": split,
    "semi_sync": semi_sync,
}
