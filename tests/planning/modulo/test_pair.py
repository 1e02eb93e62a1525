"""Two walkers: who is faster changes nothing, and each hears of what the other found."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from swpipe.analysis.validation import validate
from swpipe.planning import simulate
from swpipe.planning.modulo.beginnings import beginnings
from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.pair import _RACE, Pair
from swpipe.planning.modulo.period import Period
from swpipe.planning.modulo.walk import Walk
from tests.planning.instances import instance
from tests.planning.modulo.graphs import graph_of, plan_at

DEPTH = 4
LARGE = 30
STEPS = 30
NEVER_US = 1.0
"""No plan has this interval."""


def pair_of(
    number: int, size: int = LARGE, *, wanted_us: float = NEVER_US, turns: int = 300_000
) -> tuple[Pair, list[Layout]]:
    """Two walkers on this instance, and where they may begin."""
    given = instance(number, size)
    period = Period(graph_of(given), given.limits.threads, DEPTH)
    firsts = list(beginnings(period.graph, DEPTH, given.limits.threads))
    return Pair(period, random.Random(1), wanted_us, turns), firsts


def watched(
    monkeypatch: pytest.MonkeyPatch, seen: Callable[[Walk, Callable[[], None]], None]
) -> None:
    """Have a test decide when each walk takes place."""
    stroll = Walk.stroll

    def told(walk: Walk, *given: Any, **how: Any) -> None:
        seen(walk, lambda: stroll(walk, *given, **how))

    monkeypatch.setattr(Walk, "stroll", told)


@dataclass
class Asked:
    """What is asked of a walk, and the best plan that its walker knows before and after."""

    start: Layout | None
    steps: int
    turns: int
    deals: bool
    thread: int
    knew: tuple[Layout, float]
    found: tuple[Layout, float]


def listed(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The walks, in the order in which they end."""
    stroll, asked = Walk.stroll, []

    def told(
        walk: Walk, start: Layout | None, steps: int, us: float, turns: int, *, deals: bool
    ) -> None:
        knew = walk.top
        stroll(walk, start, steps, us, turns, deals=deals)
        asked.append(Asked(start, steps, turns, deals, threading.get_ident(), knew, walk.top))

    monkeypatch.setattr(Walk, "stroll", told)
    return asked


@pytest.mark.parametrize("number", range(6))
def test_what_they_find_can_run_and_keeps_its_promise(number: int) -> None:
    """Within the limits."""
    given = instance(number, LARGE)
    pair, firsts = pair_of(number)
    pair.search(firsts, STEPS)
    assert pair.best is not None
    layout, promised_us = pair.best
    plan = plan_at(given, graph_of(given), layout)
    validate(plan)
    found = simulate(plan, given.costs, streams=given.streams)
    assert found.ii_us == pytest.approx(promised_us, rel=1e-9)


def after(monkeypatch: pytest.MonkeyPatch, slow: int) -> tuple[tuple[Layout, float] | None, int]:
    """What a pair finds where one of them begins each walk when the other one has ended its own."""
    pair, firsts = pair_of(2)
    ended = threading.Semaphore(0)

    def in_turn(walk: Walk, stroll: Callable[[], None]) -> None:
        if walk is pair._walks[slow]:
            assert ended.acquire(timeout=60)
        stroll()
        if walk is not pair._walks[slow]:
            ended.release()

    with monkeypatch.context() as patch:
        watched(patch, in_turn)
        assert len(firsts) == 6  # so that both walk in every round
        pair.search(firsts, STEPS)
    return pair.best, pair.turns


def test_whoever_is_faster_they_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither hears what the other found before both are done."""
    pair, firsts = pair_of(2)
    pair.search(firsts, STEPS)
    assert after(monkeypatch, 0) == after(monkeypatch, 1) == (pair.best, pair.turns)


def test_each_has_numbers_of_its_own() -> None:
    """Whatever a walker writes, the other one does not even see."""

    def arrays(of: Any) -> list[int]:
        if isinstance(of, tuple):
            return [found for each in of for found in arrays(each)]
        return [] if isinstance(of, (int, float)) else [id(of)]

    one, two = ([*arrays(w._walker), *arrays(w._cast)] for w in pair_of(2)[0]._walks)
    assert len(set(one)) > 40
    assert not set(one) & set(two)


def test_they_walk_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walk begins before the other one ends."""
    pair, firsts = pair_of(2)
    both = threading.Barrier(2, timeout=60)

    def together(walk: Walk, stroll: Callable[[], None]) -> None:
        both.wait()
        stroll()

    watched(monkeypatch, together)
    pair.search(firsts, STEPS)
    assert pair.best is not None
    assert not both.broken


