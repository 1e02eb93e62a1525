"""Plans that pass verification: the shipped ones, variants with an edge less, and faults."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import swpipe
from bench import recsys14
from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis import verify
from swpipe.analysis.verification import verify_for_run
from swpipe.core.effects import DRAWS, Effects, Location, undeclared_effects
from swpipe.core.plan import PULL
from swpipe.core.task_memory import KEPT, Block, TaskMemory
from swpipe.errors import PlanError
from swpipe.pipeline import borrowed
from swpipe.plans import prefetch_plan
from swpipe.plans.torchrec import sparse_dist
from tests.support.plans_for_tests import piped
from tests.support.safety import edges_of, fights, verify_tasks, without

STATES = {"model", "optimizer", "gradients", "histogram", "guard", "tables", "cache", "dense"}


def touching(reads: str = "", writes: str = "") -> Effects:
    """Return effects from names between spaces; those in ``STATES`` outlive an iteration."""
    return Effects(frozenset(places(reads.split())), frozenset(places(writes.split())))


def places(names: Iterable[str]) -> Iterable[Location]:
    """Return the locations of these names."""
    return (Location(name, name in STATES) for name in names)


CLICKS = {
    "read": touching("batch", "raw"),
    "decode": touching("batch raw", "frame rejected raw"),
    "hash": touching("frame", "host frame"),
    "copy": touching("host", "inputs host"),
    "embed": touching("inputs model", "embedded"),
    "forward": touching("inputs embedded model batch guard", "logits loss guard"),
    "backward": touching("loss model", "gradients"),
    "step": touching("gradients optimizer model", "optimizer model"),
    "auc": touching("logits inputs histogram", "histogram"),
}
"""What the tasks of a click model access."""

FEED = ("read", "decode", "hash", "copy")
CLICK_PLANS = {
    "clicks serial": PipelinePlan.serial([*CLICKS]),
    "clicks pipelined": prefetch_plan(
        FEED,
        [name for name in CLICKS if name not in FEED],
        carried=[("embed", "step"), ("forward", "step")],
        depth=3,
        pull_group=None,
        streams={"copy": "memcpy"},
    ),
}
"""A plan that runs one task after the other, and one that reads and copies batches ahead."""

CHAIN = {
    "h2d": touching("batch", "here"),
    "dist": touching("here", "ids"),
    "forward": touching("ids model", "loss"),
    "backward": touching("loss model gradients", "gradients"),
    "step": touching("gradients model", "gradients model"),
}
"""What the tasks of the design's example access."""

SPLIT = {
    sparse_dist.COPY: touching("batch", "batch"),
    sparse_dist.START: touching("batch", "pipeline"),
    sparse_dist.WAIT: touching("pipeline", "pipeline"),
    sparse_dist.PREFETCH: touching("pipeline cache", "pipeline cache"),
    sparse_dist.EMBED: touching("pipeline tables cache", "pipeline cache"),
    sparse_dist.DENSE: touching("batch pipeline dense", "losses output pipeline"),
    sparse_dist.LOSS: touching("losses", "loss"),
    sparse_dist.DENSE_BACK: touching("loss pipeline gradients", "pipeline gradients"),
    sparse_dist.EMBED_BACK: touching(
        "pipeline tables optimizer gradients", "pipeline tables gradients"
    ),
    sparse_dist.FINALIZE: touching("gradients", "gradients"),
    sparse_dist.STEP: touching(
        "gradients dense optimizer tables", "gradients dense optimizer tables"
    ),
}
"""What the recommender's tasks access with the split forward: the most of all that they may."""


def on_paper(plan: PipelinePlan) -> dict[str, Effects]:
    """Return effects that require exactly the dependences of a plan."""
    table = dict.fromkeys(plan.schedule, Effects())
    for consumer, producer, distance in (
        *((*pair, 0) for pair in plan.deps),
        *plan.cross_iter_deps,
    ):
        place = frozenset({Location(f"of {producer} for {consumer}", bool(distance))})
        table[producer] |= Effects(writes=place)
        table[consumer] |= Effects(reads=place)
    return table


