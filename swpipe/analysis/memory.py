"""The memory that the iterations in flight hold at most under a plan, whatever their tasks' times.

A block (``swpipe.core.task_memory``) lives from the task that allocates it to the task that frees
it, or to the end of its iteration. If its end on iteration i always comes before its beginning on
iteration i + n (``swpipe.analysis.happens_before``), there are at most n copies.

If a plan uses streams of a device, memory is freed later: an attribute that a task removes from the
context is held until its iteration retires, and the device may be behind the host by ``depth``
iterations and ``run_ahead`` more. So memory on the context counts that many times.

Under a plan with ``keep``, an attribute that is not kept lives until it is deleted
(``swpipe.analysis.last_readers``). If the plan uses streams of a device, one more iteration has
this memory, which waits for the device (``swpipe._engine.release``).

The result is an upper bound. It counts every block with its largest number of copies, and for each
thread the task with the largest needs, whether or not these maxima coincide. So it holds in every
interleaving, whereas ``swpipe.planning.simulate`` describes one. Memory that the caller keeps is
not included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import ReleasePlaces
from swpipe.core.messages import in_bytes as in_words
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.core.task_memory import KEPT, WORKING, Block, TaskMemory, holder
from swpipe.errors import Problem
from swpipe.program import RETIRE

SHOWN_BLOCKS = 3
"""The number of the largest blocks that a message names."""


@dataclass(frozen=True, slots=True)
class Held:
    """A block of a task, with the number of iterations that can hold a copy at once."""

    attribute: str
    task: str
    copies: int
    bytes_each: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all copies together."""
        return self.copies * self.bytes_each

    def __str__(self) -> str:
        what = holder(repr(self.task), self.attribute)
        return f"{what} ({self.copies} x {in_words(self.bytes_each)})"


@dataclass(frozen=True, slots=True)
class Footprint:
    """The maximum memory of the iterations in flight: every block, the largest first."""

    held: tuple[Held, ...]
    streams: bool

    @property
    def total_bytes(self) -> int:
        """The bytes of all blocks together."""
        return sum(held.total_bytes for held in self.held)

    def format(self) -> str:
        """Return the sum, and the largest blocks, on one line."""
        shown = ", ".join(map(str, self.held[:SHOWN_BLOCKS]))
        return f"in flight at most: {in_words(self.total_bytes)}; the largest: {shown or 'none'}"


def bytes_in_flight(before: HappensBefore, memory: TaskMemory) -> Footprint:
    """Return an upper bound on the memory that the iterations in flight hold."""
    plan = before.plan
    blocks = memory.under(plan.keep)
    places = ReleasePlaces(before)
    waits = before.streams and plan.names_streams
    several = plan.most_workers > 1

    def copies(block: Block) -> int:
        # How many iterations can hold the block at once.
        end = block.end
        goes = bool(block.users)
        later = block.later
        if goes:
            end = places.after(block.users).task
        elif waits and block.attribute and not later and (block.removed or end == KEPT):
            # Streams may still use memory on the context: as many copies as the host is ahead.
            return plan.depth + (plan.launch_limit or 0)
        end = RETIRE if end == KEPT else end
        apart = range(1 - later, plan.depth)
        ordered = partial(before.host, end, block.begin)
        if several:
            # An order n iterations apart holds at multiples of n, not beyond each n: of iterations
            # that far apart, at most one holds the block. So the first such n is looked for.
            free = next((k for k, n in enumerate(apart) if ordered(n)), len(apart))
        else:
            # With one worker, an order n iterations apart holds at all larger distances: bisect.
            free = bisect_left(apart, True, key=ordered)
        return 1 + free + (goes and waits) * plan.most_workers

    held = [Held(block.attribute, block.begin, copies(block), block.bytes) for block in blocks]
    # Each thread of a group runs one task at a time: the largest need counts for each of them.
    working: dict[str, Held] = {}
    for task, size in memory.working.items():
        group = plan.schedule[task].thread_group
        if size > (working[group].bytes_each if group in working else 0):
            working[group] = Held(WORKING, task, plan.workers(group), size)
    held += working.values()
    held.sort(key=lambda h: (-h.total_bytes, h.attribute, h.task))
    return Footprint(tuple(held), before.streams)


def memory_problems(
    before: HappensBefore, memory: TaskMemory, budget_bytes: int
) -> Iterator[Problem]:
    """Yield a problem if the budget is exceeded: the largest blocks, and what would fit."""
    plan = before.plan
    streams = before.streams

    def fits(changed: PipelinePlan) -> bool:
        # A smaller depth keeps other orders, so the plan is compiled again.
        other = HappensBefore.of(resolve_plan(changed), streams=streams)
        return bytes_in_flight(other, memory).total_bytes <= budget_bytes

    footprint = bytes_in_flight(before, memory)
    if footprint.total_bytes > budget_bytes:
        largest = footprint.held[:SHOWN_BLOCKS]
        ahead = f" and run_ahead {plan.launch_limit}" if streams and plan.launch_limit else ""
        yield Problem(
            f"up to {in_words(footprint.total_bytes)} may be in flight at depth {plan.depth}"
            f"{ahead}, more than the budget of {in_words(budget_bytes)}; the largest are "
            f"{', '.join(map(str, largest))}: {_mend(plan, footprint, fits)}",
            tuple(dict.fromkeys(h.task for h in largest)),
        )


def _mend(plan: PipelinePlan, footprint: Footprint, fits: Callable[[PipelinePlan], bool]) -> str:
    """Return the largest run-ahead that fits the budget, or else the largest depth."""
    # The run-ahead first: to reduce it costs less overlap than to reduce the depth.
    alone = sum(held.bytes_each for held in footprint.held)
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
