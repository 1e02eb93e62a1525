"""Kept tensors stand in the autograd graph where a task's outputs would have stood."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swpipe.shortcut.graft import ZeroGradients, connect, find_sources, gradient_edges


def x(value: float = 1.0) -> Tensor:
    return torch.full((3,), float(value))


def weight() -> Tensor:
    return x(2).requires_grad_()


def test_types_and_shapes_may_differ() -> None:
    """Half, double and complex outputs stand beside upstream tensors of other shapes."""
    parameter = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    upstream = [parameter * 2]
    kept = [x().half(), x().double(), x().to(torch.complex64)]
    outputs = connect(kept, upstream, ZeroGradients().like(upstream, None))
    assert [output.dtype for output in outputs] == [torch.half, torch.double, torch.complex64]
    total = sum(output.abs().sum().double() for output in outputs)
    for _ in range(2):  # the zeros are not used up by the first backward
        total.backward(retain_graph=True)  # type: ignore[union-attr]
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    assert not parameter.grad.any()


class Special(Tensor):
    """Only the class knows what else has to match."""


@pytest.mark.parametrize(
    ("other", "stream"),
    [
        (torch.ones(4), "a"),
        (x().double(), "a"),
        (torch.ones(3, device="meta"), "a"),
        (x().to_sparse(), "a"),
        (x().as_subclass(Special), "a"),
        (x(), "b"),  # which may not have written them yet
    ],
)
def test_zeros_are_reused_while_all_matches(other: Tensor, stream: str) -> None:
    """Another shape, type, device, layout, class or stream gets zeros of its own."""
    zeros = ZeroGradients()
    (first,) = zeros.like([weight()], "a")
    (second,) = zeros.like([weight()], "a")
    assert second is first
    (third,) = zeros.like([other], stream)
    assert third is not first
    assert (third.shape, third.dtype, third.device) == (other.shape, other.dtype, other.device)
    assert (third.layout, type(third)) == (other.layout, type(other))
    (fourth,) = zeros.like([other], stream)
    assert (fourth is third) == (type(other) is Tensor and other.layout is torch.strided)


def test_zeros_that_a_hook_modified_are_replaced() -> None:
    """A gradient hook that writes into the gradient spoils it for that backward only."""
    zeros = ZeroGradients()
    for _ in range(2):
        inner = weight() * 1
        inner.register_hook(lambda gradient: gradient.add_(7))
        given = zeros.like([inner], None)
        assert not given[0].any()
        connect([x()], [inner], given)[0].sum().backward()


def test_gradients_do_not_share_memory_with_the_zeros() -> None:
    """An optimizer that modifies .grad in place leaves the zeros as they are."""
    parameter = weight()
    zeros = ZeroGradients()
    (given,) = zeros.like([parameter], None)
    connect([x()], [parameter], [given])[0].sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() != given.data_ptr()


def test_the_search_ends_at_the_nearest_attribute() -> None:
    """Views, parts of a split and what is modified in place are told apart; paths double."""
    leaf, late = weight(), weight() * 3
    left, right = (torch.ones(4, requires_grad=True) * 2).split(2)
    modified = weight() * 2
    many = modified
    given = {"leaf": leaf, "early": leaf * 2, "late": late, "left": left, "modified": modified}
    edges = gradient_edges({**given, "right": right})
    for _ in range(60):
        many = many + many
    for output, names in (
        (given["early"].exp(), ("early",)),
        (late.exp() + given["early"], ("early", "late")),
        (late, ("late",)),
        (leaf.view(3, 1).sum(), ("leaf",)),
        (right.sum(), ("right",)),
        (many, ("modified",)),
        (modified.mul_(2), ("modified",)),
        (x(), ()),
    ):
        assert find_sources([output], edges).attributes == names
