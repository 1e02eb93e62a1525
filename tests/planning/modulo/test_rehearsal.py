"""Rehearsals: what they say is what the simulator says, and how they come to say it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits, simulate
from swpipe.planning.modulo.beginnings import beginning
from swpipe.planning.modulo.cast import DONE, PERIODS, cast_of
from swpipe.planning.modulo.compiled import whole
from swpipe.planning.modulo.layout import Layout
from swpipe.planning.modulo.period import Arrangement, Period
from swpipe.planning.modulo.rehearsal import critical, rehearse, waits
from swpipe.planning.modulo.walk import Walk
from tests.planning.instances import Instance, instance
from tests.planning.modulo.graphs import Listener, graph_of, plan_at

DEPTH = 5


def rehearsed(given: Instance, layout: Layout, begun: int = 0) -> float:
    """What a rehearsal says, with so many iterations in flight when it begins."""
    period = Period(graph_of(given), given.limits.threads, layout.depth)
    place = Arrangement(whole(layout.order), whole(layout.lanes), whole(layout.stages))
    return rehearse(period.loop, place, cast_of(period.loop), math.inf, begun)


def simulated(given: Instance, layout: Layout) -> float:
    """What the simulator says."""
    plan = plan_at(given, graph_of(given), layout)
    return simulate(plan, given.costs, streams=given.streams).ii_us


def on_a_walk(given: Instance, number: int) -> Iterator[Layout]:
    """Some plans of an instance, far from each other."""
    graph = graph_of(given)
    start, listener = beginning(graph, DEPTH, given.limits.threads), Listener()
    assert start is not None
    period = Period(graph, given.limits.threads, DEPTH)
    walk = Walk(period, random.Random(number), rehearses=False)
    walk.go(start, 300, listener, lanes_change=True)
    yield from listener.heard[::12][:8]


def loop(
    costs: dict[str, TaskCost],
    *,
    threads: int = 2,
    streams: bool = False,
    deps: tuple[tuple[str, str], ...] = (),
    ordered: tuple[str, ...] = (),
    on: dict[str, str] | None = None,
    handover_us: float = 0.0,
) -> Instance:
    """A loop of a few tasks."""
    on = on if on is not None else {}
    schedule = {
        name: TaskSchedule(stream=on.get(name), globally_ordered=name in ordered) for name in costs
    }
    model = CostModel(costs, handover_us=handover_us)
    return Instance(PipelinePlan(schedule, deps=deps), model, Limits(threads=threads), streams)


def test_what_it_says_is_what_the_simulator_says() -> None:
    """To the last bit but three, for 99 plans of 100, be they on a device or on threads alone.

    Of 1,289 plans on walks in 200 loops it is wrong about six.
    """
    found = [
        (rehearsed(given, layout), simulated(given, layout))
        for number in range(60)
        for given in (instance(number),)
        for layout in on_a_walk(given, number)
    ]
    same = [said == pytest.approx(true, rel=1e-9) for said, true in found]
    assert len(found) > 250
    assert sum(same) >= 0.99 * len(same)


@pytest.mark.parametrize("number", [68, 112, 182])
def test_loops_that_settle_late_are_not_taken_at_their_first_word(number: int) -> None:
    """Gaps have to stay alike for as long as iterations are in flight; and each thread counts."""
    given = instance(number)
    for layout in on_a_walk(given, 1):
        assert rehearsed(given, layout) == pytest.approx(simulated(given, layout), rel=1e-9)


def test_who_waits_for_the_lock_holds_its_resource() -> None:
    """As in the simulator: it is taken first, and nobody else has it meanwhile."""
    given = loop(
        {
            "a": TaskCost(host_us=100, gil_us=100),
            "b": TaskCost(host_us=60, gil_us=30, resources=("disk",)),
            "c": TaskCost(host_us=50, resources=("disk",)),
        },
        threads=3,
    )
    layout = Layout((0, 1, 2), (0, 0, 0), (0, 1, 2), 1)
    assert rehearsed(given, layout) == simulated(given, layout) == 100 + 60 + 50


def test_an_iteration_ends_when_all_its_tasks_have() -> None:
    """The caller's thread waits for the worker, whether or not it waits for anything else."""
    given = loop({"a": TaskCost(host_us=100), "b": TaskCost(host_us=300)}, handover_us=20)
    layout = Layout((0, 1), (0, 0), (0, 1), 1)
    assert rehearsed(given, layout) == simulated(given, layout) == 20 + 300 + 20


def test_tasks_by_turns_go_in_the_order_of_the_plan() -> None:
    """On two threads as on one, and a hand-over for each turn."""
    given = loop(
        {"a": TaskCost(host_us=100), "b": TaskCost(host_us=300)}, ordered=("a", "b"), handover_us=20
    )
    layout = Layout((0, 1), (0, 0), (0, 1), 3)
    assert rehearsed(given, layout) == simulated(given, layout) == 100 + 20 + 300 + 20


