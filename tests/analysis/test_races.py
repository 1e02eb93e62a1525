"""A plan is refused exactly if some interleaving breaks a serial order that matters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis.races import guarantees, race_problems, stale_problems
from swpipe.analysis.validation import validate
from swpipe.core.dependence import CycleError
from swpipe.core.effects import Effects, Location
from swpipe.core.plan import DEFAULT_GROUP, PULL
from swpipe.core.resolved import resolve_plan
from swpipe.core.task import Mode
from swpipe.errors import PlanError, Problem
from tests.device.virtual import VirtualDevice
from tests.support.budget import seeds
from tests.support.exhaustive import TooManyError
from tests.support.plans_for_tests import piped
from tests.support.safety import (
    KINDS,
    edges_of,
    effects_of,
    fights,
    is_as_stale_as_allowed,
    random_pair,
    small_workload,
    with_loader,
    without,
)
from tests.support.strategies import random_plan

SAFE_PLANS = 70
MUTATED_PLANS = 30
LOADER_PLANS = 100
SHIFTED_PLANS = 160
SHIFTS = (
    {"stale": {"model": 1}},
    {"stale": {"model": 2}},
    {"newer": {"model": 1}},
    {"newer": {"model": 2}},
    {"stale": {"model": 1}, "newer": {"model": 1}},
)

X = Location("x", persistent=False)
MODEL = Location("model", persistent=True)
READS_MODEL = Effects(reads=frozenset({MODEL}))
CHANGES_MODEL = Effects(reads=frozenset({MODEL}), writes=frozenset({MODEL}))


def named(problems: list[Problem]) -> set[frozenset[str]]:
    """Return the pairs of tasks that problems name."""
    return {frozenset(problem.tasks) for problem in problems}


def order_problems(
    plan: PipelinePlan, effects: Mapping[str, Effects], *, streams: bool | None = None
) -> list[Problem]:
    """Return the problems with the order that a plan keeps."""
    return race_problems(effects, guarantees(resolve_plan(plan), streams))


# ------------------------------------------------------------------- against trying everything


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("streams", KINDS, ids=["streams", "cpu"])
def test_refused_is_exactly_what_some_interleaving_breaks(streams: bool, workers: int) -> None:
    """Many safe plans raise no false alarm; all unsafe ones are refused, for the pairs at fault.

    This holds also where groups have several workers, which run a task on several iterations at
    once.
    """
    safe = unsafe = threaded = too_large = 0
    for seed in count():
        plan, workload = random_pair(seed, 4 if workers == 1 else 2, workers)
        effects = effects_of(workload)
        try:
            broken = fights(plan, effects, streams=streams)
        except TooManyError:
            too_large += 1
            continue
        assert named(order_problems(plan, effects, streams=streams)) == broken, f"seed {seed}"
        known = workers == 1 or plan.most_workers > 1
        safe += known and not broken
        unsafe += known and bool(broken)
        groups = {entry.thread_group for entry in plan.schedule.values()}
        threaded += not broken and len(groups) > 1
        if safe == SAFE_PLANS:
            break
    assert too_large < SAFE_PLANS // 5
    assert unsafe > SAFE_PLANS // 5
    assert threaded > SAFE_PLANS // 2


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("streams", KINDS, ids=["streams", "cpu"])
def test_the_loader_is_a_task_like_any_other(streams: bool) -> None:
    """A plan is refused if some interleaving breaks it, also for what the loader uses."""
    refused = allowed = groups = 0
    for seed in seeds("plans", LOADER_PLANS):
        plan, workload = random_pair(seed, most_tasks=3)
        effects = with_loader(random.Random(seed), effects_of(workload))
        try:
            broken = fights(plan, effects, streams=streams)
        except TooManyError:
            continue
        assert named(order_problems(plan, effects, streams=streams)) == broken, f"seed {seed}"
        own = any(PULL in pair for pair in broken)
        refused += own
        allowed += not own and any(place.persistent for place in effects[PULL].reads)
        groups += plan.pull_group is not None
    assert refused > LOADER_PLANS // 12
    assert allowed > LOADER_PLANS // 60
    assert groups > LOADER_PLANS // 12


@pytest.mark.examples
@pytest.mark.slow
def test_what_lies_further_apart_follows() -> None:
    """Runs of four iterations have no other errors than runs of two."""
    explored = 0
    for seed in seeds("plans", 16):
        plan, workload = random_pair(seed, most_tasks=3)
        effects = effects_of(workload)
        for streams in KINDS:
            with suppress(TooManyError):
                broken = fights(plan, effects, streams=streams, iterations=(3, 4))
                assert broken <= named(order_problems(plan, effects, streams=streams)), seed
                explored += 1
    assert explored > 22


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("streams", KINDS, ids=["streams", "cpu"])
def test_a_plan_that_loses_an_edge_it_needs_is_refused_for_that_pair(streams: bool) -> None:
    """Each edge of valid plans is removed, one at a time."""
    needed = spare = 0
    for seed in seeds("plans", MUTATED_PLANS):
        rng = random.Random(seed)
        workload = small_workload(rng)
        plan, effects = random_plan(rng, workload), effects_of(workload)
        assert not order_problems(plan, effects, streams=streams)
        for edge in edges_of(plan):
            mutant = without(plan, edge)
            try:
                broken = fights(mutant, effects, streams=streams)
            except TooManyError:
                continue
            pairs = named(order_problems(mutant, effects, streams=streams))
            assert pairs == broken, f"seed {seed}, without {edge}"
            lost = frozenset(map(str, edge[1][:2])) in pairs
            needed += lost
            spare += not lost
    assert needed > MUTATED_PLANS
    assert spare > MUTATED_PLANS // 4


def shifted_pair(seed: int) -> tuple[PipelinePlan, dict[str, Effects]]:
    """Return tasks with one state, few of them in order, and a plan that allows shifted reads."""
    rng = random.Random(seed)
    names = ["a", "b", "c"][: rng.choice((2, 2, 3))]
    plan = PipelinePlan(
        schedule={
            name: TaskSchedule(
                stage=rng.randint(0, 2),
                stream=rng.choice((None, None, "s")),
                thread_group=rng.choice((DEFAULT_GROUP, DEFAULT_GROUP, "io")),
            )
            for name in names
        },
        **rng.choice(SHIFTS),  # type: ignore[arg-type]
    )
    for _ in range(rng.randint(0, 4)):
        pair = (rng.choice(names), rng.choice(names))
        far = (*pair, rng.randint(1, 2))
        wider = rng.choice(
            (
                replace(plan, deps=[*plan.deps, pair]),
                replace(plan, cross_iter_deps=[*plan.cross_iter_deps, far]),
                replace(plan, same_period_deps=[*plan.same_period_deps, pair]),
            )
        )
        with suppress(PlanError):
            validate(wider, [PipelineTask(name, print) for name in names])
            plan = wider
    uses = (READS_MODEL, READS_MODEL, CHANGES_MODEL, Effects(writes=frozenset({MODEL})))
    return plan, {name: rng.choice(uses) for name in names}


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.parametrize("streams", KINDS, ids=["streams", "cpu"])
def test_a_shift_is_allowed_exactly_if_it_is_the_same_in_every_interleaving(
    streams: bool,
) -> None:
    """The shift is at most the plan's, however the threads run."""
    accepted = refused = 0
    shifted = dict.fromkeys(("stale", "newer"), 0)
    for seed in seeds("plans", SHIFTED_PLANS):
        plan, effects = shifted_pair(seed)
        try:
            fine = is_as_stale_as_allowed(plan, effects, streams=streams, iterations=(1, 2, 3, 4))
        except TooManyError:
            continue
        assert fine == (not order_problems(plan, effects, streams=streams)), f"seed {seed}"
        accepted += fine
        refused += not fine
        for what in shifted:
            strict = replace(plan, **{what: {}})
            shifted[what] += fine and bool(order_problems(strict, effects, streams=streams))
    assert accepted + refused > 0.8 * SHIFTED_PLANS
    assert min(accepted, refused) > SHIFTED_PLANS // 5
    assert min(shifted.values()) > SHIFTED_PLANS // 50


