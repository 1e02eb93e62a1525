"""Which modules of a model are in training mode: what a batch keeps from its pull on."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from torch import nn

from swpipe.core.messages import listed


class ModuleModes(NamedTuple):
    """The names of the modules in training mode, and how many modules there are."""

    training: tuple[str, ...] = ()
    modules: int = 0

    def __str__(self) -> str:
        if len(self.training) in (0, self.modules):
            return f"the model in {'training' if self.training else 'evaluation'} mode"
        named = listed([name or "the model" for name in self.training])
        return f"{len(self.training)} of {self.modules} modules in training mode ({named})"


class ModuleModesOf:
    """Called before each batch, returns the modes of a model's modules; mostly as before."""

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_modules())
        self._modules = [module for _, module in self._named]
        self._training: list[bool] = []
        self._modes = ModuleModes()

    def __call__(self) -> ModuleModes:
        training = list(map(attrgetter("training"), self._modules))
        if training != self._training:
            trained = tuple(name for name, module in self._named if module.training)
            self._training = training
            self._modes = ModuleModes(trained, len(training))
        return self._modes
