"""The step, split into parts that add up to it: what each task takes of the critical path.

    <pull> | read | decode | forward | backward | step | gaps
    input ..................| compute ..................| host       one iteration of the path

What a part is depends on what the task is for:

- **input**: calling the loader, and tasks such as a decode, which need nothing that an earlier
  iteration did, while others that do need them;
- **collective**: the time in which a task that communicates waits, off the CPU; or, for one that
  only feeds the model, such as an exchange of ids, its work on a stream;
- **host**: time between tasks, tasks that wait for a lock, a file or a device, and on a device with
  streams, time in which the device waits for the host;
- **compute**: all else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from swpipe._engine.program import OWN, SOURCES
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import dependences_of
from swpipe.profiler import ProfileResult
from swpipe.trace import CriticalPath
from swpipe.trace.critical_path import GAPS
from swpipe.trace.span import Kind

Cause: TypeAlias = Literal["input", "host", "collective", "compute"]
"""What a part of the step is spent on."""

CAUSES: tuple[Cause, ...] = ("input", "collective", "host", "compute")

BETWEEN = "between tasks"
"""The name of the part that no task has."""

LOADER = "loader"
"""The name of the part in which a batch is pulled."""

_WAITS = 0.25  # of a task's time: less is preemption


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of the step. All parts of a step add up to it.

    Attributes:
        task: A task, ``LOADER`` or ``BETWEEN``; a task may have several parts.
        cause: What it is spent on.
        seconds: Per iteration.
        share: Of the step, from 0 to 1.
    """

    task: str
    cause: Cause
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Roles:
    """What tasks are for.

    Attributes:
        recurring: Tasks on a cycle of dependences: they need what an earlier iteration did.
        feeding: Other tasks, which these need: input.
        communicating: Tasks that enter collectives.
    """

    recurring: tuple[str, ...]
    feeding: frozenset[str]
    communicating: frozenset[str]

    @classmethod
    def of(cls, plan: PipelinePlan) -> Roles:
        """The roles of a plan's tasks, by its dependences and its global order."""
        after: dict[str, set[str]] = defaultdict(set)
        for dep in dependences_of(plan):
            after[dep.producer].add(dep.consumer)
        reached = {name: _reached(name, after) for name in plan.schedule}
        recurring = tuple(name for name, of in reached.items() if name in of)
        feeding = {n for n, of in reached.items() if n not in recurring and of & {*recurring}}
        ordered = {name for name, entry in plan.schedule.items() if entry.globally_ordered}
        return cls(recurring, frozenset(feeding), frozenset(ordered))


def _reached(name: str, after: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        new = after[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def step_parts(path: CriticalPath, profile: ProfileResult, roles: Roles) -> tuple[StepPart, ...]:
    """Split the step that was profiled, in proportion to a critical path that was traced.

    Returns:
        The parts, those of a cause together, in the order of ``CAUSES``; within one the longest
        come first. No parts if the path has no steady state.
    """
    times = path.by_kind()
    whole_ms = sum(times.values())
    found: dict[tuple[str, Cause], float] = defaultdict(float)
    for (task, kind), ms in times.items():
        if task == GAPS or (task in OWN and task not in SOURCES):
            found[BETWEEN, "host"] += ms / whole_ms
        elif task in SOURCES:
            found[LOADER, "input"] += ms / whole_ms
        else:
            for cause, share in _causes(task, kind, profile, roles):
                found[task, cause] += share * ms / whole_ms
    parts = (
        StepPart(task, cause, share * profile.baseline_s, share)
        for (task, cause), share in found.items()
        if share
    )
    return tuple(sorted(parts, key=lambda part: (CAUSES.index(part.cause), -part.share)))


def _causes(
    task: str, kind: Kind, profile: ProfileResult, roles: Roles
) -> Iterator[tuple[Cause, float]]:
    """What a task's time on the path is spent on, and which share of it."""
    feeds, communicates = task in roles.feeding, task in roles.communicating
    if kind == "stream":
        waits: Cause = "collective" if communicates else "input"
        yield (waits if feeds else "compute"), 1.0
        return
    host_s = profile.host_s.get(task, 0.0)
    waiting = min(1.0, profile.blocked_s.get(task, 0.0) / host_s) if host_s else 0.0
    if waiting < _WAITS:
        waiting = 0.0
    if communicates:
        yield "collective", waiting
    elif not feeds:
        yield "host", waiting
    else:
        waiting = 0.0
    on_streams = bool(profile.device_s)
    busy: Cause = "input" if feeds else "host" if on_streams else "compute"
    yield busy, 1.0 - waiting
