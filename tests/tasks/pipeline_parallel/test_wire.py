"""Values between ranks: any structure, and tensors with all properties that kernels use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe.tasks.pipeline_parallel.wire import TensorLayout, layouts_of, pack, unpack
from tests.tasks.pipeline_parallel.stage_kinds import Hidden

X = torch.arange(24.0).view(4, 6)
C = torch.complex(X, X + 1)

TENSORS = {
    "as it is": X,
    "transposed": X.t(),
    "a slice": X[:, ::2],
    "a column": X[:, 1:2],
    "expanded": X[0].expand(5, 6),
    "an expanded column": X[:, :1].expand(4, 5),
    "windows": X.unfold(1, 3, 1),
    "windows of a slice": X[:, ::2].unfold(1, 2, 1),
    "a part": X.double().t()[1:],
    "no rows": torch.empty(0, 3),
    "no columns": torch.empty(3, 0, 2).transpose(0, 2),
    "a scalar": torch.tensor(3),
    "complex": C,
    "conjugates": C.conj(),
    "conjugates, transposed": C.t().conj(),
    "an imaginary part": C.imag,
    "a negative one": C.conj().imag,
    "booleans": (X > 3).t(),
    "half": X.bfloat16(),
    "integers": torch.arange(4)[None].expand(3, 4),
}


def sent(tensor: Tensor) -> Tensor:
    """Return the received copy of a tensor."""
    layout = TensorLayout.of(tensor)
    memory = torch.full((layout.elements * layout.dtype.itemsize,), 7, dtype=torch.uint8)
    if layout.elements:
        memory.copy_(layout.memory_of(tensor))
    return layout.tensor_of(memory)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    """Values, strides and dtype are equal; a lazy conjugate or negative is computed first."""
    (tensor,) = pack(TENSORS[name]).tensors
    arrived = sent(tensor)
    assert torch.equal(arrived, TENSORS[name])
    assert TensorLayout.of(arrived) == TensorLayout.of(tensor)
    assert arrived.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert not arrived._is_view()


def test_nothing_is_sent_twice_or_needlessly() -> None:
    """Expanded tensors send a row, slices their elements, windows what they cover."""
    counts = {name: TensorLayout.of(tensor).elements for name, tensor in TENSORS.items()}
    assert counts["expanded"] == 6
    assert counts["a slice"] == 12
    assert counts["windows"] == 24
    assert counts["an expanded column"] == 4


def test_a_value_of_any_structure_arrives() -> None:
    """Its tensors are in place; a tensor that occurs twice is one."""
    value: Any = {"a": [X, None, 2.5], "b": Hidden(X, X > 3, 1.5), "c": (X.t(), "text", 1j, True)}
    packed = pack(value)
    assert len(packed.tensors) == 3
    arrived = unpack(packed.header, [sent(tensor) for tensor in packed.tensors])
    assert pack(arrived).header == packed.header
    assert arrived["a"][0] is arrived["b"].values
    assert arrived["a"][1:] == [None, 2.5]
    assert arrived["c"][1:] == ("text", 1j, True)
    assert torch.equal(arrived["c"][0], X.t())


def test_whether_a_gradient_is_required_is_told() -> None:
    """This holds for each tensor."""
    packed = pack((X.clone().requires_grad_(), X))
    assert [layout.requires_grad for layout in layouts_of(packed.header)] == [True, False]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (X.to_sparse(), r"a tensor \(sparse_coo\) cannot be handed on"),
        (torch.empty(2, device="meta"), r"a tensor \(meta\) cannot be handed on"),
        (lambda: X, "a function cannot be handed on, since it cannot be pickled"),
    ],
)
def test_what_cannot_be_sent_is_refused(value: Any, told: str) -> None:
    """The error names it."""
    with pytest.raises(TypeError, match=told):
        pack(value)
