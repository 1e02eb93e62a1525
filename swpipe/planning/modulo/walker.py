"""Where a walk is, in numbers, and what chance it has.

The plan of the step under way, the one where the walk is and the best on the way stand side by
side; a step that is not taken is undone.
"""

from __future__ import annotations

from typing import NamedTuple

from swpipe.planning.modulo.compiled import Real, Whole, compiled
from swpipe.planning.modulo.period import Arrangement

SEEDS = 2**31 - 1
"""Seeds are from 1 up to, not including, this."""

_MULTIPLIER = 48_271
"""S. K. Park and K. W. Miller, "Random number generators: good ones are hard to find" (1988), with
the multiplier that they came to prefer (1993): no product leaves 64 bits."""

STEPS, TURNS, CRITICAL, WAITS, LIMITING, LANES = range(6)
"""Counts: steps that are left; turns that may be done yet, in all that is rehearsed or played;
tasks that set the interval, and waits that do, where plans are rehearsed; the operation that does,
where a period was played; 1 where tasks may go to other threads."""

FIRST_HEAT, HEAT, COOLING, COST, LIMIT, PRICE, BEST, TOP, WANTED = range(9)
"""Levels: what a step may cost, over the interval, at first and now, and by what that shrinks at
each step; what the plan costs where the walk is; what the step under way may cost, and does; the
least interval promised on the way, the least on any way, and the one that ends the search."""


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
        rehearses: Whether plans are rehearsed, or a period of them played.
        place: The plan of the step under way.
        load: Thread to its host work there.
        kept: The plan where the walk is.
        kept_load: Thread to its host work there.
        best: The plan that promises most on the way.
        top: The one that promises most of all so far.
        first: Where walks begin anew.
        critical: The tasks that set the interval where the walk is.
        awaited: The tasks that others wait for on the way that sets it, the last wait first.
        awaiting: Those that wait for them.
        tasks: Those that the step under way places anew.
        gone: Task to 1 where it is to be placed yet, or goes along with another one.
        rest: The order that is being made.
        seed: What chance comes from.
        keys: Task to what decides when it is dealt.
        counts: Whole numbers, as listed above.
        levels: Real ones.
    """

    rehearses: bool
    place: Arrangement
    load: Real
    kept: Arrangement
    kept_load: Real
    best: Arrangement
    top: Arrangement
    first: Arrangement
    critical: Whole
    awaited: Whole
    awaiting: Whole
    tasks: Whole
    gone: Whole
    rest: Whole
    seed: Whole
    keys: Real
    counts: Whole
    levels: Real


@compiled
def go_back(walker: Walker) -> None:
    """Undo the step under way."""
    copy(walker.kept, walker.place)
    for lane in range(len(walker.load)):
        walker.load[lane] = walker.kept_load[lane]


@compiled
def copy(source: Arrangement, target: Arrangement) -> None:
    """Make one plan the other."""
    for v in range(len(source.order)):
        target.order[v] = source.order[v]
        target.lanes[v] = source.lanes[v]
        target.stages[v] = source.stages[v]


@compiled
def draw(seed: Whole) -> float:
    """A number between 0 and 1."""
    seed[0] = seed[0] * _MULTIPLIER % SEEDS
    return seed[0] / SEEDS
