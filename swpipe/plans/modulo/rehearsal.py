r"""Some periods of a loop, rehearsed as a plan has them: how far do they come apart in the end?

    thread          [a 0]      [b 0][a 1]      [b 1]         rows that work through lists: a thread
    thread               [c 0]           [c 1]               through its tasks, a stream through
    stream "s1"               [c 0]           [c 1]          what is submitted to it
                    ready ──> has all that it holds ──> done

What contends with nothing ends whenever it is ready. Once there is nothing more of that kind, the
earliest of all that contends goes, and has what it holds as soon as that is free: whatever is not
ready yet will be later. So what no order is fixed for is had by who comes first, as in the
simulator, and where several threads submit to the caller's stream, it works in the order in which
they do; one alone has it for a stream of its own.

What it says is what the simulator says but for what it leaves out: where a task takes a resource
and the interpreter lock, it takes both at once; and the mean of some periods is taken, repeating or
not. A hundred times as fast, it is what a walk listens to; the simulator has the last word.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from swpipe.plans.modulo.compiled import Real, Whole, compiled, real, whole
from swpipe.plans.modulo.period import BOTH, LOCK, RESOURCE, Arrangement, Loop, highest

PERIODS = 40
"""So many are rehearsed; the interval is the mean of the second half."""

_ALIKE = 1e-9
"""Gaps that differ by less than this part are alike."""

_UNKNOWN = -1.0


class Cast(NamedTuple):
    """Who works through what, and how far each is.

    *Players* are, in this order: threads; streams, but for the caller's; each thread as it submits
    to the caller's stream; the caller's stream, which does what was submitted last. Their work are
    *turns*: v is the host work of task v, ``size`` is ``<admit>``, ``size + 1`` is ``<retire>``;
    device work comes after these, ``width = size + 2`` further on. In period p, that is
    ``2 * width * p`` more.

    Attributes:
        listed: ``player * width + k`` to the k-th turn of its list.
        length: Player to the length of its list.
        at: Player to its place in its list; the caller's stream to its turn, or -1.
        period: Player to the period that it is in.
        free: Player to when it is through with what it did last.
        ready: Player to when its next is ready; -1 where that is not known.
        missing: Player to the turn that has to end before that is known.
        looks: How often a player was looked at, all in all: what a rehearsal costs.
        holds: Player to 1 where it holds its resources and waits for the lock.
        stage: Task to its stage, the last being the depth - 1.
        rank: Task to its place in the order of a period.
        need_of: Turn to where its needs stand.
        need: How much sooner a turn is that has to have ended.
        need_over_us: How long its end takes to be heard of.
        last: Row of the loop to the task that took it last, while needs are listed.
        before: Hold to the task that took its row before.
        held: Row of the loop to when it is free.
        end: Turn to its end; -1 where that is not known. Of the last two entries one is known from
            the beginning, and one never is.
    """

    listed: Whole
    length: Whole
    at: Whole
    period: Whole
    free: Real
    ready: Real
    missing: Whole
    looks: Whole
    holds: Whole
    stage: Whole
    rank: Whole
    need_of: Whole
    need: Whole
    need_over_us: Real
    last: Whole
    before: Whole
    held: Real
    end: Real


def cast_of(loop: Loop) -> Cast:
    """Room for rehearsals of a loop."""
    width = loop.size + 2
    players = 2 * loop.threads + loop.streams if loop.streams else loop.threads
    needs = len(loop.into_tail) + len(loop.hold_row) + 4 * width
    return Cast(
        listed=whole([0] * players * width),
        length=whole([0] * players),
        at=whole([0] * players),
        period=whole([0] * players),
        free=real([0.0] * players),
        ready=real([0.0] * players),
        missing=whole([0] * players),
        looks=whole([0]),
        holds=whole([0] * players),
        stage=whole([0] * width),
        rank=whole([0] * width),
        need_of=whole([0] * (2 * width + 1)),
        need=whole([0] * needs),
        need_over_us=real([0.0] * needs),
        last=whole([0] * loop.rows),
        before=whole([0] * len(loop.hold_row)),
        held=real([0.0] * loop.rows),
        end=real([0.0] * 2 * width * (PERIODS + loop.depth) + [0.0] * 2),
    )


@compiled
def rehearse(  # noqa: C901 - one loop, as in play
    loop: Loop, place: Arrangement, cast: Cast, limit_us: float
) -> float:
    """The interval of a plan; of one above the limit, roughly."""
    _forget(loop, cast)
    shared, busiest_us = _list_turns(loop, place, cast), _busiest(loop, place, cast)
    _list_needs(loop, place, cast)
    width, end, ready, missing = loop.size + 2, cast.end, cast.ready, cast.missing
    players, known = len(ready), len(end) - 2
    callers = players - 1 if shared else players
    submitters = callers - loop.threads if shared else players
    cast.looks[0] = 0
    player, idle, first, soonest, number = 0, 0, -1, math.inf, 0
    while True:
        cast.looks[0] += 1
        if ready[player] < 0 and end[missing[player]] >= 0:
            _prepare(cast, player, submitters, callers)
        chosen = -1
        if ready[player] >= 0:
            turn, submits = _turn_of(cast, player, callers), submitters <= player < callers
            if not submits and not _contends(loop, turn):
                chosen = player
            elif ready[player] <= soonest and (submits or not _must_wait(loop, cast, player, turn)):
                rank = (2 * cast.period[player] + turn // width) * width + cast.rank[turn % width]
                if ready[player] < soonest or rank < number:
                    first, soonest, number = player, ready[player], rank
        if chosen < 0:
            player = player + 1 if player + 1 < players else 0
            idle += 1
            if idle < players:
                continue
            if first < 0:
                return math.inf  # they wait for each other
            chosen = first
        turn, period, at = _turn_of(cast, chosen, callers), cast.period[chosen], ready[chosen]
        idle, first, soonest = 0, -1, math.inf
        if turn < loop.size and loop.contends[turn] == BOTH and not cast.holds[chosen]:
            ready[chosen] = _granted(loop, cast, turn, period, at)
            cast.holds[chosen] = 1
            continue
        ready[chosen], missing[chosen], cast.holds[chosen] = _UNKNOWN, known, 0
        if not submitters <= chosen < callers:
            here = turn + 2 * width * period
            cast.free[chosen] = end[here] = _taken(loop, cast, turn, period, at)
            if turn == (2 * width - 1 if loop.streams else width - 1):  # <retire> is done
                us = _interval(loop, cast, here, period, limit_us)
                if us > 0:
                    return max(us, busiest_us)
        _go_on(cast, chosen, submitters, callers)


@compiled
def _go_on(cast: Cast, player: int, submitters: int, callers: int) -> None:
    """Who did something does what comes next; of what is submitted, one thing at a time."""
    known, never = len(cast.end) - 2, len(cast.end) - 1
    if player == callers:
        cast.at[callers], cast.missing[callers] = -1, never
        for other in range(submitters, callers):
            cast.missing[other] = known
        return
    if submitters <= player < callers:
        cast.at[callers] = _turn_of(cast, player, callers)
        cast.period[callers], cast.missing[callers] = cast.period[player], known
        for other in range(submitters, callers):
            cast.ready[other], cast.missing[other] = _UNKNOWN, never
    cast.at[player] += 1
    if cast.at[player] == cast.length[player]:
        cast.at[player], cast.period[player] = 0, cast.period[player] + 1


@compiled
def _interval(loop: Loop, cast: Cast, here: int, period: int, limit_us: float) -> float:
    """The interval, where <retire> of this period shows it; -1 where it does not."""
    end, back, depth = cast.end, 2 * len(cast.rank), loop.depth
    if period <= depth:
        return -1.0
    gap_us, alike = end[here] - end[here - back], True
    for then in range(here - back, here - back * (depth + 1), -back):
        alike = alike and abs(end[then] - end[then - back] - gap_us) <= _ALIKE * gap_us
    if alike and _settled(cast, period, gap_us):
        return gap_us
    if period >= 2 * depth and end[here] - end[here - back * depth] > limit_us * depth:
        return (end[here] - end[here - back * depth]) / depth
    if period == PERIODS - 1:
        return (end[here] - end[here - back * (PERIODS // 2)]) / (PERIODS // 2)
    return -1.0


@compiled
def _settled(cast: Cast, period: int, gap_us: float) -> bool:
    """Whether all that was done came as long after that of the period before: nothing drifts."""
    width = len(cast.rank)
    for turn in range(2 * width * period, 2 * width * (period + 1)):
        end, before = cast.end[turn], cast.end[turn - 2 * width]
        if end >= 0 and abs(end - before - gap_us) > _ALIKE * end:
            return False
    return True


@compiled
def _busiest(loop: Loop, place: Arrangement, cast: Cast) -> float:
    """The time that is taken of a thread, or of anything else, by each iteration."""
    busiest_us = loop.busiest_us
    for lane in range(loop.threads):
        cast.free[lane] = 0.0
    for v in range(loop.size):
        cast.free[place.lanes[v]] += loop.host_us[v]
    for lane in range(loop.threads):
        busiest_us, cast.free[lane] = max(busiest_us, cast.free[lane]), 0.0
    return busiest_us


@compiled
def _turn_of(cast: Cast, player: int, callers: int) -> int:
    if player == callers:
        return cast.at[player]
    return cast.listed[player * len(cast.rank) + cast.at[player]]


@compiled
def _contends(loop: Loop, turn: int) -> int:
    """Whether it holds what is had by who comes first."""
    width = loop.size + 2
    if turn % width >= loop.size:
        return 0
    return loop.contends[turn if turn < width else turn - 2]


@compiled
def _prepare(cast: Cast, player: int, submitters: int, callers: int) -> None:
    """Tell when what a player does next is ready, or what is missing for that."""
    end, width, period = cast.end, len(cast.rank), cast.period[player]
    if period >= PERIODS + cast.stage[width - 1]:
        cast.missing[player] = len(end) - 1
        return
    turn = _turn_of(cast, player, callers)
    here = turn + 2 * width * period
    if submitters <= player < callers:
        if end[here - width] < 0:
            cast.missing[player] = here - width
        else:
            cast.ready[player] = end[here - width]
        return
    since = cast.free[player]
    for need in range(cast.need_of[turn], cast.need_of[turn + 1]):
        there = here - cast.need[need]
        if there >= 0:
            if end[there] < 0:
                cast.missing[player] = there
                return
            since = max(since, end[there] + cast.need_over_us[need])
    cast.ready[player] = since


@compiled
def _must_wait(loop: Loop, cast: Cast, player: int, turn: int) -> bool:
    """Whether a resource is held by who still waits for the lock: nobody knows for how long."""
    if cast.holds[player]:
        return False
    operation = turn if turn < loop.size else turn - 2
    for hold in range(loop.hold_of[operation], loop.hold_of[operation + 1]):
        if loop.hold_first_come[hold] and cast.held[loop.hold_row[hold]] == math.inf:
            return True
    return False


@compiled
def _granted(loop: Loop, cast: Cast, task: int, period: int, ready: float) -> float:
    """Hold resources while waiting for the lock; when the wait begins."""
    if period < cast.stage[task]:
        return ready
    for hold in range(loop.hold_of[task], loop.hold_of[task + 1]):
        if loop.hold_first_come[hold] == RESOURCE:
            ready = max(ready, cast.held[loop.hold_row[hold]])
    for hold in range(loop.hold_of[task], loop.hold_of[task + 1]):
        if loop.hold_first_come[hold] == RESOURCE:
            cast.held[loop.hold_row[hold]] = math.inf
    return ready


@compiled
def _taken(loop: Loop, cast: Cast, turn: int, period: int, ready: float) -> float:
    """Take what a turn holds, as soon as it is free; when the turn ends."""
    width = loop.size + 2
    task = turn % width
    if task >= loop.size or period < cast.stage[task]:
        return ready
    operation = task if turn < width else loop.size + task
    begin, kinds = ready, LOCK if loop.contends[operation] == BOTH else BOTH
    for hold in range(loop.hold_of[operation], loop.hold_of[operation + 1]):
        if loop.hold_first_come[hold] & kinds:
            begin = max(begin, cast.held[loop.hold_row[hold]])
    for hold in range(loop.hold_of[operation], loop.hold_of[operation + 1]):
        if loop.hold_first_come[hold]:
            cast.held[loop.hold_row[hold]] = begin + loop.hold_us[hold]
    return begin + (loop.host_us[task] if turn < width else loop.device_us[task])


@compiled
def _forget(loop: Loop, cast: Cast) -> None:
    """Nothing is done yet, and nobody has anything to do."""
    for player in range(len(cast.ready)):
        cast.length[player] = cast.at[player] = cast.period[player] = cast.holds[player] = 0
        cast.free[player], cast.ready[player] = 0.0, _UNKNOWN
        cast.missing[player] = len(cast.end) - 2
    for turn in range(len(cast.end)):
        cast.end[turn] = _UNKNOWN
    cast.end[len(cast.end) - 2] = 0.0
    for row in range(loop.rows):
        cast.held[row] = 0.0


@compiled
def _list_turns(loop: Loop, place: Arrangement, cast: Cast) -> bool:
    """Who does what, in which order; whether several threads submit to the caller's stream."""
    size, width, players = loop.size, loop.size + 2, len(cast.ready)
    ahead = loop.depth - 1 - highest(place.stages)
    cast.stage[size], cast.stage[size + 1] = 0, loop.depth - 1
    cast.rank[size], cast.rank[size + 1] = 0, size + 1
    admitted = not loop.streams
    if admitted:
        _list(cast, 0, size)
    for rank in range(size):
        task = place.order[rank]
        cast.rank[task], cast.stage[task] = rank + 1, place.stages[task] + ahead
        if not admitted and cast.stage[task] == 0:
            _list(cast, 0, size)
            admitted = True
        _list(cast, place.lanes[task], task)
        if loop.streams:
            _list(cast, _queue(loop, place.lanes[task], loop.stream[task]), width + task)
    if not admitted:
        _list(cast, 0, size)
    _list(cast, 0, size + 1)
    if loop.streams:
        _list(cast, _queue(loop, 0, 0), width + size + 1)
        cast.at[players - 1] = -1
    submitters = 0
    for player in range(players):
        if not cast.length[player]:
            cast.missing[player] = len(cast.end) - 1
        elif player >= loop.threads + loop.streams - 1:
            submitters += 1
    return loop.streams > 0 and submitters > 1


