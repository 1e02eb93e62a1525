"""Values become plain data, and values again."""

from __future__ import annotations

import io
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from swpipe.tuning.plain_values import made_from, plain

VALUES: list[Any] = [
    1,
    None,
    b"x",
    [1, ("a", {3})],
    {"a": {1: 2.5}},
    deque([1, 2]),
    np.int64(4),
    np.arange(6).reshape(2, 3),
    np.array([True]),
    torch.arange(3),
]


def written_and_read(value: Any) -> Any:
    """After it was plain data in a file."""
    file = io.BytesIO()
    torch.save(plain(value), file)
    file.seek(0)
    return made_from(torch.load(file, weights_only=True))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back(value: Any) -> None:
    """Of the same type."""
    found = written_and_read(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.Generator, lambda it: torch.rand(3, generator=it).tolist()),
    "Python": (lambda: random.Random(3), lambda it: it.gauss(0, 1)),
    "numpy": (lambda: np.random.default_rng(3), lambda it: it.normal()),
    "numpy, another": (lambda: np.random.Generator(np.random.SFC64(3)), lambda it: it.normal()),
    "numpy, old": (lambda: np.random.RandomState(3), lambda it: it.randn()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_goes_on(name: str) -> None:
    """Also with the second of two numbers that it has made together."""
    make, draw = GENERATORS[name]
    generator = make()
    draw(generator)
    found = written_and_read(generator)
    assert [draw(found) for _ in range(3)] == [draw(generator) for _ in range(3)]


@pytest.mark.parametrize(
    "value", [object(), [object()], torch.nn.Linear(1, 1), np.array([object()]), torch.ones(2**23)]
)
def test_anything_else_is_none(value: Any) -> None:
    """Nor is what is large."""
    with pytest.raises(TypeError):
        plain(value)
