"""Walks: every plan on the way can run, and the same numbers lead the same way."""

from __future__ import annotations

import math
import random

import pytest

from swpipe.analysis.validation import validate
from swpipe.planning import simulate
from swpipe.planning.modulo.beginnings import beginning
from swpipe.planning.modulo.compiled import COMPILED
from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.period import Period
from swpipe.planning.modulo.strolls import A_STEP, DEALS, HOT, TRIALS
from swpipe.planning.modulo.walk import Walk
from swpipe.planning.modulo.walker import FIRST_HEAT, HEAT, LANES
from tests.planning.instances import Instance, instance
from tests.planning.modulo.graphs import Listener, device_work, graph_of, host_work, plan_at

DEPTH = 4


def walked(
    given: Instance,
    listener: Listener,
    steps: int = 300,
    *,
    lanes_change: bool = True,
    rehearses: bool = COMPILED,
) -> Walk:
    """A walk on this instance."""
    graph = graph_of(given)
    layout = beginning(graph, DEPTH, given.limits.threads)
    assert layout is not None
    period = Period(graph, given.limits.threads, DEPTH)
    walk = Walk(period, random.Random(1), rehearses=rehearses)
    walk.go(layout, steps, listener, lanes_change=lanes_change)
    return walk


def threads_of(layout: Layout) -> list[list[tuple[int, int]]]:
    """Thread to its tasks, in their order, and their stages: the plan, however it is written."""
    return [
        [(v, layout.stages[v]) for v in layout.order if layout.lanes[v] == lane]
        for lane in range(max(layout.lanes) + 1)
    ]


@pytest.mark.parametrize("rehearses", [True, False])
@pytest.mark.parametrize("number", range(12))
def test_every_plan_on_the_way_can_run(number: int, rehearses: bool) -> None:
    """Dependences, frozen tasks and limits are kept at every step."""
    given, listener = instance(number), Listener()
    walked(given, listener, rehearses=rehearses)
    graph = graph_of(given)
    for layout in dict.fromkeys(listener.heard):
        validate(plan_at(given, graph, layout))
        assert sorted(layout.order) == list(range(graph.size))
        assert set(layout.stages) <= set(range(DEPTH))
        assert set(layout.lanes) <= set(range(given.limits.threads))
        assert all((layout.lanes[v], layout.stages[v]) == (0, DEPTH - 1) for v in graph.frozen)


@pytest.mark.parametrize("number", [3, 53, 54])
def test_a_walk_finds_better_plans_than_the_one_it_begins_with(number: int) -> None:
    """By what they promise."""
    listener = Listener()
    walked(instance(number), listener, steps=600)
    assert min(listener.promised_us) < 0.97 * listener.promised_us[0]


def test_the_same_numbers_lead_the_same_way() -> None:
    """No chance but that which is handed in."""
    first, second = Listener(), Listener()
    walked(instance(17), first)
    walked(instance(17), second)
    assert first.heard == second.heard


def test_threads_stay_where_they_are_meant_to() -> None:
    """Only order and stages change."""
    listener = Listener()
    walked(instance(17), listener, lanes_change=False)
    assert len({layout.lanes for layout in listener.heard}) == 1
    assert len({layout.stages for layout in listener.heard}) > 1


def test_a_plan_that_does_not_keep_its_promise_is_left() -> None:
    """The word of who was asked counts for more than the promise."""
    listener = Listener(says_us=1e9)
    walk = walked(instance(17), listener)
    assert threads_of(walk.here) == threads_of(listener.heard[0])


def test_who_is_satisfied_hears_no_more() -> None:
    """The walk ends there and then."""
    listener = Listener(enough=3)
    walked(instance(17), listener)
    assert len(listener.heard) == 3


