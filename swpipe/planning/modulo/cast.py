r"""Who does what in a rehearsal, and who waits for whom.

    thread          [a 0]      [b 0][a 1]      [b 1]         *turns*: what a thread does for a task,
    thread               [c 0]           [c 1]               and what a stream does; where several
    stream "s1"               [c 0]           [c 1]          threads submit to the caller's stream,
                                                             also the submission

Each turn waits for the one before it on its thread or stream, and for what its task depends on. So
a plan is a list of *links*: from a turn to one that waits for it, so many periods later.
"""

from __future__ import annotations

from typing import NamedTuple

from swpipe.planning.modulo.compiled import Real, Whole, compiled, inlined, reals, wholes
from swpipe.planning.modulo.period import Arrangement, Loop, highest

PERIODS = 40
"""So many are rehearsed at most."""

LISTED, LINKED, KNOWN, READY, WAITING, HOLDING, CHOSEN, SUBMITTED, WORKED, DONE, END = range(11)
"""Counts: the turns and the links that there are; where periods begin that nothing is noted of yet;
turns that can be done; turns that wait for what others want too, those of them that hold a resource
meanwhile, and how often one was chosen; turns submitted to the caller's stream, and those of them
that are done; all that are done; and the turn that was the last."""

SUBMITS = 4
"""What a turn contends for that submits to the caller's stream; others want resources or locks."""


class Cast(NamedTuple):
    """Room for rehearsals of one loop: what a plan makes of it, and how far a rehearsal is.

    Turn v is the host work of task v, turn ``size`` is ``<admit>``, ``size + 1`` is ``<retire>``;
    device work comes ``width = size + 2`` further on, and what submits it ``2 * width``. In period
    p of those that are rehearsed, all are ``span * p`` further on.

    Attributes:
        width: Tasks, ``<admit>`` and ``<retire>``.
        span: Numbers that the turns of a period have.
        counts: Whole numbers, as listed above.
        listed: The turns that there are.
        stage: Turn to the stage of its task, the last being the depth - 1.
        since: Turn to the first that takes its time, that of the first iteration.
        rank: Turn to its place among those that are ready at once.
        took_us: Turn to how long it takes.
        contends: Turn to what it contends for: RESOURCE, LOCK, BOTH, SUBMITS or 0.
        queued: Turn to 1 where it is done in the order of submission.
        needs: Turn to how many it waits for.
        link: Turn to its last link; -1 for none.
        link_before: Link to the one before it, of the same turn; -1 for none.
        link_turn: Link to the turn that waits.
        link_on: Link to how much further on that is.
        link_since: Link to the first period in which that turn waits; once a rehearsal has begun,
            to that turn of that period.
        link_over_us: Link to how long it takes to be heard of.
        first: Thread, stream, and thread as it submits: to its first turn.
        last: The same to its last turn; -1 for none.
        hears: Thread to the task that waits for admission on behalf of all; -1 for none.
        tells: Thread, or stream, to the task that retirement waits for; -1 for none.
        row_last: Row of the loop to the task that took it last.
        row_before: Hold to the task that took its row before.
        left: Turn of any period to how many it still waits for; -1 where it is done.
        at_us: The same to when it is ready, and then to its end.
        cause: The same to the one that it waited for last; -1 for none.
        ready: Turns, of any period, that can be done.
        ready_turn: Which turns they are.
        waiting: Turns, of any period, that contend.
        waiting_turn: Which turns they are.
        waiting_holds: 1 where it holds its resources, and waits for the lock.
        queue: Turns, of any period, that were submitted to the caller's stream.
        queue_turn: Which turns they are.
        held_us: Row of the loop to when it is free.
        holder: Row of the loop to the turn that had it last, of any period.
        seen: Task to 1 where it was seen on the way back from the end.
    """

    width: int
    span: int
    counts: Whole
    listed: Whole
    stage: Whole
    since: Whole
    rank: Whole
    took_us: Real
    contends: Whole
    queued: Whole
    needs: Whole
    link: Whole
    link_before: Whole
    link_turn: Whole
    link_on: Whole
    link_since: Whole
    link_over_us: Real
    first: Whole
    last: Whole
    hears: Whole
    tells: Whole
    row_last: Whole
    row_before: Whole
    left: Whole
    at_us: Real
    cause: Whole
    ready: Whole
    ready_turn: Whole
    waiting: Whole
    waiting_turn: Whole
    waiting_holds: Whole
    queue: Whole
    queue_turn: Whole
    held_us: Real
    holder: Whole
    seen: Whole


