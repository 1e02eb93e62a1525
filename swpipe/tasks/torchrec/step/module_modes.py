"""The train/eval modes of a model's modules, which a batch keeps from its pull on."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from torch import nn

from swpipe.core.messages import listed


class ModuleModes(NamedTuple):
    """The names of the modules in training mode, and the total number of modules."""

    training: tuple[str, ...] = ()
    modules: int = 0

    def __str__(self) -> str:
        if len(self.training) in (0, self.modules):
            return f"the model in {'training' if self.training else 'evaluation'} mode"
        named = listed([name or "the model" for name in self.training])
        return f"{len(self.training)} of {self.modules} modules in training mode ({named})"


class ModuleModesOf:
    """A callable that returns the current modes of a model's modules, called before each batch."""

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_modules())
        self._modules = [module for _, module in self._named]
        self._training: list[bool] = []
        self._modes = ModuleModes()

    def __call__(self) -> ModuleModes:
        # Called for every batch, and the modes rarely change: comparing lists of flags is fast, and
        # the names are collected only after a change.
        training = list(map(attrgetter("training"), self._modules))
        if training != self._training:
            trained = tuple(name for name, module in self._named if module.training)
            self._training = training
            self._modes = ModuleModes(trained, len(training))
        return self._modes
