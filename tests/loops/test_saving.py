"""A state is saved if it leads to the same numbers; otherwise it is refused by name."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule, overlap
from swpipe.inference.early_changes import early_changes
from swpipe.loops import OverlappedLoop, ResumableLoop
from swpipe.loops.saved_state import OF_PLACE, complete
from swpipe.plans import prefetch_plan
from tests.loops.ordinary_loops import NoisyRows, Rows, StatefulRows, batches
from tests.support.plans_for_tests import NOBODY_ELSE

PURE = ("read", "use", "use_nothing")


def tasks_of(*functions: Callable[[Any], None], **io: Any) -> list[PipelineTask]:
    """Return tasks named after the functions; ``io`` is by name."""
    return [
        PipelineTask(n, one, io=io.get(n, ()), pure=n in PURE)
        for one in functions
        for n in (one.__name__,)
    ]


def ahead(*functions: Callable[[Any], None], group: str = "io", **io: Any) -> SWPipeline[Any]:
    """Return a pipeline in which the first function runs ahead of the others."""
    tasks = tasks_of(*functions, **io)
    names = [task.name for task in tasks]
    plan = PipelinePlan(
        schedule={
            names[0]: TaskSchedule(stage=0, thread_group=group),
            **{name: TaskSchedule(stage=1) for name in names[1:]},
        },
        deps=[(after, before) for before, after in pairwise(names)],
    )
    return SWPipeline(plan, tasks, device="cpu")


def read(ctx: Any) -> None:
    """Use the context alone."""
    ctx.x = ctx.batch


def use(ctx: Any) -> None:
    """Use the context alone."""
    ctx.y = ctx.x


def use_nothing(ctx: Any) -> None:
    """Do nothing."""


# ------------------------------------------------------------------------------ within a call


@pytest.mark.parametrize("run", ["run", "run_serial"])
def test_a_state_is_not_saved_in_a_task(run: str) -> None:
    """Its iteration is not complete: the number would be old, and the model after its step."""

    def save(ctx: Any) -> None:
        pipe.state_dict()

    tasks = tasks_of(read, save)
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        with pytest.raises(RuntimeError, match="within a call of the pipeline.*between two calls"):
            getattr(pipe, run)(range(3))


# ---------------------------------------------------------------------- what is lost, or is not


def failing(at: int) -> SWPipeline[Any]:
    """Return a pipeline whose task ahead fails once."""
    numbers = [at]

    def read(ctx: Any) -> None:
        if ctx.iter_idx in numbers:
            numbers.clear()
            raise KeyError

    return ahead(read, use_nothing)


def test_what_a_failure_has_dropped_is_not_saved() -> None:
    """The number after it skips these batches; a new run, or a loaded state, may be saved."""
    with failing(at=3) as pipe:
        early = pipe.state_dict()
        with pytest.raises(KeyError):
            pipe.run(range(9))
        with pytest.raises(RuntimeError, match="iterations 2 to 3 were dropped by a failure"):
            pipe.state_dict()
        assert pipe.state_dict(check=False)["next_iteration"] == 4
        pipe.run(range(2))
        assert pipe.state_dict()["next_iteration"] == 6
    with failing(at=0) as pipe:
        with pytest.raises(KeyError):
            pipe.run(range(9))
        pipe.load_state_dict(early)
        assert pipe.state_dict()["next_iteration"] == 0


def test_a_serial_iteration_that_failed_is_not_saved() -> None:
    """Some of its tasks may have changed the model."""
    with failing(at=1) as pipe:
        pipe.run_one_serial_iter(0)
        with pytest.raises(KeyError):
            pipe.run_one_serial_iter(1)
        with pytest.raises(RuntimeError, match="iteration 1 was run serially, and has failed"):
            pipe.state_dict()
        pipe.run_one_serial_iter(1)
        assert pipe.state_dict()["next_iteration"] == 2


def test_a_closed_pipeline_is_saved_only_if_it_was_idle() -> None:
    """``close`` drops what is in flight; ``drop`` keeps the number."""
    with ahead(read, use) as idle:
        idle.run(range(3))
    assert idle.state_dict()["next_iteration"] == 3
    with ahead(read, use) as pipe:
        pipe.progress(iter(range(9)))
    with pytest.raises(RuntimeError, match=r"iterations 1 to 1 were dropped .* or by close\(\)"):
        pipe.state_dict()
    with ahead(read, use) as pipe:
        pipe.progress(iter(range(9)))
        pipe.drop()
        assert pipe.state_dict()["next_iteration"] == 1


# ------------------------------------------------------------------- changed by what is in flight


def counts(ctx: Any) -> None:
    """Do nothing, without a declaration."""


@pytest.mark.parametrize("group", ["io", "default"])
def test_what_may_have_changed_ahead_is_not_saved(group: str) -> None:
    """A task on another thread or before the last stage may have; after a drain it is saved."""
    with ahead(counts, use_nothing, group=group) as pipe:
        pipe.progress(iter(range(9)))
        reason = r"in flight \(1\).*'counts' does not declare its effects.*pure=True"
        with pytest.raises(RuntimeError, match=reason):
            pipe.state_dict()
        assert pipe.state_dict(check=False)["in_flight"] == 1
        pipe.drain()
        assert pipe.state_dict()["next_iteration"] == 2


def test_a_task_that_declares_what_it_uses_is_taken_at_its_word() -> None:
    """The declaration says whether it changes or reads it; a pure task changes nothing."""
    with ahead(read, use) as pipe:
        pipe.progress(iter(range(9)))
        assert pipe.state_dict()["in_flight"] == 1
    for mode, refused in (("r", False), ("rw", True)):
        io = [DeclaredIO(state="the features", mode=mode, others="")]  # type: ignore[arg-type]
        with ahead(counts, use_nothing, counts=io) as pipe:
            pipe.progress(iter(range(9)))
            if not refused:
                assert pipe.state_dict()["in_flight"] == 1
                continue
            with pytest.raises(RuntimeError, match="'counts' changes the features before"):
                pipe.state_dict()


# ---------------------------------------------------------------------------- a pass that was left


def loop_over(loader: Any, depth: int = 3) -> ResumableLoop[Any]:
    """Return a loop that pulls ahead."""
    tasks = tasks_of(read, use)
    pipe = SWPipeline(prefetch_plan(["read"], ["use"], depth=depth), tasks, device="cpu")
    return ResumableLoop(pipe, loader)


def test_after_a_break_a_state_has_to_say_where_it_leads() -> None:
    """It leads to the rest of the pass, or to a new pass."""
    loop = loop_over(range(9))
    for ctx in loop:
        if ctx.batch == 3:
            inside = loop.state_dict()
            break
    with pytest.raises(RuntimeError, match=r"left early.*state_dict\(rest=True\)"):
        loop.state_dict()
    for state, first in (
        (inside, 4),
        (loop.state_dict(rest=True), 4),
        (loop.state_dict(rest=False), 0),
    ):
        other = loop_over(range(9))
        other.load_state_dict(state)
        found = [(ctx.iter_idx, ctx.batch) for ctx in other]
        assert found == list(enumerate(range(first, 9), start=4))
        other.pipe.close()
    assert [ctx.iter_idx for ctx in loop] == list(range(4, 13))  # as in a run that goes on
    loop.pipe.close()


def test_a_loader_with_a_state_leads_to_the_rest_of_a_pass_that_was_left() -> None:
    """Such a loader cannot begin again."""
    loop = loop_over(StatefulRows())
    for _ in loop:
        break
    with pytest.raises(RuntimeError, match="the loader has a state of its own"):
        loop.state_dict(rest=False)
    assert loop.state_dict(rest=True)["batches"] == 1
    loop.pipe.close()


def test_a_pass_of_a_plan_that_changes_state_ahead_stays_in_flight() -> None:
    """``drain`` returns it, and it counts."""
    with ahead(counts, use_nothing) as pipe:
        loop = ResumableLoop(pipe, range(9))
        for _ in loop:
            break
        assert [ctx.batch for ctx in pipe.drain()] == [1]
        state = loop.state_dict(rest=True)
        assert (state["batches"], state["pipeline"]["next_iteration"]) == (2, 2)


# ----------------------------------------------------------------------------- how a state is used


def test_a_state_may_be_loaded_twice_and_saved_again_under_another_plan() -> None:
    """It is saved at once; the generators of a device that does not exist here are ignored."""
    loop = loop_over(range(9))
    state = next(copy.deepcopy(loop.state_dict()) for ctx in loop if ctx.batch == 4)
    for states in (state["at_start"], state["generators"]):
        states["torch cuda:0"] = torch.zeros(16, dtype=torch.uint8)
    state = complete(state["pipeline"], {name: state[name] for name in OF_PLACE})
    for _ in range(2):
        other = loop_over(range(9), depth=6)
        other.load_state_dict(state)
        other.load_state_dict(state)
        state = other.state_dict()
    assert [ctx.batch for ctx in other] == [5, 6, 7, 8]


def test_a_loader_with_fewer_batches_or_without_a_beginning_is_refused() -> None:
    """The error has the number of trained batches, and comes when a pass begins, each time."""
    loop = loop_over(range(9))
    state = next(loop.state_dict() for ctx in loop if ctx.batch == 4)
    for loader, said in (
        (range(3), "the loader has 3 batches, but 5 were handed out"),
        (iter(range(9)), r"the loader is an iterator \(range_iterator\)"),
    ):
        other = loop_over(loader)
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ValueError, match=said):
                iter(other)


def test_an_evaluation_with_the_same_pipeline_is_not_counted() -> None:
    """It runs after a drain, in the body."""
    loop = loop_over(range(9))
    for ctx in loop:
        if ctx.batch == 2:
            rest = [late.batch for late in loop.pipe.drain()]  # type: ignore[attr-defined]
            list(loop.pipe.iterate(range(100, 104)))  # type: ignore[attr-defined]
            state = loop.state_dict()
            loop.pipe.progress(iter(range(9)))  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match=r"in flight \(3\) that are not of this loop"):
                loop.state_dict()
            loop.pipe.drain()  # type: ignore[attr-defined]
            break
    assert rest == [3, 4, 5]
    assert (state["batches"], state["pipeline"]["next_iteration"]) == (6, 10)
    loop.pipe.close()  # type: ignore[attr-defined]


def test_batches_that_an_iterator_gives_again_count_once() -> None:
    """They come again after a break, under a hand-written plan."""
    loop = loop_over(iter(range(9)))
    for ctx in loop:
        if ctx.batch == 2:
            break
    counts = [(ctx.batch, loop.state_dict(check=False)["batches"]) for ctx in loop]
    assert counts == [(number, number + 1) for number in range(3, 9)]
    loop.pipe.close()  # type: ignore[attr-defined]


class Unplaced:
    """A loader without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize("make", [Unplaced, lambda: iter(range(6))])
