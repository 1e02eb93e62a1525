"""Parameters get zero gradients of the kind that the cached run gave them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.core.task import PipelineTask
from swpipe.shortcut import Shortcuts
from swpipe.shortcut.leaf_gradients import LeafGradients, OwnLeaf


def test_zeros_are_like_the_gradient_of_the_cached_run() -> None:
    """They have the parameter's shape and type; later iterations have no hook.

    A leaf without a gradient gets none, such as the weights of a table with a fused optimizer; nor
    does one whose memory was released: a gathered parameter is not read before the next gathering.
    """
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.double))
    leaf = OwnLeaf(parameter)
    assert leaf.zero() is None
    parameter.sum().backward()
    hooks: Any = parameter._backward_hooks
    assert not hooks
    zero = leaf.zero()
    assert zero is not None
    assert torch.equal(zero, torch.zeros_like(parameter))
    assert not zero.requires_grad
    parameter.untyped_storage().resize_(0)
    assert leaf.zero() is None


def test_zeros_of_a_sparse_gradient_are_sparse() -> None:
    """An optimizer of sparse gradients takes them, and changes nothing."""
    table = nn.Embedding(4, 3, sparse=True)
    leaf = OwnLeaf(table.weight)
    table(torch.tensor([1, 2])).sum().backward()
    zero = leaf.zero()
    assert zero is not None
    assert zero.layout is torch.sparse_coo
    assert (zero.shape, zero.sparse_dim(), zero._nnz()) == (table.weight.shape, 1, 0)
    before, table.weight.grad = table.weight.detach().clone(), zero
    torch.optim.SparseAdam([table.weight]).step()
    assert torch.equal(table.weight, before)


def test_disabling_removes_the_hook() -> None:
    """It is removed also if no backward followed."""
    module = nn.Linear(2, 1)
    shortcuts = Shortcuts()
    shortcuts.enable(["t"])
    task = PipelineTask("t", lambda ctx: setattr(ctx, "y", module(torch.ones(2))))
    shortcuts.run(task, SimpleNamespace())
    hooks: Any = module.weight._backward_hooks
    assert len(hooks) == 1
    shortcuts.disable(["t"])
    assert not hooks


@pytest.mark.parametrize("before", [None, torch.zeros(2)])
def test_gradients_that_a_task_left_are_found(before: Tensor | None) -> None:
    """A gradient that was set or added to counts once; one that stayed does not."""
    changed, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    changed.grad, other.grad = before, torch.zeros(2)
    gradients = LeafGradients([(changed * other + changed).sum(), other * 2])
    (changed * 3).sum().backward()
    (left,) = gradients.changed()
    assert left.leaf is changed
    left.restore()
    assert changed.grad is not None
    assert changed.grad.tolist() == [3, 3]
    changed.grad = None
    left.restore()
    assert torch.equal(changed.grad, torch.zeros(2))  # type: ignore[arg-type]
