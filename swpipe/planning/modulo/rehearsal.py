r"""Some periods of a loop, rehearsed as a plan has them: how far do they come apart in the end?

    ready ──> contends with nothing ──────────────────────────> done ──> who waited for it is ready
        └───> contends ──> the earliest of them has what it wants ──^

What contends with nothing ends whenever it is ready. Once there is nothing more of that kind, the
earliest of all that contends goes, and has what it wants as soon as that is free: whatever is not
ready yet will be later. So what no order is fixed for is had by who comes first, as in the
simulator, and where several threads submit to the caller's stream, it works in the order in which
they do; one alone has it for a stream of its own.

What it says is what the simulator says but for what it leaves out: where a task wants several
resources, it has them all at once; and where gaps have not begun to repeat themselves after some
periods, their mean is taken. A hundred times as fast, it is what a walk listens to; the simulator
has the last word.

It may begin with all iterations in flight, as if all that came before had just been done: it
settles in half the time then. Waiting for each other, turns come to the same interval whatever they
begin with (F. Baccelli, G. Cohen, G. J. Olsder, J.-P. Quadrat, "Synchronization and Linearity",
1992: it is an eigenvalue). What is had by who comes first may go another way.
"""

from __future__ import annotations

import math

from swpipe.planning.modulo.cast import (
    CHOSEN,
    DONE,
    END,
    HOLDING,
    KNOWN,
    LINKED,
    LISTED,
    PERIODS,
    READY,
    SUBMITS,
    SUBMITTED,
    WAITING,
    WORKED,
    Cast,
    assign,
)
from swpipe.planning.modulo.compiled import Whole, compiled, inlined
from swpipe.planning.modulo.period import BOTH, LOCK, RESOURCE, Arrangement, Loop

_ALIKE = 1e-9
"""Gaps that differ by less than this part are alike."""


@compiled
def rehearse(loop: Loop, place: Arrangement, cast: Cast, limit_us: float, begun: int) -> float:
    """The interval of a plan; of one above the limit, roughly; infinity where it gets nowhere.

    Args:
        loop: The loop.
        place: The plan.
        cast: Room for it.
        limit_us: Where the interval is above this, its value is of no interest.
        begun: 0 to rehearse how the loop starts, as the simulator does; depth - 1 to begin with so
            many iterations in flight: half of the periods are enough then, but what is had by who
            comes first may go to others in the end.
    """
    busiest_us = _busiest(loop, place, cast)
    assign(loop, place, cast, begun)
    _begin(loop, cast)
    counts, left, at_us, cause, span = cast.counts, cast.left, cast.at_us, cast.cause, cast.span
    link_before, link_turn, link_on = cast.link_before, cast.link_turn, cast.link_on
    link_since, link_over_us = cast.link_since, cast.link_over_us
    closing = 2 * cast.width - 1 if loop.streams else cast.width - 1
    end, known = len(left), counts[KNOWN]
    while True:
        while not counts[READY]:
            counts[CHOSEN] += 1
            if not _arbitrate(loop, cast):
                return math.inf  # they wait for each other
        counts[READY] -= 1
        counts[DONE] += 1
        here, turn = cast.ready[counts[READY]], cast.ready_turn[counts[READY]]
        end_us = at_us[here] + (cast.took_us[turn] if here >= cast.since[turn] else 0.0)
        at_us[here], left[here] = end_us, -1
        if turn == closing:
            us = _interval(loop, cast, here, limit_us, begun)
            if us > 0:
                counts[END] = here
                return max(us, busiest_us)
        link = cast.link[turn]
        while link >= 0:
            there = here + link_on[link]
            if link_since[link] <= there < end:
                while there >= known:
                    _note(cast, known)
                    known += span
                heard_us = end_us + link_over_us[link]
                if heard_us >= at_us[there]:
                    at_us[there], cause[there] = heard_us, here
                left[there] -= 1
                if not left[there]:
                    _wait_or_go(cast, there, link_turn[link])
            link = link_before[link]
        if cast.queued[turn]:
            counts[WORKED] += 1
            _work(cast)


@inlined
def _begin(loop: Loop, cast: Cast) -> None:
    """Nothing is done yet."""
    counts, span, left = cast.counts, cast.span, cast.left
    counts[READY] = counts[WAITING] = counts[HOLDING] = counts[SUBMITTED] = counts[WORKED] = 0
    counts[DONE] = counts[CHOSEN] = 0
    periods = 1
    for link in range(counts[LINKED]):
        periods = max(periods, cast.link_since[link])
    counts[KNOWN] = min(span * (periods + 1), len(left))
    for start in range(0, counts[KNOWN], span):
        _note(cast, start)
    for number in range(counts[LISTED]):
        link = cast.link[cast.listed[number]]
        while link >= 0:
            head = cast.link_turn[link]
            since = head + span * cast.link_since[link]
            for there in range(head, min(since, counts[KNOWN]), span):
                left[there] -= 1
            cast.link_since[link] = since
            link = cast.link_before[link]
    for row in range(loop.rows):
        cast.held_us[row], cast.holder[row] = 0.0, -1
    for number in range(counts[LISTED]):
        turn = cast.listed[number]
        if not left[turn]:
            _wait_or_go(cast, turn, turn)


