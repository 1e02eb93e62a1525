"""A step of a walk, in numbers: a task goes elsewhere in the order, to another stage or thread."""

from __future__ import annotations

from swpipe.plans.modulo.compiled import Whole, compiled
from swpipe.plans.modulo.period import Loop
from swpipe.plans.modulo.walker import CRITICAL, LANES, LIMIT, Ties, Walker, draw

_OF_CRITICAL = 0.8
"""Of the steps, so many begin with a task that sets the interval."""

_STAGE = 0.3
"""Of the steps, so many try another stage."""

_LANE = 0.5
"""Of the steps, so many try another thread, where that is meant to change."""

_TOGETHER = 12
"""So many tasks go to another stage together at most. Where more would have to, they leave such a
hole in the period that hardly ever is anything gained; and to place them all anew takes long."""

_DRAWS = 4
"""So many draws for a task that shares something."""

NOWHERE, ALIKE, ELSEWHERE = range(3)
"""Where a step leads: to a plan that cannot be; to one that only seems to be another, since nothing
passed what it takes turns with; to another one."""


@compiled
def step(loop: Loop, ties: Ties, walker: Walker) -> int:
    """A step at random; where it leads: nowhere, and it may be half done."""
    seed = walker.seed
    if draw(seed) < _OF_CRITICAL:
        task = walker.critical[int(draw(seed) * walker.counts[CRITICAL])]
    else:
        task = int(draw(seed) * loop.size)
    walker.tasks[0] = task
    kind = draw(seed)
    to_lane = _LANE if walker.counts[LANES] else 0.0
    if kind < to_lane:
        if not _other_lane(loop, ties, walker, task):
            return NOWHERE
        return _reordered(loop, ties, walker, 1, 0, True)
    if kind < to_lane + _STAGE:
        by = 1 if draw(seed) < 0.5 else -1
        count = _pushed(loop, ties, walker, by)
        return _reordered(loop, ties, walker, count, by, True) if count else NOWHERE
    return _reordered(loop, ties, walker, 1, 0, False)


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
def _reordered(loop: Loop, ties: Ties, walker: Walker, count: int, by: int, changed: bool) -> int:
    """Place the step's tasks anew; where that leads.

    Args:
        loop: The loop.
        ties: What binds its tasks.
        walker: Whose step it is.
        count: So many tasks.
        by: Stages that they went on.
        changed: Whether stages or threads are others than before.
    """
    order, rest, gone = walker.place.order, walker.rest, walker.gone
    for moved in range(count):
        gone[walker.tasks[moved]] = 1
    length = 0
    for v in order:
        if not gone[v]:
            rest[length] = v
            length += 1
    possible, passes = True, changed
    for turn in range(count):
        task = walker.tasks[turn if by >= 0 else count - 1 - turn]
        at = _new_place(loop, ties, walker, task, length, changed)
        possible = at >= 0
        passes = changed or (possible and _passes(loop, ties, walker, task, at))
        if not possible:
            break
        for later in range(length, at, -1):
            rest[later] = rest[later - 1]
        rest[at] = task
        length += 1
        gone[task] = 0
    for moved in range(count):
        gone[walker.tasks[moved]] = 0
    if not possible:
        return NOWHERE
    for place in range(length):
        order[place] = rest[place]
    return ELSEWHERE if passes else ALIKE


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
def _new_place(
    loop: Loop, ties: Ties, walker: Walker, task: int, length: int, changed: bool
) -> int:
    """A place in the order for a task, beside one that shares something with it; -1 for none."""
    seed, at = walker.seed, _place_of(walker.place.order, task, loop.size)
    low, high = _between(ties, walker, task, length)
    if low > high:
        return -1
    if changed and low <= at <= high and draw(seed) < 0.5:
        return at
    place = _beside(loop, ties, walker, task, length)
    place = min(max(place + 1 if draw(seed) < 0.5 else place, low), high)
    return place if changed or place != at else -1


@compiled
def _passes(loop: Loop, ties: Ties, walker: Walker, task: int, place: int) -> bool:
    """Whether a task that goes elsewhere in the order passes one that it takes turns with."""
    at, lanes = _place_of(walker.place.order, task, loop.size), walker.place.lanes
    for number in range(min(at, place), max(at, place)):
        other = walker.rest[number]
        if lanes[other] == lanes[task] or ties.shares[task * loop.size + other]:
            return True
    return False


@compiled
def _beside(loop: Loop, ties: Ties, walker: Walker, task: int, length: int) -> int:
    """The place of a task that shares something with this one, if one is found soon."""
    lanes, place = walker.place.lanes, 0
    for _ in range(_DRAWS):
        if length:
            place = int(draw(walker.seed) * length)
            other = walker.rest[place]
            if lanes[other] == lanes[task] or ties.shares[task * loop.size + other]:
                break
    return place