SHIPPED: dict[str, tuple[PipelinePlan, dict[str, Effects]]] = {
    **{name: (plan, CLICKS) for name, plan in CLICK_PLANS.items()},
    **{f"sparse-dist {name}": (make(), SPLIT) for name, make in sparse_dist.PLANS.items()},
    "recsys14": (recsys14.plan(), on_paper(recsys14.plan())),
    "design": (piped(), CHAIN),
}
"""Plans, and what their tasks access, in serial order."""

NEEDED = {
    "clicks serial": 0,
    "clicks pipelined": 2,
    "sparse-dist serial": 0,
    "sparse-dist sparse_dist": 2,
    "sparse-dist prefetch": 3,
    "sparse-dist split": 3,
    "recsys14": 5,
    "design": 2,
}
"""Plans without staleness, and how many of their edges are necessary."""


def named(error: PlanError) -> set[frozenset[str]]:
    """Return the pairs that a refusal names."""
    return {frozenset(problem.tasks) for problem in error.problems}


@pytest.mark.parametrize(("plan", "effects"), SHIPPED.values(), ids=SHIPPED)
def test_a_shipped_plan_is_right_on_both_kinds_of_device(
    plan: PipelinePlan, effects: dict[str, Effects]
) -> None:
    """The test also checks that there was something to verify."""
    assert verify_tasks(plan, effects=effects).orders > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_a_shipped_plan_that_loses_an_edge_it_needs_is_refused_for_that_pair(name: str) -> None:
    """Each edge is removed, one at a time; edges that others imply are not needed."""
    plan, effects = SHIPPED[name]
    missed = 0
    for key, entry in edges_of(plan):
        mutant = without(plan, (key, entry))
        broken = fights(mutant, effects, streams=False)
        # Two iterations of the click model's two threads and two streams are too many to try.
        iterations = (1,) if name == "clicks pipelined" else (1, 2)
        broken |= fights(mutant, effects, streams=True, iterations=iterations, most=10**5)
        pairs: set[frozenset[str]] = set()
        try:
            verify_tasks(mutant, effects=effects)
        except PlanError as error:
            pairs = named(error)
        assert pairs == broken, f"without {entry}"
        pair = frozenset(map(str, entry[:2]))
        assert pair in pairs or not pairs
        missed += pair in pairs
    assert missed == NEEDED[name]


def test_serial_is_right_whatever_the_tasks_touch() -> None:
    """Everything runs on one thread and stream."""
    plan = PipelinePlan.serial([PipelineTask(name, print) for name in CLICKS])
    assert (
        verify_tasks(plan, effects=CLICKS).orders
        == verify_tasks(CLICK_PLANS["clicks serial"], effects=CLICKS).orders
    )


def unconnected(**more: object) -> PipelinePlan:
    """Return a plan of two tasks on threads of their own."""
    schedule = {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule()}
    return PipelinePlan(schedule=schedule, **more)  # type: ignore[arg-type]


def test_declared_states_are_checked_without_effects() -> None:
    """The declarations of the tasks suffice for the declared states."""
    tasks = [PipelineTask(name, print, io=[DeclaredIO(state="log")]) for name in "ab"]
    with pytest.raises(PlanError, match="'b' on iteration i must come after 'a' on iteration i"):
        verify_tasks(unconnected(), tasks)
    mended = unconnected(deps=[("b", "a")], cross_iter_deps=[("a", "b")])
    assert verify_tasks(mended, tasks).orders == 5
    assert verify_tasks(replace(mended, tasks=tuple(tasks))).orders == 5


def test_declared_and_recorded_effects_are_joined() -> None:
    """A recording shows that one task writes a state that another one declares to read."""
    tasks = [PipelineTask("a", print), PipelineTask("b", print, io=[DeclaredIO(state="model")])]
    effects = {"a": touching("", "model"), "b": touching()}
    assert verify_tasks(unconnected(), tasks, {"a": touching(), "b": touching()}).orders == 1
    with pytest.raises(PlanError, match="state 'model'"):
        verify_tasks(unconnected(), tasks, effects)


