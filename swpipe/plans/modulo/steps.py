"""The steps of a walk, in numbers: what `walk` has run for it.

wander ──> a step ──> play ──> rehearse ──> worse than may be: back to where it was
  ^                                    ──> better than all before: who walks is told; settle
  └────────────────────────────────<── else: on from there
"""

from __future__ import annotations

import math
from typing import NamedTuple

from swpipe.plans.modulo.compiled import Real, Whole, compiled
from swpipe.plans.modulo.period import Arrangement, Loop, Played, play, trace
from swpipe.plans.modulo.rehearsal import Cast, rehearse

SEEDS = 2**31 - 1
"""Seeds are from 1 up to, not including, this."""

_MULTIPLIER = 48_271
"""S. K. Park and K. W. Miller, "Random number generators: good ones are hard to find" (1988), with
the multiplier that they came to prefer (1993): no product leaves 64 bits."""

_OF_CRITICAL = 0.8
"""Of the steps, so many begin with a task that sets the interval."""

_STAGE = 0.3
"""Of the steps, so many try another stage."""

_LANE = 0.5
"""Of the steps, so many try another thread, where that is meant to change."""

_NEIGHBOURS = 4
"""Draws of a task that shares something, to go beside."""

_LOOKS = 8
"""So many looks at a player of a rehearsal take as long as each task of a period played."""

STEPS, PLAYS, CRITICAL, LIMITING = range(4)
"""Counts: steps and plays that are left, tasks that set the interval; the operation that does."""

HEAT, COOLING, COST, ROUGH, LIMIT, PRICE, ROUGH_PRICE, BEST = range(8)
"""Levels: what a step may cost, over the interval, and by what that shrinks at each step; what the
plan costs where the walk is, rehearsed and played; what the step under way may cost, and does;
the least interval promised on the way."""


class Ties(NamedTuple):
    """What binds tasks to each other. Of task v, from ``..._of[v]`` up to ``..._of[v + 1]``.

    Attributes:
        frozen: Task to 1 where it stays on the caller's thread.
        last: Task to 1 where it stays in the last stage.
        producer_of: Where the tasks that it depends on stand.
        producer: They.
        producer_distance: Iterations from them to it.
        consumer_of: Where the tasks that depend on it stand.
        consumer: They.
        consumer_distance: Iterations from it to them.
        shares: ``v * size + w`` to 1 where v and w take the same stream or resource.
    """

    frozen: Whole
    last: Whole
    producer_of: Whole
    producer: Whole
    producer_distance: Whole
    consumer_of: Whole
    consumer: Whole
    consumer_distance: Whole
    shares: Whole


class Walker(NamedTuple):
    """Where a walk is, and how far.

    Attributes:
        lanes_change: Whether tasks may go to other threads.
        rehearses: Whether what is played is rehearsed too.
        place: The plan of the step under way.
        load: Thread to its host work there.
        kept: The plan where the walk is.
        kept_load: Thread to its host work there.
        best: The plan that promises most.
        critical: The tasks that set its interval.
        tasks: Those that the step under way places anew.
        gone: Task to 1 where it is to be placed yet.
        rest: The order that is being made.
        seed: What chance comes from.
        counts: Whole numbers, as listed above.
        levels: Real ones.
    """

    lanes_change: bool
    rehearses: bool
    place: Arrangement
    load: Real
    kept: Arrangement
    kept_load: Real
    best: Arrangement
    critical: Whole
    tasks: Whole
    gone: Whole
    rest: Whole
    seed: Whole
    counts: Whole
    levels: Real


@compiled
def begin(loop: Loop, walker: Walker, played: Played, cast: Cast) -> float:
    """Play where the walk begins; the interval promised."""
    walker.levels[LIMIT] = math.inf
    us = _tried(loop, walker, played, cast, math.inf)
    walker.levels[BEST] = us
    _copy(walker.place, walker.best)
    settle(loop, walker, played, walker.levels[PRICE])
    return us


@compiled
def wander(
    loop: Loop, ties: Ties, walker: Walker, played: Played, cast: Cast, below_us: float
) -> float:
    """Walk on until a plan promises less than this; what it promises, or infinity at the end.

    The step that led there is to be settled before the walk goes on.
    """
    count, level = walker.counts, walker.levels
    while count[STEPS] > 0 and count[PLAYS] > 0:
        count[STEPS] -= 1
        level[HEAT] *= level[COOLING]
        worse = 1 - level[HEAT] * math.log(1 - _draw(walker.seed))
        level[LIMIT] = level[COST] * worse
        if not _step(loop, ties, walker):
            _go_back(walker)
            continue
        count[PLAYS] -= 1
        us = _tried(loop, walker, played, cast, max(level[COST], level[ROUGH]) * worse)
        if us < level[BEST]:
            level[BEST] = us
            _copy(walker.place, walker.best)
        if us < below_us and level[PRICE] <= level[LIMIT]:
            return us
        settle(loop, walker, played, level[PRICE])
    return math.inf