@inlined
def _note(cast: Cast, start: int) -> None:
    """Nothing is done of the period that begins there."""
    for turn in range(cast.span):
        cast.left[start + turn], cast.cause[start + turn] = cast.needs[turn], -1
        cast.at_us[start + turn] = 0.0


@inlined
def _wait_or_go(cast: Cast, here: int, turn: int) -> None:
    """A turn waits for nobody any more; what it wants it may have to contend for."""
    counts = cast.counts
    if cast.contends[turn] and here >= cast.since[turn]:
        cast.waiting[counts[WAITING]], cast.waiting_turn[counts[WAITING]] = here, turn
        cast.waiting_holds[counts[WAITING]] = 0
        counts[WAITING] += 1
    else:
        cast.ready[counts[READY]], cast.ready_turn[counts[READY]] = here, turn
        counts[READY] += 1


@inlined
def _arbitrate(loop: Loop, cast: Cast) -> bool:
    """The earliest of those that contend has what it wants; False where there is none."""
    counts, chosen, soonest_us, lowest = cast.counts, -1, math.inf, 0
    for number in range(counts[WAITING]):
        here, turn = cast.waiting[number], cast.waiting_turn[number]
        since_us = cast.at_us[here]
        if since_us <= soonest_us and not (counts[HOLDING] and _must_wait(loop, cast, number)):
            rank = here - turn + cast.rank[turn]
            if since_us < soonest_us or rank < lowest:
                chosen, soonest_us, lowest = number, since_us, rank
    if chosen >= 0:
        here, turn = cast.waiting[chosen], cast.waiting_turn[chosen]
        holds = cast.waiting_holds[chosen]
        if cast.contends[turn] == BOTH and not holds:
            cast.at_us[here] = _granted(loop, cast, turn, here)
            cast.waiting_holds[chosen] = 1
            counts[HOLDING] += 1
        else:
            counts[HOLDING] -= holds
            if cast.contends[turn] == SUBMITS:
                _submit(cast, here - cast.width, turn - cast.width)
            else:
                cast.at_us[here] = _taken(loop, cast, turn, here)
            _go(cast, chosen)
    return chosen >= 0


@inlined
def _go(cast: Cast, chosen: int) -> None:
    """One that was waiting can be done."""
    counts = cast.counts
    cast.ready[counts[READY]] = cast.waiting[chosen]
    cast.ready_turn[counts[READY]] = cast.waiting_turn[chosen]
    counts[READY] += 1
    counts[WAITING] -= 1
    last = counts[WAITING]
    cast.waiting[chosen], cast.waiting_turn[chosen] = cast.waiting[last], cast.waiting_turn[last]
    cast.waiting_holds[chosen] = cast.waiting_holds[last]


@inlined
def _must_wait(loop: Loop, cast: Cast, number: int) -> bool:
    """Whether a resource is held by who still waits for the lock: nobody knows for how long."""
    turn, found = cast.waiting_turn[number], False
    if not cast.waiting_holds[number] and cast.contends[turn] != SUBMITS:
        operation = turn if turn < loop.size else turn - 2
        for hold in range(loop.hold_of[operation], loop.hold_of[operation + 1]):
            row = loop.hold_row[hold]
            found = found or (loop.hold_first_come[hold] > 0 and cast.held_us[row] == math.inf)
    return found


@inlined
def _granted(loop: Loop, cast: Cast, task: int, here: int) -> float:
    """Hold resources while waiting for the lock; when the wait begins."""
    since_us = _free(loop, cast, task, here, RESOURCE)
    for hold in range(loop.hold_of[task], loop.hold_of[task + 1]):
        if loop.hold_first_come[hold] == RESOURCE:
            cast.held_us[loop.hold_row[hold]] = math.inf
    return since_us


@inlined
def _taken(loop: Loop, cast: Cast, turn: int, here: int) -> float:
    """Take what a turn wants, as soon as it is free; when that is."""
    operation = turn if turn < loop.size else turn - 2
    since_us = _free(loop, cast, operation, here, LOCK if cast.contends[turn] == BOTH else BOTH)
    for hold in range(loop.hold_of[operation], loop.hold_of[operation + 1]):
        if loop.hold_first_come[hold]:
            row = loop.hold_row[hold]
            cast.held_us[row], cast.holder[row] = since_us + loop.hold_us[hold], here
    return since_us


@inlined
def _free(loop: Loop, cast: Cast, operation: int, here: int, kinds: int) -> float:
    """When all that an operation wants of these kinds is free, and it is ready."""
    since_us = cast.at_us[here]
    for hold in range(loop.hold_of[operation], loop.hold_of[operation + 1]):
        row = loop.hold_row[hold]
        if loop.hold_first_come[hold] & kinds and cast.held_us[row] > since_us:
            since_us, cast.cause[here] = cast.held_us[row], cast.holder[row]
    return since_us


