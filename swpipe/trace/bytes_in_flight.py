"""The memory that the iterations of a timeline hold, and when they hold most.

    begin of a task     + the blocks that it makes, + what it needs while it runs
    end of a task       - what it needed, - the blocks that it frees, or whose last user it is
    end of <retire>     - all that the iteration still holds

The result depends only on a timeline, measured or simulated, and on what tasks hold. Memory is
allocated when a task is called, and freed when Python drops the last reference. Under a plan that
uses streams, memory that is on the context at ``<retire>`` is freed when all streams have done the
work submitted by then. Memory that an allocator keeps for later use is not included.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from swpipe.analysis.last_readers import ReleasePlace
from swpipe.core.drawing import CALLERS_STREAM
from swpipe.core.messages import counted, in_bytes
from swpipe.core.plan import PULL
from swpipe.core.task_memory import WORKING, Block, TaskMemory, holder
from swpipe.program import ADMIT, RETIRE
from swpipe.trace.span import Span

_NAMED = 3  # the number of holdings named in a line

_Runs: TypeAlias = Mapping[str, Span]
_Places: TypeAlias = Mapping[tuple[str, ...], ReleasePlace]


class Holding(NamedTuple):
    """The memory that one iteration holds of one task.

    Attributes:
        iteration: The iteration's number.
        task: The task that made the memory; ``PULL`` for the batch.
        attribute: The attribute of the ``Block``, or ``WORKING``.
        bytes: The size; negative for memory that a task has freed before it made its own.
    """

    iteration: int
    task: str
    attribute: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The moment at which the iterations in flight hold most.

    Attributes:
        bytes: The memory of the iterations, and what running tasks need.
        at_ns: The time on the timeline's clock.
        held: The parts of that memory, the largest first.
    """

    bytes: int
    at_ns: int
    held: tuple[Holding, ...]

    @property
    def iterations(self) -> int:
        """The number of iterations that hold memory at that moment."""
        return len({holding.iteration for holding in self.held})

    def format(self) -> str:
        """Return the sum and the largest parts as a line, each part summed over all iterations."""
        if not self.held:
            return "memory: the iterations in flight hold nothing"
        sums: Counter[tuple[str, str]] = Counter()
        where: dict[tuple[str, str], set[int]] = defaultdict(set)
        for holding in self.held:
            sums[holding.task, holding.attribute] += holding.bytes
            where[holding.task, holding.attribute].add(holding.iteration)
        parts = []
        for (task, attribute), size in sums.most_common(_NAMED):
            on = counted(len(where[task, attribute]), "iteration")
            parts.append(f"{holder(task, attribute)} {in_bytes(size)} ({on})")
        return (
            f"memory: at most {in_bytes(self.bytes)} in {counted(self.iterations, 'iteration')}"
            + (f"; the largest: {', '.join(parts)}" if parts else "")
        )


class _Step(NamedTuple):
    """Memory that is allocated or, with ``turn`` 0 or 2, freed.

    At one time, ends of earlier memory come first (0), then begins (1), then the ends of memory
    that began at the same time (2).
    """

    at_ns: int
    turn: int
    holding: Holding


def peak_memory(
    spans: Iterable[Span],
    memory: TaskMemory,
    *,
    streams: Mapping[str, str] | None,
    places: _Places | None = None,
) -> PeakMemory:
    """Return the most memory that the iterations of a timeline hold.

    Args:
        spans: The timeline. An iteration without a ``<retire>`` ends with its last task.
        memory: The memory of the tasks.
        streams: Task to its stream, as rows are named, under a plan that uses streams of a device:
            memory that a task removes from the context is then held until the iteration is retired
            and all other streams are done with it, and memory that the plan releases is held for
            one more iteration. None if there are no streams, or one.
        places: Users of memory that the plan releases to the place of the release; if it is not
            known, the place is the end of the last user.
    """
    runs: dict[int, dict[str, Span]] = defaultdict(dict)
    work: list[Span] = []
    for span in spans:
        if span.row.kind == "thread":
            runs[span.iteration][span.task] = span
        else:
            work.append(span)
    done_ns = None if streams is None else _behind(work, runs, streams)
    steps = [
        step
        for i, of in runs.items()
        for step in _steps(i, of, runs.get(i + 1, {}), memory, done_ns, places or {})
    ]
    steps.sort()
    # A sweep over time: the peak is right after one of the steps.
    total = most = place = 0
    for number, step in enumerate(steps, 1):
        total += step.holding.bytes if step.turn == 1 else -step.holding.bytes
        if total > most:
            most = total
            place = number
    # The same steps again, up to the peak: what was added and not removed is held there.
    held: Counter[Holding] = Counter()
    for step in steps[:place]:
        held[step.holding] += 1 if step.turn == 1 else -1
    largest_first = sorted(held.elements(), key=lambda holding: -holding.bytes)
    return PeakMemory(most, steps[place - 1].at_ns if place else 0, tuple(largest_first))


