"""A step of a walk, in numbers: a task goes elsewhere in the order, to another stage or thread.

    order    a  p  x  b        b waits for a, since both want the same thread or stream;
                               p comes before b, for it depends on it
    steps    p  b  a  x        b goes right before a, and takes p along
             p  x  b  a        a goes right after b, and takes along what depends on it

Alone, b would get no further than p. Whatever the order was, the new one keeps all dependences.

Source: to take a task out of a row of those that wait for each other, and put it to either end of
the row, is from E. Balas and A. Vazacopoulos, "Guided local search with shifting bottleneck for job
shop scheduling" (Management Science 44, 1998).
"""

from __future__ import annotations

from swpipe.planning.modulo.compiled import Whole, compiled
from swpipe.planning.modulo.period import Loop
from swpipe.planning.modulo.walker import CRITICAL, LANES, LIMIT, WAITS, Ties, Walker, draw

_OF_WAITS = 0.3
"""Of the steps, so many turn a wait round that sets the interval."""

_FURTHER = 0.5
"""By such a chance a wait is turned round together with the one before it, which that waits for."""

_OF_CRITICAL = 0.8
"""Of the others, so many begin with a task that sets the interval."""

_STAGE = 0.3
"""Of these others, so many try another stage."""

_LANE = 0.5
"""And so many another thread, where that is meant to change."""

_TOGETHER = 12
"""So many tasks go to another stage together at most. Where more would have to, they leave such a
hole in the period that hardly ever is anything gained; and to place them all anew takes long."""

_DRAWS = 4
"""So many draws for a task that shares something."""


@compiled
def step(loop: Loop, ties: Ties, walker: Walker) -> bool:
    """A step at random; False where it leads to no plan, and it may be half done then."""
    seed = walker.seed
    if walker.counts[WAITS] and draw(seed) < _OF_WAITS:
        return _wait_turned(loop, ties, walker)
    if draw(seed) < _OF_CRITICAL:
        task = walker.critical[int(draw(seed) * walker.counts[CRITICAL])]
    else:
        task = int(draw(seed) * loop.size)
    walker.tasks[0] = task
    kind = draw(seed)
    to_lane = _LANE if walker.counts[LANES] else 0.0
    if kind < to_lane:
        return _other_lane(loop, ties, walker, task) and _placed(loop, ties, walker, 1, 0)
    if kind < to_lane + _STAGE:
        by = 1 if draw(seed) < 0.5 else -1
        count = _pushed(loop, ties, walker, by)
        return count > 0 and _placed(loop, ties, walker, count, by)
    return _past_another(loop, ties, walker, task)


@compiled
def _wait_turned(loop: Loop, ties: Ties, walker: Walker) -> bool:
    """Who waits on the way that sets the interval goes first, before one or more that it waits for.

    Who waits for a task of the period before stays where it is.
    """
    number = int(draw(walker.seed) * walker.counts[WAITS])
    first, then = walker.awaited[number], walker.awaiting[number]
    while number + 1 < walker.counts[WAITS] and draw(walker.seed) < _FURTHER:
        number += 1
        before = walker.awaited[number]
        if walker.awaiting[number] != first or not _share(loop, ties, walker, before, then):
            break
        first = before
    low = _place_of(walker.place.order, first, loop.size)
    high = _place_of(walker.place.order, then, loop.size)
    return low < high and _exchanged(ties, walker, low, high)


@compiled
def _past_another(loop: Loop, ties: Ties, walker: Walker, task: int) -> bool:
    """The task, and one at random that it shares something with, come the other way round."""
    for _ in range(_DRAWS):
        other = int(draw(walker.seed) * loop.size)
        if other != task and _share(loop, ties, walker, task, other):
            low = _place_of(walker.place.order, task, loop.size)
            high = _place_of(walker.place.order, other, loop.size)
            return _exchanged(ties, walker, min(low, high), max(low, high))
    return False


@compiled
def _share(loop: Loop, ties: Ties, walker: Walker, task: int, other: int) -> bool:
    """Whether two tasks take turns: on a thread, on a stream or with a resource."""
    lanes = walker.place.lanes
    return lanes[other] == lanes[task] or ties.shares[task * loop.size + other] > 0


@compiled
def _exchanged(ties: Ties, walker: Walker, low: int, high: int) -> bool:
    """Have the tasks at two places of the order the other way round, whoever of them moves.

    False where the later one depends on the sooner one within the period.
    """
    order, gone, rest = walker.place.order, walker.gone, walker.rest
    late = draw(walker.seed) < 0.5  # the sooner one moves
    gone[order[low if late else high]] = 1
    for number in range(high - low):
        _join(ties, walker, order[low + 1 + number if late else high - 1 - number], late)
    possible = not gone[order[high if late else low]]
    length = 0
    for goes in range(2):
        for place in range(low, high + 1):
            if gone[order[place]] == (goes if late else 1 - goes):
                rest[length] = order[place]
                length += 1
    for number in range(length):
        order[low + number] = rest[number]
        gone[rest[number]] = 0
    return possible