@pytest.mark.parametrize("rehearses", [True, False])
@pytest.mark.parametrize(
    ("apart", "reached"),
    [
        (0, {"paxb", "pxab", "xapb", "pxba", "pbax", "axpb", "apbx"}),
        (1, {"paxb", "pxab", "xapb", "pxba", "bapx", "axpb", "apbx", "axbp", "abpx"}),
    ],
)
def test_who_passes_another_takes_along_what_has_to_go(
    apart: int, reached: set[str], rehearses: bool
) -> None:
    """One step from "a p x b", on one thread, where b depends on p: all orders that it leads to.

    In another stage than p, b depends on the p of another period: then they may pass each other.
    """
    graph = host_work(10, 20, 30, 40, chain=False, deps=(("d", "b"),))  # a, p, x and b
    start, found = Layout((0,) * 4, (1, 1 - apart, 1, 1), (0, 1, 2, 3), 2), set()
    for number in range(400):
        listener = Listener()
        walk = Walk(Period(graph, threads=1, depth=2), random.Random(number), rehearses=rehearses)
        walk.go(start, 1, listener, lanes_change=False)
        assert listener.heard[0] == start
        found |= {
            "".join("apxb"[v] for v in layout.order)
            for layout in listener.heard[1:]
            if layout.stages == start.stages
        }
    assert found - {"apxb"} == reached


def test_waits_that_set_the_interval_are_turned_round() -> None:
    """One thread has two long tasks, the other forty short ones: few steps by chance meet those."""
    graph = host_work(1_000.0, 1_000.0, *[1.0] * 40, chain=False)
    start = Layout((1, 1, *[0] * 40), (0,) * 42, tuple(range(42)), 1)
    turned = 0
    for number in range(150):
        listener = Listener()
        walk = Walk(Period(graph, threads=2, depth=1), random.Random(number), rehearses=True)
        walk.go(start, 1, listener, lanes_change=False)
        turned += any(each.order.index(1) < each.order.index(0) for each in listener.heard)
    assert turned > 15


def test_who_takes_turns_with_nobody_passes_nobody() -> None:
    """Whatever their order, such tasks do the same: there is nothing to be rehearsed again."""
    period = Period(host_work(100, 200, 300, chain=False), threads=3, depth=1)
    start = Layout((0, 1, 2), (0, 0, 0), (0, 1, 2), 1)
    walk, listener = Walk(period, random.Random(1), rehearses=True), Listener()
    walk.go(start, 1, listener, lanes_change=False)
    once = walk.turns
    walk.go(start, 300, listener, lanes_change=False)
    assert walk.turns == 2 * once + 299 * A_STEP
    assert once > A_STEP
    assert walk.here == start


@pytest.mark.parametrize("rehearses", [True, False])
def test_the_best_of_many_deals_is_taken(rehearses: bool) -> None:
    """130 us each: all other ways to deal are less even."""
    period = Period(host_work(70, 60, 50, 40, 40, chain=False), threads=2, depth=2)
    walk = Walk(period, random.Random(1), rehearses=rehearses)
    start = Layout((0,) * 5, (1,) * 5, (0, 1, 2, 3, 4), 2)
    dealt = walk.dealt(start, math.inf, 0.0)
    assert dealt is not None
    assert {sum((70, 60, 50, 40, 40)[v] for v in range(5) if dealt.lanes[v] == 0)} == {130}
    assert (dealt.stages, dealt.order) == (start.stages, start.order)


def test_no_thread_is_dealt_more_than_it_may_have() -> None:
    """Where they all have enough room; and where they have not, nothing is dealt."""
    period = Period(host_work(70, 60, 50, 40, 40, chain=False), threads=3, depth=2)
    start = Layout((0,) * 5, (1,) * 5, (0, 1, 2, 3, 4), 2)
    for number in range(20):
        dealt = Walk(period, random.Random(number)).dealt(start, 110.001, 110.0)
        loads = [0, 0, 0]
        for v, us in enumerate((70, 60, 50, 40, 40)) if dealt is not None else ():
            loads[dealt.lanes[v]] += us
        assert max(loads) <= 110
    assert Walk(period, random.Random(1)).dealt(start, 85, 85) is None
    assert Walk(period, random.Random(1)).dealt(start, 0, 0) is None


