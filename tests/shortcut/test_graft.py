"""Cached tensors take the place of a task's outputs in the autograd graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swpipe.shortcut.graft import connect
from swpipe.shortcut.leaf_gradients import find_sources, gradient_edges


def x(value: float = 1.0) -> Tensor:
    return torch.full((3,), float(value))


def weight() -> Tensor:
    return x(2).requires_grad_()


def test_types_and_shapes_may_differ() -> None:
    """Half, double and complex outputs are next to upstream tensors of other shapes."""
    parameter = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    upstream = [parameter * 2]
    kept = [x().half(), x().double(), x().to(torch.complex64)]
    outputs = connect(kept, upstream)
    assert [output.dtype for output in outputs] == [torch.half, torch.double, torch.complex64]
    total = sum(output.abs().sum().double() for output in outputs)
    for _ in range(2):  # the zeros are not used up by the first backward
        total.backward(retain_graph=True)  # type: ignore[union-attr]
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    assert not parameter.grad.any()


class Special(Tensor):
    """A subclass of ``Tensor``."""


@pytest.mark.parametrize(
    "upstream",
    [x(), torch.ones(4).double(), torch.ones(3, device="meta"), x().as_subclass(Special)],
)
def test_zeros_are_like_the_upstream_tensor(upstream: Tensor) -> None:
    """They have its shape, type, device and class, and are new in each backward."""
    inner = upstream.requires_grad_() * 1
    given: list[Tensor] = []
    inner.register_hook(given.append)
    for _ in range(2):
        connect([x()], [inner])[0].sum().backward(retain_graph=True)
        assert (given[-1].shape, given[-1].dtype) == (inner.shape, inner.dtype)
        assert (given[-1].device, type(given[-1])) == (inner.device, type(inner))
        assert inner.is_meta or not given[-1].any()
        given[-1].data.add_(7)


def test_the_search_ends_at_the_nearest_attribute() -> None:
    """Views, parts of a split and in-place results are distinct; paths double."""
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
