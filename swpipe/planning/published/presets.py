"""Roles and thread presets: who prepares a batch, and which thread submits it.

A task's *home* is its stream or, where it names none, its thread group other than the caller's. The
tasks of one home move together. A home *prepares* if none of its tasks comes after a task of the
caller's within an iteration. In the order in which a batch passes the homes that prepare, the first
has the role **io**, the last of three or more is **prefetch**, and what lies between is **data
dist**; all else is **compute**:

    role        io       data dist    prefetch    compute
    home        memcpy   data_dist    prefetch    the caller's stream, and all that comes after it

The presets say which roles have a thread of their own; the others are on the caller's.

    preset                         io           data dist    prefetch
    default                        io
    by_stream                      one thread for each home
    io_prefetch_compute            io                        prefetch
    io_data_dist_compute           io           data_dist
    io_data_dist_prefetch_compute  io           data_dist    prefetch
    per_task                       one thread for each task that is not the caller's

Source: the named thread maps of the joint search in NVIDIA's recsys-examples, which are tables of
task names there. Here they go by roles, and so fit any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.resolved import ResolvedPlan
from swpipe.planning.published.queue_rules import callers_own

IO = "io"
DATA_DIST = "data_dist"
PREFETCH = "prefetch"


@dataclass(frozen=True, slots=True)
class Roles:
    """Who does what in a plan.

    Attributes:
        own: Tasks that stay on the caller's thread.
        homes: Home to its tasks, in the order in which a batch passes them.
        role: Task to "io", "data_dist" or "prefetch"; the tasks of compute have no entry.
    """

    own: frozenset[str]
    homes: Mapping[str, tuple[str, ...]]
    role: Mapping[str, str]

    @classmethod
    def of(cls, resolved: ResolvedPlan, frozen: Iterable[str] = ()) -> Roles:
        """The roles in a plan; frozen tasks are the caller's."""
        plan = resolved.plan
        own = callers_own(plan) | {*frozen}
        homes: dict[str, list[str]] = {}
        for name in resolved.serial_order:
            if name not in own:
                entry = plan.schedule[name]
                home = entry.stream if isinstance(entry.stream, str) else entry.thread_group
                homes.setdefault(home, []).append(name)
        after = _after(resolved, own)
        preparing = [tasks for tasks in homes.values() if after.isdisjoint(tasks)]
        role: dict[str, str] = {}
        for place, tasks in enumerate(preparing):
            last = place == len(preparing) - 1 and place > 1
            role |= dict.fromkeys(tasks, IO if not place else PREFETCH if last else DATA_DIST)
        frozen_homes = {home: tuple(tasks) for home, tasks in homes.items()}
        return cls(own, MappingProxyType(frozen_homes), MappingProxyType(role))


def _after(resolved: ResolvedPlan, own: frozenset[str]) -> set[str]:
    """The tasks that come after one of the caller's within an iteration."""
    after: set[str] = set()
    for name in resolved.serial_order:
        producers = {dep.producer for dep in resolved.within_iteration if dep.consumer == name}
        if producers & (own | after):
            after.add(name)
    return after


Groups = Callable[[Roles, PipelinePlan], dict[str, str]]
"""From roles, and a plan with the streams at hand, to the thread groups of the preparation."""


def _threads(*roles: str) -> Groups:
    def groups(who: Roles, plan: PipelinePlan) -> dict[str, str]:
        return {name: role for name, role in who.role.items() if role in roles}

    return groups


def _by_stream(who: Roles, plan: PipelinePlan) -> dict[str, str]:
    streams = {name: plan.schedule[name].stream for tasks in who.homes.values() for name in tasks}
    home = {name: home for home, tasks in who.homes.items() for name in tasks}
    return {n: s if isinstance(s, str) else home[n] for n, s in streams.items()}


def _per_task(who: Roles, plan: PipelinePlan) -> dict[str, str]:
    return {name: name for tasks in who.homes.values() for name in tasks}


PRESETS: Mapping[str, Groups] = MappingProxyType(
    {
        "default": _threads(IO),
        "by_stream": _by_stream,
        "io_prefetch_compute": _threads(IO, PREFETCH),
        "io_data_dist_compute": _threads(IO, DATA_DIST),
        "io_data_dist_prefetch_compute": _threads(IO, DATA_DIST, PREFETCH),
        "per_task": _per_task,
    }
)
"""Name to thread preset."""


def thread_map(preset: str, roles: Roles, plan: PipelinePlan) -> dict[str, str]:
    """Task to thread group under a preset.

    Args:
        preset: A name in ``PRESETS``.
        roles: Who does what.
        plan: Its streams are what ``by_stream`` goes by.
    """
    return {**dict.fromkeys(plan.schedule, DEFAULT_GROUP), **PRESETS[preset](roles, plan)}
