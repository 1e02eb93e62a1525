"""The space of the joint search: candidates, their neighbours, and what comes of each.

A candidate chooses threads, streams and an order. What comes of it is judged: the lookaheads that
``lookahead`` makes of it, the order nearest to the one that was chosen, and the
interval under the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from swpipe.core.costs import CostModel
from swpipe.core.errors import PlanError, Problem
from swpipe.core.plan import DEFAULT_GROUP, PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.planning.limits import Limits
from swpipe.planning.published.lookahead import best_assignment
from swpipe.planning.published.lookahead_rules import Rules, too_deep, within
from swpipe.planning.published.policies import POLICIES, Outlook, ranked, swaps
from swpipe.planning.published.presets import PRESETS, Roles, thread_map
from swpipe.planning.published.queue_rules import require

GIVEN = "as given"
"""Stands for the thread groups of the plan at hand."""


class Candidate(NamedTuple):
    """A choice of threads, streams and order.

    Attributes:
        threads: Name of a thread preset, or "as given".
        streams: Each task's stream, in the order of the schedule.
        priority: All tasks; of those that may be next in a period, the first in this list is.
    """

    threads: str
    streams: tuple[str | None, ...]
    priority: tuple[str, ...]


class Judged(NamedTuple):
    """A candidate and what came of it.

    Attributes:
        candidate: The choice; its priority is the order that came of it.
        plan: With lookaheads and order.
        ii_us: Its interval under the simulator; microseconds.
    """

    candidate: Candidate
    plan: PipelinePlan
    ii_us: float

    @property
    def score(self) -> tuple[float, int, int]:
        """Less is better: interval, threads, iterations in flight."""
        return (round(self.ii_us, 3), len(self.plan.thread_groups), self.plan.depth)

    @property
    def layout(self) -> tuple[object, ...]:
        """Threads, streams and lookaheads: all but the order."""
        return tuple((e.thread_group, e.stream, e.stage) for e in self.plan.schedule.values())


class Space:
    """All that holds for every candidate, and which have been judged.

    Args:
        plan: The plan at hand.
        costs: What its tasks cost.
        limits: What to keep to.
        streams: Whether the device has streams.

    Raises:
        PlanError: The plan cannot run, a task has no cost, a frozen task is unknown; or the limits
            admit nothing.
    """

    def __init__(
        self, plan: PipelinePlan, costs: CostModel, limits: Limits, *, streams: bool
    ) -> None:
        resolved = require(plan, costs, limits)
        if problems := list(too_deep(plan, limits)):
            raise PlanError(problems)
        self._plan = within(plan, limits)
        self._costs = costs
        self._limits = limits
        self._on_device = streams
        self._roles = Roles.of(resolved, limits.frozen)
        self._rules = Rules.of(resolved, costs, limits)
        self._order = resolved.period_order
        self._outlook = Outlook.of(resolved, costs, self._roles)
        self._seen: set[object] = set()
        streams_now = tuple(self._stream(entry.stream) for entry in plan.schedule.values())
        self._first = Candidate(GIVEN, streams_now, self._order)
        self.threads_needed = {
            name: len(self._shaped(self._first._replace(threads=name)).thread_groups)
            for name in (GIVEN, *PRESETS)
        }

    def beginnings(self) -> Iterator[Candidate]:
        """The plan at hand and the default preset's threads, in its order and the engine's own.

        Raises:
            PlanError: Neither keeps to the limit on threads.
        """
        need = {name: self.threads_needed[name] for name in (GIVEN, "default")}
        if min(need.values()) > self._limits.threads:
            both = ", ".join(f"{name}: {count}" for name, count in need.items())
            raise PlanError(
                [
                    Problem(
                        f"the limit of {self._limits.threads} thread groups binds: the least that "
                        f"any thread map takes is {min(need.values())} ({both}): allow that many"
                    )
                ]
            )
        ties = resolve_plan(replace(self._plan, order=())).period_order
        for name in need:
            yield self._first._replace(threads=name)
            yield self._first._replace(threads=name, priority=ties)

    def neighbours(self, one: Judged) -> Iterator[Candidate]:
        """What differs from a candidate in its threads, in one home's stream, or in its order."""
        for preset in PRESETS:
            yield one.candidate._replace(threads=preset)
        if self._on_device:
            yield from self._on_other_streams(one.candidate)
        order = one.candidate.priority
        for policy in POLICIES:
            yield one.candidate._replace(priority=ranked(policy, self._outlook, order))
        for swapped in swaps(one.plan, order, self._rules.queues):
            yield one.candidate._replace(priority=swapped)

    def judge(self, candidates: Iterable[Candidate]) -> list[Judged]:
        """What comes of each that has not been judged and keeps to the limits."""
        judged = []
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
                order = tuple(found.plan.order)
                judged.append(Judged(candidate._replace(priority=order), found.plan, found.ii_us))
        return judged

    def _on_other_streams(self, candidate: Candidate) -> Iterator[Candidate]:
        """Each home's tasks that name a stream, together, on each other stream of the plan."""
        names = [stream for stream in dict.fromkeys(self._first.streams) if stream is not None]
        for tasks in self._roles.homes.values():
            for stream in names:
                moved = tuple(
                    stream if old is not None and name in tasks else old
                    for name, old in zip(self._plan.schedule, candidate.streams, strict=True)
                )
                if moved != candidate.streams:
                    yield candidate._replace(streams=moved)

    def _shaped(self, candidate: Candidate) -> PipelinePlan:
        """The plan at hand with a candidate's streams and threads."""
        stream = dict(zip(self._plan.schedule, candidate.streams, strict=True))
        moved = replace(
            self._plan,
            schedule={n: replace(e, stream=stream[n]) for n, e in self._plan.schedule.items()},
            streams={s: spec for s, spec in self._plan.streams.items() if s in candidate.streams},
        )
        groups = {name: entry.thread_group for name, entry in moved.schedule.items()}
        if candidate.threads == GIVEN:
            groups |= dict.fromkeys(self._limits.frozen, DEFAULT_GROUP)
        else:
            groups = thread_map(candidate.threads, self._roles, moved)
        return replace(
            moved,
            schedule={n: replace(e, thread_group=groups[n]) for n, e in moved.schedule.items()},
        )

    @staticmethod
    def _stream(stream: object) -> str | None:
        return stream if isinstance(stream, str) else None
