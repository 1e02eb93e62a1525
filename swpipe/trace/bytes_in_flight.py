"""What the iterations of a timeline hold, and when they hold most.

    begin of a task     + the blocks that it makes, + what it needs while it runs
    end of a task       - what it needed, - the blocks that it frees, or that go after it
    end of <retire>     - all that the iteration still holds

A pure function of a timeline, measured or simulated, and of what tasks hold. Memory is taken when a
task is called, and given back when Python lets it go. Under a plan that uses streams, what stands
on the context at ``<retire>`` is given back when all streams have done what they were given by
then. What an allocator keeps for later comes on top.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from swpipe._engine.program import ADMIT, RETIRE
from swpipe.analysis.last_readers import Place
from swpipe.core.drawing import CALLERS_STREAM
from swpipe.core.messages import counted, in_bytes
from swpipe.core.plan import PULL
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.trace.span import Span

WORKING = "while it runs"
"""The ``attribute`` of what a task needs while it runs."""

SHOWN = 3
"""So many of the largest holdings are named in a line."""


class Holding(NamedTuple):
    """What one iteration holds of one task.

    Attributes:
        iteration: The iteration's number.
        task: The task that made it; ``PULL`` for the batch.
        attribute: As in ``Block``, or ``WORKING``.
        bytes: Its size; negative for what a task has freed before it made its own.
    """

    iteration: int
    task: str
    attribute: str
    bytes: int


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The moment at which the iterations in flight hold most.

    Attributes:
        bytes: What they hold, and what running tasks need.
        at_ns: When, on the timeline's clock.
        held: Of what that consists, the largest first.
    """

    bytes: int
    at_ns: int
    held: tuple[Holding, ...]

    @property
    def iterations(self) -> int:
        """How many iterations hold something then."""
        return len({one.iteration for one in self.held})

    def format(self) -> str:
        """The sum and the largest parts, in a line; of one task's over all iterations."""
        sums: dict[tuple[str, str], int] = defaultdict(int)
        where: dict[tuple[str, str], set[int]] = defaultdict(set)
        for one in self.held:
            sums[one.task, one.attribute] += one.bytes
            where[one.task, one.attribute].add(one.iteration)
        largest = sorted(sums, key=lambda key: -sums[key])[:SHOWN]
        parts = [
            f"{_what(*key)} {in_bytes(sums[key])} ({counted(len(where[key]), 'iteration')})"
            for key in largest
        ]
        return (
            f"memory: at most {in_bytes(self.bytes)} in {counted(self.iterations, 'iteration')}"
            + (f"; the largest: {', '.join(parts)}" if parts else "")
        )


class Change(NamedTuple):
    """Memory that is taken or, with ``turn`` 0 or 2, given back.

    At one time, what ends then comes first, then what begins, then what began and ended then.
    """

    at_ns: int
    turn: int
    holding: Holding


def peak_memory(
    spans: Iterable[Span],
    memory: TaskMemory,
    *,
    streams: Mapping[str, str] | None,
    places: Mapping[tuple[str, ...], Place] | None = None,
) -> PeakMemory:
    """What the iterations of a timeline hold at most.

    Args:
        spans: The timeline. An iteration whose ``<retire>`` it lacks ends with its last task.
        memory: What the tasks hold.
        streams: Task to its stream, as rows are named, under a plan that uses streams of a device:
            memory that a task removes from the context is then held until the iteration is retired
            and all other streams are done with it, and what the plan lets go waits for one
            iteration. None where there are no streams, or one.
        places: Users of what the plan lets go to the place where it goes; where that is not known,
            it is the end of the last one.
    """
    runs: dict[int, dict[str, Span]] = defaultdict(dict)
    work: list[Span] = []
    for span in spans:
        if span.row.kind == "thread":
            runs[span.iteration][span.task] = span
        else:
            work.append(span)
    behind = None if streams is None else _Behind(work, runs, streams)
    found = (
        _changes(i, of, runs.get(i + 1, {}), memory, behind, places or {}) for i, of in runs.items()
    )
    changes = sorted(chain.from_iterable(found))
    total = most = place = 0
    for number, change in enumerate(changes, 1):
        total += change.holding.bytes if change.turn == 1 else -change.holding.bytes
        if total > most:
            most, place = total, number
    held: dict[Holding, int] = defaultdict(int)
    for change in changes[:place]:
        held[change.holding] += 1 if change.turn == 1 else -1
    each = (one for one, times in held.items() for _ in range(times))
    at_ns = changes[place - 1].at_ns if place else 0
    return PeakMemory(most, at_ns, tuple(sorted(each, key=lambda one: -one.bytes)))