def test_a_state_on_the_host_is_the_one_that_a_recording_saw() -> None:
    """A declared state and a recorded one are one state, which a device may use."""
    reader = PipelineTask("a", print, io=[DeclaredIO(state="model", mode="r", on_host=True)])
    tasks = [reader, PipelineTask("b", print, pure=True)]
    effects = {"a": touching(), "b": touching("", "model")}
    with pytest.raises(PlanError, match="'b' on iteration i must come after 'a' .* state 'model'"):
        verify_tasks(unconnected(), tasks, effects)
    # Of device work, an order of functions is none.
    edges = {"deps": [("b", "a")], "cross_iter_deps": [("a", "b")]}
    mended = unconnected(**edges)
    assert verify_tasks(mended, tasks, effects).orders == 4
    schedule = {**mended.schedule, "b": TaskSchedule(stream="side")}
    of_functions = replace(mended, schedule=schedule, host_only=[("b", "a"), ("a", "b")])
    with pytest.raises(PlanError, match="the edge between them is host_only"):
        verify_tasks(of_functions, tasks, effects, streams=True)
    alone = {"a": touching(), "b": touching()}
    verify_tasks(of_functions, tasks, alone, streams=True)
    # The body touches the same one state.
    behind = {"a": TaskSchedule(1), "b": TaskSchedule()}
    ahead = replace(mended, schedule=behind, deps=[], cross_iter_deps=[], newer={"model": 1})
    with pytest.raises(PlanError, match="'b' touches state 'model', which the loop's body may"):
        verify(ahead, tasks, effects, pull_ahead=True)


def test_a_table_of_effects_alone_joins_what_is_not_known_with_each_state_in_it() -> None:
    """This holds for an unknown task, loader or body, no matter what the other entries name."""
    plan = PipelinePlan(
        {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule(1)}, deps=[("b", "a")]
    )
    with pytest.raises(PlanError, match=r"'a' on iteration i must come after 'b' on .* 'model'"):
        verify_tasks(plan, effects={"a": touching("model", "model"), "b": undeclared_effects()})
    verify_tasks(plan, effects={"a": touching("model", "model"), "b": touching()})
    pulled = PipelinePlan({"b": TaskSchedule()}, pull_group="loader")
    step = touching("model", "model")
    with pytest.raises(PlanError, match="the effects of the loader are not declared"):
        verify_tasks(pulled, effects={PULL: undeclared_effects(), "b": step})
    verify_tasks(pulled, effects={PULL: touching(), "b": step})


def test_declared_states_keep_their_order_of_a_serial_run_beside_recorded_effects() -> None:
    """Recorded effects have another order; the pipeline's serial run has its own."""
    plan = PipelinePlan(dict.fromkeys("ab", TaskSchedule()), order="ab")
    state = DeclaredIO(state="log", others="")
    tasks = [PipelineTask(name, print, io=[state]) for name in "ba"]
    effects = {"a": touching(), "b": touching()}
    with pytest.raises(PlanError, match="'a' on iteration i must come after 'b' on iteration i"):
        SWPipeline(plan, tasks, effects=effects, device="cpu")
    SWPipeline(plan, tasks[::-1], effects=effects, device="cpu").close()
    free = [replace(task, io=[], pure=True) for task in tasks]
    SWPipeline(plan, free, effects=effects, device="cpu").close()


def test_tasks_and_their_effects_are_refused_where_effects_alone_are() -> None:
    """A task declares a log and was seen to change weights, which the unknown body may read."""
    weights = frozenset([Location("weights", True)])
    effects = {PULL: Effects(), "a": Effects(weights, weights), "b": Effects()}
    log = DeclaredIO(state="log", others="")
    tasks = [
        PipelineTask("a", lambda ctx: None, io=[log]),
        PipelineTask("b", lambda ctx: None, pure=True),
    ]
    ahead = PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule(1)}, deps=[("b", "a")])
    for given in (None, tasks):
        with pytest.raises(PlanError, match="'a' touches state 'weights', which the loop's body"):
            verify(ahead, given, effects=effects, pull_ahead=True)


