"""A plan that prepares batches ahead on a second thread while one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from swpipe.core.plan import PipelinePlan, StreamRef, StreamSpec, TaskSchedule
from swpipe.core.task import PipelineTask, TaskRef, name_of, refs_in


def prefetch_plan(
    feed: Sequence[TaskRef],
    compute: Sequence[TaskRef],
    *,
    carried: Iterable[tuple[TaskRef, TaskRef]] = (),
    group: str = "io",
    depth: int = 3,
    pull_group: str | None = "loader",
    streams: Mapping[TaskRef, StreamRef] | None = None,
) -> PipelinePlan:
    """Pull and prepare batches on threads of their own, ahead of the tasks that use them.

    ::

        thread    period 0    period 1    period 2    period 3
        loader    pull 0      pull 1      pull 2      pull 3
        io                    feed 0      feed 1      feed 2
        caller                            compute 0   compute 1

    Each list runs in order, and ``compute`` after ``feed``. With a depth of 2 the two overlap; each
    further iteration lets the feeding thread run one batch further ahead, which evens out batches
    that take longer than others.

    Args:
        feed: Tasks that prepare a batch, in order.
        compute: Tasks that use it, in order; they run on the caller's thread.
        carried: (consumer, producer): the consumer on one iteration comes after the producer on
            the one before, such as ("forward", "step") where the step updates what forward reads.
        group: Name of the feeding thread group.
        depth: How many iterations may be in flight, besides one that is pulled; 2 or more.
        pull_group: Name of the thread group that calls the loader; None for the caller's thread.
        streams: Streams of tasks whose device work runs on a stream of its own, such as a copy.

    Raises:
        ValueError: A list is empty, or the depth is below 2.
    """
    feed, compute = refs_in(feed), refs_in(compute)
    if not feed or not compute:
        raise ValueError("feed or compute is empty: give at least one task in each")
    if depth < 2:
        raise ValueError(f"depth is {depth}: give 2 or more iterations in flight to prefetch")
    stream_of = {name_of(task): stream for task, stream in (streams or {}).items()}
    schedule: dict[str | PipelineTask, TaskSchedule] = {
        task: TaskSchedule(stage=0, stream=stream_of.get(name_of(task)), thread_group=group)
        for task in feed
    }
    schedule |= {
        task: TaskSchedule(stage=1, stream=stream_of.get(name_of(task))) for task in compute
    }
    named = [stream for stream in stream_of.values() if isinstance(stream, str)]
    return PipelinePlan(
        schedule=schedule,
        deps=[(after, before) for before, after in pairwise([*feed, *compute])],
        cross_iter_deps=carried,
        streams=dict.fromkeys(named, StreamSpec()),
        pipeline_depth=depth + (pull_group is not None),
        pull_group=pull_group,
    )
