"""A plan that prepares batches ahead on a second thread while one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from swpipe.core.keywords import suggests_keywords
from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan, StreamRef, StreamSpec, TaskSchedule, is_host
from swpipe.core.task import PipelineTask, TaskRef, name_of, refs_in
from swpipe.device import BatchCopy, Device, copy_task
from swpipe.errors import PlanError, Problem


@suggests_keywords
def prefetch_plan(
    feed: Sequence[TaskRef],
    compute: Sequence[TaskRef],
    *,
    carried: Iterable[tuple[TaskRef, TaskRef]] = (),
    group: str = "io",
    depth: int = 3,
    workers: int = 1,
    pull_group: str | None = "loader",
    streams: Mapping[TaskRef, StreamRef] | None = None,
    device: Device | torch.device | str | None = None,
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
        depth: How many iterations may be in flight, besides one that is pulled and one for each
            further worker; 2 or more. How far their work is launched ahead of a device is apart
            from it (``PipelinePlan.run_ahead``).
        workers: How many threads feed: so many batches are prepared at once, where one takes longer
            than ``compute``. ``feed`` must not depend on the batch before.
        pull_group: Name of the thread group that calls the loader; None for the caller's thread.
        streams: Streams of tasks whose device work runs on a stream of its own. If ``feed`` has a
            ``copy_task``, its tasks up to it have the stream "copy", and the others "ahead", where
            nothing else is said.
        device: Where ``swpipe.device.copy_task`` moves the batch before the other tasks; the plan
            has this task in ``plan.tasks``. ``feed`` may then be empty. None: no such task.

    Raises:
        ValueError: A list is empty, the depth is below 2, or ``workers`` below 1, or the device is
            not on this machine.
        PlanError: With ``device``, a task is called "copy".
    """
    feed, compute = refs_in(feed), refs_in(compute)
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers is {shown(workers)}: give 1 thread or more")
    total = depth + workers - 1 + (pull_group is not None)
    if device is not None:
        feed = (copy_before((*feed, *compute), device, buffers=max(total, 1)), *feed)
    if not feed or not compute:
        raise ValueError("feed or compute is empty: give at least one task in each")
    if depth < 2:
        raise ValueError(f"depth is {depth}: give 2 or more iterations in flight to prefetch")
    stream_of = _streams_of_copy(feed)
    stream_of |= {name_of(task): stream for task, stream in (streams or {}).items()}
    schedule: dict[str | PipelineTask, TaskSchedule] = {
        task: TaskSchedule(0, stream_of.get(name_of(task)), group, workers=workers) for task in feed
    }
    schedule |= {
        task: TaskSchedule(stage=1, stream=stream_of.get(name_of(task))) for task in compute
    }
    named = [s for s in stream_of.values() if isinstance(s, str) and not is_host(s)]
    return PipelinePlan(
        schedule=schedule,
        deps=[(after, before) for before, after in pairwise([*feed, *compute])],
        cross_iter_deps=carried,
        streams=dict.fromkeys(named, StreamSpec()),
        pipeline_depth=total,
        pull_group=pull_group,
    )


def copy_before(
    tasks: Iterable[TaskRef], device: Device | torch.device | str, buffers: int = 4
) -> PipelineTask:
    """The task that ``device=`` adds before others.

    Raises:
        PlanError: One of them has its name.
        ValueError: The device is not on this machine.
    """
    copy = copy_task(device, buffers=buffers)
    if copy.name in map(name_of, tasks):
        text = (
            f"task {copy.name!r} is among the tasks, and device= adds a task of this name, which "
            "moves the batch to the device: leave yours out, or rename it, or leave device= out"
        )
        raise PlanError([Problem(text, (copy.name,))])
    return copy


def _streams_of_copy(feed: Sequence[TaskRef]) -> dict[str, StreamRef]:
    """If one of the tasks is a copy: the streams of all.

    None stays on the caller's stream. There a copy would wait, after them, for the computing of an
    earlier batch, or the computing for the copy of a later one.
    """
    copies = [
        number
        for number, task in enumerate(feed)
        if isinstance(task, PipelineTask) and isinstance(task.fn, BatchCopy)
    ]
    return {
        name_of(task): "copy" if number <= copies[-1] else "ahead"
        for number, task in enumerate(feed if copies else ())
    }