def cast_of(loop: Loop) -> Cast:
    """Room for rehearsals of a loop."""
    width = loop.size + 2
    span = 3 * width if loop.streams else width
    periods = PERIODS + loop.depth
    links = len(loop.into_tail) + len(loop.hold_row) + 6 * width + span
    players = 2 * loop.threads + max(0, loop.streams - 1)

    return Cast(
        width=width,
        span=span,
        counts=wholes(11),
        listed=wholes(span),
        stage=wholes(span),
        since=wholes(span),
        rank=wholes(span),
        took_us=reals(span),
        contends=wholes(span),
        queued=wholes(span),
        needs=wholes(span),
        link=wholes(span),
        link_before=wholes(links),
        link_turn=wholes(links),
        link_on=wholes(links),
        link_since=wholes(links),
        link_over_us=reals(links),
        first=wholes(players),
        last=wholes(players),
        hears=wholes(loop.threads),
        tells=wholes(max(loop.threads, loop.streams)),
        row_last=wholes(loop.rows),
        row_before=wholes(len(loop.hold_row)),
        left=wholes(span * periods),
        at_us=reals(span * periods),
        cause=wholes(span * periods),
        # Each turn of each period comes up once: there is room, whatever waits side by side.
        ready=wholes(span * periods),
        ready_turn=wholes(span * periods),
        waiting=wholes(span * periods),
        waiting_turn=wholes(span * periods),
        waiting_holds=wholes(span * periods),
        queue=wholes(span * periods),
        queue_turn=wholes(span * periods),
        held_us=reals(loop.rows),
        holder=wholes(loop.rows),
        seen=wholes(loop.size),
    )


@compiled
def assign(loop: Loop, place: Arrangement, cast: Cast, begun: int) -> None:
    """What a plan makes of a loop: turns, and links between them.

    Args:
        loop: The loop.
        place: The plan.
        cast: Is told.
        begun: So many iterations have begun before the periods that are rehearsed; what they left
            to do before them is done.
    """
    cast.counts[LISTED] = cast.counts[LINKED] = 0
    for turn in range(cast.span):
        cast.needs[turn], cast.link[turn], cast.queued[turn] = 0, -1, 0
    for player in range(len(cast.last)):
        cast.last[player] = -1
    if loop.streams:
        _list_on_streams(loop, place, cast, begun)
    else:
        _list_on_threads(loop, place, cast, begun)
    for player in range(len(cast.last)):
        if cast.last[player] >= 0:
            _link(cast, cast.last[player], cast.first[player], 1, 1, 0.0)
    _link_host(loop, place, cast)
    if loop.streams:
        _link_device(loop, place, cast, begun)


@compiled
def _list_on_threads(loop: Loop, place: Arrangement, cast: Cast, begun: int) -> None:
    """Who does what, in which order, on a device without streams."""
    size, last = loop.size, loop.depth - 1
    ahead = last - highest(place.stages)
    _list(cast, begun, 0, size, 0, 0, 0.0, 0)
    for number in range(size):
        task = place.order[number]
        stage, us = place.stages[task] + ahead, loop.host_us[task]
        _list(cast, begun, place.lanes[task], task, stage, number + 1, us, loop.contends[task])
    _list(cast, begun, 0, size + 1, last, size + 1, 0.0, 0)


@compiled
def _list_on_streams(loop: Loop, place: Arrangement, cast: Cast, begun: int) -> None:
    """Who does what, in which order: an iteration is admitted right before its first task."""
    size, width, last = loop.size, cast.width, loop.depth - 1
    callers = loop.threads + loop.streams - 1
    ahead, shared, admitted = last - highest(place.stages), False, False
    for v in range(size):
        shared = shared or (loop.stream[v] == 0 and place.lanes[v] > 0)
    for number in range(size):
        task, rank = place.order[number], number + 1
        lane, stage = place.lanes[task], place.stages[task] + ahead
        if not admitted and stage == 0:
            _list(cast, begun, 0, size, 0, 0, 0.0, 0)
            admitted = True
        _list(cast, begun, lane, task, stage, rank, loop.host_us[task], loop.contends[task])
        player, work, rank = callers, width + task, width + rank
        if loop.stream[task]:
            player = loop.threads + loop.stream[task] - 1
        elif shared:
            player = -1
            _list(cast, begun, callers + lane, width + work, stage, rank, 0.0, SUBMITS)
            _link(cast, task, width + work, 0, 0, 0.0)
        us, contends = loop.device_us[task], loop.contends[size + task]
        _list(cast, begun, player, work, stage, rank, us, contends)
    if not admitted:
        _list(cast, begun, 0, size, 0, 0, 0.0, 0)
    retire, closing = size + 1, width + size + 1
    _list(cast, begun, 0, retire, last, retire, 0.0, 0)
    if shared:
        _list(cast, begun, callers, width + closing, last, closing, 0.0, SUBMITS)
        _link(cast, retire, width + closing, 0, 0, 0.0)
    _list(cast, begun, -1 if shared else callers, closing, last, closing, 0.0, 0)