@inlined
def _submit(cast: Cast, here: int, turn: int) -> None:
    """Put work into the caller's stream."""
    counts = cast.counts
    cast.queue[counts[SUBMITTED]], cast.queue_turn[counts[SUBMITTED]] = here, turn
    counts[SUBMITTED] += 1
    if counts[SUBMITTED] == counts[WORKED] + 1:
        _work(cast)


@inlined
def _work(cast: Cast) -> None:
    """The caller's stream comes to what was submitted next, if anything was."""
    counts, place = cast.counts, cast.counts[WORKED]
    if place < counts[SUBMITTED]:
        here = cast.queue[place]
        if place:
            before = cast.queue[place - 1]
            if cast.at_us[before] > cast.at_us[here]:
                cast.at_us[here], cast.cause[here] = cast.at_us[before], before
        cast.left[here] -= 1
        if not cast.left[here]:
            _wait_or_go(cast, here, cast.queue_turn[place])


@inlined
def _busiest(loop: Loop, place: Arrangement, cast: Cast) -> float:
    """The time that is taken of a thread, or of anything else, by each iteration."""
    busiest_us, load_us = loop.busiest_us, cast.at_us  # a rehearsal clears it
    for lane in range(loop.threads):
        load_us[lane] = 0.0
    for v in range(loop.size):
        load_us[place.lanes[v]] += loop.host_us[v]
    for lane in range(loop.threads):
        busiest_us = max(busiest_us, load_us[lane])
    return busiest_us


@inlined
def _interval(loop: Loop, cast: Cast, here: int, limit_us: float, begun: int) -> float:
    """The interval, where the end of this period shows it; -1 where it does not."""
    end_us, back, depth, us = cast.at_us, cast.span, loop.depth, -1.0
    period, full = here // back, 1 if begun else depth
    if period > full:
        gap_us = end_us[here] - end_us[here - back]
        before_us = end_us[here - back] - end_us[here - 2 * back]
        if abs(gap_us - before_us) <= _ALIKE * gap_us and _settled(cast, period, gap_us):
            us = gap_us
        elif period >= full + depth and _mean(cast, here, depth) > limit_us:
            us = _mean(cast, here, depth)
        elif period == PERIODS - 1:
            us = _mean(cast, here, _cycle(cast, here))
    return us


@inlined
def _mean(cast: Cast, here: int, periods: int) -> float:
    return (cast.at_us[here] - cast.at_us[here - periods * cast.span]) / periods


@inlined
def _settled(cast: Cast, period: int, gap_us: float) -> bool:
    """Whether all that was done came as long after that of the period before: nothing drifts."""
    span, settled = cast.span, True
    for number in range(cast.counts[LISTED]):
        here = cast.listed[number] + span * period
        while here >= span and cast.left[here] >= 0:  # not that far yet
            here -= span
        end_us = cast.at_us[here]
        if here < span or abs(end_us - cast.at_us[here - span] - gap_us) > _ALIKE * end_us:
            settled = False
            break
    return settled


@inlined
def _cycle(cast: Cast, here: int) -> int:
    """So many periods until the gaps repeat; half of what is rehearsed where they do not."""
    end_us, back, found = cast.at_us, cast.span, PERIODS // 2
    for cycle in range(PERIODS // 4, 1, -1):
        whole_us, alike = end_us[here] - end_us[here - back * cycle], True
        for then in range(here - back, here - back * (PERIODS // 2), -back):
            off_us = end_us[then] - end_us[then - back * cycle] - whole_us
            alike = alike and abs(off_us) <= _ALIKE * whole_us
        if alike:
            found = cycle
    return found


@compiled
def critical(loop: Loop, cast: Cast, found: Whole) -> int:
    """How many tasks set the interval of what was rehearsed last; which, in ``found``.

    They are those of the last periods that the end waited for.
    """
    span, here, count = cast.span, cast.counts[END], 0
    first = here - loop.depth * span
    for v in range(loop.size):
        cast.seen[v] = 0
    while here > first and here >= 0:
        v = here % span % cast.width
        if v < loop.size and not cast.seen[v]:
            cast.seen[v], found[count] = 1, v
            count += 1
        here = cast.cause[here]
    return count


@compiled
def waits(loop: Loop, cast: Cast, awaited: Whole, awaiting: Whole) -> int:
    """How many waits of one task for another set that interval; which, in the two lists.

    They are in the same last periods, the last of them first; no more than there are tasks.
    """
    here, count = cast.counts[END], 0
    first, before = here - loop.depth * cast.span, cast.cause[here]
    while before > first and before >= 0 and count < loop.size:
        then, v = here % cast.span % cast.width, before % cast.span % cast.width
        if v < loop.size and then < loop.size and v != then:
            awaited[count], awaiting[count] = v, then
            count += 1
        here, before = before, cast.cause[before]
    return count
