"""The account of a step: its parts, what bounds it, and what any overlap can still gain.

All statements of a report are derived from the account. Its parts add up to the step that was
profiled. Each part is the share of a task in the critical path that was traced::

    <pull> | read | decode | forward | backward | step | gaps
    input ..................| compute ..................| host       one iteration of the path

The cause of a part depends on the role of its task:

- **input**: calls of the loader, and tasks such as a decode, which do not depend on an earlier
  iteration, but are needed by tasks that do;
- **collective**: the time in which a task that communicates waits off the CPU; for a task that
  only feeds the model, such as an exchange of ids, its work on a stream;
- **host**: time between tasks, tasks that wait for a lock, a file or a device, and on a device with
  streams, time in which the device waits for the host;
- **cores**: time in which a thread could run, but other threads had the cores;
- **compute**: all other time.

If a loader works ahead and is still no faster than one batch per step, the loader is the whole
step: it hides the tasks' times. The start of a pass is a part of its own; its time is divided by
the steps of a pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.core.messages import counted, listed
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.resolved import dependences_of
from swpipe.planning import lower_bounds
from swpipe.profiler import ProfileResult
from swpipe.profiler.spread import Estimate, short_ms
from swpipe.program import OWN, SOURCES
from swpipe.trace import CriticalPath
from swpipe.trace.critical_path import GAPS
from swpipe.trace.span import Kind as RowKind

Cause: TypeAlias = Literal["input", "host", "collective", "cores", "compute"]
"""The cause of a part: the kind of work or waiting that it is spent on."""

CAUSES: tuple[Cause, ...] = ("input", "collective", "host", "cores", "compute")

Bound: TypeAlias = Literal[
    "input-bound", "host-bound", "collective-bound", "cores-bound", "compute-bound", "balanced"
]

BETWEEN = "between tasks"
"""The name of the part that belongs to no task."""

LOADER = "loader"
"""The name of the part in which a batch is pulled."""

START = "start of a pass"
"""The name of the part in which the loader's iterator is created and makes its first batch."""

MOST = 0.5
"""The fraction of a step that a cause must reach for the verdict to name it."""

WORTH = 0.03
"""A ceiling below this fraction of a step counts as none, as it is not known that exactly."""

_WAITS = 0.25  # fraction of a task's time; a smaller one is preemption
_NAMED = 3  # the most tasks that are listed by name
_SAME = 1e-3  # relative difference of two bounds that counts as none
_WORDS: Mapping[Cause, str] = {
    "input": "waits for its input",
    "host": "waits for the host",
    "collective": "waits for other ranks",
    "cores": "waits for a core",
    "compute": "computes",
}


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of the step. All parts of a step add up to it.

    Attributes:
        task: A task, ``LOADER``, ``START`` or ``BETWEEN``; a task may have several parts.
        cause: The cause of the time.
        seconds: Seconds per iteration.
        share: The fraction of the step, from 0 to 1.
    """

    task: str
    cause: Cause
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict on what bounds a step.

    Attributes:
        bound: The cause that bounds the step, or "balanced".
        why: A sentence with the reason.
        shares: Cause to the fraction of the step spent on it; the fractions add up to 1.
    """

    bound: Bound
    why: str
    shares: Mapping[Cause, float]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that any overlap can gain: no plan for these tasks makes a step shorter.

    Attributes:
        step: The time of a step.
        floor_s: The least time of a step, in seconds.
        limit: The cause of ``floor_s``, in words.
    """

    step: Estimate
    floor_s: float
    limit: str = ""

    @property
    def saved_s(self) -> float:
        """The time of a step, less ``floor_s``."""
        return self.step.value_s - self.floor_s

    @property
    def share(self) -> float:
        """``saved_s``, as a fraction of the step; from 0 to 1."""
        return self.saved_s / self.step.value_s

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is distinct from 0 and large enough to matter."""
        return self.saved_s > self.step.spread_s and self.share >= WORTH

    def after_trial(self, tried: Estimate, shared: str) -> Ceiling:
        """Return the ceiling that remains when a promising plan saved nothing in its trial.

        ``shared`` is what the tasks most likely share, which no cost shows.
        """
        # The trial is evidence that no plan of this kind saves more.
        saved_s = min(self.saved_s, max(0.0, tried.value_s))
        limit = f"what tasks share, most likely {shared.partition(',')[0].partition(':')[0]}"
        return Ceiling(self.step, self.step.value_s - saved_s, limit)


@dataclass(frozen=True, slots=True)
class StepAccount:
    """The account of a step: what it is spent on, and what follows.

    Attributes:
        parts: The step, split into parts that add up to it.
        verdict: The cause that bounds it.
        ceiling: How much any overlap can still gain.
    """

    parts: tuple[StepPart, ...]
    verdict: StepVerdict
    ceiling: Ceiling


