"""Linear maps whose weight gradients can be computed later than their input gradients.

Nobody but the optimizer waits for a weight gradient, so that it can fill the time of an exchange.

    backward       grad_x = grad_y W           and a note: weight, x, grad_y
    backward_dw    grad_W = grad_y^T x

Whoever runs a forward within ``delaying(notes)`` gets the notes; elsewhere autograd computes both.
Where a checkpoint computes such a forward again, in a backward pass, it runs the same operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional


class WeightGradient(NamedTuple):
    """A weight gradient that is still to be computed.

    Attributes:
        weight: (out, in).
        bias: (out,), or None.
        inputs: What the map was applied to, (rows, in).
        grad: The gradient of what it gave, (rows, out).
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    grad: Tensor

    def compute(self) -> None:
        """Add to the gradients of weight and bias, with their hooks, as autograd does."""
        with torch.no_grad():
            # The products of autograd's own formula for a linear map: the same bits.
            found = {self.weight: self.grad.t().mm(self.inputs)}
            if self.bias is not None:
                found[self.bias] = self.grad.sum(0)
        wanted = {leaf: grad for leaf, grad in found.items() if leaf.requires_grad}
        torch.autograd.backward(list(wanted), list(wanted.values()))


Notes: TypeAlias = list[WeightGradient]

_notes: ContextVar[Notes | None] = ContextVar("notes of weight gradients", default=None)


@contextmanager
def delaying(notes: Notes | None) -> Iterator[None]:
    """Backward passes of what runs within the block leave their weight gradients in ``notes``.

    None for nothing: autograd computes all gradients.
    """
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


class _AtOnce(list[WeightGradient]):
    """Notes that are not kept: nobody would ask for them."""

    def append(self, note: WeightGradient) -> None:
        note.compute()


class Linear(nn.Linear):
    """``nn.Linear`` that respects ``delaying``."""

    _is_delayed = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Of (..., in), (..., out)."""
        notes = _notes.get()
        if torch._C._current_graph_task_id() != -1:  # in a backward pass, maybe on its own thread
            notes = notes if notes is not None or not self._is_delayed else _AtOnce()
        elif torch.is_grad_enabled():
            self._is_delayed = notes is not None
        trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if notes is None or not trained or not torch.is_grad_enabled():
            return functional.linear(hidden, self.weight, self.bias)
        # Autograd is not told of the parameters, whose hooks it would call for no gradient.
        anchor = torch.empty(0, requires_grad=True)
        out: Tensor = _Delayed.apply(hidden, anchor, self, notes)  # type: ignore[no-untyped-call]
        return out


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, linear: Linear, notes: Notes) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.linear, ctx.notes = linear, notes
        ctx.version = linear.weight._version
        return functional.linear(hidden, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (hidden,), linear, notes = ctx.saved_tensors, ctx.linear, ctx.notes
        ctx.linear = ctx.notes = None
        weight: Tensor = linear.weight
        if weight._version != ctx.version:
            raise RuntimeError(
                "a weight was modified between a microbatch's forward and its backward: step the "
                "optimizer when no microbatch is in flight"
            )
        grad = grads[0].reshape(-1, weight.shape[0])
        rows = hidden.reshape(-1, weight.shape[1])
        notes.append(WeightGradient(weight, linear.bias, rows, grad))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return grad.mm(weight).view(hidden.shape), None, None, None
