"""Which gradients of parameters tasks use, while other threads train.

torch may crash where one thread reads ``parameter.grad`` while another one accumulates into it or
clears it. So a gradient is known by what has been seen of it::

    backward     autograd's own operators at a parameter     the first result is its gradient
    any task     operators on the memory of a gradient       use it
    zero_grad    a gradient that was there before is gone    clears it

A parameter is known from the first gradient that autograd accumulates, or from the memory of a
declared state. ``parameter.grad`` is read only where nothing else can train: before a run, and
around a task beside which no other one runs. There it shows also what is set or cleared by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._values.storages import StorageId, Storages
from swpipe._values.walk import grad_or_none


class Gradient(NamedTuple):
    """A gradient that a parameter has, or had.

    Attributes:
        parameter: Whose it is.
        tensor: Gives it as long as it exists.
        memory: Storage to a reference, which keeps the number from being used again.
    """

    parameter: Tensor
    tensor: weakref.ref[Tensor]
    memory: Mapping[StorageId, Any]

    @classmethod
    def of(cls, parameter: Tensor, tensor: Tensor, storages: Storages) -> Gradient:
        """This tensor, as the gradient of a parameter."""
        memory = {number: storages.reference(number) for number in storages.of(tensor)}
        return cls(parameter, weakref.ref(tensor), memory)


def accumulating() -> Tensor | None:
    """The parameter whose gradient autograd's engine accumulates on this thread now."""
    if torch._C._current_graph_task_id() == -1:
        return None
    # Only the node that accumulates a gradient has it.
    return getattr(torch._C._current_autograd_node(), "variable", None)


class WatchedGradients:
    """The gradients of parameters, as far as they are known; call it under a lock.

    Args:
        parameters: Those that are known before; nothing trains them now.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = {id(one): one for one in parameters}
        self._known: dict[int, Gradient] = {}
        self.read()

    def read(self) -> None:
        """Read the gradients themselves; nothing trains now."""
        for number, parameter in self.parameters.items():
            gradient, known = grad_or_none(parameter), self._known.get(number)
            if gradient is None:
                self._known.pop(number, None)
            elif known is None or known.tensor() is not gradient:
                self._known[number] = Gradient.of(parameter, gradient, Storages())

    def add(self, accumulated: Mapping[int, Gradient]) -> None:
        """Add what autograd has accumulated, and whose it is."""
        self.parameters |= {number: one.parameter for number, one in accumulated.items()}
        self._known |= accumulated

    def present(self) -> dict[int, Gradient]:
        """Id of a parameter to its gradient, where one is known to exist."""
        return {number: one for number, one in self._known.items() if one.tensor() is not None}

    def memory(self, before: Mapping[int, Gradient]) -> Iterator[tuple[int, StorageId]]:
        """Id of each parameter, and storages of the gradient that it has or had ``before``."""
        for found in (before, self._known):
            for number, gradient in found.items():
                yield from ((number, storage) for storage in gradient.memory)

    def owners(self, storage: StorageId) -> set[int]:
        """Ids of the parameters whose gradients are in some memory."""
        return {number for number, other in self.memory({}) if other == storage}

    def gone(self, before: Mapping[int, Gradient]) -> set[int]:
        """Ids of the parameters that do not have the gradients any more that they had."""
        return {n for n, one in before.items() if n not in self._known or one.tensor() is None}
