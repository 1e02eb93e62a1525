"""Memory that passes between tasks without an attribute, and the order that it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.inference.helpers import orders, reads, recorded, writes


class Hidden:
    """Holds a tensor where no recording looks."""

    def __init__(self, tensor: Tensor) -> None:
        self.get = lambda: tensor


def test_a_gradient_in_a_hidden_leaf_is_a_transfer() -> None:
    """The seam of a step that is cut in two: backward writes no attribute that the rest reads.

    Planned without this order, tables were updated before their gradients were there.
    """

    def cut(ctx: Any) -> None:
        leaf = torch.ones(4, requires_grad=True)
        ctx.seam = Hidden(leaf)
        ctx.loss = (leaf * 3).sum()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    def go_on(ctx: Any) -> None:
        float(ctx.seam.get().grad.sum())

    found = recorded(cut, backward, go_on)
    assert orders(found) == {("backward", "cut", 0), ("go_on", "backward", 0)}
    place = "memory from 'backward' to 'go_on'"
    assert place in writes(found, "backward")
    assert place in reads(found, "go_on")
    (note,) = [note for note in found.notes if "no attribute led to" in note]
    assert note.startswith("'go_on' uses memory (float32 [4]) that 'backward' created or wrote")
    (told,) = [one for one in found.dependences().needed if one.consumer == "go_on"]
    assert str(told) == f'("go_on", "backward") in deps, for {place}'


def make(ctx: Any) -> None:
    """A box with memory in it."""
    ctx.box = Hidden(torch.ones(4))


def look(ctx: Any) -> None:
    """What is in the box."""
    float(ctx.box.get().sum())


def test_hidden_writes_are_ordered_with_reads() -> None:
    """Readers stay before or after the write."""

    def change(ctx: Any) -> None:
        ctx.box.get().add_(1)

    def look_again(ctx: Any) -> None:
        float(ctx.box.get().sum())

    assert orders(recorded(make, look, change, look_again)) == {
        ("look", "make", 0),
        ("change", "look", 0),
        ("look_again", "change", 0),
    }


def test_hidden_reads_need_no_order() -> None:
    """Two tasks that read what a third one created can do so in any order."""

    def peek(ctx: Any) -> None:
        float(ctx.box.get().max())

    found = recorded(make, look, peek)
    assert orders(found) == {("look", "make", 0), ("peek", "make", 0)}
    assert not [note for note in found.notes if "no attribute led to" in note]


def test_memory_in_attributes_is_no_transfer() -> None:
    """The attribute orders the tasks already."""

    def make(ctx: Any) -> None:
        ctx.a = torch.ones(4)

    def double(ctx: Any) -> None:
        ctx.b = ctx.a * 2

    def both(ctx: Any) -> None:
        ctx.c = ctx.a + ctx.b

    found = recorded(make, double, both)
    assert reads(found, "both") == {"ctx.a", "ctx.b"}
    assert writes(found, "make") == {"ctx.a"}