def test_a_loader_without_a_place_is_not_saved_in_mid_pass(make: Callable[[], Any]) -> None:
    """The error says what to give; it is saved between passes, and if its author declares it."""
    loop = loop_over(make())
    for _ in loop:
        with pytest.raises(RuntimeError, match="give it state_dict and load_state_dict"):
            loop.state_dict()
        assert loop.state_dict(check=False)["batches"] > 0
    assert loop.state_dict()["batches"] == 0
    loop.pipe.close()  # type: ignore[attr-defined]


def test_a_state_of_another_kind_of_loader_is_refused() -> None:
    """The error names what one of them lacks."""
    loop, other = (
        loop_over(batches(shuffle=True, generator=torch.Generator())),
        loop_over(batches()),
    )
    generator = "the generator of its DataLoader"
    with pytest.raises(ValueError, match=f"of its loader are {generator}, and those of .* none"):
        other.load_state_dict(loop.state_dict())
    with pytest.raises(ValueError, match=f"of its loader are none, and those of .* {generator}"):
        loop.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="was saved of one without a state of its own"):
        loop_over(StatefulRows()).load_state_dict(other.state_dict())


def test_a_loader_and_a_task_that_draw_in_turn_are_saved_after_a_drain() -> None:
    """In flight, the loader has drawn what the task would draw in a resumed run."""

    def draw(ctx: Any) -> None:
        ctx.noise = torch.rand(1)

    def made(seed: int) -> ResumableLoop[Any]:
        torch.manual_seed(seed)
        tasks = tasks_of(read, draw)
        plan = prefetch_plan(["read"], ["draw"], depth=2, pull_group=None)
        return ResumableLoop(SWPipeline(plan, tasks, device="cpu"), batches(NoisyRows()))

    first, second = made(0), made(1)
    contexts = iter(first)
    next(contexts)
    with pytest.raises(RuntimeError, match=r"draw from torch.s default generators.*random=True"):
        first.state_dict()
    first.pipe.drain()  # type: ignore[attr-defined]
    torch.rand(3)  # by the body
    state = copy.deepcopy(first.state_dict())
    expected = [(ctx.batch, ctx.noise) for ctx in contexts]
    random.seed(5)
    second.load_state_dict(state)
    found = [(ctx.batch, ctx.noise) for ctx in second]
    assert len(found) == 4
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for loop in (first, second):
        loop.pipe.close()  # type: ignore[attr-defined]


