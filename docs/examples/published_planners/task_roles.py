"""The roles of tasks, and the thread presets that assign thread groups by role.

A *bundle* consists of the tasks of one stream or, for tasks without a stream, of one thread group
other than the caller's. The tasks of a bundle move together. A bundle is *preparing* if none of its
tasks comes after a caller's task within an iteration. In serial order, the first preparing bundle
has the role **io**. If there are three or more preparing bundles, the last one has the role
**prefetch**. The remaining preparing bundles have the role **data dist**, and all other tasks have
the role **compute**:

    role        io       data dist    prefetch    compute
    bundle      memcpy   data_dist    prefetch    the caller's stream, and everything after it

A preset determines the roles that have a thread of their own. All other roles run on the caller's
thread. With ``by_stream`` each bundle has its own thread, and with ``per_task`` each task that is
not the caller's has its own thread.

Source: the named thread maps of the joint search in NVIDIA's recsys-examples, which list tasks by
name. Roles make them applicable to any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swpipe.core.resolved import ResolvedPlan

from .queue_rules import DEFAULT_GROUP, caller_tasks, stream_of

IO = "io"
DATA_DIST = "data_dist"
PREFETCH = "prefetch"

GIVEN = "as given"
"""The name in place of a preset's for the thread groups of the given plan."""

PRESETS: Mapping[str, tuple[str, ...]] = {
    "default": (IO,),
    "by_stream": (),
    "io_prefetch_compute": (IO, PREFETCH),
    "io_data_dist_compute": (IO, DATA_DIST),
    "io_data_dist_prefetch_compute": (IO, DATA_DIST, PREFETCH),
    "per_task": (),
}
"""The roles that have their own thread, by the name of the preset."""


@dataclass(frozen=True, slots=True)
class TaskRoles:
    """The roles of a plan's tasks.

    Attributes:
        caller: The tasks that stay on the caller's thread.
        bundles: The tasks of each bundle in serial order, by the name of its stream or group.
        role: The role of each preparing task, by name: "io", "data_dist" or "prefetch".
    """

    caller: frozenset[str]
    bundles: Mapping[str, tuple[str, ...]]
    role: Mapping[str, str]

    @classmethod
    def of(cls, resolved: ResolvedPlan, frozen: Iterable[str] = ()) -> TaskRoles:
        """Return the roles of a plan's tasks, where frozen tasks count as the caller's."""
        plan = resolved.plan
        caller = caller_tasks(resolved.plan) | {*frozen}
        bundles: dict[str, tuple[str, ...]] = {}
        # Tasks that come after a caller's task within an iteration, also through other tasks: in
        # serial order producers come first.
        after: set[str] = set()
        for name in resolved.serial_order:
            deps = [dep for dep in resolved.dependences if dep.distance == 0]
            producers = {dep.producer for dep in deps if dep.consumer == name}
            if producers & (caller | after):
                after.add(name)
            if name not in caller:
                key = stream_of(plan, name) or plan.schedule[name].thread_group
                bundles[key] = (*bundles.get(key, ()), name)
        preparing = [tasks for tasks in bundles.values() if after.isdisjoint(tasks)]
        role: dict[str, str] = {}
        for place, tasks in enumerate(preparing):
            # With two preparing bundles the second is data dist: place is above 1 from three on.
            last = place == len(preparing) - 1 and place > 1
            role |= dict.fromkeys(tasks, IO if not place else PREFETCH if last else DATA_DIST)
        return cls(caller, bundles, role)

    def groups(self, preset: str, streams: Mapping[str, str | None]) -> dict[str, str]:
        """Return the thread group of each task under a preset.

        Args:
            preset: The name of a preset.
            streams: The stream of every task, by name.
        """
        groups = dict.fromkeys(streams, DEFAULT_GROUP)
        for key, tasks in self.bundles.items():
            for name in tasks:
                if preset == "per_task":
                    groups[name] = name
                elif preset == "by_stream":
                    # The joint search may have moved the bundle to another stream.
                    groups[name] = streams[name] or key
                elif (role := self.role.get(name)) in PRESETS[preset]:
                    groups[name] = role
        return groups