@compiled
def _list(cast: Cast, player: int, turn: int) -> None:
    cast.listed[player * len(cast.rank) + cast.length[player]] = turn
    cast.length[player] += 1


@compiled
def _queue(loop: Loop, lane: int, stream: int) -> int:
    """Who has device work on its list: its stream, or its thread for the caller's."""
    return loop.threads + (stream - 1 if stream else loop.streams - 1 + lane)


@compiled
def _list_needs(loop: Loop, place: Arrangement, cast: Cast) -> None:
    """What has to have ended before a turn is ready, but for what its player did before."""
    size, width, lanes, stage = loop.size, loop.size + 2, place.lanes, cast.stage
    over_us, count = loop.handover_us, 0
    _list_takers(loop, place, cast)
    for v in range(size):
        cast.need_of[v] = count
        if lanes[v]:
            count = _need(cast, count, v, size, stage[v], over_us)
        for edge in range(loop.into_of[v], loop.into_of[v + 1]):
            u = loop.into_tail[edge]
            lag = stage[v] - stage[u] + loop.into_distance[edge]
            count = _need(cast, count, v, u, lag, over_us if lanes[u] != lanes[v] else 0.0)
        for hold in range(loop.hold_of[v], loop.hold_of[v + 1]):
            if loop.hold_turn[hold]:
                u = cast.before[hold]
                lag = 0 if cast.rank[u] < cast.rank[v] else 1
                count = _need(cast, count, v, u, lag, over_us if lanes[u] != lanes[v] else 0.0)
    cast.need_of[size] = count
    if loop.streams:  # <admit>: the iteration depth before is done
        count = _need(cast, count, size, 2 * width - 1, 1, over_us)
    cast.need_of[size + 1] = count
    for v in range(size):
        lag = loop.depth - 1 - stage[v]
        count = _need(cast, count, size + 1, v, lag, over_us if lanes[v] else 0.0)
    cast.need_of[width] = count
    if loop.streams:
        count = _list_device_needs(loop, cast, count)
    cast.need_of[2 * width] = count


