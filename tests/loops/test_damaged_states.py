"""A state that is damaged, or of another loop, is refused in words, or is one that could be."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy.random
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import swpipe
from swpipe.loops import OverlappedLoop
from tests.loops.ordinary_loops import (
    NoisyRows,
    Rows,
    StatefulRows,
    batches,
    torchdata,
    with_generator,
)

# Told of any loader that draws in this process; test_overlapping looks at it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the loader draws from", "ignore:the state of the loader"
)


class WithNumpy(Rows):
    """It draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = numpy.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(self.draws.random())


LOADERS: dict[str, Callable[[], Any]] = {
    "a tuple": lambda: Rows().rows.split(4),
    "a given generator": lambda: batches(NoisyRows(), shuffle=True, generator=with_generator()),
    "a state of its own": StatefulRows,
    "torchdata": torchdata,
    "a generator of numpy's": lambda: batches(WithNumpy()),
}


@swpipe.task(pure=True)
def decode(ctx: Any) -> None:
    """Uses the context alone."""
    ctx.x = ctx.batch * 2


def made(name: str) -> OverlappedLoop[Any]:
    """A loop over one of the loaders."""
    return swpipe.overlap(
        LOADERS[name](), [decode], pull_ahead=True, device="cpu", seed=3, check_effects=False
    )


@cache
def saved(name: str) -> tuple[dict[str, Any], ...]:
    """States from the middle of a pass, and from between two passes."""
    torch.manual_seed(3)
    random.seed(3)
    with made(name) as loop:
        states = [copy.deepcopy(loop.state_dict()) for _ in loop]
        return states[2], states[-1], loop.state_dict()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each part of a state; of a long sequence, to a few of its items."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))[:3]
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A copy with another value at a path, or without it."""
    if not path:
        return change(value)
    key, *rest = path
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = {
        k: replaced(one, tuple(rest), change) if k == key else one
        for k, one in pairs
        if not (k == key and not rest and change is without)
    }
    return found if isinstance(value, dict) else type(value)(found.values())


def without(value: Any) -> Any:
    """Stands for nothing."""
    return None


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 2**31, 2**63, 2**64, 10**400, sys.maxsize, 5, 7]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.builds(torch.zeros, st.integers(0, 3)),
    st.sampled_from([torch.zeros(5056, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]),
    st.sampled_from([object(), torch.nan, {1, 2}, ("MT19937", [1], 2, 0, 0.0)]),
)


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_state_is_refused_in_words(name: str, data: st.DataObject) -> None:
    """Any part is another value, or is missing; what is taken can be gone on with."""
    state = data.draw(st.sampled_from(saved(name)))
    path = data.draw(st.sampled_from([*places(state)]))
    new = data.draw(VALUES)
    change = data.draw(st.sampled_from([without, lambda value: new]))
    damaged = replaced(state, path, change)
    with made(name) as loop:
        told = "taken: the rest of the pass is there"
        try:
            loop.load_state_dict(damaged)
            if path[:1] not in (("loader",), ("loader_at_start",)):  # the loader's own
                assert all(ctx.x.shape[1] == 4 for ctx in loop)
        except ValueError as error:
            told = str(error)
    assert len(told.split()) > 6


def test_a_state_of_another_version_is_refused() -> None:
    """It is said which."""
    with made("a tuple") as loop:
        with pytest.raises(ValueError, match="its version is 99, and this swpipe has 3"):
            loop.load_state_dict(saved("a tuple")[0] | {"version": 99})
