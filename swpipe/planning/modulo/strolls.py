"""Walks, in numbers: what `walk` has run for it.

    wander ──> a step ──> rehearse, or play ──> worse than may be: back to where it was
      ^                                     ──> as good as wanted: who walks is told; settle
      └─────────────────────────────────<── else: on from there

    stroll ──> wander from a plan, or from the best so far, as it is or dealt anew

Plans are rehearsed twice at most. Once with all iterations in flight, which takes half the time;
what seems to be the best plan on the way is rehearsed from the start of the loop.
"""

from __future__ import annotations

import math

from swpipe.planning.modulo.cast import CHOSEN, DONE, Cast
from swpipe.planning.modulo.compiled import Real, compiled, inlined
from swpipe.planning.modulo.loop_graph import SAME
from swpipe.planning.modulo.period import Loop, Played, play, trace
from swpipe.planning.modulo.rehearsal import critical, rehearse, waits
from swpipe.planning.modulo.steps import step
from swpipe.planning.modulo.walker import (
    BEST,
    COOLING,
    COST,
    CRITICAL,
    FIRST_HEAT,
    HEAT,
    LANES,
    LIMIT,
    LIMITING,
    PRICE,
    STEPS,
    TOP,
    TURNS,
    WAITS,
    WANTED,
    Ties,
    Walker,
    copy,
    draw,
    go_back,
)

HOT, _COLD = 0.5, 0.042
"""What a step may cost at first and at last: parts of the interval, over the number of tasks. At
first it is more where tasks are unlike: to take a long one elsewhere costs more, for a while."""

A_STEP = 20
"""To make a step takes as long as so many turns."""

_A_REHEARSAL, _A_TURN = 48, 3
"""To begin a rehearsal takes as long as so many turns, and so many more for each turn of a period;
that is half of its time."""

DEALS, TRIALS = 128, 1024
"""So many ways to deal the tasks to threads are looked at before one is taken for a walk; and so
many are tried at most, since few are even enough where threads are to be busy nearly always."""

_A_DEAL = 1 / 12
"""To deal tasks takes as long as so many turns for each pair of them."""

_GAIN = 0.35
"""A deal is to promise this part of what there is to gain, if one can: no thread has more work."""

_MIXED = 0.5
"""By up to this part tasks count as shorter than they are, to be dealt in another order."""


@compiled
def stroll(
    loop: Loop,
    ties: Ties,
    walker: Walker,
    played: Played,
    cast: Cast,
    steps: int,
    anew: bool,
    deals: bool,
) -> None:
    """Walk, from ``first`` or from ``top``; the best plan found on the way, or before, is ``top``.

    Args:
        loop: The loop.
        ties: What binds its tasks.
        walker: Stops where a plan promises what is wanted, or there are no turns left.
        played: What a period leaves behind.
        cast: Room for rehearsals.
        steps: Of the walk.
        anew: Whether it begins with ``first``.
        deals: Whether tasks are dealt to threads anew, and stay there; else they may change them.
    """
    count, level = walker.counts, walker.levels
    enough_us = level[WANTED] * (1 + SAME)
    begins = walker.first if anew else walker.top
    copy(begins, walker.place)
    if deals and loop.threads > 1:
        us = deal(loop, ties, walker, played, cast, level[TOP], level[WANTED])
        copy(walker.best if us < math.inf else begins, walker.place)
    count[LANES] = not deals and loop.threads > 1
    us = begin(loop, walker, played, cast, steps)
    if us > enough_us:
        wander(loop, ties, walker, played, cast, enough_us)
    if level[BEST] < level[TOP] * (1 - SAME):
        level[TOP] = level[BEST]
        copy(walker.best, walker.top)


@compiled
def begin(loop: Loop, walker: Walker, played: Played, cast: Cast, steps: int) -> float:
    """Stand where a walk of so many steps begins; the interval promised."""
    count, level, load = walker.counts, walker.levels, walker.load
    for lane in range(loop.threads):
        load[lane] = 0.0
    for v in range(loop.size):
        load[walker.place.lanes[v]] += loop.host_us[v]
    count[STEPS] = steps
    level[HEAT] = level[FIRST_HEAT]
    level[COOLING] = (_COLD / loop.size / level[HEAT]) ** (1 / steps)
    level[LIMIT] = level[BEST] = math.inf
    level[BEST] = us = _tried(loop, walker, played, cast)
    copy(walker.place, walker.best)
    settle(loop, walker, played, cast, level[PRICE])
    return us


@compiled
def wander(
    loop: Loop, ties: Ties, walker: Walker, played: Played, cast: Cast, below_us: float
) -> float:
    """Walk on until a plan promises less than this; what it promises, or infinity at the end.

    The step that led there is to be settled before the walk goes on.
    """
    count, level = walker.counts, walker.levels
    while count[STEPS] > 0 and count[TURNS] > 0:
        count[STEPS] -= 1
        count[TURNS] -= A_STEP
        level[HEAT] *= level[COOLING]
        worse = 1 - level[HEAT] * math.log(1 - draw(walker.seed))
        level[LIMIT] = level[COST] * worse
        if not step(loop, ties, walker):
            go_back(walker)
            continue
        us = _tried(loop, walker, played, cast)
        if us < level[BEST]:
            level[BEST] = us
            copy(walker.place, walker.best)
        if us < below_us and level[PRICE] <= level[LIMIT]:
            return us
        settle(loop, walker, played, cast, level[PRICE])
    return math.inf


