"""A watch for the use of random generators within one call, even if no change is left of it.

    lines of a pull       state = get_rng_state()   manual_seed(3)   rand(8)   set_rng_state(state)
    the states            A                         B                C         A
                          └────────────────── compared after each line ─────────────────────────┘

A dataset that seeds a generator for a moment (``torch.random.fork_rng``, torchvision's
``FakeData``) leaves its state unchanged, so that the states before and after the call are equal.
Within the block, a trace function of this thread compares them after each line.

Assumptions
    - The use spans more than one line of code that is neither torch's nor Python's own.
    - The first 4,000 of these lines are representative, if the call leaves no change.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import torch

from swpipe.loops.pass_generators import PassGenerators, changed

_MOST_EVENTS = 4000

_LIBRARIES = (*(str(Path(str(module.__file__)).parent) for module in (torch, random)), "<frozen")
"""Folders of torch and Python, whose lines are not traced; the lines that call them are."""


class Use(NamedTuple):
    """A use of generators: their names, and a description of the code that was running."""

    names: frozenset[str]
    where: str


class GeneratorWatch:
    """A watch on the calling thread within the block; a debugger or profiler there goes first.

    Attributes:
        use: The use that was seen within the last block; None for no use.

    Args:
        generators: The generators of the loop.
    """

    def __init__(self, generators: PassGenerators) -> None:
        self.use: Use | None = None
        self._generators = generators

    def __enter__(self) -> Self:
        self.use = None
        self._left = _MOST_EVENTS  # how many more events are looked at
        self._names = self._generators.defaults
        self._before = self._generators.read(self._names)
        # Called with None, it ends the watch.
        self._end: Callable[[Any], object] = lambda _: None
        # A debugger occupies settrace. Then setprofile serves, which sees calls and not lines.
        if sys.gettrace() is None:
            sys.settrace(self._trace)
            self._end = sys.settrace
        elif sys.getprofile() is None:
            sys.setprofile(self._trace)
            self._end = sys.setprofile
        return self

    def __exit__(self, *failure: object) -> None:
        self._end(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call" and self._left > 0:
            # No local trace function for a library's frame: its lines would only cost time.
            return None if frame.f_code.co_filename.startswith(_LIBRARIES) else self._trace
        self._left -= 1
        # The first use is enough, and each further event would cost a comparison.
        if self._left <= 0 or self.use is not None:
            self._end(None)
            return None
        names = changed(self._before, self._generators.read(self._names))
        if names:
            code = frame.f_code
            self.use = Use(names, f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
        return self._trace
