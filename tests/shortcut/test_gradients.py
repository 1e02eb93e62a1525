"""Parameters get zero gradients of the form that the cached run's had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.core.task import PipelineTask
from swpipe.shortcut import Shortcuts
from swpipe.shortcut.leaf_gradients import LeafGradients, OwnLeaf, leaves_behind


def used(parameter: Tensor, gradient: Tensor) -> OwnLeaf:
    """A leaf whose gradient of the cached run is ``gradient``."""
    leaf = OwnLeaf(parameter)
    torch.autograd.backward(parameter.clone(), gradient)
    return leaf


def test_zeros_are_like_the_gradient_of_the_cached_run() -> None:
    """Dense, of the parameter's shape and type."""
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.double))
    zero = used(parameter, torch.ones(2, 3, dtype=torch.double)).zero()
    assert zero is not None
    assert torch.equal(zero, torch.zeros_like(parameter))
    assert not zero.requires_grad


def test_a_leaf_that_got_no_gradient_gets_none() -> None:
    """As the weights of a table with a fused optimizer."""
    assert OwnLeaf(nn.Parameter(torch.ones(2))).zero() is None


def test_a_leaf_whose_memory_was_released_gets_none() -> None:
    """A gathered parameter of a sharded module is not read before the next gathering."""
    parameter = nn.Parameter(torch.ones(2))
    leaf = used(parameter, torch.ones(2))
    parameter.untyped_storage().resize_(0)
    assert leaf.zero() is None


def test_the_hook_is_removed_after_one_gradient() -> None:
    """Later iterations pay nothing."""
    parameter = nn.Parameter(torch.ones(2))
    used(parameter, torch.ones(2))
    hooks: Any = parameter._backward_hooks
    assert not hooks


def test_disabling_removes_the_hook() -> None:
    """Also if no backward followed."""
    module = nn.Linear(2, 1)
    shortcuts = Shortcuts()
    shortcuts.enable(["t"])
    task = PipelineTask("t", lambda ctx: setattr(ctx, "y", module(torch.ones(2))))
    shortcuts.run(task, SimpleNamespace())
    hooks: Any = module.weight._backward_hooks
    assert len(hooks) == 1
    shortcuts.disable(["t"])
    assert not hooks


def test_leaves_are_found_through_any_graph() -> None:
    """Each once."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    output = (a * b + a).sum()
    assert {id(leaf) for leaf in leaves_behind([output])} == {id(a), id(b)}


@pytest.mark.parametrize("before", [None, torch.zeros(2)])
def test_gradients_that_a_task_left_are_found(before: Tensor | None) -> None:
    """Set or added to; a gradient that stayed as it was is not among them."""
    changed, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    changed.grad, other.grad = before, torch.zeros(2)
    gradients = LeafGradients([(changed * 2).sum(), other * 2])
    (changed * 3).sum().backward()
    assert [left.leaf is changed for left in gradients.changed()] == [True]


def test_a_gradient_that_is_there_stays() -> None:
    """Zeros are left only where no gradient is."""
    leaf = torch.ones(2, requires_grad=True)
    gradients = LeafGradients([leaf * 2])
    (leaf * 3).sum().backward()
    (left,) = gradients.changed()
    left.restore()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]
    leaf.grad = None
    left.restore()
    assert torch.equal(leaf.grad, torch.zeros(2))  # type: ignore[arg-type]