@compiled
def _join(ties: Ties, walker: Walker, task: int, late: bool) -> None:
    """Have a task go along, if it depends on one that goes, or one that goes depends on it."""
    stages, gone = walker.place.stages, walker.gone
    of = ties.producer_of if late else ties.consumer_of
    other = ties.producer if late else ties.consumer
    distance = ties.producer_distance if late else ties.consumer_distance
    way = 1 if late else -1
    for tie in range(of[task], of[task + 1]):
        apart = (stages[task] - stages[other[tie]]) * way + distance[tie]
        if gone[other[tie]] and apart == 0:
            gone[task] = 1


@compiled
def _other_lane(loop: Loop, ties: Ties, walker: Walker, task: int) -> bool:
    """Take a task to another thread, maybe in exchange; False where a thread has too much then."""
    seed, lanes, load = walker.seed, walker.place.lanes, walker.load
    partner = -1
    lane = int(draw(seed) * loop.threads)
    if draw(seed) < 0.5:
        partner = int(draw(seed) * loop.size)
        lane = lanes[partner]
    left = lanes[task]
    if lane == left or ties.frozen[task] or (partner >= 0 and ties.frozen[partner]):
        return False
    more_us = loop.host_us[task]
    if partner >= 0:
        more_us -= loop.host_us[partner]
        lanes[partner] = left
    lanes[task] = lane
    load[lane] += more_us
    load[left] -= more_us
    return max(load[lane], load[left]) <= walker.levels[LIMIT]


@compiled
def _pushed(loop: Loop, ties: Ties, walker: Walker, by: int) -> int:
    """Take the first task a stage on, or back, and all that go with it; none where one cannot."""
    stages, tasks, gone = walker.place.stages, walker.tasks, walker.gone
    count, at, possible = 1, 0, True
    gone[tasks[0]] = 1
    while at < count and possible:
        v = tasks[at]
        stage = stages[v] + by
        possible = 0 <= stage < loop.depth and not ties.last[v] and count <= _TOGETHER
        of = ties.consumer_of if by > 0 else ties.producer_of
        other = ties.consumer if by > 0 else ties.producer
        distance = ties.consumer_distance if by > 0 else ties.producer_distance
        for tie in range(of[v], of[v + 1]):
            u = other[tie]
            if (stages[u] - stage) * by + distance[tie] < 0 and not gone[u]:
                tasks[count], gone[u] = u, 1
                count += 1
        at += 1
    for moved in range(count):
        gone[tasks[moved]] = 0
        stages[tasks[moved]] += by
    return count if possible else 0


@compiled
def _placed(loop: Loop, ties: Ties, walker: Walker, count: int, by: int) -> bool:
    """Place the step's tasks anew; False where one of them has no place.

    Args:
        loop: The loop.
        ties: What binds its tasks.
        walker: Whose step it is.
        count: So many tasks.
        by: Stages that they went on.
    """
    order, rest, gone = walker.place.order, walker.rest, walker.gone
    for moved in range(count):
        gone[walker.tasks[moved]] = 1
    length = 0
    for v in order:
        if not gone[v]:
            rest[length] = v
            length += 1
    possible = True
    for turn in range(count):
        task = walker.tasks[turn if by >= 0 else count - 1 - turn]
        at = _new_place(loop, ties, walker, task, length)
        possible = at >= 0
        if not possible:
            break
        for later in range(length, at, -1):
            rest[later] = rest[later - 1]
        rest[at] = task
        length += 1
        gone[task] = 0
    for moved in range(count):
        gone[walker.tasks[moved]] = 0
    if possible:
        for place in range(length):
            order[place] = rest[place]
    return possible


@compiled
def _place_of(order: Whole, task: int, length: int) -> int:
    for place in range(length):
        if order[place] == task:
            return place
    return -1


@compiled
def _between(ties: Ties, walker: Walker, task: int, length: int) -> tuple[int, int]:
    """The first and the last place that dependences within the period leave to a task."""
    stages, stage, gone, rest = (
        walker.place.stages,
        walker.place.stages[task],
        walker.gone,
        walker.rest,
    )
    low, high = 0, length
    for tie in range(ties.producer_of[task], ties.producer_of[task + 1]):
        producer = ties.producer[tie]
        if stage - stages[producer] + ties.producer_distance[tie] == 0 and not gone[producer]:
            low = max(low, _place_of(rest, producer, length) + 1)
    for tie in range(ties.consumer_of[task], ties.consumer_of[task + 1]):
        consumer = ties.consumer[tie]
        if stages[consumer] - stage + ties.consumer_distance[tie] == 0 and not gone[consumer]:
            high = min(high, _place_of(rest, consumer, length))
    return low, high


@compiled
def _new_place(loop: Loop, ties: Ties, walker: Walker, task: int, length: int) -> int:
    """Where it was, or beside one that shares something with it; -1 where there is no place."""
    seed, at = walker.seed, _place_of(walker.place.order, task, loop.size)
    low, high = _between(ties, walker, task, length)
    if low > high:
        return -1
    if low <= at <= high and draw(seed) < 0.5:
        return at
    place = _beside(loop, ties, walker, task, length)
    return min(max(place + 1 if draw(seed) < 0.5 else place, low), high)


@compiled
def _beside(loop: Loop, ties: Ties, walker: Walker, task: int, length: int) -> int:
    """The place of a task that shares something with this one, if one is found soon."""
    place = 0
    for _ in range(_DRAWS):
        if length:
            place = int(draw(walker.seed) * length)
            if _share(loop, ties, walker, task, walker.rest[place]):
                break
    return place