# ------------------------------------------------------------------------------- what it says


def two(
    first: TaskSchedule | None = None, then: TaskSchedule | None = None, **more: object
) -> PipelinePlan:
    """Return a plan of two tasks; by default on threads of their own."""
    schedule = {"a": first or TaskSchedule(thread_group="io"), "b": then or TaskSchedule()}
    return PipelinePlan(schedule=schedule, **more)  # type: ignore[arg-type]


def says(
    plan: PipelinePlan, effects: Mapping[str, Effects], *, streams: bool | None = False
) -> list[str]:
    """Return the texts of the problems."""
    return [problem.text for problem in order_problems(plan, effects, streams=streams)]


SET_AND_READ = {"a": Effects(writes=frozenset({X})), "b": Effects(reads=frozenset({X}))}


def test_an_attribute_that_may_be_read_too_soon() -> None:
    """The error has the pair, the iterations, the location, the hazard, and the line to paste."""
    (text,) = says(two(), SET_AND_READ)
    assert text == (
        "'b' on iteration i must come after 'a' on iteration i, but may come before it, and both "
        'touch ctx.x (read after write): add deps=[("b", "a")]'
    )
    assert not says(two(deps=[("b", "a")]), SET_AND_READ)


def test_a_state_that_may_be_read_too_soon() -> None:
    """The next iteration may read it; the fix is an edge across iterations."""
    effects = {"a": READS_MODEL, "b": CHANGES_MODEL}
    plan = two(deps=[("b", "a")], pipeline_depth=2)
    (text,) = says(plan, effects)
    assert text == (
        "'a' on iteration i must come after 'b' on iteration i - 1, but may come before it, and "
        'both touch state \'model\' (read after write): add cross_iter_deps=[("a", "b", 1)]'
    )
    assert not says(replace(plan, cross_iter_deps=[("a", "b", 1)]), effects)