@compiled
def _tried(loop: Loop, walker: Walker, played: Played, cast: Cast, limit_us: float) -> float:
    """What the step under way promises, and costs: more than it may where nobody need know."""
    count, level = walker.counts, walker.levels
    price, us, limiting = play(loop, walker.place, played, limit_us)
    if price <= limit_us and walker.rehearses:
        rehearsed_us = rehearse(loop, walker.place, cast, level[LIMIT])
        count[PLAYS] -= cast.looks[0] // (_LOOKS * loop.size)
        level[PRICE], level[ROUGH_PRICE] = price - us + rehearsed_us, price
        us = rehearsed_us
    else:
        level[PRICE] = level[ROUGH_PRICE] = price
        if walker.rehearses:
            us = math.inf  # what was not rehearsed is no promise
    count[LIMITING] = limiting
    return us


@compiled
def settle(loop: Loop, walker: Walker, played: Played, price: float) -> None:
    """Stay where the step under way led, or go back, if it costs more than it may."""
    level = walker.levels
    if price > level[LIMIT]:
        _go_back(walker)
        return
    _copy(walker.place, walker.kept)
    for lane in range(loop.threads):
        walker.kept_load[lane] = walker.load[lane]
    level[COST], level[ROUGH] = price, level[ROUGH_PRICE]
    walker.counts[CRITICAL] = trace(loop, played, walker.counts[LIMITING], walker.critical)


@compiled
def _go_back(walker: Walker) -> None:
    _copy(walker.kept, walker.place)
    for lane in range(len(walker.load)):
        walker.load[lane] = walker.kept_load[lane]


@compiled
def _copy(source: Arrangement, target: Arrangement) -> None:
    for v in range(len(source.order)):
        target.order[v] = source.order[v]
        target.lanes[v] = source.lanes[v]
        target.stages[v] = source.stages[v]


@compiled
def _draw(seed: Whole) -> float:
    """A number between 0 and 1."""
    seed[0] = seed[0] * _MULTIPLIER % SEEDS
    return seed[0] / SEEDS


@compiled
def _step(loop: Loop, ties: Ties, walker: Walker) -> bool:
    """A step at random; False for one that leads nowhere, and may be half done."""
    seed = walker.seed
    if _draw(seed) < _OF_CRITICAL:
        task = walker.critical[int(_draw(seed) * walker.counts[CRITICAL])]
    else:
        task = int(_draw(seed) * loop.size)
    walker.tasks[0] = task
    kind = _draw(seed)
    to_lane = _LANE if walker.lanes_change else 0.0
    if kind < to_lane:
        changed = _other_lane(loop, ties, walker, task)
        return changed and _reordered(loop, ties, walker, 1, 0, True)
    if kind < to_lane + _STAGE:
        by = 1 if _draw(seed) < 0.5 else -1
        count = _pushed(loop, ties, walker, by)
        return count > 0 and _reordered(loop, ties, walker, count, by, True)
    return _reordered(loop, ties, walker, 1, 0, False)


@compiled
def _other_lane(loop: Loop, ties: Ties, walker: Walker, task: int) -> bool:
    """Take a task to another thread, maybe in exchange; False where a thread has too much then."""
    seed, lanes, load = walker.seed, walker.place.lanes, walker.load
    partner = -1
    lane = int(_draw(seed) * loop.threads)
    if _draw(seed) < 0.5:
        partner = int(_draw(seed) * loop.size)
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
        possible = 0 <= stage < loop.depth and not ties.last[v]
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
def _reordered(loop: Loop, ties: Ties, walker: Walker, count: int, by: int, changed: bool) -> bool:
    """Place the step's tasks anew, beside others that share something; False where nothing does.

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
    possible = True
    for turn in range(count):
        task = walker.tasks[turn if by >= 0 else count - 1 - turn]
        low, high = _between(ties, walker, task, length)
        at = _place_of(order, task, loop.size)
        if low > high:
            possible = False
        elif not (changed and low <= at <= high and _draw(walker.seed) < 0.5):
            place = min(max(_beside(loop, ties, walker, task, length), low), high)
            possible = possible and (changed or place != at)
            at = place
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
def _beside(loop: Loop, ties: Ties, walker: Walker, task: int, length: int) -> int:
    """A place beside a task that shares something with this one, if one is found soon."""
    seed, lanes = walker.seed, walker.place.lanes
    place = 0
    for _ in range(_NEIGHBOURS):
        if length:
            place = int(_draw(seed) * length)
            other = walker.rest[place]
            if lanes[other] == lanes[task] or ties.shares[task * loop.size + other]:
                break
    return place + 1 if _draw(seed) < 0.5 else place
