"""The modules that a task runs, and the switches of their mode, train or eval.

A task that evaluates in mid-epoch leaves the mode as it found it and changes no parameter; but
another task that runs the module at the same time would run it in the wrong mode. The switch itself
is not seen, only the mode of each module when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook


class ModuleModes:
    """The modules that one task runs; the task's runs follow each other.

    While the task runs, torch's global hook reports each module that is called. The hook is not
    installed if something is compiled: it would be compiled into what other threads run.

    Args:
        modules: Modules whose mode is compared although the task may not run them.
        eager: Whether nothing compiled runs meanwhile.

    Attributes:
        ran: The modules that the last run called, outermost first.
        switched: The modules whose mode differed within a run or from an earlier run, outermost
            first.
    """

    def __init__(self, modules: Iterable[Module] = (), *, eager: bool = False) -> None:
        self._given = [*modules]
        # The mode in which each module ran last.
        self._last = WeakKeyDictionary({module: module.training for module in self._given})
        self._eager = eager
        self.ran: dict[Module, None] = {}
        self.switched: dict[Module, None] = {}

    def __enter__(self) -> ModuleModes:
        self._hook = None
        self.ran = {}
        self._begin = {module: module.training for module in self._last}
        if self._eager or not something_is_compiled():
            thread = get_ident()

            def running(module: Module, inputs: Any) -> None:
                # The hook is global: it also fires for modules that other threads run.
                if get_ident() == thread:
                    self.ran[module] = None
                    self._compare(module)
                    self._last[module] = module.training

            self._hook = register_module_forward_pre_hook(running)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        for module in (*self.ran, *self._given):
            self._compare(module)
        self._begin = {}

    def _compare(self, module: Module) -> None:
        """Note a module whose mode is not the one of the run's begin, or of its last call."""
        mode = module.training
        begin = self._begin.setdefault(module, mode)
        if begin != mode or self._last.get(module, mode) != mode:
            self.switched[module] = None


def something_is_compiled() -> bool:
    """Return whether torch has begun to compile functions in this process."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # any optimizer imports it
    # cached_backends is private in torch 2.13; without it, an imported compiler counts as in use.
    backends = getattr(compiler, "cached_backends", {0: compiler})
    # None stands for a callable that stays eager.
    return any(backend is not None for backend in backends.values())
