"""The schedule of HSTU's step: the tasks' lookaheads, streams, waits and threads.

With a depth of K, from left to right; the number is the lookahead::

    h2d > start_shuffle > finish_shuffle   K + 1   memcpy
    start_input_dist > wait_input_dist     K       data_dist
    prefetch_embeddings                    1       prefetch, after this period's forward and before
                                                   its backward
    all other tasks                        0       default

The forward is two tasks: ``compute_output_dist`` looks the embeddings up and starts their exchange,
``dense_forward`` does the rest.

A prefetch counts the keys of its batch as outstanding until the look-up of that batch. It comes
after this period's forward, so that the keys of one batch are outstanding and not of two. The
backward waits for the prefetch, as in seed section 5.4, but that does not order the prefetch and
the forward: ``prefetch_embeddings`` therefore waits for ``dense_forward`` as well.

The look-up exchanges embeddings, so it is globally ordered among the collectives.

Sources: seed sections 5.1, 5.2, 5.4 and 5.5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

from swpipe.core.messages import listed, shown
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan, StreamSpec
from swpipe.plans.torchrec.hstu_config import renamed
from swpipe.schedulable import (
    Schedule,
    SequentialExecutor,
    Stage,
    StreamPool,
    Task,
    TaskContext,
    ThreadedExecutor,
)
from swpipe.schedulable.executors import ThreadMap as NamedMap
from swpipe.schedulable.executors import threads_of
from swpipe.schedulable.schedule_rules import check_stages
from swpipe.schedulable.translation import translate

IO = ("h2d", "start_shuffle", "finish_shuffle")
DATA_DIST = ("start_input_dist", "wait_input_dist")
PREFETCH = "prefetch_embeddings"
BARRIER = "nccl_safety_barrier"
COMPUTE = (
    "global_tokens_allreduce",
    "zero_grad",
    BARRIER,
    "compute_output_dist",
    "dense_forward",
    "backward",
    "finalize_model_grads",
    "optimizer_step",
    "watchdog_step",
)
TASKS = (*IO, *DATA_DIST, PREFETCH, *COMPUTE)
"""The fifteen tasks, in serial order."""

IN_PERIOD = (*IO, DATA_DIST[0], COMPUTE[0], DATA_DIST[1], PREFETCH, *COMPUTE[1:])
"""The order of a period: tokens are counted while the next batch's sizes are exchanged."""

STREAMS = ("memcpy", "data_dist", "prefetch")

CALLER = "compute"
"""The name of the caller's thread in thread maps."""

ThreadMap: TypeAlias = str | Mapping[str, str] | Callable[[Task], str] | None


def _each(io: Any, data_dist: Any, prefetch: Any, others: Any = CALLER) -> dict[str, Any]:
    """Return a value for each task, given those of the three groups that run ahead."""
    groups = {**dict.fromkeys(IO, io), **dict.fromkeys(DATA_DIST, data_dist), PREFETCH: prefetch}
    return {name: groups.get(name, others) for name in TASKS}


HSTU_THREAD_MAPS: dict[str, dict[str, str]] = {
    "default": _each("io", CALLER, CALLER),
    "by_stream": _each(*STREAMS),
    "io_prefetch_compute": _each("io", CALLER, "prefetch"),
    "io_data_dist_compute": _each("io", "data_dist", CALLER),
    "io_data_dist_prefetch_compute": _each("io", "data_dist", "prefetch"),
    "all_noncritical_on_io": _each("io", "io", "io"),
}
"""Preset to the thread of each task; "compute" is the caller's thread (seed section 5.5)."""

HSTU_THREAD_MAP_PRESETS = HSTU_THREAD_MAPS
"""The same presets, under their name in recsys-examples."""

HSTU_DEFAULT_THREAD_MAP = HSTU_THREAD_MAPS["default"]
"""The default map: copies and shuffles on a thread of their own (seed section 5.2)."""


