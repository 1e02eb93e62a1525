"""A plan that prepares batches on other threads while the caller's thread computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan, StreamRef, StreamSpec, TaskSchedule, is_host
from swpipe.core.task import PipelineTask, TaskRef, name_of, refs_in
from swpipe.device import BatchCopy, Device, copy_task
from swpipe.errors import PlanError, Problem


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
    """Return a plan that pulls and prepares batches on threads of their own, ahead of their use.

    ::

        thread    period 0    period 1    period 2    period 3
        loader    pull 0      pull 1      pull 2      pull 3
        io                    feed 0      feed 1      feed 2
        caller                            compute 0   compute 1

    The tasks of each list run in order, and ``compute`` runs after ``feed``. With a depth of 2 the
    two lists overlap. Each additional iteration lets the feeding thread run one more batch ahead,
    which compensates for batches that take longer to prepare.

    Args:
        feed: The tasks that prepare a batch, in order.
        compute: The tasks that use the batch, in order; they run on the caller's thread.
        carried: Pairs (consumer, producer): the consumer on each iteration comes after the producer
            on the previous iteration. For example, ("forward", "step") if the step updates
            parameters that the forward pass reads.
        group: The name of the feeding thread group.
        depth: The number of iterations that may be in flight, 2 or more. In addition, there is one
            iteration whose batch is being pulled if ``pull_group`` is given, and one for each
            worker after the first. The depth does not limit the run-ahead; see
            ``PipelinePlan.run_ahead``.
        workers: The number of feeding threads, each of which prepares a batch. Use several if
            preparing takes longer than ``compute``. ``feed`` must then not depend on the previous
            batch.
        pull_group: The name of the thread group that calls the loader; None for the caller's
            thread.
        streams: The streams of tasks whose device work does not run on the caller's stream. If
            ``feed`` has a ``copy_task``, the default is "copy" for the tasks up to it, and "ahead"
            for the tasks after it.
        device: The device to which a ``swpipe.device.copy_task`` moves the batch before all other
            tasks. The plan has this task in ``plan.tasks``, and ``feed`` may be empty. None for no
            copy.

    Raises:
        ValueError: A list is empty, ``depth`` is below 2, ``workers`` is below 1, or the device is
            not on this machine.
        PlanError: ``device`` is given, and a task has the name "copy".
    """
    feed = refs_in(feed)
    compute = refs_in(compute)
    if type(workers) is not int or workers < 1:
        raise ValueError(f"workers is {shown(workers)}: give 1 thread or more")
    # Pulling and each further worker hold an iteration that the caller cannot compute yet. The copy
    # needs a buffer for each iteration in flight.
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
    # A plan declares the streams that it names; ``HOST`` and streams of torch need no declaration.
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
    """Return the copy task that ``device=`` adds before other tasks.

    Args:
        tasks: The other tasks.
        device: The device to copy to.
        buffers: The number of batches that may be on the way at once.

    Raises:
        PlanError: One of the other tasks has the name of the copy task.
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
    """Return the default stream of each feeding task if one is a copy task, else an empty dict."""
    # On the caller's stream a copy would wait for the computation of an earlier batch, and the
    # computation for the copy of a later batch. Tasks after the copy have another stream than it,
    # so that they do not delay the copy of the next batch.
    copies = [
        number
        for number, task in enumerate(feed)
        if isinstance(task, PipelineTask) and isinstance(task.fn, BatchCopy)
    ]
    return {
        name_of(task): "copy" if number <= copies[-1] else "ahead"
        for number, task in enumerate(feed if copies else ())
    }