def test_the_callers_stream_works_in_the_order_of_submission() -> None:
    """The second in the plan submits first: its work is not kept waiting."""
    given = loop(
        {
            "late": TaskCost(host_us=200, device_us=100),
            "soon": TaskCost(host_us=10, device_us=150),
            "after": TaskCost(host_us=10, device_us=40),
        },
        threads=2,
        streams=True,
        deps=(("after", "soon"),),
        on={"after": "side"},
    )
    layout = Layout((0, 1, 1), (0, 0, 0), (0, 1, 2), 1)
    assert rehearsed(given, layout) == simulated(given, layout)


def test_who_wants_a_resource_waits_for_who_waits_for_the_lock_with_it() -> None:
    """Nobody knows for how long: b has the disk from 500 on, and who came later comes after it."""
    given = loop(
        {
            "first": TaskCost(host_us=500, resources=("disk",)),
            "b": TaskCost(host_us=60, gil_us=30, resources=("disk",)),
            "c": TaskCost(host_us=50, resources=("disk",)),
            "locker": TaskCost(host_us=100, gil_us=100),
        },
        threads=4,
    )
    layout = Layout((0, 1, 2, 3), (0, 0, 0, 0), (0, 1, 2, 3), 1)
    assert rehearsed(given, layout) == simulated(given, layout) == 500 + 60 + 50


def test_a_thread_that_falls_behind_counts_in_the_end() -> None:
    """The worker is 1 us late in each period, for as long as there are iterations in flight."""
    given = loop({"a": TaskCost(host_us=100), "b": TaskCost(host_us=101)})
    layout = Layout((0, 1), (1, 0), (0, 1), 5)
    assert rehearsed(given, layout) == simulated(given, layout) == 101


def test_what_drifts_is_not_taken_for_the_last_word() -> None:
    """Iterations end at 28,290 us from each other for fourteen periods, then at 29,200 us.

    Meanwhile other tasks drift: it was found when a plan promised what it did not keep.
    """
    layout = Layout(
        lanes=(1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0),
        stages=(0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2),
        order=(13, 1, 3, 6, 8, 10, 5, 7, 9, 11, 12, 0, 2, 4),
        depth=3,
    )
    given = instance(54)
    assert simulated(given, layout) == 29_200
    assert rehearsed(given, layout) == pytest.approx(29_200)


@pytest.mark.parametrize(
    ("number", "stages", "order", "us"),
    [
        (102, (0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4), "0a7bc1234d8956", 123_200),
        (164, (0, 1, 2, 2, 2, 1, 2, 2, 3, 4, 3, 4, 4, 4), "12937ca8546db0", 20_440),
        (188, (0, 2, 2, 2, 2, 3, 4, 2, 2, 2, 3, 2, 3, 3), "62cd51b903a487", 195_600),
    ],
)
def test_streams_do_not_wait_for_iterations_that_do_not_exist(
    number: int, stages: tuple[int, ...], order: str, us: int
) -> None:
    """While the pipeline fills nothing does; it matters for good who has the resource first.

    It was found when plans of one thread promised up to 3% less than they took.
    """
    given = instance(number)
    layout = Layout((0,) * 14, stages, tuple(int(v, 16) for v in order), depth=5)
    assert rehearsed(given, layout) == simulated(given, layout) == us


def test_a_stream_that_falls_behind_counts_too() -> None:
    """What it did last was of an earlier period; it comes later each time, until it is waited for.

    It was found when a plan promised 70,300 us, and took 72,800.
    """
    layout = Layout(
        lanes=(1, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0),
        stages=(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4),
        order=(0, 13, 1, 2, 3, 12, 9, 4, 5, 6, 7, 10, 11, 8),
        depth=5,
    )
    given = instance(118)
    assert rehearsed(given, layout) == simulated(given, layout) == 72_800


def test_gaps_that_repeat_themselves_are_averaged_over_whole_cycles() -> None:
    """Iterations end 45,520, 45,520 and 42,460 us from each other, again and again."""
    layout = Layout(
        lanes=(0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0),
        stages=(0, 0, 0, 0, 2, 0, 0, 2, 3, 1, 2, 1, 4, 2),
        order=(3, 2, 11, 5, 1, 0, 4, 7, 6, 8, 10, 13, 9, 12),
        depth=5,
    )
    given = instance(32)
    assert rehearsed(given, layout) == simulated(given, layout) == 44_500


def test_there_is_room_for_all_that_can_be_done_at_once() -> None:
    """A thread runs ahead while the pipeline fills.

    Compiled, the work of iterations that do not exist piled up beyond the room there was. Now it
    waits for a submission that never comes, and there is room for every turn.
    """
    layout = Layout(
        lanes=(0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0),
        stages=(1, 0, 4, 1, 4, 1, 4, 4, 4, 4, 4, 4, 4, 4),
        order=(7, 9, 11, 2, 4, 6, 1, 8, 10, 3, 5, 12, 13, 0),
        depth=5,
    )
    given = instance(644)
    assert rehearsed(given, layout) == simulated(given, layout)