class StepTask(Task):
    """The schedule of a task, whose functions are methods of ``SparseDistTasks``."""

    def run(self, ctx: TaskContext) -> None:
        """Raise an error, since the task has no function of its own.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"task {self.name!r} only says when it runs: HSTUPipeline has its function"
        )


def hstu_schedule(
    *,
    prefetch: bool,
    prefetch_depth: int,
    shuffled: bool,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Schedule:
    """Return the schedule of the step.

    Args:
        prefetch: Whether there is the task ``prefetch_embeddings``.
        prefetch_depth: Number of batches whose ids are exchanged ahead, K; 1 or more.
        shuffled: Whether both shuffle tasks launch collectives.
        changes: Task to the fields in which its ``Task`` differs from the defaults here.

    Raises:
        ValueError: ``prefetch_depth`` is below 1, or not an integer.
    """
    # type() rather than isinstance(), since True is an int.
    if type(prefetch_depth) is not int or prefetch_depth < 1:
        raise ValueError(f"prefetch_depth is {prefetch_depth!r}: give batches, 1 or more")
    # A batch is copied one period before its ids are exchanged, hence K + 1.
    lookaheads = _each(prefetch_depth + 1, prefetch_depth, 1, 0)
    streams = _each(*STREAMS, "default")
    collectives = {*_COLLECTIVES, *(IO[1:] if shuffled else ())}
    waits = _waits(prefetch)
    tasks = []
    for name in IN_PERIOD:
        if prefetch or name != PREFETCH:
            own: dict[str, Any] = {
                "lookahead": lookaheads[name],
                "stream": streams[name],
                "nccl": name in collectives,
                **waits.get(name, {}),
            }
            tasks.append(StepTask(name, **{**own, **changes.get(name, {})}))
    return Schedule((Stage(tuple(tasks)),), ("default", *STREAMS))


_COLLECTIVES = (
    *DATA_DIST,
    "global_tokens_allreduce",
    "compute_output_dist",
    "dense_forward",
    "backward",
    "finalize_model_grads",
)
"""The tasks that launch collectives with any shuffler."""


def _waits(prefetch: bool) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the tasks that each task waits for, by field of ``Task``."""
    last = PREFETCH if prefetch else DATA_DIST[1]
    # The tasks of one batch depend on each other in sequence: with this chain the verifier can
    # prove that no two of them race.
    chain = [name for name in TASKS if name != BARRIER and (prefetch or name != PREFETCH)]
    waits: dict[str, dict[str, tuple[str, ...]]] = {
        name: {"depends_on": (before,)} for before, name in pairwise(chain)
    }
    # compute_output_dist depends on the barrier, so that its collectives come after those of this
    # period's shuffle.
    waits[BARRIER] = {"same_progress_sync": ("finish_shuffle",)}
    inputs = (last, "zero_grad", "global_tokens_allreduce", BARRIER)
    waits["compute_output_dist"] = {"depends_on": inputs}
    # Gradients are cleared after the batch before has used them. Tables, learning rates and
    # parameters are those that it has written.
    for name in ("zero_grad", "compute_output_dist", "dense_forward"):
        waits[name]["cross_iter_depends_on"] = ("optimizer_step",)
    if prefetch:
        # Not orders of one batch: the prefetch of the next batch waits for this period's forward,
        # and this period's backward for that prefetch. See the module.
        waits[PREFETCH]["same_progress_sync"] = ("dense_forward",)
        waits["backward"]["same_progress_sync"] = (PREFETCH,)
    return waits


def hstu_plan(schedule: Schedule, thread_map: ThreadMap, *, threaded: bool = True) -> PipelinePlan:
    """Return the plan of a schedule of the step.

    Args:
        schedule: From ``hstu_schedule``, with or without tasks of the user's.
        thread_map: None for ``HSTU_DEFAULT_THREAD_MAP``; a name of ``HSTU_THREAD_MAPS``; or as for
            ``ThreadedExecutor``. A dict may name any of the fifteen tasks, even if the schedule
            lacks it.
        threaded: Whether tasks have the threads of the map; False for the caller's thread alone.

    Raises:
        ScheduleValidationError: ``thread_map`` names an unknown task.
        TypeError, ValueError: ``thread_map`` has the wrong type or an unknown value.
    """
    tasks = schedule.all_tasks()
    named = _named(thread_map, {task.name for task in tasks})
    executor = ThreadedExecutor(named) if threaded else SequentialExecutor()
    threads, problems = threads_of(executor, tasks)
    # The pool has no streams: the plan names them, and the engine creates them.
    pool = StreamPool(dict.fromkeys(("default", *STREAMS)))
    check_stages(schedule, pool, problems)
    plan = translate(schedule, pool, threads)
    # The functions come from the task set, which the caller gives to the pipeline with the plan.
    streams = [name for name in STREAMS if any(task.stream == name for task in tasks)]
    return replace(plan, tasks=(), streams=dict.fromkeys(streams, StreamSpec(priority=-1)))


def _named(thread_map: ThreadMap, present: Collection[str]) -> NamedMap:
    """Return the thread map for the tasks that are in the schedule."""
    if thread_map is None:
        thread_map = HSTU_DEFAULT_THREAD_MAP
    if isinstance(thread_map, str):
        if thread_map == "per_task":
            return "per_task"
        if thread_map not in HSTU_THREAD_MAPS:
            raise ValueError(
                f"thread_map is {shown(thread_map)}: give one of {listed([*HSTU_THREAD_MAPS])}, "
                "'per_task', a dict, or a function of the task"
            )
        thread_map = HSTU_THREAD_MAPS[thread_map]
    if not isinstance(thread_map, Mapping):
        return thread_map
    return {
        name: DEFAULT_GROUP if thread == CALLER else thread
        for name, thread in renamed(thread_map).items()
        # A preset names all fifteen tasks, also where there is no prefetch task. Unknown names stay
        # in the map, so that they are reported.
        if name in present or name not in TASKS
    }
