"""Plans that are verified, and what can be wrong with them beside races."""

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
from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis import verify
from swpipe.core.effects import DRAWS, UNKNOWN, Effects, Location
from swpipe.core.plan import PULL
from swpipe.core.task_memory import KEPT, Block, TaskMemory
from swpipe.errors import PlanError
from tests.support.plans_for_tests import piped
from tests.support.safety import verify_tasks

STATES = {"model", "gradients"}


def touching(reads: str = "", writes: str = "") -> Effects:
    """Effects from names between spaces; ``STATES`` outlive an iteration."""
    return Effects(frozenset(places(reads.split())), frozenset(places(writes.split())))


def places(names: Iterable[str]) -> Iterable[Location]:
    """What these names stand for."""
    return (Location(name, name in STATES) for name in names)


CHAIN = {
    "h2d": touching("batch", "here"),
    "dist": touching("here", "ids"),
    "forward": touching("ids model", "loss"),
    "backward": touching("loss model gradients", "gradients"),
    "step": touching("gradients model", "gradients model"),
}
"""What the tasks of the design's example touch."""


def test_a_right_plan_and_the_serial_one_keep_the_same_orders() -> None:
    """On both kinds of device; and there is something to keep."""
    serial = PipelinePlan.serial([PipelineTask(name, print) for name in CHAIN])
    orders = verify_tasks(piped(), effects=CHAIN).orders
    assert verify_tasks(serial, effects=CHAIN).orders == orders > 10


def unconnected(**more: object) -> PipelinePlan:
    """Two tasks on threads of their own."""
    schedule = {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule()}
    return PipelinePlan(schedule=schedule, **more)  # type: ignore[arg-type]


def test_declared_states_are_checked_without_effects() -> None:
    """What the tasks say of themselves is enough for what they say."""
    tasks = [PipelineTask(name, print, io=[DeclaredIO(state="log")]) for name in "ab"]
    with pytest.raises(PlanError, match="'b' on iteration i must come after 'a' on iteration i"):
        verify_tasks(unconnected(), tasks)
    mended = unconnected(deps=[("b", "a")], cross_iter_deps=[("a", "b")])
    assert verify_tasks(mended, tasks).orders == 5
    assert verify_tasks(replace(mended, tasks=tuple(tasks))).orders == 5


def test_declared_and_recorded_effects_are_joined() -> None:
    """One task was seen to write what another one declares to read."""
    tasks = [PipelineTask("a", print), PipelineTask("b", print, io=[DeclaredIO(state="model")])]
    effects = {"a": touching("", "model"), "b": touching()}
    assert verify_tasks(unconnected(), tasks, {"a": touching(), "b": touching()}).orders == 1
    with pytest.raises(PlanError, match="state 'model'"):
        verify_tasks(unconnected(), tasks, effects)


def test_tasks_that_touch_nothing_leave_nothing_to_check() -> None:
    """And the result says so."""
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
    """In the last stage, on the caller's thread and stream, in serial order with all its like."""
    plan = PipelinePlan({"a": entry, "b": TaskSchedule(1)}, deps=[("b", "a")])
    with pytest.raises(PlanError, match=f"nothing is declared of what 'a' touches.*{where}"):
        verify(plan, [PipelineTask(name, print) for name in "ab"], pull_ahead=True)
    verify(plan, [PipelineTask("a", print, pure=True), PipelineTask("b", print)], pull_ahead=True)
    together = replace(plan, schedule={"a": TaskSchedule(1), "b": TaskSchedule(1)})
    found = verify(together, [PipelineTask(n, print) for n in "ab"], pull_ahead=True)
    assert found.undeclared == ("a", "b")
    # A plan that is written by hand is its author's word.
    SWPipeline(plan, [PipelineTask(name, print) for name in "ab"], device="cpu").close()


AHEAD = PipelinePlan(
    {"a": TaskSchedule(), "b": TaskSchedule(1)}, deps=[("b", "a")], cross_iter_deps=[("a", "b")]
)
"""Its first task may run before the body of the iteration before."""