class Roles(NamedTuple):
    """The roles of tasks in an iteration.

    Attributes:
        recurring: Tasks on a cycle of dependences: they depend on an earlier iteration.
        feeding: Other tasks that recurring tasks depend on: the input.
        communicating: Tasks that enter collectives.
    """

    recurring: tuple[str, ...]
    feeding: frozenset[str]
    communicating: frozenset[str]

    @classmethod
    def of(cls, plan: PipelinePlan) -> Roles:
        """Return the roles of a plan's tasks, from its dependences and its global order."""
        after: dict[str, set[str]] = defaultdict(set)
        for dep in dependences_of(plan):
            after[dep.producer].add(dep.consumer)
        # A task on a cycle of dependences reaches itself.
        reached = {name: _reached(name, after) for name in plan.schedule}
        recurring = tuple(name for name, of in reached.items() if name in of)
        feeding = {n for n, of in reached.items() if n not in recurring and of & {*recurring}}
        ordered = {name for name, entry in plan.schedule.items() if entry.globally_ordered}
        return cls(recurring, frozenset(feeding), frozenset(ordered))


def _reached(name: str, after: Mapping[str, set[str]]) -> set[str]:
    # The transitive consumers of a task, which include the task itself if it lies on a cycle.
    consumers: set[str] = set()
    ahead = [name]
    while ahead:
        new = after[ahead.pop()] - consumers
        consumers |= new
        ahead += new
    return consumers


def account_of(
    profile: ProfileResult,
    path: CriticalPath,
    plan: PipelinePlan,
    *,
    streams: bool,
    cpu_s: float = 0.0,
) -> StepAccount:
    """Return the account of the step that was profiled.

    Args:
        profile: The measurements.
        path: The critical path of a trace of the same loop.
        plan: A plan with the dependences between the tasks, and the global order. Its stages and
            threads do not matter.
        streams: Whether the device has streams.
        cpu_s: The least CPU time of an iteration, on all threads of the process.
    """
    parts = _parts(path, profile, Roles.of(plan))
    ceiling = _ceiling(plan, profile, streams=streams, cpu_s=cpu_s)
    return StepAccount(parts, _verdict(parts, profile), ceiling)


# ------------------------------------------------------------------------------------------ parts


def _parts(path: CriticalPath, profile: ProfileResult, roles: Roles) -> tuple[StepPart, ...]:
    """Split the step that was profiled, in proportion to a critical path that was traced.

    Returns:
        The parts, grouped by cause in the order of ``CAUSES``. Within a cause, the longest come
        first. Empty if the path has no steady state.
    """
    whole_s = profile.baseline_s
    start_s = min(profile.pace.start_s, whole_s)
    shares: dict[tuple[str, Cause], float] = defaultdict(float)
    # If the loader sets the pace, the traced path shows only how its time is filled.
    if profile.limited_by_loader:
        shares[LOADER, "input"] = 1.0
    else:
        for (task, cause), share in _traced(path, profile, roles):
            shares[task, cause] += share
    # The trace and the profile ran at different times: only the shares are the trace's.
    seconds = {key: share * (whole_s - start_s) for key, share in shares.items()}
    if start_s:
        seconds[START, "input"] = start_s
    parts = (StepPart(task, why, s, s / whole_s) for (task, why), s in seconds.items() if s)
    return tuple(sorted(parts, key=lambda part: (CAUSES.index(part.cause), -part.share)))


def _traced(
    path: CriticalPath, profile: ProfileResult, roles: Roles
) -> Iterator[tuple[tuple[str, Cause], float]]:
    """Yield each task and cause, with their share of the critical path."""
    times = path.by_kind()
    whole_ms = sum(times.values())
    for (task, kind), ms in times.items():
        # The engine's own actions, apart from those that bring a batch, are overhead between tasks.
        if task == GAPS or (task in OWN and task not in SOURCES):
            yield (BETWEEN, "host"), ms / whole_ms
        elif task in SOURCES:
            yield (LOADER, "input"), ms / whole_ms
        else:
            for cause, share in _causes(task, kind, profile, roles):
                yield (task, cause), share * ms / whole_ms


def _causes(
    task: str, kind: RowKind, profile: ProfileResult, roles: Roles
) -> Iterator[tuple[Cause, float]]:
    """Yield the causes of a task's time on the path, each with its share of that time."""
    feeds = task in roles.feeding
    communicates = task in roles.communicating
    # On a stream there are no host times: all of the work has one cause.
    if kind == "stream":
        waits: Cause = "collective" if communicates else "input"
        yield (waits if feeds else "compute"), 1.0
        return
    thread = profile.tasks[task].thread
    host_s = thread.host_s or 1.0
    waiting = min(1.0, thread.blocked_s / host_s)
    # A small part off the CPU is preemption. Input tasks that wait, for a disk for example, stay
    # input.
    if waiting < _WAITS or (feeds and not communicates):
        waiting = 0.0
    queued = min(1.0 - waiting, thread.core_s / host_s)
    yield ("collective" if communicates else "host"), waiting
    yield "cores", queued
    # On a device with streams, host time on the critical path means that the device waits for the
    # host.
    rest: Cause = "input" if feeds else "host" if profile.on_streams else "compute"
    yield rest, 1.0 - waiting - queued