def test_small_loops_need_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hand a walk over takes as long as it takes."""
    asked = listed(monkeypatch)
    for size, here in ((14, True), (LARGE, False)):
        asked.clear()
        pair, firsts = pair_of(2, size)
        pair.search(firsts, STEPS)
        assert {each.thread == threading.get_ident() for each in asked} == {here}


def test_all_beginnings_have_a_go_and_the_best_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as if it were the only one, for fewer steps; from then on it is the winner."""
    asked = listed(monkeypatch)
    pair, firsts = pair_of(10, 14)
    assert len(firsts) == 6
    pair.search(firsts, STEPS)
    race, rounds = asked[:6], asked[6:]
    assert [each.start for each in race] == firsts
    assert {(each.steps, each.deals, each.knew[1]) for each in race} == {
        (math.ceil(STEPS * _RACE), False, math.inf)
    }
    winner = min(race, key=lambda each: each.found[1])
    assert winner.start != firsts[0]
    assert {each.start for each in rounds} == {winner.start, None}
    ways = {(each.steps, each.start is None, each.deals) for each in rounds}
    assert ways == {(STEPS, on, deals) for on in (True, False) for deals in (True, False)}


def test_each_hears_of_the_best_plan_before_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever found it, and whenever; in the end it is what was looked for."""
    asked = listed(monkeypatch)
    pair, firsts = pair_of(3, 14)
    pair.search(firsts, STEPS)
    begun = len(firsts)
    assert len(asked) > begun + 8
    for number in range(begun, len(asked)):
        before = asked[: begun + (number - begun) // 2 * 2]
        assert asked[number].knew == min((each.found for each in before), key=lambda f: f[1])
    assert pair.best == min((each.found for each in asked), key=lambda found: found[1])
    improved = {number % 2 for number, each in enumerate(asked) if each.found[1] < each.knew[1]}
    assert improved == {0, 1}


@pytest.mark.parametrize("size", [14, LARGE])
def test_they_stop_when_it_is_found(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """In the race, or later: once a plan promises what is wanted, no further walk begins."""
    asked = listed(monkeypatch)
    pair, firsts = pair_of(2, size, wanted_us=1e9)
    pair.search(firsts, STEPS)
    assert len(asked) == 2
    pair, firsts = pair_of(2, size)
    pair.search(firsts, STEPS)
    assert pair.best is not None
    least_us, before = pair.best[1], len(asked)
    again, _ = pair_of(2, size, wanted_us=least_us)
    again.search(firsts, STEPS)
    assert again.best is not None
    assert again.best[1] <= least_us
    assert again.turns > 0
    assert len(asked) - before < before


def test_turns_are_counted_and_bound_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of what is left; with none, nothing begins."""
    asked = listed(monkeypatch)
    pair, firsts = pair_of(2, turns=100_000)
    pair.search(firsts, STEPS)
    assert -20_000 < pair.turns <= 0
    assert pair.turns == 100_000 - sum(walk.turns for walk in pair._walks)
    assert asked[0].turns == asked[1].turns == 50_000
    assert all(0 < each.turns <= 50_000 for each in asked)
    asked.clear()
    none, firsts = pair_of(2, turns=0)
    none.search(firsts, STEPS)
    assert none.best is None
    assert not asked


def test_where_nothing_can_begin_nothing_is_found() -> None:
    """No beginning, no plan; nothing was spent."""
    pair, _ = pair_of(2)
    pair.search([], STEPS)
    assert (pair.best, pair.turns) == (None, 300_000)


@pytest.mark.parametrize("size", [14, LARGE])
def test_ctrl_c_is_heard_after_a_walk(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """What interrupts a walk is not lost, and no other round begins."""
    walks = []

    def interrupted(walk: Walk, stroll: Callable[[], None]) -> None:
        walks.append(walk)
        stroll()
        if len(walks) > 7:
            raise KeyboardInterrupt

    watched(monkeypatch, interrupted)
    pair, firsts = pair_of(2, size)
    with pytest.raises(KeyboardInterrupt):
        pair.search(firsts, STEPS)
    assert len(walks) == 8