def named_by(name: str, mode: Any = "rw", **more: Any) -> PipelineTask:
    """A task that names the state "scale"."""
    return PipelineTask(name, print, io=[DeclaredIO(state="scale", mode=mode, **more)])


@pytest.mark.parametrize("mode", ["r", "w", "rw"])
def test_a_state_may_be_touched_by_whoever_says_nothing(mode: Any) -> None:
    """The body, and a task: its one user must stay beside them."""
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
    """Whoever else names it."""
    plan = PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule()})
    ahead = replace(plan, pipeline_depth=3, pull_group="io")
    verify(ahead, [named_by("a", others=""), named_by("b")], pull_ahead=True)
    with pytest.raises(ValueError, match="others is given, and no state"):
        DeclaredIO(lambda: 1, print, others="")
    with pytest.raises(ValueError, match="others is 'w'; give 'rw', 'r' or ''"):
        DeclaredIO(state="x", others="w")  # type: ignore[arg-type]


def test_a_loader_of_which_nothing_is_said_is_pulled_in_turn() -> None:
    """Also without a word on it; a list, or the word, lets it be ahead."""
    tasks = [PipelineTask("a", print, pure=True), PipelineTask("b", print)]
    plan = replace(AHEAD, cross_iter_deps=[])
    for unknown in (None, (n for n in range(3)), [1].__iter__()):
        with pytest.raises(PlanError, match=r"the loader uses.*name it \(loader=\), or say so"):
            verify(plan, tasks, loader=unknown)
    verify(plan, tasks, loader=[1, 2])
    verify(plan, tasks, pull_ahead=True)
    verify(PipelinePlan.serial(tasks), tasks)


def test_a_pipeline_refuses_a_body_beside_which_a_state_is_touched() -> None:
    """``run`` has none, and takes the plan."""
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
    private = [replace(tasks[0], io=[DeclaredIO(state="scale", others="")]), tasks[1]]
    with SWPipeline(AHEAD, private, device="cpu") as pipe:
        assert len([*pipe.iterate([1, 2])]) == 2


def test_a_random_task_does_not_run_beside_whoever_may_draw() -> None:
    """Its seed is that of all threads; it may come sooner or later, for it has its own."""
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
    """Some state is a thread's own; in serial order it is, too, in one iteration at a time."""
    plan = PipelinePlan(
        {"a": TaskSchedule(thread_group="io"), "b": TaskSchedule()}, deps=[("b", "a")]
    )
    tasks = [PipelineTask(name, print) for name in "ab"]
    with pytest.raises(PlanError, match="nothing is declared of what 'a' touches"):
        verify(plan, tasks)
    verify(plan, [named_by("a"), tasks[1]])
    away = replace(plan, schedule=dict.fromkeys("ab", TaskSchedule(thread_group="io")))
    verify_tasks(away, tasks)
    with pytest.raises(PlanError, match="nothing is declared of what 'a' touches"):
        verify(away, tasks)


def test_tasks_of_which_nothing_is_declared_keep_their_order() -> None:
    """Also where they touch no attribute in common."""
    tasks = [PipelineTask(name, print) for name in "ab"]
    plan = PipelinePlan({name: TaskSchedule() for name in "ab"}, order=["b", "a"])
    with pytest.raises(PlanError, match=r"state 'undeclared'.*add deps=\[\(\"b\", \"a\"\)\]"):
        verify(plan, tasks, dict.fromkeys("ab", UNKNOWN))
    verify(plan, [PipelineTask("a", print, pure=True), tasks[1]])


def test_a_loader_of_which_nothing_is_declared_is_not_pulled_ahead_of_the_body() -> None:
    """Whoever else declares: the body may change what the loader reads."""
    plan = PipelinePlan({"a": TaskSchedule(), "b": TaskSchedule(1)}, deps=[("b", "a")])
    effects = {PULL: UNKNOWN, "a": Effects(), "b": UNKNOWN}
    with pytest.raises(PlanError, match=r"the loader uses.*pipeline_depth=1"):
        verify(plan, effects=effects)
    verify(plan, effects={**effects, PULL: Effects()})
    together = replace(plan, schedule={"a": TaskSchedule(), "b": TaskSchedule()})
    verify(together, effects=effects)
    with pytest.raises(PlanError, match=r"the loader uses.*pipeline_depth=1"):
        verify(replace(together, pull_group="loader"), effects=effects)