READ_THEN_CHANGED = {"a": READS_MODEL, "b": CHANGES_MODEL}
CHANGED_THEN_READ = {"a": CHANGES_MODEL, "b": READS_MODEL}


def apart(stage: int, **shift: object) -> PipelinePlan:
    """Return a plan of two tasks in this order in a period, the second in a later stage."""
    return two(TaskSchedule(), TaskSchedule(stage), order=["a", "b"], **shift)


def test_a_read_that_always_comes_too_soon_may_be_meant() -> None:
    """By its stages the read is always late, and the message says how to allow it."""
    (text,) = says(apart(2), READ_THEN_CHANGED, streams=None)
    assert text == (
        "'a' on iteration i must come after 'b' on iteration i - 1, but always comes before it, "
        "and both touch state 'model' (read after write): move 'a' from stage 0 to 1 or later, or "
        '\'b\' from stage 2 to 1 or earlier, and add cross_iter_deps=[("a", "b", 1)]; or, if '
        "reads may be 2 behind, set stale={'model': 2}"
    )
    assert not says(apart(2, stale={"model": 2}), READ_THEN_CHANGED, streams=None)
    (further,) = says(apart(2, stale={"model": 1}), READ_THEN_CHANGED)
    assert "iteration i - 2, but always comes before it" in further


def test_staleness_must_not_be_a_matter_of_luck() -> None:
    """One thread may run ahead of the other: its reads depend on how far."""
    plan = two(TaskSchedule(thread_group="io"), TaskSchedule(stage=1), stale={"model": 1})
    effects = READ_THEN_CHANGED
    (text,) = says(replace(plan, deps=[("b", "a")]), effects)
    assert text == (
        "'a' on iteration i may come before or after 'b' on iteration i - 1, and both touch "
        "state 'model' (read after write): stale reads are allowed, but must be the same in every "
        'run: add cross_iter_deps=[("a", "b", 1)]'
    )
    late = replace(plan, same_period_deps=[("b", "a")], cross_iter_deps=[("a", "b", 2)])
    assert not says(late, effects, streams=None)
    assert not says(replace(plan, cross_iter_deps=[("a", "b", 1)], deps=[("b", "a")]), effects)


def test_a_read_of_what_the_next_iteration_wrote_may_be_meant() -> None:
    """It is the mirror of a stale read; the message says how to allow it."""
    (text,) = says(apart(1), CHANGED_THEN_READ, streams=None)
    assert text.endswith(
        '(write after read): to add cross_iter_deps=[("a", "b", 1)] would make a cycle '
        "('a' after 'b' after 'a'): take out what puts 'a' first, or move 'a' to stage 1 or "
        "later, and add it; or, if reads may be 1 ahead, set newer={'model': 1}"
    )
    assert not says(apart(1, newer={"model": 1}), CHANGED_THEN_READ, streams=None)
    assert says(apart(1, stale={"model": 9}), CHANGED_THEN_READ, streams=None)
    (text,) = says(apart(2, newer={"model": 1}), CHANGED_THEN_READ, streams=None)
    assert "iteration i - 2, but always comes before it" in text
    assert text.endswith("if reads may be 2 ahead, set newer={'model': 2}")


