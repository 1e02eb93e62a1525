"""The modules that a task runs, and the switches of their mode, train or eval.

A task that evaluates in mid-epoch leaves the mode as it found it and changes no parameter; but
another task that runs the module at the same time would run it in the wrong mode. The switch itself
is not seen, only the mode of each module when it runs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from swpipe.inference.pruned_dict import PrunedDict


class ModuleModes:
    """The modules that one task runs; the task's runs follow each other.

    While the task runs, torch's global hook reports each module that is called. The hook is not
    installed if something is compiled: it would be compiled into what other threads run.

    Args:
        modules: Modules whose mode is compared although the task may not run them.
        eager: Whether nothing compiled runs meanwhile.

    Attributes:
        ran: Id to module, of those that the last run called.
        switched: Id to module, of those whose mode differed within a run or from an earlier run,
            outermost first.
    """

    def __init__(self, modules: Iterable[Module] = (), *, eager: bool = False) -> None:
        self._given = {id(module): module for module in modules}
        self._known = PrunedDict[int, tuple[weakref.ref[Module], bool]]()
        for module in self._given.values():
            self._known[id(module)] = weakref.ref(module), module.training
        self._eager = eager
        self.ran: dict[int, Module] = {}
        self.switched: dict[int, Module] = {}

    def __enter__(self) -> ModuleModes:
        self._hook = None
        self.ran = {}
        self._modes = {number: module.training for number, module in self._alive()}
        if self._eager or not something_is_compiled():
            thread = get_ident()

            def running(module: Module, inputs: Any) -> None:
                # The hook is global: it also fires for modules that other threads run.
                if get_ident() == thread:
                    self._run(module)

            self._hook = register_module_forward_pre_hook(running)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        for module in {**self.ran, **self._given}.values():
            self._compare(module)
        self._known.prune(lambda known: known[0]() is None)

    def _run(self, module: Module) -> None:
        """Note that a module is about to run, and in which mode."""
        self._modes.setdefault(id(module), module.training)
        self.ran[id(module)] = module
        self._compare(module)
        # An id can be reused by a new module, so the weak reference decides whether it is the same
        # one.
        reference, mode = self._known.get(id(module), (None, module.training))
        if reference is not None and reference() is module and mode != module.training:
            self.switched.setdefault(id(module), module)
        self._known[id(module)] = weakref.ref(module), module.training

    def _compare(self, module: Module) -> None:
        if self._modes.get(id(module), module.training) != module.training:
            self.switched.setdefault(id(module), module)

    def _alive(self) -> Iterator[tuple[int, Module]]:
        for number, (reference, _) in self._known.items():
            if (module := reference()) is not None:
                yield number, module


def something_is_compiled() -> bool:
    """Return whether torch has begun to compile functions in this process."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # any optimizer imports it
    # cached_backends is private in torch 2.13; without it, an imported compiler counts as in use.
    backends = getattr(compiler, "cached_backends", {0: compiler})
    # None stands for a callable that stays eager.
    return any(backend is not None for backend in backends.values())
