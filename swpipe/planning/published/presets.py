"""Roles of tasks, and thread presets that assign thread groups by role.

A *bundle* is the tasks of one stream or, for tasks without a stream, of one thread group other than
the caller's; they move together. It *prepares* if none of its tasks comes after a caller's task
within an iteration. Of the preparing bundles, in serial order, the first has the role **io**, the
last of three or more **prefetch**, and those between **data dist**; all other tasks **compute**:

    role        io       data dist    prefetch    compute
    bundle      memcpy   data_dist    prefetch    the caller's stream, and all that comes after it

A preset says which roles have their own thread; the others run on the caller's.

    preset                         io           data dist    prefetch
    default                        io
    by_stream                      one thread for each bundle
    io_prefetch_compute            io                        prefetch
    io_data_dist_compute           io           data_dist
    io_data_dist_prefetch_compute  io           data_dist    prefetch
    per_task                       one thread for each task that is not the caller's

Source: the named thread maps of the joint search in NVIDIA's recsys-examples, which list tasks by
name. Here they go by roles, and so apply to any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from swpipe.core.plan import DEFAULT_GROUP
from swpipe.core.resolved import ResolvedPlan
from swpipe.planning.published.queue_rules import caller_tasks, stream_of

IO = "io"
DATA_DIST = "data_dist"
PREFETCH = "prefetch"


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a plan's tasks.

    Attributes:
        caller: Tasks that stay on the caller's thread.
        bundles: Stream or thread group to its tasks, in serial order.
        role: Task to "io", "data_dist" or "prefetch"; compute tasks have no entry.
    """

    caller: frozenset[str]
    bundles: Mapping[str, tuple[str, ...]]
    role: Mapping[str, str]

    @classmethod
    def of(cls, resolved: ResolvedPlan, frozen: Iterable[str] = ()) -> Roles:
        """The roles in a plan; frozen tasks count as the caller's."""
        plan = resolved.plan
        caller = caller_tasks(plan) | {*frozen}
        bundles: dict[str, list[str]] = {}
        for name in resolved.serial_order:
            if name not in caller:
                key = stream_of(plan, name) or plan.schedule[name].thread_group
                bundles.setdefault(key, []).append(name)
        after = _after(resolved, caller)
        preparing = [tasks for tasks in bundles.values() if after.isdisjoint(tasks)]
        role: dict[str, str] = {}
        for place, tasks in enumerate(preparing):
            last = place == len(preparing) - 1 and place > 1
            role |= dict.fromkeys(tasks, IO if not place else PREFETCH if last else DATA_DIST)
        tuples = {key: tuple(tasks) for key, tasks in bundles.items()}
        return cls(caller, tuples, role)


def _after(resolved: ResolvedPlan, caller: frozenset[str]) -> set[str]:
    """The tasks that come after one of the caller's within an iteration."""
    after: set[str] = set()
    for name in resolved.serial_order:
        producers = {dep.producer for dep in resolved.within_iteration if dep.consumer == name}
        if producers & (caller | after):
            after.add(name)
    return after


Groups = Callable[[Roles, Mapping[str, str | None]], dict[str, str]]
"""From roles and streams to the thread groups of the tasks that are not on the caller's thread."""


def _threads(*roles: str) -> Groups:
    return lambda of, streams: {name: role for name, role in of.role.items() if role in roles}


def _by_stream(of: Roles, streams: Mapping[str, str | None]) -> dict[str, str]:
    return {n: streams[n] or key for key, tasks in of.bundles.items() for n in tasks}


PRESETS: Mapping[str, Groups] = {
    "default": _threads(IO),
    "by_stream": _by_stream,
    "io_prefetch_compute": _threads(IO, PREFETCH),
    "io_data_dist_compute": _threads(IO, DATA_DIST),
    "io_data_dist_prefetch_compute": _threads(IO, DATA_DIST, PREFETCH),
    "per_task": lambda of, streams: {n: n for tasks in of.bundles.values() for n in tasks},
}
"""Name to thread preset."""


def thread_map(preset: str, roles: Roles, streams: Mapping[str, str | None]) -> dict[str, str]:
    """Task to thread group under the named preset; ``streams`` has the stream of every task."""
    return {**dict.fromkeys(streams, DEFAULT_GROUP), **PRESETS[preset](roles, streams)}