def test_where_hardly_any_deal_is_even_enough_many_are_tried() -> None:
    """The threads have no room to spare: as many trials as rehearsals would find 12 of the 20."""
    graph = host_work(585, 478, 424, 363, 343, 343, 294, 282, 260, 240, 233, 155, chain=False)
    start = Layout((0,) * 12, (1,) * 12, tuple(range(12)), 2)
    for number in range(20):
        walk = Walk(Period(graph, 4, 2), random.Random(number), rehearses=True)
        assert walk.dealt(start, 1_000.001, 1_000.0) is not None


def test_threads_that_are_of_no_use_are_dealt_nothing() -> None:
    """Each would wait for another at every task; all on one is a deal that chance hardly finds."""
    graph = host_work(*[100.0] * 10, handover_us=1_000.0)
    start = Layout((0,) * 10, (0,) * 10, tuple(range(10)), 1)
    for number in range(20):
        walk = Walk(Period(graph, 4, 1), random.Random(number), rehearses=True)
        dealt = walk.dealt(start, math.inf, 0.0)
        assert dealt is not None
        assert set(dealt.lanes) == {0}


def test_deals_come_to_an_end() -> None:
    """Where each is possible after some rehearsals, where none is after some trials; all count."""
    period = Period(host_work(70, 60, 50, 40, 40, chain=False), threads=2, depth=2)
    start = Layout((0,) * 5, (1,) * 5, (0, 1, 2, 3, 4), 2)
    loose, tight = (Walk(period, random.Random(1), rehearses=True) for _ in range(2))
    assert loose.dealt(start, math.inf, 0.0) is not None
    assert tight.dealt(start, 120, 120) is None
    assert 50 * DEALS < loose.turns < 150 * DEALS
    assert TRIALS < tight.turns < 10 * TRIALS


def test_who_has_to_be_chosen_takes_time_as_well() -> None:
    """A rehearsal where tasks want the same costs more than one where they do not."""
    turns = []
    for resources in ((), ("disk",)):
        graph = host_work(100, 100, chain=False, resources=resources)
        walk = Walk(Period(graph, threads=1, depth=1), random.Random(1), rehearses=True)
        walk.go(Layout((0, 0), (0, 0), (0, 1), 1), 1, Listener(enough=1), lanes_change=False)
        turns.append(walk.turns)
    assert turns[0] < turns[1]
    assert turns[0] > 2 * A_STEP  # to make it ready takes most of the time


def test_frozen_tasks_are_not_dealt() -> None:
    """They stay on the caller's thread, and count there."""
    graph = host_work(70, 60, 50, chain=False, frozen=("b",))
    start = Layout((0, 0, 0), (1, 1, 1), (0, 1, 2), 2)
    for number in range(20):
        dealt = Walk(Period(graph, 2, 2), random.Random(number)).dealt(start, 125.001, 125.0)
        assert dealt is not None
        assert dealt.lanes[1] == 0
        assert dealt.lanes[0] == 1


def strolled(number: int) -> tuple[Instance, Walk]:
    """Two walks on this instance; the second is on from the best plan, dealt anew."""
    given = instance(number)
    graph = graph_of(given)
    first = beginning(graph, DEPTH, given.limits.threads)
    assert first is not None
    walk = Walk(Period(graph, given.limits.threads, DEPTH), random.Random(1), rehearses=True)
    for start in (first, None):
        walk.stroll(start, 40, 1.0, 100_000, deals=start is None)
    return given, walk


@pytest.mark.parametrize("number", [*range(8), 39, 53, 81, 102, 129])
def test_what_a_stroll_finds_can_run_and_keeps_its_promise(number: int) -> None:
    """Within the limits; and it is rehearsed from the start of the loop, as the simulator does."""
    given, walk = strolled(number)
    layout, promised_us = walk.top
    plan = plan_at(given, graph_of(given), layout)
    validate(plan)
    assert all(layout.lanes[v] == 0 for v in graph_of(given).frozen)
    found = simulate(plan, given.costs, streams=given.streams)
    assert found.ii_us == pytest.approx(promised_us, rel=1e-9)


