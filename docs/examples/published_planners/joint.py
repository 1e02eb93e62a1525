"""Joint search: a beam search over threads, streams and the order of the period.

Each round runs these steps::

    (1) vary each layout in the beam
          |- each thread preset                      (``task_roles``)
          |- each bundle on each other stream        (the tasks of a bundle move together)
          `- each policy, and each swap of two neighbours in the order
    (2) evaluate each new layout: assign lookaheads, and simulate
    (3) of all layouts with the same threads, streams and lookaheads, keep the best
    (4) the best of the kept layouts are the next beam

The search ends after the given number of rounds, or after ``patience`` rounds without a better
score. Lookaheads are assigned by ``lookahead`` instead of searched. Scores compare the simulated
interval first, then the number of threads, and then the iterations in flight; less is better. The
search starts from the given plan and from the default preset's threads. Therefore the result is at
least as good as the given plan and as the result of ``assign_lookaheads``, if these are within the
limits.

A policy ranks the tasks: of all tasks that can be next in a period, the task with the first rank
is. A policy removes no edge, and communicators keep their order. Frozen tasks and the caller's
tasks keep their thread, stream and lookahead. The plan must declare all dependences. The search is
deterministic.

Source: the joint search of the schedulable engine in NVIDIA's recsys-examples. It is written for
the fourteen tasks of one model, which it lists by name, with limits of 4 threads and 5 iterations
in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from swpipe import HOST, PipelinePlan
from swpipe.core.resolved import ResolvedPlan, resolve_plan
from swpipe.errors import PlanError, Problem
from swpipe.planning import Limits
from swpipe.planning.simulation.interval import interval_us
from swpipe.profiler import CostModel

from .lookahead import Rules, best_assignment
from .queue_rules import (
    DEFAULT_GROUP,
    Queues,
    check_inputs,
    period_edges,
    remaining_us,
    stream_of,
)
from .task_roles import GIVEN, IO, PRESETS, TaskRoles


@dataclass(frozen=True, slots=True)
class JointSearch:
    """The result of the joint search.

    Attributes:
        plan: The best plan.
        ii_us: The simulated interval of the best plan, in microseconds.
        given_ii_us: The simulated interval of the given plan, in microseconds.
        threads: The name of the best plan's thread preset, or "as given".
        why: A sentence about the chosen plan and the end of the search.
    """

    plan: PipelinePlan
    ii_us: float
    given_ii_us: float
    threads: str
    why: str


def joint_search(
    plan: PipelinePlan,
    costs: CostModel,
    *,
    limits: Limits | None = None,
    beam_width: int = 4,
    rounds: int = 8,
    patience: int = 2,
    streams: bool = True,
) -> JointSearch:
    """Search threads, streams and order together, and assign lookaheads.

    Args:
        plan: The plan to start from, serial or pipelined. It may name tasks without functions.
            Tasks that may run ahead have a stream, or a thread group other than the caller's.
        costs: The cost of each task, in microseconds.
        limits: The planner's limits; None for ``Limits()``.
        beam_width: The number of layouts from which each round continues, 1 or more.
        rounds: The maximal number of rounds; with 0 only the initial layouts are evaluated.
        patience: The number of rounds without a better score after which the search ends, 1 or
            more.
        streams: Whether to plan for a device with streams. Otherwise all cost is host time, and
            tasks keep their streams.

    Raises:
        PlanError: The plan cannot run, a task has no cost, a frozen task is unknown, or the limits
            allow no plan. In the last case the message names the limit and the least value that
            allows a plan.
        ValueError: A number is out of range.
    """
    for what, value, least in (
        ("beam_width", beam_width, 1),
        ("rounds", rounds, 0),
        ("patience", patience, 1),
    ):
        if type(value) is not int or value < least:
            raise ValueError(f"{what} is {value!r}: give an integer of {least} or more")
    limits = limits or Limits()
    space = SearchSpace(plan, costs, limits, streams=streams)
    beam = sorted(space.evaluate(space.initial()), key=attrgetter("score"))[:beam_width]
    best = beam[0]
    without = 0
    ended = "all rounds were used"
    for _ in range(rounds):
        # Layouts that an earlier round has evaluated are skipped, so that this may be empty.
        evaluated = space.evaluate(near for parent in beam for near in space.neighbours(parent))
        if not evaluated:
            ended = "nothing was left to try"
            break
        beam = sorted(prune(evaluated), key=attrgetter("score"))[:beam_width]
        # The beam may get worse than the best so far, which leads out of local minima.
        without += 1
        if beam[0].score < best.score:
            best = beam[0]
            without = 0
        if without == patience:
            ended = "patience ran out"
            break
    # The given plan may exceed the limits, so that it need not be among the layouts.
    given_us = interval_us(plan, costs, streams=streams)
    threads = best.layout.threads
    why = (
        f"{given_us:.0f} us become {best.ii_us:.0f} us; iterations in flight: {best.plan.depth}; "
        f"threads: {len(best.plan.thread_groups)} ({threads}); candidates tried: {space.tried}, "
        f"until {ended}"
    )
    return JointSearch(best.plan, best.ii_us, given_us, threads, why)


class Layout(NamedTuple):
    """A choice of threads, streams and order.

    Attributes:
        threads: The name of a thread preset, or "as given".
        streams: The stream of each task, in the order of the plan's schedule.
        priority: All tasks in the order of priority among tasks that can be next in a period.
    """

    threads: str
    streams: tuple[str | None, ...]
    priority: tuple[str, ...]


class Evaluated(NamedTuple):
    """An evaluated layout.

    Attributes:
        layout: The layout, with the order of the plan as its priority.
        plan: The plan with this layout and the assigned lookaheads.
        ii_us: The simulated interval of the plan, in microseconds.
    """

    layout: Layout
    plan: PipelinePlan
    ii_us: float

    @property
    def score(self) -> tuple[float, int, int]:
        """The interval, the number of threads, and the iterations in flight; less is better."""
        # Rounded to nanoseconds, so that float noise does not decide before threads and depth.
        return (round(self.ii_us, 3), len(self.plan.thread_groups), self.plan.depth)

    @property
    def places(self) -> tuple[object, ...]:
        """The thread group, stream and stage of each task, without the order."""
        return tuple((e.thread_group, e.stream, e.stage) for e in self.plan.schedule.values())


def prune(evaluated: Iterable[Evaluated]) -> list[Evaluated]:
    """Return the best of all evaluated layouts with the same threads, streams and lookaheads."""
    best: dict[object, Evaluated] = {}
    for layout in evaluated:
        if layout.score < best.setdefault(layout.places, layout).score:
            best[layout.places] = layout
    return list(best.values())


class SearchSpace:
    """The layouts of one plan, and the record of the layouts that have been evaluated.

    See ``joint_search`` for the arguments and errors.

    Attributes:
        rules: The constraints on lookaheads.
        policies: The policies by name.
        tried: The number of layouts that have been evaluated.
    """

    def __init__(
        self, plan: PipelinePlan, costs: CostModel, limits: Limits, *, streams: bool
    ) -> None:
        resolved = check_inputs(plan, costs, limits)
        self.rules = Rules(resolved, costs, limits)
        self._plan = self.rules.plan
        self._costs = costs
        self._limits = limits
        self._on_device = streams
        self._roles = TaskRoles.of(resolved, limits.frozen)
        self.policies = policies(resolved, costs, self._roles)
        self.tried = 0
        self._seen: set[object] = set()
        # The plan without changes; all layouts are derived from it.
        streams_now = tuple(stream_of(plan, name) for name in plan.schedule)
        self._first = Layout(GIVEN, streams_now, resolved.period_order)

    def initial(self) -> Iterator[Layout]:
        """Yield the given and the default threads, each in the given and in the engine's order.

        Raises:
            PlanError: Both the given and the default threads exceed the limit.
        """
        # ``evaluate`` drops the one above the limit if only one is.
        need = {
            name: len(self._shaped(self._first._replace(threads=name)).thread_groups)
            for name in (GIVEN, "default")
        }
        if min(need.values()) > self._limits.groups:
            both = ", ".join(f"{name}: {count}" for name, count in need.items())
            text = (
                f"every plan needs at least {min(need.values())} thread groups ({both}), "
                f"but the limit is {self._limits.groups}: allow that many"
            )
            raise PlanError([Problem(text)])
        ties = resolve_plan(replace(self._plan, order=())).period_order
        for name in need:
            yield self._first._replace(threads=name)
            yield self._first._replace(threads=name, priority=ties)

    def neighbours(self, parent: Evaluated) -> Iterator[Layout]:
        """Yield the layouts that differ in the threads, in one bundle's stream, or in the order."""
        for preset in PRESETS:
            yield parent.layout._replace(threads=preset)
        if self._on_device:
            yield from self._on_other_streams(parent.layout)
        order = parent.layout.priority
        # Sorting is stable: where a policy ranks tasks equally, the present order decides.
        for rank in self.policies.values():
            yield parent.layout._replace(priority=tuple(sorted(order, key=rank)))
        for swapped in swaps(parent.plan, order, self.rules.queues):
            yield parent.layout._replace(priority=swapped)

    def evaluate(self, layouts: Iterable[Layout]) -> list[Evaluated]:
        """Return the evaluations of all layouts that are new and within the limits."""
        evaluated = []
        for layout in layouts:
            shaped = self._shaped(layout)
            # By thread groups, since several presets may give a plan the same threads.
            groups = tuple(entry.thread_group for entry in shaped.schedule.values())
            key = (groups, layout.streams, layout.priority)
            if key in self._seen or len(shaped.thread_groups) > self._limits.groups:
                continue
            self._seen.add(key)
            assigned = best_assignment(
                shaped, self._costs, self.rules, layout.priority, streams=self._on_device
            )
            if assigned is not None:
                self.tried += 1
                # The priority is only a wish; the plan's order also keeps all edges.
                chosen = layout._replace(priority=tuple(assigned.plan.order))
                evaluated.append(Evaluated(chosen, assigned.plan, assigned.ii_us))
        return evaluated

    def _on_other_streams(self, layout: Layout) -> Iterator[Layout]:
        """Yield layouts in which one bundle's tasks that have a stream move to another stream."""
        stays = (None, HOST)
        names = [stream for stream in dict.fromkeys(self._first.streams) if stream not in stays]
        for tasks in self._roles.bundles.values():
            for stream in names:
                moved = tuple(
                    stream if old not in stays and name in tasks else old
                    for name, old in zip(self._plan.schedule, layout.streams, strict=True)
                )
                if moved != layout.streams:
                    yield layout._replace(streams=moved)

    def _shaped(self, layout: Layout) -> PipelinePlan:
        """Return the given plan with a layout's streams and threads."""
        stream = dict(zip(self._plan.schedule, layout.streams, strict=True))
        given = self._plan.schedule
        if layout.threads == GIVEN:
            groups = {name: entry.thread_group for name, entry in given.items()}
            groups |= dict.fromkeys(self._limits.frozen, DEFAULT_GROUP)
        else:
            groups = self._roles.groups(layout.threads, stream)
        return replace(
            self._plan,
            schedule={
                n: replace(e, stream=stream[n], thread_group=groups[n]) for n, e in given.items()
            },
            # A plan with a stream that no task uses would be refused.
            streams={s: spec for s, spec in self._plan.streams.items() if s in layout.streams},
        )