# ---------------------------------------------------------------------------------------- verdict


def _verdict(parts: tuple[StepPart, ...], profile: ProfileResult) -> StepVerdict:
    shares = {cause: sum(p.share for p in parts if p.cause == cause) for cause in CAUSES}
    bound, why = _bound(parts, profile, shares)
    # The longest wait of a rank for another one, if there is any.
    waits = (f"{wait.text}." for wait in profile.rank_waits[:1])
    return StepVerdict(bound, " ".join([why, *waits]), shares)


def _bound(
    parts: tuple[StepPart, ...], profile: ProfileResult, shares: Mapping[Cause, float]
) -> tuple[Bound, str]:
    """Return what bounds the step, and a sentence with the reason."""
    pace = profile.pace
    busy = profile.limiting
    if profile.limited_by_loader:
        who = f"its {counted(pace.workers, 'worker')}" if pace.workers else "what it has of its own"
        rest_s = profile.baseline_s - max(pace.start_s, profile.exposed_s[PULL])
        return "input-bound", (
            f"The loader makes a batch in {short_ms(pace.rate_s)} ms, with {who}; the rest of a "
            f"step takes {short_ms(rest_s)} ms."
        )
    # Several busy thread groups hide each other's time, so the causes on the path are not decisive.
    if len(busy) > 1:
        named = listed(busy)
        why = f"Threads {named} are busy all the time: to save time, all have to do less."
        return "balanced", why
    if not parts:
        return "balanced", "It takes no time that could be measured."
    ranked = sorted(CAUSES, key=lambda cause: -shares[cause])
    most = ranked[0]
    if shares[most] < MOST:
        spent = ", ".join(f"{cause} {shares[cause]:.0%}" for cause in ranked if shares[cause])
        return "balanced", f"No single cause takes half of the step: {spent}."
    # Within a cause, the longest parts come first.
    tasks = [p.task for p in parts if p.cause == most]
    long = [p.task for p in parts if p.cause == most and p.share >= WORTH]
    named = listed(long, _NAMED) if long else f"{counted(len(tasks), 'task')}, each a little"
    bound: Bound = f"{most}-bound"  # type: ignore[assignment]
    return bound, f"For {shares[most]:.0%} of its time it {_WORDS[most]}: {named}."


# ---------------------------------------------------------------------------------------- ceiling


def _ceiling(plan: PipelinePlan, profile: ProfileResult, *, streams: bool, cpu_s: float) -> Ceiling:
    """Return the ceiling over all plans of any depth, from the mean costs of the tasks.

    A task that does not depend on earlier iterations may run on several threads. Then only a
    fraction of its time bounds an iteration.
    """
    roles = Roles.of(plan)
    # Tasks that cannot have workers: the pull, tasks on a cycle, and collectives, which are
    # ordered.
    stays = {PULL, *roles.recurring, *roles.communicating}
    workers = {n: task.most_workers for n, task in profile.tasks.items() if n not in stays}
    shared = {name: 1 / number for name, number in workers.items() if number > 1 and not streams}
    costs = profile.costs.with_scaled(shared)
    # With one thread more than tasks, the number of threads never limits the bound.
    bounds = lower_bounds(plan, costs, streams=streams, threads=len(costs.tasks) + 1)
    floor_s = bounds.ii_us / 1e6
    # The bound's text reads "resource: task, task alone"; its parts are needed separately.
    what, _, names = bounds.busiest.partition(": ")
    longest = names.removesuffix(" alone").partition(", ")[0]
    limit = f"{what}: {listed(names.replace(PULL, f'the {LOADER}').split(', '), _NAMED)}"
    # A cycle of dependences bounds the step more than any resource does.
    if bounds.rec_mii_us > (1 + _SAME) * bounds.res_mii_us:
        named = listed(roles.recurring, 2 * _NAMED)
        limit = f"{named}, which wait for each other across iterations"
    elif longest in shared:
        limit = f"{workers[longest]} threads: {longest}"
    own_cores = max(1, cores() // ranks_on_machine())
    tasks_s = sum(task.thread.cpu_s for task in profile.tasks.values())
    on_cpu_s = max(cpu_s, tasks_s) / own_cores
    # ``lower_bounds`` does not know the cores, the loader and the start of a pass. The first two
    # replace the limit if they are higher; the start is added at the end.
    if on_cpu_s > floor_s:
        floor_s = on_cpu_s
        limit = f"{counted(own_cores, 'core')} for all tasks"
    pace = profile.pace
    if pace.works_ahead and pace.rate_s > floor_s:
        floor_s = pace.rate_s
        limit = f"the loader, which makes a batch in {short_ms(pace.rate_s)} ms"
    # Noise can put the bound above the measured step; the gain is never negative.
    floor_s = min(floor_s + pace.start_s, profile.baseline_s)
    return Ceiling(profile.step, floor_s, limit)