def test_tasks_that_touch_nothing_leave_nothing_to_check() -> None:
    """The result says so."""
    tasks = [PipelineTask(name, print, pure=True) for name in "ab"]
    assert verify_tasks(unconnected(), tasks).orders == 0


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        (TaskSchedule(), "stage 0"),
        (TaskSchedule(1, thread_group="io"), "thread group 'io'"),
        (TaskSchedule(1, stream="copies"), "stream 'copies'"),
    ],
)
def test_a_task_of_which_nothing_is_declared_stays_with_the_body(
    entry: TaskSchedule, where: str
) -> None:
    """It runs in the last stage, on the caller's thread and stream, in serial order."""
    plan = PipelinePlan({"a": entry, "b": TaskSchedule(1)}, deps=[("b", "a")])
    with pytest.raises(PlanError, match=f"the effects of task 'a' are not declared.*{where}"):
        verify(plan, [PipelineTask(name, print) for name in "ab"], pull_ahead=True)
    verify(plan, [PipelineTask("a", print, pure=True), PipelineTask("b", print)], pull_ahead=True)
    together = replace(plan, schedule={"a": TaskSchedule(1), "b": TaskSchedule(1)})
    found = verify(together, [PipelineTask(n, print) for n in "ab"], pull_ahead=True)
    assert found.undeclared == ("a", "b")
    # A hand-written plan is its author's claim.
    SWPipeline(plan, [PipelineTask(name, print) for name in "ab"], device="cpu").close()


AHEAD = PipelinePlan(
    {"a": TaskSchedule(), "b": TaskSchedule(1)}, deps=[("b", "a")], cross_iter_deps=[("a", "b")]
)
"""A plan whose first task may run before the body of the previous iteration."""


def named_by(name: str, mode: Any = "rw", **more: Any) -> PipelineTask:
    """Return a task that declares the state "scale"."""
    return PipelineTask(name, print, io=[DeclaredIO(state="scale", mode=mode, **more)])


@pytest.mark.parametrize("mode", ["r", "w", "rw"])
def test_a_state_may_be_touched_by_whoever_says_nothing(mode: Any) -> None:
    """The body or a task may use it: its one user must keep its order with them."""
    alone = [named_by("a", mode), PipelineTask("b", print, pure=True)]
    with pytest.raises(PlanError, match="'a' touches state 'scale', which the loop's body may"):
        verify(AHEAD, alone, pull_ahead=True)
    verify(AHEAD, alone, pull_ahead=True, body=False)
    verify(AHEAD, [named_by("a", mode, others=""), alone[1]], pull_ahead=True)
    read = [named_by("a", mode, others="r"), alone[1]]  # by the body, in any order with reads
    if mode == "r":
        verify(AHEAD, read, pull_ahead=True)
    else:
        with pytest.raises(PlanError, match="'a' touches state 'scale'"):
            verify(AHEAD, read, pull_ahead=True)
    free = replace(AHEAD, cross_iter_deps=[], order="ab")
    beside = [named_by("a", mode), PipelineTask("b", print)]
    with pytest.raises(PlanError, match=r"'a' on iteration i must come after 'b' on iteration i"):
        verify_tasks(free, beside)
    verify_tasks(AHEAD, beside)
    verify_tasks(free, [named_by("a", mode, others=""), beside[1]])


def test_how_others_touch_a_state_is_said_once_of_it() -> None:
    """This holds no matter what else names the state."""
    plan = PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule()})
    ahead = replace(plan, pipeline_depth=3, pull_group="io")
    verify(ahead, [named_by("a", others=""), named_by("b")], pull_ahead=True)
    with pytest.raises(ValueError, match="others is given without a state"):
        DeclaredIO(lambda: 1, print, others="")
    with pytest.raises(ValueError, match="others is 'w'; give 'rw', 'r' or ''"):
        DeclaredIO(state="x", others="w")  # type: ignore[arg-type]