@inlined
def _list(
    cast: Cast, begun: int, player: int, turn: int, stage: int, rank: int, us: float, contends: int
) -> None:
    """Give a player one more turn; that of nobody, -1, waits for its submission."""
    cast.stage[turn], cast.since[turn] = stage, turn + cast.span * max(0, stage - begun)
    cast.rank[turn], cast.took_us[turn], cast.contends[turn] = rank, us, contends
    cast.listed[cast.counts[LISTED]] = turn
    cast.counts[LISTED] += 1
    if player < 0:
        cast.queued[turn] = 1
        cast.needs[turn] += 1
    else:
        if cast.last[player] < 0:
            cast.first[player] = turn
        else:
            _link(cast, cast.last[player], turn, 0, 0, 0.0)
        cast.last[player] = turn


@inlined
def _link(cast: Cast, tail: int, head: int, lag: int, since: int, over_us: float) -> None:
    """Note that a turn waits for another, of ``lag`` periods ago, from period ``since`` on.

    Nobody waits for what was before the periods that are rehearsed.
    """
    number = cast.counts[LINKED]
    cast.counts[LINKED] += 1
    cast.link_before[number], cast.link[tail] = cast.link[tail], number
    cast.link_turn[number], cast.link_on[number] = head, head - tail + cast.span * lag
    cast.link_since[number], cast.link_over_us[number] = max(lag, since), over_us
    cast.needs[head] += 1


@compiled
def _link_host(loop: Loop, place: Arrangement, cast: Cast) -> None:
    """Threads wait for each other in every period, whether or not the iteration exists.

    What the order of a thread says needs no link. So of all its tasks one waits for admission, the
    first of those of the least stage, and retirement waits for one, the last of the highest.
    """
    size, lanes, stage, over_us = loop.size, place.lanes, cast.stage, loop.handover_us
    _list_takers(loop, place, cast)
    for lane in range(loop.threads):
        cast.hears[lane] = cast.tells[lane] = -1
    for v in place.order:
        lane = lanes[v]
        if cast.hears[lane] < 0 or stage[v] < stage[cast.hears[lane]]:
            cast.hears[lane] = v
        if cast.tells[lane] < 0 or stage[v] >= stage[cast.tells[lane]]:
            cast.tells[lane] = v
        for edge in range(loop.into_of[v], loop.into_of[v + 1]):
            u = loop.into_tail[edge]
            if lanes[u] != lane:
                lag = stage[v] - stage[u] + loop.into_distance[edge]
                _link(cast, u, v, lag, lag, over_us)
        for hold in range(loop.hold_of[v], loop.hold_of[v + 1]):
            u = cast.row_before[hold]
            if loop.hold_turn[hold] and lanes[u] != lane:
                lag = 0 if cast.rank[u] < cast.rank[v] else 1
                _link(cast, u, v, lag, lag, over_us)
    for lane in range(1, loop.threads):
        if cast.hears[lane] >= 0:
            v, u = cast.hears[lane], cast.tells[lane]
            _link(cast, size, v, stage[v], stage[v], over_us)
            lag = loop.depth - 1 - stage[u]
            _link(cast, u, size + 1, lag, lag, over_us)


@compiled
def _link_device(loop: Loop, place: Arrangement, cast: Cast, begun: int) -> None:
    """Streams wait for each other, and admission for them, where both iterations exist.

    What the order of a stream says needs no link; that of the caller's is the order of submission,
    and who waits for work there has been submitted after it.
    """
    size, width, stage, last = loop.size, cast.width, cast.stage, loop.depth - 1
    closing = width + size + 1
    _link(cast, closing, size, 1, loop.depth - begun, loop.handover_us)
    _link(cast, size + 1, closing, 0, 0, 0.0)
    for stream in range(loop.streams):
        cast.tells[stream] = -1
    for v in place.order:
        work, stream = width + v, loop.stream[v]
        _link(cast, v, work, 0, 0, 0.0)
        for edge in range(loop.into_of[size + v], loop.into_of[size + v + 1]):
            u = loop.into_tail[edge] - size
            if u >= 0 and loop.stream[u] != stream:
                lag = stage[v] - stage[u] + loop.into_distance[edge]
                since = max(stage[v], stage[u] + lag) - begun
                _link(cast, width + u, work, lag, since, 0.0)
        if cast.tells[stream] < 0 or stage[v] >= stage[cast.tells[stream]]:
            cast.tells[stream] = v
    for stream in range(1, loop.streams):
        v = cast.tells[stream]
        if v >= 0:
            _link(cast, width + v, closing, last - stage[v], last - begun, 0.0)


@compiled
def _list_takers(loop: Loop, place: Arrangement, cast: Cast) -> None:
    """Hold to the task that has the turn before, that of the period before for the first."""
    for again in range(2):
        for task in place.order:
            for hold in range(loop.hold_of[task], loop.hold_of[task + 1]):
                if loop.hold_turn[hold]:
                    row = loop.hold_row[hold]
                    if again:
                        cast.row_before[hold] = cast.row_last[row]
                    cast.row_last[row] = task
