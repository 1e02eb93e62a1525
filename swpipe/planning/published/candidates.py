"""The search space of the joint search: candidates, their neighbours, and their evaluation.

A candidate chooses threads, streams and a priority order. Its evaluation adds the lookaheads that
``lookahead`` assigns, the closest valid order, and the simulated interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.errors import PlanError, Problem
from swpipe.planning.limits import Limits
from swpipe.planning.published.lookahead import best_assignment
from swpipe.planning.published.lookahead_rules import Rules, limit_depth, too_deep
from swpipe.planning.published.policies import POLICIES, PolicyInputs, ranked, swaps
from swpipe.planning.published.presets import PRESETS, Roles, thread_map
from swpipe.planning.published.queue_rules import check_inputs, stream_of

GIVEN = "as given"
"""Stands for the thread groups of the given plan."""


class Candidate(NamedTuple):
    """A choice of threads, streams and order.

    Attributes:
        threads: Name of a thread preset, or "as given".
        streams: Each task's stream, in the order of the schedule.
        priority: All tasks; of those that can be next in a period, the first in this list is.
    """

    threads: str
    streams: tuple[str | None, ...]
    priority: tuple[str, ...]


class Evaluated(NamedTuple):
    """An evaluated candidate.

    Attributes:
        candidate: The candidate, with the plan's order as its priority.
        plan: With lookaheads and order.
        ii_us: Its simulated interval; microseconds.
    """

    candidate: Candidate
    plan: PipelinePlan
    ii_us: float

    @property
    def score(self) -> tuple[float, int, int]:
        """Interval, threads, iterations in flight; less is better."""
        return (round(self.ii_us, 3), len(self.plan.thread_groups), self.plan.depth)

    @property
    def layout(self) -> tuple[object, ...]:
        """Threads, streams and lookaheads, without the order."""
        return tuple((e.thread_group, e.stream, e.stage) for e in self.plan.schedule.values())


class SearchSpace:
    """The candidates for one plan, and which have been evaluated.

    Arguments and errors are those of ``joint_search``.
    """

    def __init__(
        self, plan: PipelinePlan, costs: CostModel, limits: Limits, *, streams: bool
    ) -> None:
        resolved = check_inputs(plan, costs, limits)
        if problems := list(too_deep(plan, limits)):
            raise PlanError(problems)
        self._plan = limit_depth(plan, limits)
        self._costs = costs
        self._limits = limits
        self._on_device = streams
        self._roles = Roles.of(resolved, limits.frozen)
        self._rules = Rules.of(resolved, costs, limits)
        self._order = resolved.period_order
        self._outlook = PolicyInputs.of(resolved, costs, self._roles)
        self._seen: set[object] = set()
        streams_now = tuple(stream_of(plan, name) for name in plan.schedule)
        self._first = Candidate(GIVEN, streams_now, self._order)
        self.threads_needed = {
            name: len(self._shaped(self._first._replace(threads=name)).thread_groups)
            for name in (GIVEN, *PRESETS)
        }

    def initial(self) -> Iterator[Candidate]:
        """The given and the default preset's threads, each in the given and the engine's order.

        Raises:
            PlanError: Both exceed the limit on threads.
        """
        need = {name: self.threads_needed[name] for name in (GIVEN, "default")}
        if min(need.values()) > self._limits.threads:
            both = ", ".join(f"{name}: {count}" for name, count in need.items())
            text = (
                f"every plan needs at least {min(need.values())} thread groups ({both}), "
                f"but the limit is {self._limits.threads}: allow that many"
            )
            raise PlanError([Problem(text)])
        ties = resolve_plan(replace(self._plan, order=())).period_order
        for name in need:
            yield self._first._replace(threads=name)
            yield self._first._replace(threads=name, priority=ties)

    def neighbours(self, one: Evaluated) -> Iterator[Candidate]:
        """Candidates that differ in the threads, in one bundle's stream, or in the order."""
        for preset in PRESETS:
            yield one.candidate._replace(threads=preset)
        if self._on_device:
            yield from self._on_other_streams(one.candidate)
        order = one.candidate.priority
        for policy in POLICIES:
            yield one.candidate._replace(priority=ranked(policy, self._outlook, order))
        for swapped in swaps(one.plan, order, self._rules.queues):
            yield one.candidate._replace(priority=swapped)

    def evaluate(self, candidates: Iterable[Candidate]) -> list[Evaluated]:
        """Evaluate the candidates that are new and within the limits."""
        evaluated = []
        for candidate in candidates:
            shaped = self._shaped(candidate)
            groups = tuple(entry.thread_group for entry in shaped.schedule.values())
            key = (groups, candidate.streams, candidate.priority)
            if key in self._seen or len(shaped.thread_groups) > self._limits.threads:
                continue
            self._seen.add(key)
            found = best_assignment(
                shaped, self._costs, self._rules, candidate.priority, streams=self._on_device
            )
            if found is not None:
                chosen = candidate._replace(priority=tuple(found.plan.order))
                evaluated.append(Evaluated(chosen, found.plan, found.ii_us))
        return evaluated

    def _on_other_streams(self, candidate: Candidate) -> Iterator[Candidate]:
        """Each bundle's tasks that have a stream, moved to each other stream of the plan."""
        names = [stream for stream in dict.fromkeys(self._first.streams) if stream is not None]
        for tasks in self._roles.bundles.values():
            for stream in names:
                moved = tuple(
                    stream if old is not None and name in tasks else old
                    for name, old in zip(self._plan.schedule, candidate.streams, strict=True)
                )
                if moved != candidate.streams:
                    yield candidate._replace(streams=moved)

    def _shaped(self, candidate: Candidate) -> PipelinePlan:
        """The given plan with a candidate's streams and threads."""
        stream = dict(zip(self._plan.schedule, candidate.streams, strict=True))
        given = self._plan.schedule
        if candidate.threads == GIVEN:
            groups = {name: entry.thread_group for name, entry in given.items()}
            groups |= dict.fromkeys(self._limits.frozen, DEFAULT_GROUP)
        else:
            groups = thread_map(candidate.threads, self._roles, stream)
        return replace(
            self._plan,
            schedule={
                n: replace(e, stream=stream[n], thread_group=groups[n]) for n, e in given.items()
            },
            streams={s: spec for s, spec in self._plan.streams.items() if s in candidate.streams},
        )
