"""How much memory the iterations in flight hold at most under a plan.

An attribute of the context lives from the task that sets it to the task that sets it anew or
deletes it, or to the end of its iteration. If its end on iteration i always comes before its
beginning on iteration i + n (``swpipe.analysis.happens_before``), there are at most n copies.

Where a plan uses streams of a device, memory comes back later: what a task drops is held until its
iteration retires, and the device may be behind the host by ``depth`` iterations and ``run_ahead``
more. So every attribute counts that many times, and once for each task that sets it. On one stream
memory that is dropped is free for the work that comes next.

Under a plan with ``keep``, an attribute that is not kept lives until it goes
(``swpipe.analysis.last_readers``). Where the plan uses streams of a device, one iteration more has
it then, whose memory waits for the device (``swpipe._engine.release``).

This is an upper bound: every attribute with as many copies as it can have, whether or not all have
them at the same time. It counts what stands on the context until an iteration is handed out; what
tasks need while they run, and what the caller keeps, come on top.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from swpipe._engine.program import RETIRE
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import Uses, places_of
from swpipe.core.messages import in_bytes as in_words
from swpipe.core.messages import shown
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import ResolvedPlan, resolve_plan, serial_order
from swpipe.errors import Problem

Sizes: TypeAlias = Mapping[tuple[str, str], int]
"""(task, attribute that it sets or deletes) to the bytes that the attribute then holds, 0 where it
is deleted; tasks in serial order. ``Recording.sizes`` is such a table."""

SHOWN_ATTRIBUTES = 3
"""Of the largest attributes, so many are named in a message."""


@dataclass(frozen=True, slots=True)
class Held:
    """One attribute, as one task sets it; ``copies`` iterations can hold it at once."""

    attribute: str
    task: str
    copies: int
    bytes_each: int

    @property
    def total_bytes(self) -> int:
        """What all copies hold together."""
        return self.copies * self.bytes_each

    def __str__(self) -> str:
        return (
            f"ctx.{self.attribute} of {self.task!r} ({self.copies} x {in_words(self.bytes_each)})"
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the iterations in flight hold at most: every attribute, the largest first."""

    held: tuple[Held, ...]
    streams: bool

    @property
    def total_bytes(self) -> int:
        """All attributes together."""
        return sum(held.total_bytes for held in self.held)

    def format(self) -> str:
        """The sum, and the largest attributes, in a line."""
        shown = ", ".join(map(str, self.held[:SHOWN_ATTRIBUTES]))
        return f"in flight at most: {in_words(self.total_bytes)}; the largest: {shown or 'none'}"


def bytes_in_flight(
    resolved: ResolvedPlan, sizes: Sizes, *, streams: bool, uses: Uses | None = None
) -> Footprint:
    """An upper bound on what the contexts in flight hold; the plan is validated.

    ``uses`` are the attributes that tasks use, as from ``swpipe.analysis.last_readers.uses_of``;
    None, if that is known of no task.
    """
    before, plan = HappensBefore.of(resolved, streams=streams), resolved.plan
    going = {} if plan.keep is None else places_of(before, uses, plan.keep)
    waits = streams and plan.names_streams
    held = []
    for attribute, lives in _lives(resolved, sizes).items():
        for task, last in lives:
            goes = attribute in going and last == RETIRE
            end = going[attribute] if goes else last
            copies = plan.depth + (plan.launch_limit or 0)
            if goes or not waits:
                # What holds n iterations apart holds further apart: search by halves.
                apart = range(1, plan.depth)
                copies = 1 + bisect_left(apart, True, key=lambda n: before.host(end, task, n))
                copies += waits
            held.append(Held(attribute, task, copies, sizes[task, attribute]))
    held.sort(key=lambda h: (-h.total_bytes, h.attribute, h.task))
    return Footprint(tuple(held), streams)


def memory_problems(
    resolved: ResolvedPlan,
    sizes: Sizes,
    budget_bytes: int,
    *,
    streams: bool,
    uses: Uses | None = None,
) -> Iterator[Problem]:
    """That the budget is exceeded, if it is: by what, and what would fit."""
    plan = resolved.plan

    def held(changed: PipelinePlan) -> Footprint:
        return bytes_in_flight(resolve_plan(changed), sizes, streams=streams, uses=uses)

    footprint = bytes_in_flight(resolved, sizes, streams=streams, uses=uses)
    if footprint.total_bytes > budget_bytes:
        mend = _mend(resolved, footprint, lambda plan: held(plan).total_bytes <= budget_bytes)
        largest = footprint.held[:SHOWN_ATTRIBUTES]
        ahead = f" and run_ahead {plan.launch_limit}" if streams and plan.launch_limit else ""
        yield Problem(
            f"up to {in_words(footprint.total_bytes)} may be in flight at depth {plan.depth}"
            f"{ahead}, more than the budget of {in_words(budget_bytes)}; the largest are "
            f"{', '.join(map(str, largest))}: {mend}",
            tuple(dict.fromkeys(h.task for h in largest)),
        )


def size_problems(plan: PipelinePlan, sizes: Sizes) -> Iterator[Problem]:
    """Sizes that cannot be right."""
    for (task, attribute), size in sizes.items():
        if task not in plan.schedule:
            yield Problem(f"sizes has task {task!r}, which the plan does not schedule")
        elif type(size) is not int or size < 0:
            what = f"the size of ctx.{attribute} after task {task!r} is {shown(size)}"
            yield Problem(f"{what}: give a number of bytes, 0 or more", (task,))


def _lives(resolved: ResolvedPlan, sizes: Sizes) -> dict[str, list[tuple[str, str]]]:
    """Attribute to the tasks that set it, each with the task that ends what it set."""
    lives: dict[str, list[tuple[str, str]]] = {}
    begun: dict[str, str] = {}
    left: dict[str, dict[str, int]] = {task: {} for task, _ in sizes}
    for (task, attribute), size in sizes.items():
        left[task][attribute] = size
    silent = [task for task in resolved.serial_order if task not in left]
    for task in serial_order([*left, *silent], resolved.dependences):
        for attribute, size in left.get(task, {}).items():
            if attribute in begun:
                lives[attribute].append((begun.pop(attribute), task))
            if size:
                lives.setdefault(attribute, [])
                begun[attribute] = task
    for attribute, task in begun.items():
        lives[attribute].append((task, RETIRE))
    return lives


def _mend(
    resolved: ResolvedPlan, footprint: Footprint, fits: Callable[[PipelinePlan], bool]
) -> str:
    """The largest run-ahead that fits, or else the largest depth."""
    plan, alone = resolved.plan, sum(held.bytes_each for held in footprint.held)
    limit = (plan.launch_limit or 0) if footprint.streams and plan.names_streams else 0
    for ahead in range(limit - 1, -1, -1):
        if fits(replace(plan, run_ahead=ahead)):
            return f"run_ahead={ahead} would fit"
    least, also = (replace(plan, run_ahead=0), " with run_ahead=0") if limit else (plan, "")
    for depth in range(plan.depth - 1, plan.least_depth - 1, -1):
        if fits(replace(least, pipeline_depth=depth)):
            return f"pipeline_depth={depth}{also} would fit"
    return (
        f"no smaller depth would fit; one iteration alone holds {in_words(alone)}: take smaller "
        "batches, or fewer stages"
    )
