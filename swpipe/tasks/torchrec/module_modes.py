"""Which modules of a model are in training mode: what batches in flight depend on."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from swpipe.core.messages import listed


class ModuleModes(NamedTuple):
    """The names of the modules in training mode, and how many modules there are."""

    training: tuple[str, ...]
    modules: int

    def __str__(self) -> str:
        if len(self.training) in (0, self.modules):
            return f"the model in {'training' if self.training else 'evaluation'} mode"
        names = listed([name or "the model" for name in self.training])
        return f"{len(self.training)} of {self.modules} modules in training mode ({names})"


class ModuleModesOf:
    """Called before each batch, returns the modes of a model's modules; mostly as before."""

    def __init__(self, model: nn.Module) -> None:
        names, modules = zip(*model.named_modules(), strict=True)
        self._names: tuple[str, ...] = names
        self._modules: tuple[nn.Module, ...] = modules
        self._training: list[bool] = []
        self._modes = ModuleModes((), 0)

    def __call__(self) -> ModuleModes:
        training = [module.training for module in self._modules]
        if training != self._training:
            of = zip(self._names, training, strict=True)
            trained = tuple(name for name, trains in of if trains)
            self._training, self._modes = training, ModuleModes(trained, len(training))
        return self._modes
