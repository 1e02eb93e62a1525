"""Linear maps whose weight gradients can be computed later than their input gradients.

Only the optimizer waits for a weight gradient, so it can be computed during an exchange.

    backward       grad_x = grad_y W           and a note: weight, x, grad_y
    backward_dw    grad_W = grad_y^T x

A forward within ``delaying(notes)`` leaves its notes there; outside, autograd computes both. If a
checkpoint repeats such a forward in a backward pass, the same operators run.
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
    """A weight gradient that is not computed yet.

    Attributes:
        weight: The weight, (out, in).
        bias: The bias, (out,), or None.
        inputs: The input of the linear map, (rows, in).
        grad: The gradient of its output, (rows, out).
    """

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    grad: Tensor

    def compute(self) -> None:
        """Add the gradients to weight and bias and call their hooks, as autograd does."""
        with torch.no_grad():
            # Autograd's own formula for a linear map, so that the bits are the same.
            grads = {self.weight: self.grad.t().mm(self.inputs)}
            if self.bias is not None:
                grads[self.bias] = self.grad.sum(0)
        wanted = {leaf: grad for leaf, grad in grads.items() if leaf.requires_grad}
        torch.autograd.backward(list(wanted), list(wanted.values()))


Notes: TypeAlias = list[WeightGradient]

# Per thread and context: the caller's thread and autograd's threads do not share it.
_notes: ContextVar[Notes | None] = ContextVar("notes of weight gradients", default=None)


@contextmanager
def delaying(notes: Notes | None) -> Iterator[None]:
    """Collect in ``notes`` the weight gradients of forwards that run within the block.

    With None, autograd computes all gradients.
    """
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


class _AtOnce(list[WeightGradient]):
    """Notes that are computed at once, since nobody would compute them later."""

    def append(self, note: WeightGradient) -> None:
        note.compute()


class Linear(nn.Linear):
    """``nn.Linear`` that respects ``delaying``."""

    _is_delayed = False

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        notes = _notes.get()
        # A checkpoint repeats the forward in a backward pass, maybe on another thread, which has no
        # notes. ``_current_graph_task_id`` is private to torch; it is -1 outside backward passes.
        if torch._C._current_graph_task_id() != -1:
            notes = notes if notes is not None or not self._is_delayed else _AtOnce()
        elif torch.is_grad_enabled():
            self._is_delayed = notes is not None
        trained = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if notes is None or not trained or not torch.is_grad_enabled():
            return functional.linear(hidden, self.weight, self.bias)
        # Autograd does not see the parameters: it would call their hooks without a gradient.
        anchor = torch.empty(0, requires_grad=True)
        out: Tensor = _Delayed.apply(hidden, anchor, self, notes)  # type: ignore[no-untyped-call]
        return out


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, linear: Linear, notes: Notes) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.linear = linear
        ctx.notes = notes
        ctx.version = linear.weight._version
        return functional.linear(hidden, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        (hidden,) = ctx.saved_tensors
        linear = ctx.linear
        notes = ctx.notes
        ctx.linear = None  # a graph that is kept holds no module
        ctx.notes = None
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
