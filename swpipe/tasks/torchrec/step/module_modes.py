"""The train/eval modes of a model's modules, which a batch keeps from its pull on."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from torch import nn

from swpipe.core.messages import listed


class ModuleModes(NamedTuple):
    """The names of all modules, and whether each is in training mode."""

    names: tuple[str, ...]
    flags: tuple[bool, ...]

    def __str__(self) -> str:
        pairs = zip(self.names, self.flags, strict=True)
        training = [name or "the model" for name, trains in pairs if trains]
        if len(training) in (0, len(self.names)):
            return f"the model in {'training' if training else 'evaluation'} mode"
        return f"{len(training)} of {len(self.names)} modules in training mode ({listed(training)})"


def module_modes(model: nn.Module) -> Callable[[], ModuleModes]:
    """Return a function that returns the current modes, which is called before each batch."""
    modules = dict(model.named_modules())
    names = tuple(modules)
    flag_of = attrgetter("training")
    return lambda: ModuleModes(names, tuple(map(flag_of, modules.values())))