class _Behind:
    """How far streams are behind the host.

    Args:
        work: Spans of streams.
        runs: Iteration to task to the span on a thread, at whose end its work was submitted.
        stream_of: Task to the stream on which it makes its memory.
    """

    def __init__(
        self,
        work: Iterable[Span],
        runs: Mapping[int, Mapping[str, Span]],
        stream_of: Mapping[str, str],
    ) -> None:
        self._stream_of = stream_of
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        last: dict[int, int] = defaultdict(int)
        for span in work:
            host = runs.get(span.iteration, {}).get(span.task)
            submitted = span.start_ns if host is None else host.end_ns
            found[span.row.name].append((submitted, span.end_ns))
            last[span.iteration] = max(last[span.iteration], span.end_ns)
        for iteration, done in last.items():  # the caller's stream waits for all of it
            if (retire := runs.get(iteration, {}).get(RETIRE)) is not None:
                found[CALLERS_STREAM].append((retire.end_ns, done))
        self._work = {name: sorted(of) for name, of in found.items()}

    def done_ns(self, maker: str, at_ns: int) -> int:
        """When streams are done with what a task has made and Python lets go at a time.

        Its own stream may use it again at once; the others have done by then what they were given
        before.
        """
        done = at_ns
        for name, of in self._work.items():
            before = bisect_right(of, (at_ns, sys.maxsize))
            if before and name != self._stream_of.get(maker, CALLERS_STREAM):
                done = max(done, of[before - 1][1])
        return done


def _changes(
    i: int,
    runs: Mapping[str, Span],
    following: Mapping[str, Span],
    memory: TaskMemory,
    behind: _Behind | None,
    places: Mapping[tuple[str, ...], Place],
) -> Iterator[Change]:
    """The changes of one iteration; tasks that the timeline lacks change nothing."""
    last = runs.get(RETIRE) or max(runs.values(), key=lambda span: span.end_ns)
    sources = {PULL: runs.get(PULL) or runs.get(ADMIT)}
    working = (Block(task, task, size, WORKING) for task, size in memory.working.items())
    for block in (*memory.blocks, *working):
        begin = runs.get(block.begin) or sources.get(block.begin)
        if begin is not None and block.bytes:
            ends = following if block.later else {} if behind and block.removed else runs
            end = ends.get(block.end, last)
            end_ns = end.end_ns
            if block.users:
                end_ns = _goes_ns(block.users, following if behind else runs, last, places)
            elif behind and end is last and block.attribute:
                end_ns = behind.done_ns(block.begin, end_ns)
            begin_ns = begin.end_ns if block.begin == PULL else begin.start_ns
            holding = Holding(i, block.begin, block.attribute, block.bytes)
            yield Change(begin_ns, 1, holding)
            yield Change(max(begin_ns, end_ns), 2 if end_ns <= begin_ns else 0, holding)


def _goes_ns(
    users: tuple[str, ...],
    runs: Mapping[str, Span],
    last: Span,
    places: Mapping[tuple[str, ...], Place],
) -> int:
    """When a plan lets go what these tasks use."""
    if users in places:
        place = places[users]
        at = runs.get(place.task, last)
        return at.end_ns if place.after else at.start_ns
    return max(runs.get(user, last).end_ns for user in users)


def _what(task: str, attribute: str) -> str:
    if attribute == WORKING:
        return f"{task} {WORKING}"
    return f"{f'ctx.{attribute}' if attribute else 'other memory'} of {task}"