def critical_of(given: Instance, layout: Layout) -> tuple[set[int], set[tuple[int, int]]]:
    """The tasks, and the waits (who is awaited, who awaits it), that set the rehearsed interval."""
    period = Period(graph_of(given), given.limits.threads, layout.depth)
    place = Arrangement(whole(layout.order), whole(layout.lanes), whole(layout.stages))
    cast = cast_of(period.loop)
    found, awaited, awaiting = (whole([0] * period.loop.size) for _ in range(3))
    rehearse(period.loop, place, cast, math.inf, 0)
    count = waits(period.loop, cast, awaited, awaiting)
    pairs = zip(awaited[:count], awaiting[:count], strict=True)
    return set(found[: critical(period.loop, cast, found)]), set(pairs)


def test_the_busiest_thread_sets_the_interval() -> None:
    """What its tasks wait for are each other; the caller's thread is in time for them."""
    given = loop(
        {"a": TaskCost(host_us=100), "b": TaskCost(host_us=200), "c": TaskCost(host_us=150)}
    )
    found = critical_of(given, Layout((0, 1, 1), (0, 0, 0), (0, 1, 2), 3))
    assert found == ({1, 2}, {(1, 2), (2, 1)})


def test_who_had_the_resource_is_waited_for() -> None:
    """It is always busy: b waits for a, and a until it is admitted, for b; nobody waits for c."""
    given = loop(
        {
            "a": TaskCost(host_us=100, resources=("disk",)),
            "b": TaskCost(host_us=130, resources=("disk",)),
            "c": TaskCost(host_us=20),
        },
        threads=3,
    )
    found = critical_of(given, Layout((0, 1, 2), (0, 0, 0), (0, 1, 2), 3))
    assert found == ({0, 1}, {(0, 1)})


@pytest.mark.parametrize("number", [0, 4, 10, 18])
def test_work_on_a_device_that_waits_for_its_submission_is_no_wait(number: int) -> None:
    """It is one task's own; there is nobody to go first."""
    given = instance(number)
    layout = beginning(graph_of(given), 3, given.limits.threads)
    assert layout is not None
    _, waiting = critical_of(given, layout)
    assert waiting
    assert all(first != then for first, then in waiting)


def test_plans_that_wait_for_themselves_have_no_interval() -> None:
    """The order of the period contradicts the dependences: each thread waits for the other."""
    given = loop(
        {name: TaskCost(host_us=100) for name in "abcd"}, deps=(("b", "a"), ("d", "c")), threads=2
    )
    crossed = Layout((0, 1, 1, 0), (0, 0, 0, 0), (3, 0, 1, 2), 1)
    assert rehearsed(given, crossed) == math.inf


def test_a_plan_above_the_limit_is_not_rehearsed_to_its_end() -> None:
    """It is said to be above it, and that is all that anybody wants to know."""
    saved = 0
    for number in range(1, 60, 4):
        given = instance(number)
        for layout in on_a_walk(given, 1):
            true = rehearsed(given, layout)
            period = Period(graph_of(given), given.limits.threads, layout.depth)
            place = Arrangement(whole(layout.order), whole(layout.lanes), whole(layout.stages))
            cast = cast_of(period.loop)
            assert rehearse(period.loop, place, cast, 0.5 * true, 0) > 0.5 * true
            saved -= int(cast.counts[DONE])
            assert rehearse(period.loop, place, cast, math.inf, 0) == true
            saved += int(cast.counts[DONE])
    assert saved > 0


def contends(given: Instance, layout: Layout) -> bool:
    """Whether who comes first has what others want as well."""
    loop = Period(graph_of(given), given.limits.threads, layout.depth).loop
    several = len(set(layout.lanes)) > 1
    return any(loop.contends) or (several and loop.streams > 0 and 0 in loop.stream)


def test_it_may_begin_with_all_iterations_in_flight() -> None:
    """The same interval where nobody contends, nearly always where some do; in half the time."""
    same, cold, warm = [], 0, 0
    for number in range(60):
        given = instance(number)
        for layout in on_a_walk(given, number):
            period = Period(graph_of(given), given.limits.threads, layout.depth)
            place = Arrangement(whole(layout.order), whole(layout.lanes), whole(layout.stages))
            cast = cast_of(period.loop)
            true = rehearse(period.loop, place, cast, math.inf, 0)
            cold += int(cast.counts[DONE])
            said = rehearse(period.loop, place, cast, math.inf, layout.depth - 1)
            warm += int(cast.counts[DONE])
            same.append(said == pytest.approx(true, rel=1e-9))
            assert same[-1] or contends(given, layout)
    assert sum(same) >= 0.9 * len(same)
    assert warm < 0.65 * cold


def test_iterations_may_depend_on_more_than_are_rehearsed() -> None:
    """Nobody waits that long: what is not rehearsed has no say, and takes no room."""
    given = loop({"a": TaskCost(host_us=100), "b": TaskCost(host_us=300)})
    plan = replace(given.plan, cross_iter_deps=[("a", "b", 10 * PERIODS)])
    given, layout = replace(given, plan=plan), Layout((0, 1), (0, 0), (0, 1), 2)
    assert rehearsed(given, layout) == simulated(given, layout) == 300
    assert rehearsed(given, layout, begun=1) == 300