def test_a_loader_of_which_nothing_is_said_is_pulled_in_turn() -> None:
    """This holds also without any declaration; a list, or a declaration, lets it be ahead."""
    tasks = [PipelineTask("a", print, pure=True), PipelineTask("b", print)]
    plan = replace(AHEAD, cross_iter_deps=[])
    for unknown in (None, (n for n in range(3)), [1].__iter__()):
        with pytest.raises(
            PlanError, match=r"effects of the loader.*pass a loader.*pull_ahead=True"
        ):
            verify(plan, tasks, loader=unknown)
    verify(plan, tasks, loader=[1, 2])
    verify(plan, tasks, pull_ahead=True)
    verify(PipelinePlan.serial(tasks), tasks)


def test_a_pipeline_refuses_a_body_beside_which_a_state_is_touched() -> None:
    """``run`` has no body, and accepts the plan."""
    tasks = [named_by("a"), PipelineTask("b", lambda ctx: None, pure=True)]
    tasks[0] = replace(tasks[0], fn=tasks[1].fn)
    with SWPipeline(AHEAD, tasks, device="cpu") as pipe:
        for call in (
            lambda: pipe.progress(iter([1, 2])),
            lambda: pipe.iterate([1, 2]),
            lambda: pipe.push(1),
        ):
            with pytest.raises(PlanError, match=r"'scale', which the loop's body.*call run\(\)"):
                call()
        assert pipe.run([1, 2, 3]).iterations == 3
        with borrowed(pipe):  # to be measured, without a body
            assert len([*pipe.iterate([1, 2])]) == 2
        with pytest.raises(PlanError, match="which the loop's body"):
            pipe.progress(iter([1, 2]))
    private = [replace(tasks[0], io=[DeclaredIO(state="scale", others="")]), tasks[1]]
    with SWPipeline(AHEAD, private, device="cpu") as pipe:
        assert len([*pipe.iterate([1, 2])]) == 2


def test_a_random_task_does_not_run_beside_whoever_may_draw() -> None:
    """Its seed holds for all threads; it may run earlier or later, since it has its own seed."""
    noise = PipelineTask("a", print, random=True, pure=True)
    tasks, plan = [noise, PipelineTask("b", print)], replace(AHEAD, cross_iter_deps=[])
    verify(plan, tasks, pull_ahead=True)
    beside = replace(plan, schedule={"a": TaskSchedule(thread_group="io"), "b": TaskSchedule(1)})
    with pytest.raises(PlanError, match="'a' is random, which seeds torch's default generators"):
        verify(beside, tasks, pull_ahead=True)
    with pytest.raises(PlanError, match="'a'.*'b'.*torch's default generators"):
        verify_tasks(beside, tasks)
    verify_tasks(beside, [noise, PipelineTask("b", print, pure=True)])
    nobody = DeclaredIO(state=DRAWS.name, mode="r", others="")
    verify(beside, [replace(noise, io=[nobody]), tasks[1]], pull_ahead=True)


def test_a_task_that_says_nothing_stays_on_the_thread_of_its_like() -> None:
    """Some states belong to a thread; serial order within an iteration keeps them right."""
    plan = PipelinePlan(
        {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule()}, deps=[("b", "a")]
    )
    tasks = [PipelineTask(name, print) for name in "ab"]
    with pytest.raises(PlanError, match="the effects of task 'a' are not declared"):
        verify(plan, tasks)
    verify(plan, [named_by("a"), tasks[1]])
    away = replace(plan, schedule=dict.fromkeys("ab", TaskSchedule(thread_group="io")))
    verify_tasks(away, tasks)
    with pytest.raises(PlanError, match="the effects of task 'a' are not declared"):
        verify(away, tasks)


def test_tasks_of_which_nothing_is_declared_keep_their_order() -> None:
    """This holds also if they use no common attribute."""
    tasks = [PipelineTask(name, print) for name in "ab"]
    plan = PipelinePlan({name: TaskSchedule() for name in "ab"}, order=["b", "a"])
    with pytest.raises(PlanError, match=r"state 'undeclared'.*add deps=\[\(\"b\", \"a\"\)\]"):
        verify(plan, tasks, dict.fromkeys("ab", undeclared_effects()))
    verify(plan, [PipelineTask("a", print, pure=True), tasks[1]])