def _behind(
    work: Iterable[Span], runs: Mapping[int, _Runs], stream_of: Mapping[str, str]
) -> Callable[[str, int], int]:
    """Return a function that tells when streams are done with memory that Python has dropped.

    The function takes the task that made the memory and the time at which Python drops it. The
    task's own stream may use the memory again at once; every other stream must have done the work
    that was submitted to it before.

    Args:
        work: Spans of streams.
        runs: Iteration to task to the span on a thread, at whose end its work was submitted.
        stream_of: Task to the stream on which it makes its memory.
    """
    given: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (submitted, done)
    last: Counter[int] = Counter()
    for span in work:
        host = runs.get(span.iteration, {}).get(span.task)
        given[span.row.name].append((host.end_ns if host else span.start_ns, span.end_ns))
        last[span.iteration] = max(last[span.iteration], span.end_ns)
    for iteration, done in last.items():  # the caller's stream waits for all work
        if (retire := runs.get(iteration, {}).get(RETIRE)) is not None:
            given[CALLERS_STREAM].append((retire.end_ns, done))
    for of in given.values():
        of.sort()

    def done_ns(maker: str, at_ns: int) -> int:
        done = at_ns
        for name, of in given.items():
            # A stream does its work in order, so the last work submitted until then ends last.
            before = bisect_right(of, (at_ns, sys.maxsize))
            if before and name != stream_of.get(maker, CALLERS_STREAM):
                done = max(done, of[before - 1][1])
        return done

    return done_ns


def _steps(
    i: int,
    runs: _Runs,
    following: _Runs,
    memory: TaskMemory,
    done_ns: Callable[[str, int], int] | None,
    places: _Places,
) -> Iterator[_Step]:
    """Yield the steps of one iteration; tasks that the timeline lacks change nothing."""
    last = runs.get(RETIRE) or max(runs.values(), key=lambda span: span.end_ns)
    pull = runs.get(PULL) or runs.get(ADMIT)
    working = (Block(task, task, size, WORKING) for task, size in memory.working.items())
    for block in (*memory.blocks, *working):
        begin = pull if block.begin == PULL else runs.get(block.begin)
        # Three kinds of block: released by the plan after its users, freed in this iteration or by
        # a task of the next one, or held until the iteration ends. With streams, memory on the
        # context at the end waits for all streams (done_ns).
        if begin is None or not block.bytes:
            continue
        if block.users:
            end_ns = _goes_ns(block.users, following if done_ns else runs, last, places)
        else:
            ends = following if block.later else {} if done_ns and block.removed else runs
            end = ends.get(block.end, last)
            end_ns = end.end_ns
            if done_ns and end is last and block.attribute:
                end_ns = done_ns(block.begin, end_ns)
        # The batch exists only when the loader has returned it; a task may allocate from its start.
        begin_ns = begin.end_ns if block.begin == PULL else begin.start_ns
        holding = Holding(i, block.begin, block.attribute, block.bytes)
        yield _Step(begin_ns, 1, holding)
        # Freed before it begins, or at once: turn 2 keeps the order of allocating and freeing.
        yield _Step(max(begin_ns, end_ns), 2 if end_ns <= begin_ns else 0, holding)


def _goes_ns(users: tuple[str, ...], runs: _Runs, last: Span, places: _Places) -> int:
    """Return when a plan releases memory that these tasks use."""
    if (place := places.get(users)) is not None:
        at = runs.get(place.task, last)
        return at.end_ns if place.after else at.start_ns
    return max(runs.get(user, last).end_ns for user in users)