def test_whether_a_read_is_newer_must_not_be_a_matter_of_luck() -> None:
    """The thread that writes ahead may or may not have reached the write."""
    schedule = {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule(stage=1)}
    plan = PipelinePlan(schedule, deps=[("b", "a")], newer={"model": 1})
    effects = {"a": CHANGES_MODEL, "b": READS_MODEL}
    (text,) = says(plan, effects)
    assert text == (
        "'a' on iteration i may come before or after 'b' on iteration i - 1, and both touch "
        "state 'model' (write after read): newer reads are allowed, but must be the same in every "
        'run: add cross_iter_deps=[("a", "b", 1)]'
    )
    ahead = replace(plan, same_period_deps=[("b", "a")], cross_iter_deps=[("a", "b", 2)])
    assert not says(ahead, effects, streams=None)
    assert not says(replace(plan, cross_iter_deps=[("a", "b", 1)]), effects)


def test_a_task_that_writes_a_state_never_finds_it_newer() -> None:
    """Its new value would come from the value of a later iteration."""
    plan = PipelinePlan(
        {"a": TaskSchedule(stage=0), "b": TaskSchedule(stage=1)},
        order=["a", "b"],
        newer={"model": 1},
    )
    assert not says(plan, {"a": CHANGES_MODEL, "b": READS_MODEL}, streams=None)
    assert says(plan, {"a": CHANGES_MODEL, "b": CHANGES_MODEL}, streams=None)


def test_a_task_that_writes_a_state_is_never_stale() -> None:
    """It would compute its new value from an old one: only tasks that only read may be stale."""
    plan = PipelinePlan({"a": TaskSchedule(stage=0), "b": TaskSchedule(stage=2)}, order=["a", "b"])
    stale = replace(plan, stale={"model": 2})
    assert not says(stale, {"a": READS_MODEL, "b": CHANGES_MODEL}, streams=None)
    assert says(stale, {"a": CHANGES_MODEL, "b": CHANGES_MODEL}, streams=None)


def test_an_attribute_is_never_stale() -> None:
    """A state of the same name may be stale."""
    turned = two(TaskSchedule(), TaskSchedule(), order=["b", "a"], stale={"x": 2})
    assert says(turned, SET_AND_READ)


def test_an_edge_that_would_close_a_cycle_is_not_advised() -> None:
    """The message names the obstacle instead."""
    plan = two(TaskSchedule(), TaskSchedule(), order=["b", "a"])
    (text,) = says(plan, SET_AND_READ)
    assert text.endswith(
        "always comes before it, and both touch ctx.x (read after write): to add "
        "deps=[(\"b\", \"a\")] would make a cycle ('a' after 'b' after 'a'): take out what puts "
        "'b' first, or move 'b' to stage 1 or later, and add it"
    )


def test_a_plan_that_only_streams_keep_right_is_refused_for_the_cpu() -> None:
    """One named stream orders two threads; a CPU has no streams."""
    plan = two(TaskSchedule(stream="s", thread_group="io"), TaskSchedule(stream="s"), order="ab")
    assert not says(plan, SET_AND_READ, streams=True)
    (text,) = says(plan, SET_AND_READ, streams=None)
    assert text.startswith("on a device without streams, such as the CPU: 'b' on iteration i")
    assert says(plan, SET_AND_READ, streams=False) == [text.partition(": ")[2]]


def test_a_plan_that_only_a_thread_keeps_right_is_refused_for_streams() -> None:
    """The plan has two streams that nothing joins."""
    plan = two(TaskSchedule(stream="s"), TaskSchedule(), order="ab")
    assert not says(plan, SET_AND_READ, streams=False)
    (text,) = says(plan, SET_AND_READ, streams=None)
    assert text.startswith("on a device with streams (here s and caller's): 'b' on")


def test_many_places_make_one_problem() -> None:
    """A pair is named once, with the first few places."""
    places = frozenset(Location(f"x{n}", persistent=False) for n in range(6))
    table = {"a": Effects(writes=places), "b": Effects(reads=places)}
    (text,) = says(two(), table)
    assert "ctx.x3 (read after write) and 2 more: add" in text