@compiled
def _list_device_needs(loop: Loop, cast: Cast, count: int) -> int:
    size, width, stage = loop.size, loop.size + 2, cast.stage
    for v in range(size):
        cast.need_of[width + v] = count
        count = _need(cast, count, width + v, v, 0, 0.0)
        for edge in range(loop.into_of[size + v], loop.into_of[size + v + 1]):
            u = loop.into_tail[edge] - size
            if u >= 0:
                lag = stage[v] - stage[u] + loop.into_distance[edge]
                count = _need(cast, count, width + v, width + u, lag, 0.0)
    cast.need_of[width + size] = cast.need_of[2 * width - 1] = count
    count = _need(cast, count, 2 * width - 1, size + 1, 0, 0.0)
    for v in range(size):
        lag = loop.depth - 1 - stage[v]
        count = _need(cast, count, 2 * width - 1, width + v, lag, 0.0)
    return count


@compiled
def _need(cast: Cast, count: int, head: int, tail: int, lag: int, over_us: float) -> int:
    """Note that a turn waits for that of another, ``lag`` periods ago."""
    width = len(cast.rank)
    cast.need[count] = head - tail + 2 * width * lag
    cast.need_over_us[count] = over_us
    return count + 1


@compiled
def _list_takers(loop: Loop, place: Arrangement, cast: Cast) -> None:
    """Hold to the task that has the turn before, that of the period before for the first."""
    for again in range(2):
        for task in place.order:
            for hold in range(loop.hold_of[task], loop.hold_of[task + 1]):
                if loop.hold_turn[hold]:
                    row = loop.hold_row[hold]
                    if again:
                        cast.before[hold] = cast.last[row]
                    cast.last[row] = task
