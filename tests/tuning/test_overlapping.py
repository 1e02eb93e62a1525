"""``swpipe.overlap``: ordinary loops run overlapped, and give the numbers of the plain loop."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import swpipe
from swpipe import PipelineTask
from tests.tuning.ordinary_loops import LOOPS, Loop, StopTraining, Training, batches

CURRICULA = {"a curriculum", "a curriculum in a generator", "a curriculum in a map"}
SERIAL = {*CURRICULA, "augmentation and dropout", "noise in a map and dropout"}
REFUSED = {"a hidden draw and dropout"}


def made(name: str) -> Loop:
    """The loop, with the generators as at the beginning of a script."""
    torch.manual_seed(11)
    random.seed(11)
    return LOOPS[name]()


def plain(loop: Loop) -> Iterator[Any]:
    """One pass of a plain loop."""
    for batch in loop.loader:
        ctx = SimpleNamespace(batch=batch, iter_idx=loop.count)  # type: ignore[attr-defined]
        for function in loop.functions:
            function(ctx)
        loop.count += 1  # type: ignore[attr-defined]
        yield ctx


def run(loop: Loop, passes: Iterable[Iterable[Any]]) -> list[Any]:
    """Run the loop's body on each context; returns the losses, and all that the loop leaves."""
    losses = []
    try:
        for contexts in passes:
            for ctx in contexts:
                losses.append(ctx.loss.detach().clone())
                loop.body(ctx)
            loop.after_epoch()
    except StopTraining:
        contexts.close()  # type: ignore[attr-defined]
    return [losses, loop.state()]


def run_plain(loop: Loop) -> list[Any]:
    """As a plain loop."""
    loop.count = 0  # type: ignore[attr-defined]
    return run(loop, (plain(loop) for _ in range(loop.epochs)))


def run_overlapped(loop: Loop, **options: Any) -> list[Any]:
    """With one call more."""
    with swpipe.overlap(loop.loader, loop.functions, device="cpu", **options) as overlapped:
        return run(loop, (iter(overlapped) for _ in range(loop.epochs)))


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in REFUSED])
def test_the_numbers_are_those_of_the_plain_loop(name: str) -> None:
    """Losses, parameters, optimizers, counters and random states; most loops overlap."""
    expected, generators = run_plain(made(name)), (torch.get_rng_state(), random.getstate())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_overlapped(made(name))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [str(one.message).startswith("nothing runs ahead") for one in caught] == [True] * (
        name in SERIAL
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in {*REFUSED, *SERIAL}])
def test_a_check_finds_nothing_that_the_recording_did_not(name: str) -> None:
    """Whatever the loop does later; and the numbers are the same again."""
    found = run_overlapped(made(name), check_effects=True)
    torch.testing.assert_close(found, run_plain(made(name)), rtol=0, atol=0, equal_nan=True)


def test_there_are_forty_loops() -> None:
    """And more."""
    assert len(LOOPS) >= 40


def test_what_runs_ahead_is_told_and_why_the_rest_does_not() -> None:
    """Decoding does; the rest uses the model."""
    loop = made("a plain loader")
    with swpipe.overlap(loop.loader, loop.functions, device="cpu") as overlapped:
        assert overlapped.overlap.ahead == ("decode",)
        assert overlapped.overlap.loader_ahead
        assert str(overlapped.overlap).startswith("ahead: the loader, decode\n'forward' uses ")
        assert overlapped.overlap.plan.pull_group == "loader"
        assert len(overlapped) == 6


@pytest.mark.parametrize("name", sorted(CURRICULA))
def test_a_loader_that_shares_something_with_a_task_is_not_ahead(name: str) -> None:
    """A warning names what they share."""
    loop = made(name)
    reason = "The loader and 'harder' may both use .*Python value .*level"
    with pytest.warns(RuntimeWarning, match=reason):
        overlapped = swpipe.overlap(loop.loader, loop.functions, device="cpu")
    assert overlapped.overlap.plan.depth == 1
    overlapped.close()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_loader_that_draws_what_a_task_draws_is_refused(name: str) -> None:
    """With what to do: the plain loop draws in turn."""
    loop = made(name)
    with pytest.raises(ValueError, match=r"the loader and 'forward' both draw from state .*torch"):
        swpipe.overlap(loop.loader, loop.functions, device="cpu")


def test_a_loop_that_is_left_can_be_begun_again() -> None:
    """Batches that were pulled ahead are dropped, as those of a DataLoader's workers are."""
    parts = Training()
    with swpipe.overlap(batches(), parts.functions(), device="cpu") as overlapped:
        for ctx in overlapped:
            if ctx.iter_idx == 1:
                break
        del ctx
        assert overlapped.pipe.in_flight == 0
        before = copy.deepcopy(parts.model.state_dict())
        numbers = [ctx.iter_idx for ctx in overlapped]
        assert numbers == [2, 3, 4, 5, 6, 7]
        assert not torch.equal(parts.model.state_dict()["0.weight"], before["0.weight"])