def test_strolls_go_on_from_the_best_plan_so_far() -> None:
    """It is never lost, wherever they begin, and may be improved on."""
    given, walk = strolled(17)
    first = beginning(graph_of(given), DEPTH, given.limits.threads)
    promised = [walk.top[1]]
    for start in (first, None, None, first):
        walk.stroll(start, 40, 1.0, 100_000, deals=False)
        promised.append(walk.top[1])
    assert promised == sorted(promised, reverse=True)
    assert promised[-1] < promised[0]


def test_a_stroll_begins_where_it_is_told_to() -> None:
    """No turn is left for a step: from a plan, or from the best so far, which may be set."""
    graph = host_work(300, 200, 100)
    one, two = (Layout((0,) * 3, stages, (0, 1, 2), 2) for stages in ((0, 0, 1), (0, 1, 1)))
    walk = Walk(Period(graph, 1, 2), random.Random(1), rehearses=True)
    walk.stroll(one, 1, 1.0, 1, deals=False)
    assert walk.top == (one, 600.0)
    walk.top = two, 700.0
    walk.stroll(None, 1, 1.0, 1, deals=False)
    assert walk.top == (two, 600.0)
    walk.top = two, 650.0
    walk.stroll(one, 1, 1.0, 1, deals=False)
    assert walk.top == (one, 600.0)


@pytest.mark.parametrize("deals", [True, False])
def test_threads_change_on_the_way_unless_they_are_dealt_first(deals: bool) -> None:
    """Two threads; the plan to begin with has all on one."""
    graph = host_work(*[100.0] * 6, chain=False)
    start = Layout((0,) * 6, (1,) * 6, tuple(range(6)), 2)
    walk = Walk(Period(graph, 2, 2), random.Random(1), rehearses=True)
    walk.stroll(start, 1, 1.0, 1, deals=deals)
    assert walk._walker.counts[LANES] == (not deals)
    assert walk.top[1] == (300.0 if deals else 600.0)
    walk.stroll(start, 200, 1.0, 100_000, deals=deals)
    assert walk.top[1] == 300.0


def test_a_stroll_ends_where_it_promises_what_is_wanted() -> None:
    """Or where there are no turns left: then there is no more than a walk that has begun."""
    graph, walks = graph_of(instance(53)), []
    first = beginning(graph, DEPTH, 4)
    for wanted_us, turns in ((1e9, 100_000), (1.0, 1), (1.0, 100_000)):
        walk = Walk(Period(graph, 4, DEPTH), random.Random(1), rehearses=True)
        walk.stroll(first, 400, wanted_us, turns, deals=False)
        walks.append(walk)
    at_once, cut, whole = walks
    assert at_once.turns == cut.turns < whole.turns / 20
    assert at_once.top[1] == cut.top[1] > whole.top[1]
    assert whole.turns < 110_000


def test_steps_may_cost_more_at_first_where_tasks_are_unlike() -> None:
    """By how much longer than others some tasks are; nothing where none takes any time."""
    heats = []
    for times_us in ((100, 100, 100), (100, 200, 1_000), (0, 0, 0)):
        walk = Walk(Period(host_work(*times_us), 1, 2), random.Random(1))
        heats.append(walk._walker.levels[FIRST_HEAT] * 3)
        walk.stroll(Layout((0,) * 3, (1,) * 3, (0, 1, 2), 2), 1, 1.0, 0, deals=False)
        assert walk._walker.levels[HEAT] == walk._walker.levels[FIRST_HEAT]
    assert heats[0] == heats[2] == HOT
    assert heats[1] == pytest.approx(HOT * math.sqrt(1_050_000 / 3) / (1_300 / 3))
    device = Walk(Period(device_work(10, 100, 200, 1_000), 1, 2), random.Random(1))
    assert device._walker.levels[FIRST_HEAT] * 3 == pytest.approx(heats[1])