@compiled
def _tried(loop: Loop, walker: Walker, played: Played, cast: Cast) -> float:
    """What the step under way promises, and costs; if that is more than it may, roughly."""
    count, level = walker.counts, walker.levels
    if walker.rehearses:
        us = rehearse(loop, walker.place, cast, level[LIMIT], loop.depth - 1)
        count[TURNS] -= _turns(cast)
        if us < level[BEST] and loop.depth > 1:
            us = rehearse(loop, walker.place, cast, level[LIMIT], 0)
            count[TURNS] -= _turns(cast)
        level[PRICE] = us
    else:
        level[PRICE], us, count[LIMITING] = play(loop, walker.place, played, level[LIMIT])
        count[TURNS] -= loop.size
    return us


@inlined
def _turns(cast: Cast) -> int:
    """As long as so many turns did a rehearsal take."""
    return cast.counts[DONE] + cast.counts[CHOSEN] + _A_REHEARSAL + _A_TURN * cast.span


@compiled
def settle(loop: Loop, walker: Walker, played: Played, cast: Cast, price: float) -> None:
    """Stay where the step under way led, or go back, if it costs more than it may."""
    level = walker.levels
    if price > level[LIMIT]:
        go_back(walker)
        return
    copy(walker.place, walker.kept)
    for lane in range(loop.threads):
        walker.kept_load[lane] = walker.load[lane]
    level[COST] = price
    if walker.rehearses:
        walker.counts[CRITICAL] = critical(loop, cast, walker.critical)
        walker.counts[WAITS] = waits(loop, cast, walker.awaited, walker.awaiting)
    else:
        walker.counts[CRITICAL] = trace(loop, played, walker.counts[LIMITING], walker.critical)


# ------------------------------------------------------------------------------------------ deals


@compiled
def deal(
    loop: Loop,
    ties: Ties,
    walker: Walker,
    played: Played,
    cast: Cast,
    top_us: float,
    wanted_us: float,
) -> float:
    """Deal the tasks to threads again and again; what the best deal promises, which is ``best``.

    They are dealt so evenly as to promise a good part of what there is to gain; if that cannot be,
    so as to promise anything. Where nothing is to be gained, it is infinity.
    """
    beaten_us, us = top_us * (1 - SAME), math.inf
    if beaten_us < math.inf:
        even_us = beaten_us + (wanted_us - beaten_us) * _GAIN
        us = _best_deal(loop, ties, walker, played, cast, even_us)
    if us == math.inf:
        us = _best_deal(loop, ties, walker, played, cast, beaten_us)
    return us


@compiled
def _best_deal(
    loop: Loop, ties: Ties, walker: Walker, played: Played, cast: Cast, most_us: float
) -> float:
    """The same where no thread may have more work than this."""
    level = walker.levels
    level[BEST] = level[LIMIT] = math.inf
    deals, trials, fewest = DEALS, TRIALS, _fewest_threads(loop, most_us)
    while deals and trials:
        trials -= 1
        walker.counts[TURNS] -= int(loop.size**2 * _A_DEAL)
        if _dealt(loop, ties, walker, fewest, most_us):
            deals -= 1
            us = _tried(loop, walker, played, cast)
            if us < level[BEST]:
                level[BEST] = level[LIMIT] = us
                copy(walker.place, walker.best)
    return level[BEST]


@compiled
def _dealt(loop: Loop, ties: Ties, walker: Walker, fewest: int, most_us: float) -> bool:
    """Deal the tasks, roughly the longest first; False where none has room for the next one.

    They go to so many threads or more. Threads wait for each other, and what they submit to the
    caller's stream waits too: a plan may be the better for doing without some.
    """
    load, lanes, key = walker.load, walker.place.lanes, walker.keys
    threads = loop.threads
    if fewest < threads:
        threads = fewest + int(draw(walker.seed) * (threads - fewest + 1))
    for lane in range(loop.threads):
        load[lane] = 0.0
    for v in range(loop.size):
        key[v] = loop.host_us[v] * (1 - _MIXED * draw(walker.seed))
        if ties.frozen[v]:
            lanes[v], key[v] = 0, -1.0
            load[0] += loop.host_us[v]
    for _ in range(loop.size):
        v = _longest(key)
        if key[v] >= 0:
            key[v], lanes[v] = -1.0, _with_room(walker, threads, most_us - loop.host_us[v])
            if lanes[v] < 0:
                return False
            load[lanes[v]] += loop.host_us[v]
    return True


@compiled
def _longest(key: Real) -> int:
    found = 0
    for v in range(len(key)):
        if key[v] > key[found]:
            found = v
    return found


@compiled
def _fewest_threads(loop: Loop, most_us: float) -> int:
    """So many threads have room for all tasks, if they can be shared out evenly."""
    work_us, threads = 0.0, 1
    for us in loop.host_us:
        work_us += us
    while threads < loop.threads and threads * most_us < work_us:
        threads += 1
    return threads


@compiled
def _with_room(walker: Walker, threads: int, most_us: float) -> int:
    """One of the first threads that have no more work than this; -1 for none."""
    fits = 0
    for lane in range(threads):
        fits += walker.load[lane] <= most_us
    turn = int(draw(walker.seed) * fits)
    for lane in range(threads):
        if walker.load[lane] <= most_us:
            if not turn:
                return lane
            turn -= 1
    return -1