def test_a_loop_may_be_closed_before_it_is_left() -> None:
    """A pass that is left after that has nothing to drop."""
    overlapped = swpipe.overlap(batches(), Training().functions(), device="cpu")
    contexts = iter(overlapped)
    next(contexts)
    overlapped.close()
    contexts.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(overlapped))


class Told(swpipe.Observer):
    """Which tasks of which iteration ended, and on which thread."""

    def __init__(self) -> None:
        self.threads: dict[int, dict[str, int]] = {}

    def stop(self, ins: Any, iteration: int, exists: bool = True) -> None:
        if exists:
            self.threads.setdefault(iteration, {})[ins.task] = threading.get_ident()


def test_an_observer_was_told_of_all_tasks_of_the_iteration_that_the_body_gets() -> None:
    """By the context's number, also after a pass that was left; each on its own thread."""
    told, numbers = Told(), []
    here = {"<admit>", "forward", "backward", "step", "<retire>"}
    loop = swpipe.overlap(batches(), Training().functions(), device="cpu")
    with loop, loop.pipe.observe(told):
        for last in (2, 8):
            for ctx in loop:
                threads = told.threads.pop(ctx.iter_idx)
                numbers.append(ctx.iter_idx)
                assert threads.keys() == {*here, "<pull>", "decode"}
                mine = threading.get_ident()
                assert {name for name, thread in threads.items() if thread == mine} == here
                if ctx.iter_idx == last:
                    break
    assert numbers == list(range(9))


def test_tasks_and_functions_may_be_mixed() -> None:
    """A random task is seeded by its iteration."""
    parts = Training()
    noise = PipelineTask("noise", lambda ctx: setattr(ctx, "x", ctx.x + torch.rand(4)), random=True)
    functions = parts.functions()
    loop = swpipe.overlap(batches(), [functions[0], noise, *functions[1:]], device="cpu", seed=3)
    with loop:
        assert loop.overlap.ahead == ("decode",)
        reason = "'noise' draws random numbers, and so may the loop's body."
        assert reason in loop.overlap.why
        assert len(list(loop)) == 6


def test_a_task_that_uses_what_the_callers_thread_has_is_not_ahead() -> None:
    """It would find nothing on the thread that runs ahead."""
    held = threading.local()
    held.scale = 2.0
    scale = PipelineTask("scale", lambda ctx: setattr(ctx, "y", ctx.batch[0] * held.scale))
    with swpipe.overlap(batches(), [*Training().functions(), scale], device="cpu") as loop:
        assert loop.overlap.ahead == ("decode",)
        assert "'scale' uses state 'held', of which each thread has its own." in loop.overlap.why
        assert len(list(loop)) == 6


def test_mistakes_are_refused() -> None:
    """An empty loader, something that is no task, no tasks."""
    with pytest.raises(ValueError, match="the loader has no batch"):
        swpipe.overlap([], Training().functions(), device="cpu")
    with pytest.raises(TypeError, match="has no name for a task"):
        swpipe.overlap([1], [lambda ctx: None], device="cpu")
    with pytest.raises(TypeError, match="a task is a function of the context, not 3"):
        swpipe.overlap([1], [3], device="cpu")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give the tasks.* in a list"):
        swpipe.overlap([1], Training().functions()[0], device="cpu")  # type: ignore[arg-type]
    with pytest.raises(swpipe.PlanError, match="there are no tasks to record"):
        swpipe.overlap([1], [], device="cpu")


class RowsContext(swpipe.TypedContext):
    """The contexts of a user."""

    x: torch.Tensor
    loss: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.batch)


def test_contexts_may_be_of_a_class_of_the_users() -> None:
    """Recorded and overlapped."""
    parts = Training()
    loop = swpipe.overlap(batches(), parts.functions(), device="cpu", context=RowsContext)
    with loop:
        assert loop.overlap.ahead == ("decode",)
        assert [ctx.rows for ctx in loop] == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("name", ["a list", "a curriculum"])
def test_a_second_pass_beside_the_first_is_refused(name: str) -> None:
    """It dropped what the first one had in flight; also where the plan is serial."""
    loop = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overlapped = swpipe.overlap(loop.loader, loop.functions, device="cpu")
    with overlapped:
        first = iter(overlapped)
        numbers = [next(first).iter_idx]
        with pytest.raises(RuntimeError, match="a pass over this loop has not ended"):
            next(iter(overlapped))
        with pytest.raises(RuntimeError, match="a pass over this loop has not ended"):
            overlapped.load_state_dict(overlapped.state_dict())
        assert [*numbers, *(ctx.iter_idx for ctx in first)] == [0, 1, 2, 3, 4, 5]