def test_the_order_of_recorded_effects_must_be_kept() -> None:
    """A dependence the other way round is no excuse; without a recording it says what is serial."""
    effects = {"a": touching("", "x"), "b": touching("x")}
    turned = unconnected(deps=[("a", "b")])
    with pytest.raises(PlanError, match="would make a cycle"):
        verify_tasks(turned, effects=effects)
    io = {"a": "w", "b": "r"}
    tasks = [PipelineTask(n, print, io=[DeclaredIO(state="s", mode=m)]) for n, m in io.items()]
    verify_tasks(replace(turned, cross_iter_deps=[("b", "a", 1)]), tasks)


def test_everything_wrong_is_listed_at_once() -> None:
    """Orders, staleness and memory, with the grid."""
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
    """The bound, which is larger where the plan uses streams of a device."""
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
        ({"a": touching()}, "nothing is known of what task 'b' touches"),
        (dict.fromkeys("abc", touching()), "effects name task 'c', which the plan does not"),
    ],
)
def test_effects_of_other_tasks_are_refused(effects: dict[str, Effects], says: str) -> None:
    """Each name that is too many or missing."""
    with pytest.raises(PlanError, match=says):
        verify_tasks(unconnected(), effects=effects)


def test_a_plan_that_cannot_run_is_refused_first() -> None:
    """With what is wrong with it, tasks or no tasks."""
    with pytest.raises(PlanError, match="future read"):
        verify_tasks(
            PipelinePlan({"a": TaskSchedule(stage=1), "b": TaskSchedule()}, deps=[("b", "a")]),
            effects=dict.fromkeys("ab", touching()),
        )
    with pytest.raises(PlanError, match="'b', which is not among the tasks"):
        verify_tasks(unconnected(), [PipelineTask("a", print)])


def test_memory_of_other_tasks_is_refused() -> None:
    """By name."""
    held = TaskMemory((Block("z", KEPT, 1, "x"),))
    with pytest.raises(PlanError, match="memory is given for tasks z: measure those of this plan"):
        verify_tasks(unconnected(), effects=dict.fromkeys("ab", touching()), memory=held)


def test_a_call_without_anything_to_check_is_a_mistake() -> None:
    """Neither tasks nor effects, and a budget for nothing."""
    with pytest.raises(TypeError, match="needs the tasks, or a table of their effects"):
        verify_tasks(unconnected())
    with pytest.raises(TypeError, match=r"a budget needs .*memory=measure_memory"):
        verify_tasks(unconnected(), effects=dict.fromkeys("ab", touching()), budget_bytes=1)


@pytest.mark.parametrize("group", [None, "loader"])
def test_a_loader_that_uses_what_a_task_changes_is_not_pulled_ahead(group: str | None) -> None:
    """Whichever thread pulls: a serial loop pulls a batch after the step before it."""
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


# ------------------------------------------------------------------------- once


def functions_called(make: Callable[[], Any]) -> Counter[str]:
    """The functions of swpipe that are called meanwhile; comprehensions have no frame in 3.12."""
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
    """Whoever needs what follows from it is handed that: making a loop once took 1,196 calls."""
    tasks = [PipelineTask(name, print, pure=n < pure) for n, name in enumerate("abc")]
    make = partial(swpipe.overlap, [1, 2, 3], tasks, device="cpu", pull_ahead=True)
    make().close()  # what is done once in a process
    found = functions_called(make)
    once = ("validate", "resolve_plan", "compile_plan", "verify_for_run", "HappensBefore.__init__")
    assert {name: found[name] for name in once} == dict.fromkeys(once, 1)
    assert sum(found.values()) <= 300