@pytest.mark.examples
def test_every_mend_mends() -> None:
    """With the edges that the messages of random plans advise, no error remains."""
    mended = 0
    for seed in seeds("plans", 60):
        plan, workload = random_pair(seed)
        effects = effects_of(workload)
        before = order_problems(plan, effects)
        texts = [problem.text.partition(": add ")[2] for problem in before]
        if before and all(texts):
            given = [eval(f"dict({text.partition(';')[0]})") for text in texts]
            more = {
                key: [*getattr(plan, key), *(e for g in given for e in g.get(key, ()))]
                for key in ("deps", "cross_iter_deps")
            }
            try:
                resolve_plan(replace(plan, **more))
            except CycleError:
                continue  # each alone could be added
            assert not order_problems(replace(plan, **more), effects)
            mended += 1
    assert mended > 7


# ------------------------------------------------------------------------------ around it


@pytest.mark.parametrize("what", ["stale", "newer"])
def test_a_state_that_nobody_touches_cannot_be_shifted(what: str) -> None:
    """A misspelt name would otherwise allow nothing, silently."""
    plan = two(**{what: {"modle": 1}})
    (problem,) = stale_problems(plan, {"a": READS_MODEL, "b": Effects()})
    rule = "which no task touches (touched are: model)"
    assert problem.text.startswith(f"{what} names state 'modle', {rule}")


def test_serial_order_is_that_of_the_pipeline() -> None:
    """It is the given order, except for the dependences within an iteration."""
    plan = two(deps=[("a", "b")])
    assert resolve_plan(plan).serial_order == ("b", "a")
    assert resolve_plan(two(), "ba").serial_order == ("b", "a")


def declaring(name: str, mode: Mode) -> PipelineTask:
    """Return a task that declares its use of the model."""
    return PipelineTask(name, lambda ctx: None, io=[DeclaredIO(state="model", mode=mode)])


TASKS = [
    *(PipelineTask(name, lambda ctx: None, pure=True) for name in ("h2d", "dist")),
    declaring("forward", "r"),
    PipelineTask("backward", lambda ctx: None),
    declaring("step", "rw"),
]


def test_a_pipeline_refuses_states_out_of_order() -> None:
    """The error has the pair, the fix and the grid, and comes before the first batch."""
    plan = replace(piped(), cross_iter_deps=[])
    plan = replace(
        plan, schedule={**plan.schedule, "forward": TaskSchedule(stage=2, thread_group="gpu")}
    )
    with pytest.raises(PlanError, match=r'add cross_iter_deps=\[\("forward", "step", 1\)\]') as e:
        SWPipeline(plan, TASKS, device="cpu")
    assert "forward [gpu]" in e.value.grid
    assert "0!" in e.value.grid
    mended = replace(plan, cross_iter_deps=[("forward", "step", 1)])
    SWPipeline(mended, TASKS, device="cpu").close()


def test_a_pipeline_asks_for_the_device_that_it_has() -> None:
    """The same plan may be right on one device, and wrong on the other."""
    plan = replace(piped(), cross_iter_deps=[])
    plan = replace(
        plan, schedule={**plan.schedule, "forward": TaskSchedule(stage=2, stream="side")}
    )
    SWPipeline(plan, TASKS, device="cpu").close()
    device = VirtualDevice()
    with pytest.raises(PlanError, match="'forward' on iteration i must come after 'step'"):
        SWPipeline(plan, TASKS, device=device)


def test_an_order_of_functions_is_none_of_their_device_work() -> None:
    """Two tasks share a counter on the host, and memory of the device, in either order."""
    counter, memory = Location("counter", True, on_host=True), Location("memory", True)
    plan = PipelinePlan(
        {"a": TaskSchedule(stream="one"), "b": TaskSchedule(stream="two")},
        deps=[("b", "a")],
        host_only=[("b", "a")],
    )
    for places in ([counter], [memory], [counter, memory]):
        touched = Effects(frozenset(places), frozenset(places))
        effects = {"a": touched, "b": touched}
        problems = order_problems(plan, effects, streams=True)
        assert any(problem.tasks == ("b", "a") for problem in problems) == (memory in places)
        assert not order_problems(plan, effects, streams=False)
