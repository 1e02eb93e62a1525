"""Large plans: what is refused, the length of messages, and the work of a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swpipe import DeclaredIO, PipelinePlan, StreamSpec, SWPipeline, TaskSchedule
from swpipe.analysis import Effects, Location, memory, verify
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.races import MOST_EXPLAINED
from swpipe.analysis.validation import validate
from swpipe.core import effects
from swpipe.core.costs import CostModel
from swpipe.core.dependence import CycleError
from swpipe.core.plan import MOST_ITERATIONS, MOST_TASKS, MOST_WORK
from swpipe.core.resolved import resolve_plan
from swpipe.core.task_memory import Block, TaskMemory
from swpipe.errors import PlanError
from swpipe.program import compile_plan
from swpipe.program.program_text import format_program
from tests.support.hostile import MOST_IN_ALL, MOST_IN_ONE_LINE
from tests.support.plans_for_tests import task

MANY = 2000
NAMES = [f"t{k}" for k in range(MANY)]
ALIKE = dict.fromkeys(NAMES, TaskSchedule())
STATE = Location("s", persistent=True)
MODEL = CostModel({})


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[int]:
    """Count the calls of a function from here on."""
    calls = [0]
    function = getattr(where, name)

    def counting(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        return function(*args, **named)

    monkeypatch.setattr(where, name, counting)
    return calls


def two_groups(stages: int) -> PipelinePlan:
    """Return a chain with a stage per task, whose first half has a thread group of its own."""
    names = NAMES[:stages]
    return PipelinePlan(
        {
            name: TaskSchedule(stage, thread_group="io" if stage < stages // 2 else "default")
            for stage, name in enumerate(names)
        },
        deps=list(zip(names[1:], names, strict=False)),
    )


# ----------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("number", [10**9, 2**70, 16**5000], ids=["large", "larger", "long"])
@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (lambda n: {"schedule": {"a": TaskSchedule(stage=n)}}, "integers from 0 to 999"),
        (lambda n: {"pipeline_depth": n}, "at most 1000 iterations may be in flight"),
        (lambda n: {"cross_iter_deps": [("a", "b", n)]}, "a distance of 1 to 1000 iterations"),
        (lambda n: {"stale": {"s": n}}, "write state = iterations, 1 to 1000"),
        (lambda n: {"streams": {"s": StreamSpec(n)}}, "integers from -128 to 127"),
    ],
    ids=["stage", "depth", "distance", "stale", "priority"],
)
def test_a_number_that_asks_for_endless_work_is_refused(
    given: Callable[[int], dict[str, Any]], rule: str, number: int
) -> None:
    """The error has the number and the limit. A distance of 10**9 once never ended."""
    fields = {"schedule": {"a": TaskSchedule(stream="s"), "b": TaskSchedule()}, **given(number)}
    with pytest.raises(PlanError) as caught:
        validate(PipelinePlan(**fields))
    said = str(number) if number < 2**100 else "an integer of 20001 bits"
    assert said in str(caught.value)
    assert rule in str(caught.value)


def test_the_largest_numbers_are_accepted() -> None:
    """Each number is at its limit; the program is compiled."""
    plan = PipelinePlan(
        {"a": TaskSchedule(MOST_ITERATIONS - 1, "s", "io"), "b": TaskSchedule()},
        cross_iter_deps=[("a", "b", MOST_ITERATIONS)],
        streams={"s": StreamSpec(priority=127)},
        pipeline_depth=MOST_ITERATIONS,
    )
    assert compile_plan(validate(plan), streams=True).ring == 2 * MOST_ITERATIONS


def test_a_plan_has_a_largest_number_of_tasks() -> None:
    """A plan with more tasks is an error of one line."""
    plan = PipelinePlan({f"t{k}": TaskSchedule() for k in range(MOST_TASKS + 1)})
    with pytest.raises(PlanError, match="10001 tasks, but a plan has at most 10000"):
        validate(plan)


def test_many_tasks_in_many_stages_are_refused() -> None:
    """Each number alone is within its limit; compiling both would take minutes."""
    names = [f"t{k}" for k in range(300)]
    stages = {name: TaskSchedule(k % 300) for k, name in enumerate(names)}
    validate(PipelinePlan(stages))
    with pytest.raises(PlanError, match="300 tasks in 300 stages, with distances up to 34"):
        validate(PipelinePlan(stages, cross_iter_deps=[("t0", "t0", 34)]))


# --------------------------------------------------------------------------------------- messages

WRONG: dict[str, Callable[[], object]] = {
    "unknown names": lambda: validate(PipelinePlan(ALIKE, deps=[(n, "x" + n) for n in NAMES])),
    "other tasks": lambda: validate(PipelinePlan(ALIKE), [task("x" + n) for n in NAMES]),
    "twice": lambda: validate(PipelinePlan(ALIKE, order=[*NAMES, *NAMES])),
    "unused streams": lambda: validate(
        PipelinePlan({n: TaskSchedule(stream=n) for n in NAMES}, streams={"x": StreamSpec()})
    ),
    "a depth": lambda: validate(PipelinePlan(ALIKE, pipeline_depth=0)),
    "a cycle": lambda: validate(
        PipelinePlan(ALIKE, deps=[(n, NAMES[k - 1]) for k, n in enumerate(NAMES)])
    ),
    "future reads": lambda: validate(
        PipelinePlan(
            {n: TaskSchedule(stage=k % 2) for k, n in enumerate(NAMES)},
            deps=[(NAMES[k], NAMES[k + 1]) for k in range(0, MANY, 2)],
        )
    ),
    "no effects": lambda: verify(PipelinePlan(ALIKE), effects={}),
    "other effects": lambda: verify(
        PipelinePlan({"a": TaskSchedule()}), effects=dict.fromkeys(["a", *NAMES], Effects())
    ),
    "stale": lambda: verify(
        PipelinePlan(ALIKE, stale={"x" + n: 1 for n in NAMES}),
        [task(n, io=[DeclaredIO(state=n)]) for n in NAMES],
        streams=False,
    ),
    "entries": lambda: PipelinePlan.from_dict({"schedule": {n: {"x": NAMES} for n in NAMES}}),
    "keys": lambda: PipelinePlan.from_dict(dict.fromkeys(NAMES, NAMES)),
    "edges": lambda: PipelinePlan(ALIKE, deps=[NAMES]),
    "long names": lambda: PipelinePlan({"x" * 10**6: TaskSchedule()}),
    "no costs": lambda: MODEL.of(NAMES),
    "cost keys": lambda: CostModel.from_json('{"tasks": {}, "' + '": 1, "'.join(NAMES) + '": 1}'),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_message_about_a_large_plan_is_short(wrong: str) -> None:
    """A plan of 87 KB once had a message of 42 MB."""
    with pytest.raises(PlanError) as caught:
        WRONG[wrong]()
    assert len(caught.value.in_one_line) <= MOST_IN_ONE_LINE
    assert len(str(caught.value)) <= MOST_IN_ALL
    assert sum(len(problem.text) for problem in caught.value.problems) <= 1000 * 2 * MANY


def test_a_long_cycle_is_told_by_its_first_tasks() -> None:
    """The last name is shown, too, which is the first again."""
    told = str(CycleError([*NAMES, NAMES[0]]))
    assert told.startswith("'t0' after 't1' after ")
    assert told.endswith(" after 't10' after 1989 more after 't0'")


def test_the_grid_of_a_large_plan_has_the_tasks_at_fault() -> None:
    """For a small plan it has all tasks."""
    with pytest.raises(PlanError) as caught:
        validate(PipelinePlan(ALIKE, deps=[("t7", "x")]))
    assert [line.split()[0] for line in caught.value.grid.splitlines()[1:]] == ["t7"]


# ------------------------------------------------------------------------------------------- work


def test_conflicts_are_looked_for_among_the_writers_of_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readers do not conflict with each other: the work grows linearly with their number."""
    calls = counted(monkeypatch, effects, "Conflict")
    read = Effects(reads=frozenset({STATE}))
    found = effects.conflicts(
        dict.fromkeys(NAMES, read) | {"w": Effects(writes=frozenset({STATE}))}
    )
    assert calls[0] == len(found) == 2 * MANY + MANY + 1


