"""The number of random examples of a test: a few fixed ones, or, every night, many new ones.

Every test that draws examples takes their number, and its seeds, from here.

    SWPIPE_EXAMPLES_FACTOR   multiplies the numbers. With 1, the default, the examples are the same
                             in each run
    SWPIPE_EXAMPLES_SEED     where the examples begin. If the factor is above 1, the default is a
                             new seed for each run of pytest, which prints it
    SWPIPE_EXAMPLES_LOG      a file; each process appends how many examples of each kind it has run
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])

FACTOR = int(os.environ.get("SWPIPE_EXAMPLES_FACTOR", "1"))

if FACTOR > 1:  # the workers of xdist inherit it: all of them must collect the same tests
    os.environ.setdefault("SWPIPE_EXAMPLES_SEED", str(random.SystemRandom().randrange(2**31)))

SEED = int(os.environ["SWPIPE_EXAMPLES_SEED"]) if "SWPIPE_EXAMPLES_SEED" in os.environ else None
"""The seed, or None for the fixed examples."""

_counts: Counter[str] = Counter()


def seeds(kind: str, number: int) -> Iterator[int]:
    """Yield seeds of random examples, and count them.

    Args:
        kind: The kind of examples: "plans", "loops", "endings" and so on.
        number: The number of examples in the quick suite.
    """
    begin = SEED or 0
    for seed in range(begin, begin + number * FACTOR):
        _counts[kind] += 1
        yield seed


def examples(kind: str, number: int, **options: Any) -> Callable[[T], T]:
    """Return a decorator that lets hypothesis run so many examples; put it above ``given``.

    Args:
        kind: See ``seeds``.
        number: See ``seeds``.
        options: Further settings of hypothesis.
    """
    from hypothesis import seed, settings  # a GPU machine's own packages may lack it

    def decorate(test: T) -> T:
        handle: Any = test
        inner = handle.hypothesis.inner_test

        @wraps(inner)
        def counted(*args: Any, **given: Any) -> None:
            _counts[kind] += 1
            inner(*args, **given)

        handle.hypothesis.inner_test = counted
        fixed = SEED is None
        drawn = settings(max_examples=number * FACTOR, derandomize=fixed, **options)(test)
        return pytest.mark.examples(drawn if fixed else seed(f"{SEED} {inner.__name__}")(drawn))

    return decorate


def log() -> None:
    """Append what this process has run to the log, if there is one."""
    if _counts and (name := os.environ.get("SWPIPE_EXAMPLES_LOG")):
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_counts) + "\n")