Policy = Callable[[str], tuple[float, ...]]
"""A function from a task's name to its rank; the least rank comes first."""


def policies(resolved: ResolvedPlan, costs: CostModel, roles: TaskRoles) -> dict[str, Policy]:
    """Return the policies by name; all of them prefer longer remaining paths among equals.

    Policies use two measures along dependences of distance 0, in microseconds. The *remaining path*
    of a task is the longest path from its start to the end of the iteration. Its *slack* is the
    time by which it can start later without lengthening the iteration's longest path.
    """
    serial = resolved.serial_order
    schedule = resolved.plan.schedule
    us = {name: costs.tasks[name].total_us for name in serial}
    edges = [(dep.consumer, dep.producer) for dep in resolved.dependences if dep.distance == 0]
    remaining = remaining_us(serial, costs, edges)
    # The earliest start of each task if nothing but dependences delays it.
    begin: dict[str, float] = {}
    for name in serial:
        begin[name] = max((begin[p] + us[p] for c, p in edges if c == name), default=0.0)
    ordered = [n for n in resolved.period_order if schedule[n].globally_ordered]
    position = {name: place for place, name in enumerate(ordered)}
    shared = {r for n in ordered for r in costs.tasks[n].resources}
    # Tasks that use a copy engine: a resource that is no communicator, or the role io.
    copies = {n for n in serial if {*costs.tasks[n].resources} - shared or roles.role.get(n) == IO}
    return {
        # The caller's tasks first.
        "critical chain first": lambda n: (n not in roles.caller, -remaining[n]),
        # The caller's tasks last, and before them all other tasks by their own time.
        "longest elsewhere first": lambda n: (
            (True, -remaining[n]) if n in roles.caller else (False, -us[n])
        ),
        "collectives early": lambda n: (position.get(n, len(position)), -remaining[n]),
        "copies early": lambda n: (n not in copies, -remaining[n]),
        # The slack is the longest path less begin and remaining; the longest path is a constant.
        "least slack first": lambda n: (-remaining[n] - begin[n], -remaining[n]),
    }


def swaps(plan: PipelinePlan, order: Sequence[str], queues: Queues) -> Iterator[tuple[str, ...]]:
    """Yield the orders of a period in which two neighbours of ``order`` are swapped.

    All orders keep the plan's edges of lag 0 and the communicators' queues.
    """
    tied = {*period_edges(plan, queues)}
    for place, (sooner, later) in enumerate(pairwise(order)):
        if (later, sooner) not in tied:
            yield (*order[:place], later, sooner, *order[place + 2 :])