def test_a_loader_of_which_nothing_is_declared_is_not_pulled_ahead_of_the_body() -> None:
    """It does not matter what else is declared: the body may change what the loader reads."""
    plan = PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule(1)}, deps=[("b", "a")])
    effects = {PULL: undeclared_effects(), "a": Effects(), "b": undeclared_effects()}
    with pytest.raises(PlanError, match=r"effects of the loader.*pipeline_depth=1"):
        verify(plan, effects=effects)
    verify(plan, effects={**effects, PULL: Effects()})
    together = replace(plan, schedule={"a": TaskSchedule(), "b": TaskSchedule()})
    verify(together, effects=effects)
    with pytest.raises(PlanError, match=r"effects of the loader.*pipeline_depth=1"):
        verify(replace(together, pull_group="loader"), effects=effects)


def test_the_order_of_recorded_effects_must_be_kept() -> None:
    """An opposite dependence is an error; without a recording it defines the serial order."""
    effects = {"a": touching("", "x"), "b": touching("x")}
    turned = unconnected(deps=[("a", "b")])
    with pytest.raises(PlanError, match="would make a cycle"):
        verify_tasks(turned, effects=effects)
    io = {"a": "w", "b": "r"}
    tasks = [PipelineTask(n, print, io=[DeclaredIO(state="s", mode=m)]) for n, m in io.items()]
    verify_tasks(replace(turned, cross_iter_deps=[("b", "a", 1)]), tasks)


def test_everything_wrong_is_listed_at_once() -> None:
    """The error lists orders, staleness and memory, with the grid."""
    plan = unconnected(stale={"modle": 1}, pipeline_depth=2)
    effects = {"a": touching("model", "x"), "b": touching("x model", "model")}
    held = TaskMemory((Block("a", KEPT, 2**20, "x"),))
    with pytest.raises(PlanError) as caught:
        verify_tasks(plan, effects=effects, memory=held, budget_bytes=2**20)
    texts = [problem.text for problem in caught.value.problems]
    assert len(texts) == 4
    assert "'modle', which no task touches" in texts[0]
    assert "up to 2 MiB may be in flight" in texts[-1]
    assert "a [io]" in caught.value.grid


def test_memory_that_fits_is_told() -> None:
    """The result has the bound, which is larger if the plan uses streams of a device."""
    plan, effects = unconnected(deps=[("b", "a")], pipeline_depth=3), {
        "a": touching("", "x"),
        "b": touching("x", "x"),
    }  # fmt: skip
    held = TaskMemory((Block("a", "b", 2**20, "x", removed=True),))
    found = verify_tasks(plan, effects=effects, memory=held, budget_bytes=3 * 2**20).footprint
    assert found is not None
    assert found.total_bytes == 2 * 2**20
    late = PipelinePlan(
        {"a": TaskSchedule(stream="side"), "b": TaskSchedule()},
        deps=[("b", "a")],
        pipeline_depth=3,
    )
    with pytest.raises(PlanError, match="up to 4 MiB"):
        verify_tasks(late, effects=effects, memory=held, budget_bytes=2**20)
    verify_tasks(late, effects=effects, memory=held, budget_bytes=2**20, streams=False)


@pytest.mark.parametrize(
    ("effects", "says"),
    [
        ({"a": touching()}, "effects has no entry for task 'b'"),
        (
            dict.fromkeys("abc", touching()),
            "effects has an entry for task 'c', which the plan does not",
        ),
    ],
)
def test_effects_of_other_tasks_are_refused(effects: dict[str, Effects], says: str) -> None:
    """Each missing or unknown name is listed."""
    with pytest.raises(PlanError, match=says):
        verify_tasks(unconnected(), effects=effects)


def test_a_plan_that_cannot_run_is_refused_first() -> None:
    """The error says what is wrong with it, with or without tasks."""
    with pytest.raises(PlanError, match="future read"):
        verify_tasks(
            PipelinePlan({"a": TaskSchedule(stage=1), "b": TaskSchedule()}, deps=[("b", "a")]),
            effects=dict.fromkeys("ab", touching()),
        )
    with pytest.raises(PlanError, match="'b', which is not among the tasks"):
        verify_tasks(unconnected(), [PipelineTask("a", print)])


