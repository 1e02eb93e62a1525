"""A damaged or foreign state is refused with a message, or it could be a state of the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import swpipe
from swpipe.loops import OverlappedLoop
from tests.loops.ordinary_loops import Rows, StatefulRows, torchdata

# Told where the body draws, too; test_draws looks at it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the loop, a task or its body, draws", "ignore:the state of the loader"
)


LOADERS: dict[str, Callable[[], Any]] = {
    "a tuple": lambda: Rows().rows.split(4),
    "a state of its own": StatefulRows,
    "torchdata": torchdata,
}


@swpipe.task(pure=True)
def decode(ctx: Any) -> None:
    """Use the context alone."""
    ctx.x = ctx.batch * 2


def made(name: str) -> OverlappedLoop[Any]:
    """Return a loop over one of the loaders."""
    return swpipe.overlap(
        LOADERS[name](), [decode], pull_ahead=True, device="cpu", seed=3, check_effects=False
    )


@cache
def saved(name: str) -> tuple[dict[str, Any], ...]:
    """Return states from the middle of a pass, and from its end."""
    torch.manual_seed(3)
    with made(name) as loop:
        states = [copy.deepcopy(loop.state_dict()) for _ in loop]
    return states[2], states[-1]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each part of a state, and to the first items of a sequence."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))[:3]
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy with the value at a path changed or removed."""
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
    """Mark a part that ``replaced`` has to remove."""
    return None


CHANGES: tuple[Callable[[Any], Any], ...] = (without, lambda _: 5)


@pytest.mark.parametrize("name", LOADERS)
def test_a_damaged_state_is_refused_in_words(name: str) -> None:
    """One part is another value, or missing; a state that is accepted can be continued."""
    taken = 0
    loop = made(name)
    for state in saved(name):
        for path, change in product(places(state), CHANGES):
            try:
                loop.load_state_dict(replaced(state, path, change))
            except ValueError as error:
                told = str(error)
            else:
                told = "it was taken, and leads to the rest of the pass"
                taken += 1
                if path[:1] not in (("loader",), ("loader_at_start",)):  # the loader's own
                    assert all(ctx.x.shape[1] == 4 for ctx in loop)
                loop.close()
                loop = made(name)
            assert len(told.split()) > 6, path
    loop.close()
    assert taken > 0


def test_a_state_of_another_version_is_refused() -> None:
    """The error names the version."""
    with made("a tuple") as loop:
        with pytest.raises(ValueError, match="its version is 99, and this swpipe has 5"):
            loop.load_state_dict(saved("a tuple")[0] | {"version": 99})
