"""The gradients of parameters that tasks use while other threads train.

torch may crash if one thread reads ``parameter.grad`` while another thread accumulates into it or
clears it. A gradient is therefore identified by what has been seen of it::

    backward     autograd's own operators at a parameter     the first result is its gradient
    any task     operators on the memory of a gradient       use it
    zero_grad    a gradient that was there before is gone    clears it

A parameter is known from the first gradient that autograd accumulates, or from the memory of a
declared state. ``parameter.grad`` is read only while nothing else can train: before a run, and
around a task that runs alone. These reads also show gradients that are set or cleared manually.
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
        parameter: The parameter.
        tensor: A weak reference to the gradient.
        memory: Storage to a reference, which keeps the number from being used again.
    """

    parameter: Tensor
    tensor: weakref.ref[Tensor]
    memory: Mapping[StorageId, Any]

    @classmethod
    def of(cls, parameter: Tensor, tensor: Tensor, storages: Storages) -> Gradient:
        """Return a tensor as the gradient of a parameter."""
        memory = {number: storages.reference(number) for number in storages.of(tensor)}
        return cls(parameter, weakref.ref(tensor), memory)


def accumulating() -> Tensor | None:
    """Return the parameter whose gradient autograd's engine accumulates on this thread now.

    None if it accumulates no gradient.
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    # AccumulateGrad is the only node with an attribute "variable". torch 2.13:
    # _current_graph_task_id and _current_autograd_node are private.
    return getattr(torch._C._current_autograd_node(), "variable", None)


class WatchedGradients:
    """The known gradients of parameters; its methods are called under a lock.

    Args:
        parameters: The parameters that are known before the run; nothing trains them now.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self._known: dict[int, Gradient] = {}
        self.read()

    def read(self) -> None:
        """Read the gradients themselves; nothing may train meanwhile."""
        for number, parameter in self.parameters.items():
            gradient = grad_or_none(parameter)
            known = self._known.get(number)
            if gradient is None:
                self._known.pop(number, None)
            # Kept while it is the same tensor: its memory may also include copies that autograd has
            # made.
            elif known is None or known.tensor() is not gradient:
                self._known[number] = Gradient.of(parameter, gradient, Storages())

    def add(self, accumulated: Mapping[int, Gradient]) -> None:
        """Add the gradients that autograd has accumulated, with their parameters."""
        self.parameters |= {number: gradient.parameter for number, gradient in accumulated.items()}
        self._known |= accumulated

    def present(self) -> dict[int, Gradient]:
        """Return the gradients that are known to exist, by the id of their parameter."""
        return {n: known for n, known in self._known.items() if known.tensor() is not None}

    def memory(self, before: Mapping[int, Gradient]) -> Iterator[tuple[int, StorageId]]:
        """Yield the id of each parameter with the storages of its gradient.

        The gradients in ``before`` count as well as the known ones.
        """
        for gradients in (before, self._known):
            for number, gradient in gradients.items():
                yield from ((number, storage) for storage in gradient.memory)

    def owners(self, storage: StorageId) -> set[int]:
        """Return the ids of the parameters whose gradients are in some memory."""
        return {number for number, other in self.memory({}) if other == storage}

    def gone(self, before: Mapping[int, Gradient]) -> set[int]:
        """Return the ids of parameters that no longer have the gradients that they had before."""
        # Known only as a weak reference: it expires if zero_grad drops the last strong one.
        return {n for n, had in before.items() if n not in self._known or had.tensor() is None}