def test_copies_of_an_attribute_take_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance between its two ends is found by bisection."""
    calls = counted(monkeypatch, memory.HappensBefore, "host")
    plan = two_groups(100)
    held = TaskMemory((Block("t0", "t99", 5, "x"),))
    found = memory.bytes_in_flight(HappensBefore.of(validate(plan), streams=False), held)
    assert found.held[0].copies == 100
    assert calls[0] <= 8


def test_of_many_races_the_first_are_explained() -> None:
    """Each fix costs as much as a plan; all pairs are named."""
    names = NAMES[:40]
    plan = PipelinePlan({n: TaskSchedule(thread_group=n) for n in names})
    with pytest.raises(PlanError) as caught:
        verify(plan, [task(n, io=[DeclaredIO(state="s")]) for n in names], streams=False)
    problems = caught.value.problems
    assert len({problem.tasks for problem in problems}) > 2 * MOST_EXPLAINED
    assert "add deps" in problems[0].text
    assert "mend the others first" in problems[-1].text


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_largest_plan_is_shown() -> None:
    """``swpipe plan show`` shows it."""
    stages = MOST_WORK // MOST_TASKS - 1
    names = [f"t{k}" for k in range(MOST_TASKS)]
    plan = PipelinePlan(
        {
            name: TaskSchedule(
                k * stages // MOST_TASKS, "s" if k % 3 else None, "io" if k % 2 else "default"
            )
            for k, name in enumerate(names)
        },
        deps=list(zip(names[1:], names, strict=False)),
    )
    with SWPipeline(plan, [task(name) for name in names], device="cpu") as pipe:
        assert pipe.format_schedule(6).count("\n") == MOST_TASKS
        assert pipe.format_stage_analysis().count("\n") == MOST_TASKS + 2
        assert len(format_program(compile_plan(resolve_plan(plan), streams=True))) < 10**7
