"""A pass over a loop begins as in a plain loop: at ``iter``; batches come later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import swpipe
from swpipe import PipelinePlan, SWPipeline
from swpipe.loops import ResumableLoop

pytestmark = pytest.mark.filterwarnings("ignore:the loop, a task or its body, draws")

Wrap = Callable[[Any], Iterable[Any]]


@swpipe.task
def nothing(ctx: Any) -> None:
    """Do nothing."""


def overlapped(loader: Any) -> Any:
    """Return an overlapped loop whose loader is pulled ahead."""
    return swpipe.overlap(loader, [nothing], pull_ahead=True, device="cpu")


def in_a_plan(loader: Any) -> Any:
    """Return a resumable loop over a serial pipeline."""
    return ResumableLoop(SWPipeline(PipelinePlan.serial([nothing]), device="cpu"), loader)


def shuffled(workers: int = 0) -> DataLoader[Any]:
    """Return a loader that draws a seed when a pass begins, and with the first batch."""
    return DataLoader(torch.arange(8), batch_size=2, shuffle=True, num_workers=workers)


def rows(contexts: Iterable[Any]) -> list[Any]:
    """Return the batches as lists, from contexts or from a plain loop."""
    return [getattr(one, "batch", one).tolist() for one in contexts]


def zipped(wrap: Wrap, workers: int) -> list[Any]:
    return [rows(both) for both in zip(wrap(shuffled(workers)), shuffled(), strict=True)]


def drawn_between(wrap: Wrap, workers: int) -> list[Any]:
    contexts = iter(wrap(shuffled(workers)))
    torch.rand(1)
    return rows(contexts)


def begun_twice(wrap: Wrap, workers: int) -> list[Any]:
    loader = wrap(shuffled(workers))
    first, second = iter(loader), iter(loader)
    return [*rows(first), *rows(second)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("script", [zipped, drawn_between, begun_twice])
def test_a_pass_begins_at_iter(script: Callable[..., Any], workers: int) -> None:
    """Its draws, and those of others, come in the order of a plain loop."""

    def numbers(wrap: Wrap) -> Any:
        torch.manual_seed(0)
        return script(wrap, workers), torch.rand(1)

    expected = numbers(lambda loader: loader)
    assert numbers(overlapped) == expected
    assert numbers(in_a_plan) == expected


class Counting:
    """A loader that records the calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __iter__(self) -> Iterator[Tensor]:
        self.told.append("begun")
        return map(self.batch, range(4))

    def batch(self, number: int) -> Tensor:
        self.told.append("pulled")
        return torch.tensor([number])


@pytest.mark.parametrize("wrap", [overlapped, in_a_plan])
def test_batches_are_pulled_when_they_are_asked_for(wrap: Wrap) -> None:
    """None is pulled at the beginning."""
    loader = Counting()
    contexts = iter(wrap(loader))
    assert loader.told == ["begun"]
    assert rows(contexts) == [[0], [1], [2], [3]]
    assert loader.told == ["begun", *["pulled"] * 4]


def test_a_pass_that_is_asked_for_nothing_leaves_nothing() -> None:
    """A trainer checks in this way whether something iterates; it knows DataLoaders."""
    torch.manual_seed(0)
    expected = rows(shuffled())
    torch.manual_seed(0)
    with overlapped(shuffled()) as loop:
        iter(loop)
        loop.state_dict()
        assert rows(loop) == expected


def test_two_passes_take_turns() -> None:
    """The second pass begins when the first has ended; by its length, if nobody asks."""
    with overlapped([torch.tensor([0]), torch.tensor([1])]) as loop:
        first, second = iter(loop), iter(loop)
        assert rows([next(first)]) == [[0]]
        with pytest.raises(RuntimeError, match="a pass over this loop has not ended"):
            next(second)
        second = iter(loop)
        assert rows([next(first)]) == [[1]]
        assert rows([next(iter(loop))]) == [[0]]
        assert rows(first) == []
        assert rows(second) == [[0], [1]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [overlapped, in_a_plan])
def test_a_state_of_a_pass_that_has_begun_leads_back_to_it(wrap: Wrap, workers: int) -> None:
    """It has its shuffle, and the draws since."""
    torch.manual_seed(0)
    loop: Any = wrap(shuffled(workers))
    contexts = iter(loop)
    drawn = torch.rand(1)
    state = loop.state_dict()
    expected = rows(contexts), torch.rand(1)
    torch.manual_seed(1)
    again: Any = wrap(shuffled(workers))
    again.load_state_dict(state)
    assert (rows(again), torch.rand(1)) == expected
    assert drawn != expected[1]


def test_an_iterator_that_was_begun_twice_is_one() -> None:
    """This is as in a plain loop."""
    with overlapped(torch.tensor([number]) for number in range(5)) as loop:
        first, second = iter(loop), iter(loop)
        assert rows([next(first), next(first)]) == [[0], [1]]
        del second
        assert rows([next(first)]) == [[2]]
        del first
        assert rows(loop) == [[3], [4]]
