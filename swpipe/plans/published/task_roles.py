"""Roles of tasks, and thread presets that assign thread groups by role.

A *bundle* is the tasks of one stream or, for tasks without a stream, of one thread group other than
the caller's; they move together. It *prepares* if none of its tasks comes after a caller's task
within an iteration. Of the preparing bundles, in serial order, the first has the role **io**, the
last of three or more **prefetch**, and those between **data dist**; all other tasks **compute**:

    role        io       data dist    prefetch    compute
    bundle      memcpy   data_dist    prefetch    the caller's stream, and all that comes after it

A preset says which roles have their own thread; the others run on the caller's. With ``by_stream``
each bundle has one, with ``per_task`` each task that is not the caller's.

Source: the named thread maps of the joint search in NVIDIA's recsys-examples, which list tasks by
name. Here they go by roles, and so apply to any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swpipe.core.plan import DEFAULT_GROUP
from swpipe.core.resolved import ResolvedPlan
from swpipe.plans.published.queue_rules import caller_tasks, stream_of

IO, DATA_DIST, PREFETCH = "io", "data_dist", "prefetch"

GIVEN = "as given"
"""Stands for the thread groups of the given plan."""

PRESETS: Mapping[str, tuple[str, ...]] = {
    "default": (IO,),
    "by_stream": (),
    "io_prefetch_compute": (IO, PREFETCH),
    "io_data_dist_compute": (IO, DATA_DIST),
    "io_data_dist_prefetch_compute": (IO, DATA_DIST, PREFETCH),
    "per_task": (),
}
"""Name of a preset to the roles that have their own thread."""


@dataclass(frozen=True, slots=True)
class TaskRoles:
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
    def of(cls, resolved: ResolvedPlan, frozen: Iterable[str] = ()) -> TaskRoles:
        """The roles in a plan; frozen tasks count as the caller's."""
        plan, caller = resolved.plan, caller_tasks(resolved.plan) | {*frozen}
        bundles: dict[str, tuple[str, ...]] = {}
        after: set[str] = set()  # what comes after one of the caller's within an iteration
        for name in resolved.serial_order:
            producers = {dep.producer for dep in resolved.within_iteration if dep.consumer == name}
            if producers & (caller | after):
                after.add(name)
            if name not in caller:
                key = stream_of(plan, name) or plan.schedule[name].thread_group
                bundles[key] = (*bundles.get(key, ()), name)
        preparing = [tasks for tasks in bundles.values() if after.isdisjoint(tasks)]
        role: dict[str, str] = {}
        for place, tasks in enumerate(preparing):
            last = place == len(preparing) - 1 and place > 1
            role |= dict.fromkeys(tasks, IO if not place else PREFETCH if last else DATA_DIST)
        return cls(caller, bundles, role)

    def groups(self, preset: str, streams: Mapping[str, str | None]) -> dict[str, str]:
        """Task to thread group under a preset; ``streams`` has the stream of every task."""
        groups = dict.fromkeys(streams, DEFAULT_GROUP)
        for key, tasks in self.bundles.items():
            for name in tasks:
                if preset == "per_task":
                    groups[name] = name
                elif preset == "by_stream":
                    groups[name] = streams[name] or key
                elif (role := self.role.get(name)) in PRESETS[preset]:
                    groups[name] = role
        return groups