def test_a_random_task_that_runs_ahead_does_not_show_in_a_state() -> None:
    """It seeds the generators while it runs; the state has those of the process."""
    inside, saved = threading.Event(), threading.Event()

    def noise(ctx: Any) -> None:
        if ctx.iter_idx == 1:
            inside.set()
            saved.wait(60)
        ctx.x = torch.rand(1)

    noisy = PipelineTask("noise", noise, io=[NOBODY_ELSE], random=True, pure=True)
    tasks = [noisy, *tasks_of(use)]
    plan = prefetch_plan(["noise"], ["use"], depth=2, pull_group=None)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        loop = ResumableLoop(pipe, range(4))
        contexts = iter(loop)
        next(contexts)
        assert inside.wait(60)
        threading.Timer(0.05, saved.set).start()
        assert torch.equal(loop.state_dict()["generators"]["torch cpu"], before)
        assert len(list(contexts)) == 3


def living(rows: Rows) -> DataLoader[torch.Tensor]:
    """Return a loader whose worker persists from pass to pass."""
    return batches(rows, shuffle=True, num_workers=1, persistent_workers=True)


@pytest.mark.filterwarnings("ignore:the loader's workers will live on")
def test_a_pass_that_is_begun_anew_has_new_workers() -> None:
    """Their draws before a state was loaded do not continue.

    Persistent workers gave other augmentation in every resumed pass.
    """

    def made(seed: int) -> OverlappedLoop[Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        return overlap(living(NoisyRows()), [read, use], device="cpu")

    with made(3) as loop, made(4) as other:
        torch.manual_seed(5)
        seen = [(ctx.batch, copy.deepcopy(loop.state_dict())) for ctx in loop]
        assert len(list(other)) == 6  # its worker lives
        other.load_state_dict(seen[1][1])
        rest = [ctx.batch for ctx in other]
    torch.manual_seed(5)
    plain = list(living(NoisyRows()))
    torch.testing.assert_close([batch for batch, _ in seen], plain, rtol=0, atol=0)
    torch.testing.assert_close(rest, plain[2:], rtol=0, atol=0)


def test_workers_that_live_on_are_refused_where_they_cannot_be_set_back() -> None:
    """This is after a pass, in the second one, and after batches that were dropped."""
    said = r"workers,? (which )?live on.*persistent_workers=False"
    with overlap(living(Rows()), [read, use], device="cpu") as loop:
        with pytest.warns(RuntimeWarning, match="will live on in the next pass") as told:
            assert [loop.state_dict()["batches"] for _ in loop] == list(range(1, 7))
        assert [one.filename for one in told] == [__file__]
        with pytest.raises(RuntimeError, match=said):
            loop.state_dict()
        for _ in loop:
            with pytest.raises(RuntimeError, match=said):
                loop.state_dict()
            assert loop.state_dict(check=False)["batches"] == 1
            break
        with pytest.raises(RuntimeError, match=f"{said}.*draws=False"):
            list(loop)
        assert loop.state_dict(rest=False, check=False)["batches"] == 0
    with overlap(living(Rows()), [read, use], pull_ahead=True, device="cpu") as loop:
        for _ in loop:
            break
        assert len(list(loop)) == 6


@pytest.mark.parametrize(("group", "early"), [("default", []), ("io", ["'b' changes log"])])
def test_a_worker_in_the_last_stage_may_have_run_ahead(group: str, early: list[str]) -> None:
    """The caller's thread has not: it returns the iteration."""
    plan = PipelinePlan(
        {"a": TaskSchedule(), "b": TaskSchedule(1, thread_group=group)}, deps=[("b", "a")]
    )
    pure = PipelineTask("a", print, pure=True)
    writes = PipelineTask("b", print, io=[DeclaredIO(state="log")])
    assert [*early_changes(plan, [pure, writes])] == early
