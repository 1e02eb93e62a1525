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


def leaves_under(output: Tensor) -> list[Tensor]:
    assert output.grad_fn is not None
    return [node.variable for node, _ in output.grad_fn.next_functions]  # type: ignore[union-attr]


def test_types_and_shapes_may_differ() -> None:
    """Half, double and complex outputs stand beside upstream tensors of other shapes."""
    parameter = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    upstream = [parameter * 2]
    kept = [x().half(), x().double(), x().to(torch.complex64)]
    outputs = connect(kept, upstream, ZeroGradients().like(upstream, None))
    assert [output.dtype for output in outputs] == [torch.half, torch.double, torch.complex64]
    sum(output.abs().sum().double() for output in outputs).backward()  # type: ignore[union-attr]
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16
    assert not parameter.grad.any()


def test_backward_twice_through_a_retained_graph_gives_zeros_twice() -> None:
    """The zeros are not used up by the first backward."""
    parameter = weight()
    upstream = [parameter * 2]
    (output,) = connect([x(5)], upstream, ZeroGradients().like(upstream, None))
    output.sum().backward(retain_graph=True)
    output.sum().backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, x(0))


# ------------------------------------------------------------------------------ zeros


def test_zeros_are_reused() -> None:
    """While shape, type and device stay the same."""
    zeros = ZeroGradients()
    first = zeros.like([weight(), weight()], None)
    assert list(map(id, zeros.like([weight(), weight()], None))) == list(map(id, first))


@pytest.mark.parametrize(
    "other",
    [torch.ones(4), torch.ones(3, 1), x().double(), torch.ones(3, device="meta"), x().to_sparse()],
)
def test_zeros_that_do_not_match_are_replaced(other: Tensor) -> None:
    """Another shape, type, device or layout gets zeros of its own."""
    zeros = ZeroGradients()
    (first,) = zeros.like([x()], None)
    (second,) = zeros.like([other], None)
    assert second is not first
    assert (second.shape, second.dtype, second.device) == (other.shape, other.dtype, other.device)
    assert second.layout is other.layout


def test_zeros_of_tensor_subclasses_are_not_reused() -> None:
    """Only the class knows what else has to match."""

    class Special(Tensor):
        pass

    zeros = ZeroGradients()
    special = x().as_subclass(Special)
    (first,) = zeros.like([special], None)
    (second,) = zeros.like([special], None)
    (third,) = zeros.like([x()], None)
    (fourth,) = zeros.like([special], None)
    assert type(first) is type(second) is type(fourth) is Special
    assert second is not first
    assert type(third) is Tensor


def test_zeros_from_another_stream_are_replaced() -> None:
    """That stream may not have written them yet."""
    zeros = ZeroGradients()
    (first,) = zeros.like([x()], "stream a")
    (second,) = zeros.like([x()], "stream b")
    assert second is not first


def test_zeros_that_a_hook_modified_are_replaced() -> None:
    """A gradient hook that writes into the gradient spoils it for that backward only."""
    zeros = ZeroGradients()
    for _ in range(2):
        parameter = weight()
        inner = parameter * 1
        upstream = [inner]
        inner.register_hook(lambda gradient: gradient.add_(7))
        given = zeros.like(upstream, None)
        assert not given[0].any()
        connect([x()], upstream, given)[0].sum().backward()


def test_gradients_do_not_share_memory_with_the_zeros() -> None:
    """An optimizer that modifies .grad in place leaves the zeros as they are."""
    parameter = weight()
    zeros = ZeroGradients()
    (given,) = zeros.like([parameter], None)
    connect([x()], [parameter], [given])[0].sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() != given.data_ptr()


# ------------------------------------------------------------- what outputs come from


def test_the_search_ends_at_the_nearest_attribute() -> None:
    """Behind an attribute lies what it came from; that is reached through it."""
    early = weight() * 2
    late = early * 3
    edges = gradient_edges({"early": early, "late": late})
    assert find_sources([late.exp()], edges).attributes == ("late",)
    assert find_sources([late.exp() + early], edges).attributes == ("early", "late")


def test_leaves_views_and_parts_of_a_split_are_found() -> None:
    """Parameters, views, tensors modified in place and parts of a split are told apart."""
    leaf, whole = weight(), torch.ones(4, requires_grad=True) * 2
    left, right = whole.split(2)
    modified = weight() * 2
    edges = gradient_edges({"leaf": leaf, "left": left, "right": right, "modified": modified})
    assert find_sources([leaf.view(3, 1).sum()], edges).attributes == ("leaf",)
    assert find_sources([right.sum()], edges).attributes == ("right",)
    modified.mul_(2)
    assert find_sources([modified], edges).attributes == ("modified",)


def test_a_graph_with_many_paths_is_searched_once() -> None:
    """Each of sixty additions doubles the number of paths."""
    total = upstream = weight() * 2
    for _ in range(60):
        total = total + total
    assert find_sources([total], gradient_edges({"upstream": upstream})).attributes == ("upstream",)


def test_an_upstream_tensor_that_is_an_output_is_found() -> None:
    """An output may be an input."""
    upstream = weight() * 2
    assert find_sources([upstream], gradient_edges({"upstream": upstream})).attributes == (
        "upstream",
    )
    assert find_sources([x()], gradient_edges({"upstream": upstream})).attributes == ()
