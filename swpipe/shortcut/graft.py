"""Insertion of cached tensors into the autograd graph, in place of tensors that a task computes.

With the task running, and with cached tensors instead::

    upstream ----> task ----> output ----> downstream

    upstream <------- zeros -----+
    task's parameters <- zeros --+
                            _GraftGrad <---- gradient ---- downstream
    cached tensor <-- gradient --+

Parameters upstream and in the task therefore stay in the graph: their gradients are zeros, not
None.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swpipe.errors import ShortcutError
from swpipe.shortcut.leaf_gradients import OwnLeaf


class _GraftGrad(torch.autograd.Function):
    """The autograd function in place of a replayed task.

    Forward returns the cached tensors. Backward returns their gradients, and zeros for upstream
    tensors. The inputs are the cached tensors, ``count`` of them, then the upstream ones and the
    leaves. Zeros are returned even if only some outputs are used.
    """

    @staticmethod
    def forward(
        graft: Any,
        leaves: tuple[OwnLeaf, ...],
        task: str,
        spent_s: list[float],
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Aliases without a graph, of which only shape, dtype and device are used.
        graft.upstream = [t.detach() for t in tensors[count : len(tensors) - len(leaves)]]
        graft.leaves = leaves
        graft.task = task
        graft.spent_s = spent_s
        # An unused output gets None as its gradient, and no tensor of zeros is allocated for it.
        graft.set_materialize_grads(False)
        # Not the inputs themselves: autograd treats those as views and forbids in-place changes.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(graft: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise ShortcutError(
                graft.task,
                "a gradient of its outputs is itself differentiated (create_graph=True), and a "
                "replay has no second derivative. Compute outputs and gradient in one task, or "
                "do not shortcut this one",
            )
        begin_s = time.perf_counter()
        zeros = [*map(torch.zeros_like, graft.upstream), *(leaf.zero() for leaf in graft.leaves)]
        graft.spent_s.append(time.perf_counter() - begin_s)
        # One entry for each argument of forward: the first four are no tensors.
        return (None, None, None, None, *gradients, *zeros)


def connect(
    cached: Sequence[Tensor],
    upstream: Sequence[Tensor],
    leaves: Sequence[OwnLeaf] = (),
    task: str = "",
    spent_s: list[float] | None = None,
) -> tuple[Tensor, ...]:
    """Return ``cached``, without a copy, as outputs of a graph that leads to ``upstream``.

    Args:
        cached: Tensors of a floating or complex type that do not require grad.
        upstream: Tensors that require grad; may be empty.
        leaves: Leaves that the task used.
        task: The name of the task, for messages.
        spent_s: Gets the seconds that each backward takes for the zeros.
    """
    # The cached tensors require grad here, so that autograd records the node even without upstream.
    inputs = [tensor.detach().requires_grad_() for tensor in cached]
    inputs += [*upstream, *(leaf.tensor for leaf in leaves)]
    apply: Any = _GraftGrad.apply
    given = (tuple(leaves), task, [] if spent_s is None else spent_s, len(cached))
    outputs: tuple[Tensor, ...] = apply(*given, *inputs)
    return outputs
