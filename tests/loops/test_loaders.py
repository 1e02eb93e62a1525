"""``swpipe.overlap``: what a loader counts, draws and keeps is as in the plain loop, or told."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import swpipe
from swpipe import PipelineTask
from swpipe.loops.overlapping import OverlappedLoop
from tests.loops import loader_passes  # noqa: F401 - adds its scripts
from tests.loops.loader_loops import AHEAD, REFUSED, SERIAL, Over, Script
from tests.loops.ordinary_loops import NoisyRows, Training, batches


class Plain:
    """A plain loop, as an iterable of contexts."""

    def __init__(self, loader: Any, functions: list[Any]) -> None:
        self.loader, self.functions, self.count = loader, functions, 0

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *failure: object) -> None:
        """Nothing."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            ctx = SimpleNamespace(batch=batch, iter_idx=self.count)
            self.count += 1
            for function in self.functions:
                function(ctx)
            yield ctx


class Overlapped:
    """Makes overlapped loops, and keeps them."""

    def __init__(self) -> None:
        self.loops: list[OverlappedLoop[Any]] = []

    def __call__(self, loader: Any, functions: list[Any]) -> OverlappedLoop[Any]:
        self.loops.append(swpipe.overlap(loader, functions, device="cpu"))
        return self.loops[-1]


def numbers(script: Script, over: Over) -> Any:
    """All that the script has, and what the generators draw next."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    found = script(over)
    return [found, torch.rand(1), random.random(), float(np.random.rand())]


def same(found: Any, expected: Any) -> None:
    """Every number is the same."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", AHEAD)
def test_a_loader_runs_ahead_and_the_numbers_are_the_same(name: str) -> None:
    """Whatever it counts and draws, and wherever the loop is left."""
    over = Overlapped()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "nothing runs ahead")
        found = numbers(AHEAD[name], over)
    same(found, numbers(AHEAD[name], Plain))
    assert all(loop.overlap.loader_ahead for loop in over.loops)


@pytest.mark.parametrize("name", SERIAL)
def test_a_loader_that_cannot_run_ahead_is_told(name: str) -> None:
    """And the numbers are the same."""
    script, why = SERIAL[name]
    with pytest.warns(RuntimeWarning, match=f"(?s)nothing runs ahead: .*{why}"):
        found = numbers(script, Overlapped())
    same(found, numbers(script, Plain))


@pytest.mark.parametrize("name", REFUSED)
def test_what_comes_too_late_is_an_error(name: str) -> None:
    """It is said what it is, and what to do."""
    script, why = REFUSED[name]
    with pytest.raises((RuntimeError, ValueError), match=why):
        numbers(script, Overlapped())


def test_there_are_many_scripts() -> None:
    """Of each kind."""
    assert len(AHEAD) >= 25
    assert len(SERIAL) + len(REFUSED) >= 25


def test_a_body_may_draw_beside_tasks_that_are_seeded() -> None:
    """They stay with the body, so that neither changes the numbers of the other."""

    def noise(ctx: Any) -> None:
        ctx.x = ctx.x + torch.rand(4)

    parts = Training()
    functions: list[Any] = parts.functions()
    functions.insert(1, PipelineTask("noise", noise, random=True))
    torch.manual_seed(5)
    with swpipe.overlap(batches(), functions, device="cpu", seed=3) as loop:
        drawn = [(float(ctx.x.sum()), float(torch.rand(1))) for ctx in loop]
    torch.manual_seed(5)
    plan = swpipe.PipelinePlan.serial(["decode", "noise"])
    tasks = [swpipe.task(functions[0]), functions[1]]
    with swpipe.SWPipeline(plan, tasks, device="cpu", seed=3) as pipe:
        expected = [(float(c.x.sum()), float(torch.rand(1))) for c in pipe.iterate(batches())]
    assert drawn == expected


def test_a_task_that_counts_stays_with_the_body() -> None:
    """The reason is told."""
    parts, rows = Training(), {"count": 0}

    def decode(ctx: Any) -> None:
        rows["count"] += len(ctx.batch)
        ctx.x = ctx.batch

    with swpipe.overlap(batches(), parts.functions(decode=decode), device="cpu") as loop:
        assert loop.overlap.ahead == ()
        assert loop.overlap.loader_ahead
        assert "'decode' changes rows, which the loop's body may use." in loop.overlap.why


def test_a_loop_that_is_left_and_forgotten_keeps_no_thread() -> None:
    """Also over an iterator, whose batches are kept for the next pass."""
    endless = (torch.ones(2, 4) for _ in iter(int, 1))
    for ctx in swpipe.overlap(endless, Training().functions(), device="cpu"):
        if ctx.iter_idx == 2:
            break
    assert next(endless).shape == (2, 4)


def test_errors_of_loader_and_tasks_say_where_they_come_from() -> None:
    """The batch of the pass, and the task and its iteration."""

    def decode(ctx: Any) -> None:
        ctx.x = ctx.batch.reshape(4, 4)

    functions = Training().functions(decode=decode)
    with swpipe.overlap(batches(), functions, device="cpu") as loop:
        with pytest.raises(RuntimeError) as raised:
            list(loop)
        assert "swpipe: raised by task 'decode', iteration 5" in raised.value.__notes__

    def loader() -> Iterator[torch.Tensor]:
        yield torch.ones(4, 4)
        raise OSError("disk")

    with swpipe.overlap(loader(), functions, device="cpu") as loop:
        with pytest.raises(OSError, match="disk") as failed:
            list(loop)
        assert "swpipe: raised by the pull of batch 1 of the pass" in failed.value.__notes__


def test_a_stopped_job_goes_on_with_the_numbers_that_the_body_had() -> None:
    """A state saved in the body has the generators of the plain loop."""

    def job(saved: Any = None) -> Any:
        parts, states = Training(), list[Any]()
        random.seed(3)
        torch.manual_seed(3)
        with swpipe.overlap(batches(NoisyRows()), parts.functions(), device="cpu") as loop:
            if saved is not None:
                loop.load_state_dict(saved)
            for ctx in loop:
                states.append((ctx.batch, random.getstate(), loop.state_dict()))
        return states

    first = job()
    again = job(first[2][2])
    same([state[:2] for state in again], [state[:2] for state in first[3:]])
