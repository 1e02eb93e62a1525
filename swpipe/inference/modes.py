"""Training and evaluation mode of modules: which tasks run a module, and which switch its mode.

A task that evaluates in mid-epoch leaves the mode as it found it, and no parameter has changed;
but another task that runs the module at the same time would run it in the wrong mode. The switch
itself is not seen, but the module that runs after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from swpipe._state.owners import Found
from swpipe._tensors.stateful import modules_in


@dataclass(frozen=True)
class Modes:
    """What one task did with modules, by the names of the outermost ones.

    Attributes:
        ran: Modules of which some part was called.
        switched: Modules of which some part ran in the other mode, or was left in it.
    """

    ran: set[str] = field(default_factory=set)
    switched: set[str] = field(default_factory=set)


class ModeObserver:
    """Observes the modes of some modules, and of all within them."""

    def __init__(self, owners: Iterable[Found]) -> None:
        self._modules: dict[int, tuple[torch.nn.Module, str]] = {}
        for path, owner in owners:
            if isinstance(owner, torch.nn.Module):
                for module in modules_in(owner):
                    self._modules.setdefault(id(module), (module, path))

    @contextmanager
    def observing(self) -> Iterator[Modes]:
        """Observe what runs within the block, on this thread."""
        modes = Modes()
        flags = {number: module.training for number, (module, _) in self._modules.items()}
        thread = get_ident()

        def running(module: torch.nn.Module, args: Any) -> None:
            if get_ident() == thread and id(module) in flags:
                name = self._modules[id(module)][1]
                modes.ran.add(name)
                if module.training != flags[id(module)]:
                    modes.switched.add(name)

        with ExitStack() as stack:
            for module, _ in self._modules.values():
                stack.callback(module.register_forward_pre_hook(running).remove)
            yield modes
        modes.switched.update(
            name for module, name in self._modules.values() if module.training != flags[id(module)]
        )