def test_memory_of_other_tasks_is_refused() -> None:
    """The error names the tasks."""
    held = TaskMemory((Block("z", KEPT, 1, "x"),))
    with pytest.raises(PlanError, match="memory is given for tasks z: measure those of this plan"):
        verify_tasks(unconnected(), effects=dict.fromkeys("ab", touching()), memory=held)


def test_a_call_without_anything_to_check_is_a_mistake() -> None:
    """It has neither tasks nor effects, or a budget without memory."""
    with pytest.raises(TypeError, match="needs the tasks, or a table of their effects"):
        verify_tasks(unconnected())
    with pytest.raises(TypeError, match=r"a budget needs .*memory=measure_memory"):
        verify_tasks(unconnected(), effects=dict.fromkeys("ab", touching()), budget_bytes=1)


@pytest.mark.parametrize("group", [None, "loader"])
def test_a_loader_that_uses_what_a_task_changes_is_not_pulled_ahead(group: str | None) -> None:
    """This holds for any thread that pulls: a serial loop pulls a batch after the previous step."""
    plan = replace(piped(), pull_group=group, pipeline_depth=None)
    effects = {PULL: touching("model", "batch"), **CHAIN}
    said = (
        r"'<pull>' on iteration i must come after 'step' on iteration i - 1, but .* state 'model' "
        r"\(read after write\): pull each batch after the iteration before it: pipeline_depth=1, "
        "and no pull_group"
    )
    with pytest.raises(PlanError, match=said):
        verify_tasks(plan, effects=effects)
    assert verify_tasks(PipelinePlan.serial(list(CHAIN)), effects=effects)
    assert verify_tasks(plan, effects={**effects, PULL: touching("", "batch")})


@pytest.mark.parametrize("fields", [{}, {"thread_group": "io"}, {"stream": "side"}, {"stage": 0}])
def test_what_is_declared_proves_nothing_of_a_silent_task_away_from_the_body(
    fields: dict[str, Any],
) -> None:
    """In the last stage, on the caller's thread and stream, the task needs no proof."""
    entry = TaskSchedule(**{"stage": 1, **fields})
    plan = PipelinePlan({"a": TaskSchedule(), "b": entry}, deps=[("b", "a")], pipeline_depth=2)
    if fields == {"stage": 0}:
        plan = replace(plan, schedule={**plan.schedule, "c": TaskSchedule(1)})
    pure = [PipelineTask(name, print, pure=True) for name in plan.schedule if name != "b"]
    tasks = [*pure, PipelineTask("b", print)]
    verified = verify_for_run(plan, tasks, None, device="cpu", streams=False)
    assert verified.proved_by_declarations() == (fields == {})


# ------------------------------------------------------------------------- once


def functions_called(make: Callable[[], Any]) -> Counter[str]:
    """Return how often ``make`` calls each function of swpipe, except comprehensions."""
    package, found = str(Path(swpipe.__file__).parent), Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package) and code.co_name[0] != "<":
            found[code.co_qualname] += 1

    sys.setprofile(count)
    try:
        made = make()
    finally:
        sys.setprofile(None)
    made.close()
    return found


@pytest.mark.parametrize("pure", [0, 1, 3])
def test_a_plan_is_resolved_verified_and_compiled_once(pure: int) -> None:
    """All users get the results: making a loop once took 1,196 calls."""
    tasks = [PipelineTask(name, print, pure=n < pure) for n, name in enumerate("abc")]
    make = partial(swpipe.overlap, [1, 2, 3], tasks, device="cpu", pull_ahead=True)
    make().close()  # what is done once in a process
    found = functions_called(make)
    once = ("validate", "resolve_plan", "compile_plan", "verify_for_run", "HappensBefore.__init__")
    assert {name: found[name] for name in once} == dict.fromkeys(once, 1)
    assert sum(found.values()) <= 320
