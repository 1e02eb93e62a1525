"""Training and evaluation mode of modules: which tasks run a module, and which switch its mode.

A task that evaluates in mid-epoch leaves the mode as it found it, and no parameter has changed;
but another task that runs the module at the same time would run it in the wrong mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from swpipe._state.discovery import find_all
from swpipe._tensors.stateful import modules_in
from swpipe.core.task import PipelineTask


@dataclass(frozen=True)
class Modes:
    """What one task did with modules that tasks can reach, by the names of the outermost ones.

    Attributes:
        ran: Modules of which some part was called.
        switched: Modules of which some part was switched, whether or not it was switched back.
    """

    ran: set[str] = field(default_factory=set)
    switched: set[str] = field(default_factory=set)


class ModeObserver:
    """Observes the modes of all modules that some tasks can reach."""

    def __init__(self, tasks: Iterable[PipelineTask]) -> None:
        self._modules: dict[int, tuple[torch.nn.Module, str]] = {}
        for found in find_all(tasks):
            if isinstance(found.owner, torch.nn.Module):
                path = found.path.removeprefix("self.") or type(found.owner).__name__
                for module in modules_in(found.owner):
                    self._modules.setdefault(id(module), (module, path))

    @contextmanager
    def observing(self) -> Iterator[Modes]:
        """Observe what runs within the block."""
        modes = Modes()
        flags = [(module, path, module.training) for module, path in self._modules.values()]
        switch = torch.nn.Module.train

        def switching(module: torch.nn.Module, mode: bool = True) -> Any:
            modes.switched.update(self._named(module))
            return switch(module, mode)

        def running(module: torch.nn.Module, args: Any) -> None:
            modes.ran.update(self._named(module))

        with ExitStack() as stack:
            for module, *_ in flags:
                stack.callback(module.register_forward_pre_hook(running).remove)
            stack.callback(setattr, torch.nn.Module, "train", switch)
            torch.nn.Module.train = switching  # type: ignore[method-assign,assignment]
            yield modes
        modes.switched.update(path for module, path, flag in flags if module.training != flag)

    def _named(self, module: torch.nn.Module) -> Iterator[str]:
        if id(module) in self._modules:
            yield self._modules[id(module)][1]
