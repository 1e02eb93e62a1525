"""Whether the modules that a task runs have the mode, train or eval, that they always have."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

_MOST_KEPT = 4096
"""How many modules are added before those are dropped that are gone."""


class WatchedModes:
    """The modules that one task runs; its runs follow each other.

    While it runs, torch's global hook tells of each module that is called, on whatever thread. It
    is not installed where something is compiled: it would be compiled into what other threads run.

    Attributes:
        switched: The first module, the outermost one, that ran in another mode than before or
            after, or in an earlier iteration.
    """

    switched: Module | None = None

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Module], bool]] = {}  # with its mode
        self._most = _MOST_KEPT

    def __enter__(self) -> None:
        self._hook, self._ran = None, dict[int, Module]()
        self._modes = {number: module.training for number, module in self._alive()}
        if not something_is_compiled():
            thread = get_ident()

            def running(module: Module, inputs: Any) -> None:
                if get_ident() == thread:
                    self._run(module)

            self._hook = register_module_forward_pre_hook(running)

    def __exit__(self, *failure: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        for module in self._ran.values():
            self._compare(module)
        if len(self._known) > self._most:
            alive = dict(self._alive())
            self._known = {number: self._known[number] for number in alive}
            self._most = 2 * len(alive) + _MOST_KEPT

    def _run(self, module: Module) -> None:
        """A module is about to run."""
        self._modes.setdefault(id(module), module.training)
        self._ran[id(module)] = module
        self._compare(module)
        reference, mode = self._known.get(id(module), (None, module.training))
        if reference is not None and reference() is module and mode != module.training:
            self.switched = self.switched or module
        self._known[id(module)] = weakref.ref(module), module.training

    def _compare(self, module: Module) -> None:
        if self._modes[id(module)] != module.training:
            self.switched = self.switched or module

    def _alive(self) -> Iterator[tuple[int, Module]]:
        for number, (reference, _) in self._known.items():
            if (module := reference()) is not None:
                yield number, module


def something_is_compiled() -> bool:
    """Whether torch compiles functions in this process, as far as it has begun to."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # any optimizer loads it, and no more
    backends = getattr(compiler, "cached_backends", {0: compiler})
    return any(one is not None for one in backends.values())  # None: what is not to be compiled
