"""The maximum memory of the iterations in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.memory import Held, bytes_in_flight, in_words, memory_problems
from swpipe.core.plan import PULL
from swpipe.core.resolved import resolve_plan
from swpipe.core.task_memory import KEPT, WORKING, Block, TaskMemory
from swpipe.program import compile_plan
from tests.support.exhaustive import Exhaustive
from tests.support.plans_for_tests import NAMES, spread

MIB = 2**20


def chain(
    stages: tuple[int, ...], groups: tuple[str, ...] | None = None, depth: int | None = None
) -> PipelinePlan:
    """Return a plan of tasks a, b, c ... in sequence; on one thread by default."""
    names = "abcdef"[: len(stages)]
    groups = groups or ("default",) * len(stages)
    return PipelinePlan(
        schedule={
            name: TaskSchedule(stage=stage, thread_group=group)
            for name, stage, group in zip(names, stages, groups, strict=True)
        },
        deps=list(zip(names[1:], names[:-1], strict=True)),
        pipeline_depth=depth,
    )


def copies(plan: PipelinePlan, *blocks: Block, streams: bool = False) -> int:
    """Return the number of copies of the single block."""
    (held,) = bytes_in_flight(
        HappensBefore.of(resolve_plan(plan), streams=streams), TaskMemory(blocks)
    ).held
    return held.copies


def deleted(begin: str, end: str) -> Block:
    """Return an attribute that one task sets and another one deletes."""
    return Block(begin, end, 8, "x", removed=True)


@pytest.mark.parametrize(("stage", "most"), [(0, 3), (1, 2), (2, 1)])
def test_an_attribute_lives_from_its_task_to_the_end(stage: int, most: int) -> None:
    """On one thread, fewer exist at once the later it is set."""
    assert copies(chain((0, stage, 2)), Block("b", KEPT, 8, "x")) == most


@pytest.mark.parametrize(("stage", "most"), [(0, 1), (1, 1), (2, 2)])
def test_an_attribute_lives_until_it_is_deleted(stage: int, most: int) -> None:
    """Fewer exist at once the sooner it is deleted; later stages run first, and delete in time."""
    assert copies(chain((0, stage, 2)), deleted("a", "b")) == most


def test_what_is_set_anew_lives_twice() -> None:
    """The old value lives until the task that replaces it has run, the new one from then on."""
    memory = TaskMemory((deleted("a", "b"), Block("b", KEPT, 4, "x")))
    found = bytes_in_flight(HappensBefore.of(resolve_plan(chain((0, 0, 2))), streams=False), memory)
    assert set(found.held) == {Held("x", "a", 1, 8), Held("x", "b", 3, 4)}
    assert found.total_bytes == 20


def test_a_thread_that_runs_ahead_fills_the_depth() -> None:
    """Only admission holds it back."""
    plan = chain((0, 1), ("io", "default"), depth=4)
    assert copies(plan, deleted("a", "b")) == 4
    assert copies(chain((0, 1), depth=4), deleted("a", "b")) == 1


@pytest.mark.parametrize("ahead", [None, 0, 1, 3])
def test_under_a_plan_with_streams_everything_counts_as_often_as_the_device_is_behind(
    ahead: int | None,
) -> None:
    """It counts ``depth`` iterations and ``run_ahead`` more; what is dropped is held, too."""
    one = replace(chain((0, 1, 2)), run_ahead=ahead)
    gone = deleted("a", "b")
    assert copies(one, gone, streams=True) == copies(one, gone) == 1
    several = replace(one, schedule={**one.schedule, "a": TaskSchedule(0, "side")})
    assert copies(several, gone, streams=True) == 3 + (1 if ahead is None else ahead)
    saved = Block("a", "b", 8)  # by autograd: nobody else's stream has it
    assert copies(several, saved, streams=True) == 1


@pytest.mark.parametrize(("stage", "most"), [(0, 2), (1, 2), (2, 3)])
def test_what_the_next_iteration_frees_lives_longer(stage: int, most: int) -> None:
    """Gradients that the next backward sets to None are an example."""
    assert copies(chain((0, stage, 2)), Block("a", "b", 8, later=1)) == most


@pytest.mark.parametrize(("keep", "most"), [([], 1), (["x"], 3), (None, 3)])
def test_what_a_plan_keeps_stays_whatever_it_was_measured_under(
    keep: list[str] | None, most: int
) -> None:
    """Another plan freed it after its last user, but this one may hold it to the end."""
    plan = replace(chain((0, 0, 2)), keep=keep)
    assert copies(plan, Block("a", KEPT, 8, "x", users=("b",))) == most


@pytest.mark.parametrize(("group", "most"), [(None, 3), ("loader", 4)])
def test_the_batch_lives_from_its_pull(group: str | None, most: int) -> None:
    """This holds also if a separate thread pulls it."""
    plan = replace(chain((0, 0, 2)), pull_group=group)
    assert copies(plan, Block(PULL, KEPT, 8, "batch")) == most


def test_of_each_thread_one_task_needs_something_at_a_time() -> None:
    """The largest need counts, once; a task that frees before it allocates needs nothing more."""
    plan = chain((0, 0, 1), ("io", "io", "default"))
    memory = TaskMemory((Block("a", "b", 8),), {"a": 3, "b": 5, "c": -7})
    found = bytes_in_flight(HappensBefore.of(resolve_plan(plan), streams=False), memory)
    assert found.held == (Held("", "a", 1, 8), Held(WORKING, "b", 1, 5))
    assert found.format() == (
        "in flight at most: 13 B; the largest: other memory of 'a' (1 x 8 B), "
        "'b' while it runs (1 x 5 B)"
    )


@pytest.mark.parametrize("depth", [4, 5])
def test_no_interleaving_has_more_copies_and_some_has_as_many(depth: int) -> None:
    """An exhaustive search agrees: the states where a value is set on i + n, and not freed on i."""
    plan = replace(spread(), pipeline_depth=depth)
    found = Exhaustive(
        compile_plan(resolve_plan(plan), streams=False), 6, streams=False, most=10**6
    )
    for end in NAMES[1:]:
        free = [n for n in range(1, 6) if (end, 0) not in found.host_before["h2d", n]]
        assert copies(plan, deleted("h2d", end)) == 1 + max(free, default=0)


BIG = TaskMemory(
    (
        Block("a", "b", 10 * MIB, "raw", removed=True),
        Block("b", KEPT, 40 * MIB, "x"),
        Block("c", KEPT, MIB, "y"),
    )
)


def problem(plan: PipelinePlan, budget_bytes: int, *, streams: bool = True) -> str:
    """Return the text of the single problem."""
    (found,) = memory_problems(
        HappensBefore.of(resolve_plan(plan), streams=streams), BIG, budget_bytes
    )
    return found.text


def test_a_smaller_depth_that_fits_is_named() -> None:
    """The error has the bound, the budget and the largest attributes."""
    plan = chain((0, 0, 1), depth=4)
    plan = replace(plan, schedule={**plan.schedule, "c": TaskSchedule(1, "s")}, run_ahead=0)
    assert problem(plan, 110 * MIB) == (
        "up to 204 MiB may be in flight at depth 4, more than the budget of 110 MiB; the largest "
        "are ctx.x of 'b' (4 x 40 MiB), ctx.raw of 'a' (4 x 10 MiB), ctx.y of 'c' (4 x 1 MiB): "
        "pipeline_depth=2 would fit"
    )
    fitting = replace(plan, pipeline_depth=2)
    assert not list(
        memory_problems(HappensBefore.of(resolve_plan(fitting), streams=True), BIG, 110 * MIB)
    )


def test_a_smaller_run_ahead_that_fits_is_named() -> None:
    """It comes first, since it costs least; then comes the depth that fits without run-ahead."""
    plan = chain((0, 0, 1), depth=4)
    plan = replace(plan, schedule={**plan.schedule, "c": TaskSchedule(1, "s")}, run_ahead=3)
    text = problem(plan, 300 * MIB)
    assert text.startswith("up to 357 MiB may be in flight at depth 4 and run_ahead 3, more than")
    assert text.endswith(": run_ahead=1 would fit")
    assert problem(plan, 110 * MIB).endswith(": pipeline_depth=2 with run_ahead=0 would fit")


def test_a_budget_that_nothing_fits_is_told_so() -> None:
    """The error says what one iteration holds."""
    assert "no smaller depth would fit; one iteration alone holds 51 MiB" in problem(
        chain((0, 0, 1)), 2 * MIB
    )


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB")]
)
def test_bytes_in_words(size: int, words: str) -> None:
    """They are printed in the largest unit that fits."""
    assert in_words(size) == words


def test_each_worker_holds_a_copy() -> None:
    """A value that begins and ends in a group has one copy per worker, at any depth."""
    plan = chain((0, 0, 1), ("io", "io", "default"))
    entry = replace(plan.schedule["a"], workers=3)
    several = replace(plan, schedule={**plan.schedule, "a": entry, "b": entry}, pipeline_depth=8)
    assert copies(plan, deleted("a", "b")) == 1
    assert copies(several, deleted("a", "b")) == 3
    assert copies(several, deleted("a", "c")) == 8
    memory = TaskMemory((), {"a": 8, "b": 5})
    (working,) = bytes_in_flight(
        HappensBefore.of(resolve_plan(several), streams=False), memory
    ).held
    assert working == Held(WORKING, "a", 3, 8)
