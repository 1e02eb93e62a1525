"""Functions that run millions of times: compiled by numba where it is there, as they stand if not.

Such a function takes and gives numbers, and arrays of numbers in named tuples; what else it calls
is compiled too. Compiled or not it does the same, to the last bit, some forty times as fast. The
first call of all compiles, for a minute or so; what comes of it is kept beside these modules,
and later processes load it in a few tenths of a second. While it runs, Python may run on other
threads: it holds no interpreter lock.

Importing this imports numba: import what uses it when it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar, cast

try:
    import numba
except ImportError:  # not installed, or not for the numpy that is
    COMPILED = False
else:
    COMPILED = not numba.config.DISABLE_JIT  # numba's own switch, NUMBA_DISABLE_JIT=1

_P = ParamSpec("_P")
_R = TypeVar("_R")

if TYPE_CHECKING:
    Whole: TypeAlias = list[int]
    Real: TypeAlias = list[float]
else:
    Whole = Real = object
"""Arrays of whole numbers and of real ones: numpy's where compiled, lists where not."""


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function compiled when it is first called."""
    if not COMPILED:
        return function
    config, given = numba.config, numba.config.CACHE_DIR
    config.CACHE_DIR = given or str(kept_in(Path(__file__).parent))
    try:
        # Nothing here makes arrays: to count who uses them would take most of the time.
        return cast(Callable[_P, _R], numba.njit(cache=True, nogil=True, _nrt=False)(function))
    finally:
        config.CACHE_DIR = given


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function compiled into whoever calls it: to hand arrays over would take longer."""
    if not COMPILED:
        return function
    return cast(Callable[_P, _R], numba.njit(inline="always", _nrt=False)(function))


def first_time() -> bool:
    """Whether nothing is compiled yet: the first call will take its time."""
    home = Path(__file__).parent
    return COMPILED and not numba.config.CACHE_DIR and not kept_in(home).exists()


@cache
def kept_in(home: Path) -> Path:
    """A folder for what comes of just these sources.

    Numba compiles functions into those that call them, but looks only at the caller's own file to
    tell whether what it kept is still true.
    """
    digest = hashlib.sha256()
    for source in sorted(home.glob("*.py")):
        digest.update(source.read_bytes())
    return home / "__pycache__" / f"compiled-{digest.hexdigest()[:16]}"


def whole(values: Iterable[int]) -> Whole:
    """An array of whole numbers."""
    return cast(Whole, _array(values, "int64"))


def real(values: Iterable[float]) -> Real:
    """An array of real numbers."""
    return cast(Real, _array(values, "float64"))


def wholes(size: int) -> Whole:
    """Room for so many whole numbers; all are 0."""
    return cast(Whole, _zeros(size, "int64") if COMPILED else [0] * size)


def reals(size: int) -> Real:
    """Room for so many real numbers; all are 0."""
    return cast(Real, _zeros(size, "float64") if COMPILED else [0.0] * size)


def _array(values: Iterable[float], kind: str) -> object:
    if not COMPILED:
        return list(values)
    import numpy as np

    return np.array(list(values), dtype=kind)


def _zeros(size: int, kind: str) -> object:
    import numpy as np

    return np.zeros(size, dtype=kind)
