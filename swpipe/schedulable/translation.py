"""The translation of a schedule into the plan that runs it.

    lookahead k              stage L - k, where L is the largest lookahead
    reads                    deps on all writers of the slot with the same or a larger lookahead
    depends_on               deps
    cross_iter_depends_on    cross_iter_deps
    same_progress_sync       same_period_deps; host_only for side CPU; no dependence for side NONE
    declaration order        order, where dependences leave a choice
    stages                   same_period_deps: each task after the tasks of the previous stage
    one stream, two threads  same_period_deps between neighbours in the order
    threads                  within_calls: nothing runs between two calls

The last three are rules of the seed's engine (its sections 3.2, 4.2, 4.4). Its users rely on them
for state outside slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from swpipe.core.context import IterContext
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan, StreamRef, TaskSchedule
from swpipe.core.task import PipelineTask, TaskFn
from swpipe.schedulable.declared_task import Task
from swpipe.schedulable.schedule import Schedule, between_stages, edges_of, period_order
from swpipe.schedulable.slot_context import Home, TaskContext, TaskPlace
from swpipe.schedulable.stream_pool import DEFAULT, StreamPool


def translate(
    schedule: Schedule,
    pool: StreamPool,
    threads: Mapping[str, str],
    home: Home | None = None,
) -> PipelinePlan:
    """Return the plan of a checked schedule, including the tasks.

    Args:
        schedule: The schedule.
        pool: The streams of the schedule.
        threads: The thread of each task, by the task's name.
        home: The reference to the pipeline that will run the plan; None if the tasks never run.
    """
    home = home or Home()
    order = period_order(schedule)
    edges = edges_of(schedule)
    between = between_stages(schedule)
    # A pair that also has an ordinary edge needs its stream order, so it cannot be host-only.
    whole = {*between, *(edge.names for edge in edges if not edge.host_only)}
    most = schedule.max_lookahead
    return PipelinePlan(
        schedule={
            task.name: TaskSchedule(
                stage=most - task.lookahead,
                stream=_stream(pool, task.stream),
                thread_group=threads[task.name],
                globally_ordered=task.nccl,
            )
            for task in schedule.all_tasks()
        },
        deps=[e.names for e in edges if e.field in ("reads", "depends_on")],
        cross_iter_deps=[
            (*e.names, e.distance) for e in edges if e.field == "cross_iter_depends_on"
        ],
        same_period_deps=[
            *(e.names for e in edges if e.field == "same_progress_sync"),
            *between,
            *_in_submission_order(order, threads),
        ],
        host_only=[e.names for e in edges if e.host_only and e.names not in whole],
        order=[task.name for task in order],
        within_calls=any(thread != DEFAULT_GROUP for thread in threads.values()),
        tasks=[
            PipelineTask(task.name, run_of(task, pool, most, home), task.io, task.random, task.pure)
            # The plan's tasks are in serial order: a batch meets large lookaheads first.
            for task in sorted(order, key=lambda task: -task.lookahead)
        ],
    )


def run_of(task: Task, pool: StreamPool, most: int, home: Home) -> TaskFn:
    """Return the function that the engine calls for a task; ``most`` is the largest lookahead."""
    # Made once per task, since each call of the task makes a new context from it.
    place = TaskPlace(pool, home, most - task.lookahead)
    run: Callable[[TaskContext], None] = task.run

    def fn(ctx: IterContext) -> None:
        run(TaskContext(ctx, place))

    if task.nvtx_tag is None:
        return fn
    try:
        import nvtx
    except ImportError:  # it has no wheels for some systems, which have no tool to show ranges
        return fn

    def tagged(ctx: IterContext) -> None:
        # The domain of the ranges around tasks. Without a tool, ``annotate`` does nothing.
        with nvtx.annotate(task.nvtx_tag, domain="swpipe", payload=ctx.iter_idx):
            fn(ctx)

    return tagged


def _stream(pool: StreamPool, name: str) -> StreamRef:
    stream = pool.get(name)
    # A plan's None is the current stream, and a name is a stream that the engine makes.
    return name if stream is None and name != DEFAULT else stream


def _in_submission_order(
    order: Sequence[Task], threads: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Return (later, sooner) for consecutive tasks of a stream that run on different threads."""
    # Two threads would submit to one stream in any order; tasks of one thread are in order already.
    for stream in dict.fromkeys(task.stream for task in order):
        for sooner, later in pairwise(task.name for task in order if task.stream == stream):
            if threads[sooner] != threads[later]:
                yield later, sooner
