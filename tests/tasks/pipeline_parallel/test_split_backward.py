"""The results of a backward pass in two parts, and how often its parts run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swpipe.tasks.pipeline_parallel.split_backward import input_pass, whole_pass


class Counted(torch.autograd.Function):
    """An autograd function that counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Counted.passes += 1
        return grads[0]


def stage(x: Tensor, layers: nn.ModuleList, weight: Tensor) -> Tensor:
    """Return some layers in sequence, of which the first and the last share a weight."""
    x = Counted.apply(x @ weight)  # type: ignore[no-untyped-call]
    for layer in layers:
        x = Counted.apply(torch.tanh(layer(x)))  # type: ignore[no-untyped-call]
    return x


def test_a_whole_pass_leaves_no_gradient_on_its_inputs() -> None:
    """It returns it; gradients of the weights are added up."""
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    grads = [whole_pass([layer(x)], [torch.ones(2, 3)], [x, 7]) for _ in range(2)]
    assert x.grad is None
    wanted = layer.weight.detach().sum(0).expand(2, 3)
    assert all(torch.allclose(grad, wanted) and rest is None for grad, rest in grads)
    assert torch.equal(layer.bias.grad, torch.full((3,), 4.0))


def test_gradients_of_inputs_keep_their_strides() -> None:
    """They are as for the previous stage in a single process, in both kinds of passes."""
    x = torch.ones(4, 3, requires_grad=True)
    for run in (whole_pass, lambda *given: input_pass(*given)[0]):
        (grad,) = run([x.sum(0)], [torch.ones(3)], [x])
        assert grad is not None
        assert grad.stride() == (0, 1)


def test_the_way_to_the_inputs_is_computed_once() -> None:
    """It is computed in I: W would repeat an exchange on it, and take as long as the whole pass."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    weight = torch.ones(4, 4, requires_grad=True)
    leaves = [*layers.parameters(), weight]
    for shared, again in ((False, 0), (True, 4)):
        found = []
        for split in (False, True):
            for leaf in leaves:
                leaf.grad = None
            x = torch.ones(2, 4).requires_grad_()
            out = stage(x, layers, weight)
            out = out @ weight if shared else out
            Counted.passes = 0
            if split:
                (grad,), left = input_pass([out], [torch.ones_like(out)], [x])
                assert Counted.passes == 4
                assert left is not None
                left.run()
                # Contributions to one weight are added in one pass, from its first use to its last.
                assert Counted.passes == 4 + again
            else:
                (grad,) = whole_pass([out], [torch.ones_like(out)], [x])
            found.append([grad, *(leaf.grad for leaf in leaves)])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))  # type: ignore[arg-type]
