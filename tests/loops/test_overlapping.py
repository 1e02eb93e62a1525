"""``swpipe.overlap``: what runs ahead, what is reported, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

import swpipe
from swpipe import PipelineTask
from swpipe.pipeline import settle
from tests.loops.ordinary_loops import Training, batches

# Told where the body draws, too; test_draws looks at it.
pytestmark = pytest.mark.filterwarnings("ignore:the loop, a task or its body, draws")


def measured() -> PipelineTask:
    """Return a pure task."""
    return PipelineTask("measure", lambda ctx: None, pure=True)


def train(ctx: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("functions", "ahead", "told"),
    [
        (
            Training().tasks(),
            ("decode",),
            "ahead: the loader, decode in turn: forward, backward, step - 'forward', 'backward',",
        ),
        ([measured()], ("measure",), "ahead: the loader, measure"),
        (
            [*Training().functions(), measured()],
            (),
            "'measure': pure, and comes after 'decode', which runs in turn",
        ),
        (
            [train, measured()],
            (),
            "If 'train' uses its context and what nobody changes while the loop runs, no model",
        ),
    ],
)
def test_what_runs_ahead_is_told_and_what_to_say_of_the_rest(
    functions: list[Any], ahead: tuple[str, ...], told: str
) -> None:
    """A task that runs ahead is on another thread, including the last one."""
    rows = [torch.ones(2, 4) for _ in range(5)]
    with swpipe.overlap(rows, functions, device="cpu") as loop:
        assert loop.overlap.ahead == ahead
        assert told in " ".join(str(loop.overlap).split())
        assert loop.overlap.plan.pull_group == "loader"
        assert (len(loop), len(list(loop))) == (5, 5)


@pytest.mark.parametrize(("tasks", "ahead"), [([train], 2), ([measured(), train], 3)])
def test_two_batches_are_pulled_ahead_and_three_where_tasks_run_ahead(
    tasks: list[Any], ahead: int
) -> None:
    """One is ready while the next is pulled: neither thread waits at every batch."""
    pulled: list[int] = []

    def loader() -> Iterator[int]:
        for number in range(9):
            pulled.append(number)
            yield number

    with swpipe.overlap(loader(), tasks, pull_ahead=True, draws=True, device="cpu") as loop:
        for number, _ in enumerate(loop, 1):
            settle(loop.pipe)
            assert len(pulled) == min(9, number + ahead)


class Own(DataLoader[Any]):
    """A subclass of ``DataLoader``, as libraries have them."""


ROWS = torch.rand(8, 2)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(ROWS), r"makes its batches in this process.*num_workers=1"),
        (Own(ROWS, num_workers=1), r"\(Own\) is of a class of which it is not known.*torch's own"),
        (
            iter(DataLoader(ROWS)),
            r"is an iterator of a DataLoader.*DataLoader itself, with workers",
        ),
        (
            DataLoader(ROWS, num_workers=1, sampler=SubsetRandomSampler([1, 2])),
            "has indices in a list or tensor, which the loop may change.*a tuple or range",
        ),
        (
            DataLoader(ROWS, num_workers=1, sampler=[1, 2]),
            r"has a sampler \(list\) that may read what the loop changes",
        ),
    ],
)
def test_why_a_loader_is_in_turn_is_told_as_it_is(loader: Any, why: str) -> None:
    """The task that the loader would be ahead of needs no declaration."""
    with pytest.warns(
        RuntimeWarning, match=f"nothing runs ahead: .*{why}.*pull_ahead=True"
    ) as told:
        swpipe.overlap(loader, [nothing()], device="cpu").close()
    assert "may run ahead" not in str(told[0].message)


@pytest.mark.parametrize("pull_ahead", [True, False])
def test_a_loop_may_be_closed_before_it_is_left(pull_ahead: bool) -> None:
    """A pass that is left later has nothing to drop."""
    tasks = Training().tasks()
    overlapped = swpipe.overlap(batches(), tasks, pull_ahead=pull_ahead, device="cpu")
    contexts = iter(overlapped)
    next(contexts)
    overlapped.close()
    contexts.close()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(overlapped))


def test_a_random_task_stays_with_the_body_which_may_draw() -> None:
    """All threads share torch's default generators, which it seeds; the message says what to do."""

    def noise(ctx: Any) -> None:
        ctx.x = ctx.x + torch.rand(4)

    def drawn(**options: Any) -> Any:
        functions = Training().tasks()
        functions.insert(1, PipelineTask("noise", noise, random=True, pure=True))
        torch.manual_seed(5)
        with swpipe.overlap(batches(), functions, device="cpu", seed=3, **options) as loop:
            found = [(ctx.x.sum(), torch.rand(1)) for _ in range(2) for ctx in loop]
            return loop.overlap, found

    ahead, found = drawn(pull_ahead=True)
    nothing, expected = drawn(pull_ahead=False)
    assert (ahead.ahead, nothing.ahead) == (("decode",), ())
    assert "'noise': random, and draws from torch's default generators" in str(ahead)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("replayed", [["decode"], ["decode", "scale"], ["scale"], ["train"]])
def test_tasks_that_run_ahead_may_be_shortcut(replayed: list[str]) -> None:
    """They then got no batch, or left none."""
    decode = PipelineTask("decode", lambda ctx: setattr(ctx, "x", ctx.batch + 1), pure=True)
    scale = PipelineTask("scale", lambda ctx: setattr(ctx, "x", 2 * ctx.x), pure=True)
    train = PipelineTask("train", lambda ctx: setattr(ctx, "loss", ctx.x.sum()))
    batches = [torch.ones(2) for _ in range(9)]
    with swpipe.overlap(batches, [decode, scale, train], device="cpu") as loop:
        with loop.pipe.shortcut(*replayed):
            assert [ctx.loss.item() for ctx in loop] == [8.0] * 9
        assert [ctx.loss.item() for ctx in loop] == [8.0] * 9


def nothing() -> PipelineTask:
    """Do nothing."""
    return PipelineTask("nothing", lambda ctx: None)
