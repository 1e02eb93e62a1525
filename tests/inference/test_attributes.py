"""Accesses to attributes of the context."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swpipe import IterContext
from swpipe.inference import Recording, recorded_context
from swpipe.inference.recorded_context import recorded_class
from tests.inference.helpers import orders, reads, recorded, writes


def make(ctx: Any) -> None:
    """Sets ``a``."""
    ctx.a = torch.ones(4)


def test_setting_and_reading() -> None:
    """Setting an attribute writes it, getting it reads it; ``iter_idx`` does not count."""

    def use(ctx: Any) -> None:
        ctx.b = ctx.a + ctx.iter_idx

    found = recorded(make, use)
    assert (reads(found, "make"), writes(found, "make")) == (set(), {"ctx.a"})
    assert (reads(found, "use"), writes(found, "use")) == ({"ctx.a"}, {"ctx.b"})
    assert orders(found) == {("use", "make", 0)}


def test_a_task_does_not_read_what_it_set_itself() -> None:
    """Only values of other tasks count as read."""

    def own(ctx: Any) -> None:
        ctx.a = 1
        ctx.a = ctx.a + 1

    assert reads(recorded(own), "own") == set()


def test_rebinding_and_deleting_are_writes() -> None:
    """Both come after tasks that read the attribute before."""

    def look(ctx: Any) -> None:
        float(ctx.a.sum())

    def rebind(ctx: Any) -> None:
        ctx.a = None

    def delete(ctx: Any) -> None:
        del ctx.a

    found = recorded(make, look, rebind, delete)
    assert writes(found, "rebind") == writes(found, "delete") == {"ctx.a"}
    assert orders(found) == {("look", "make", 0), ("rebind", "look", 0), ("delete", "rebind", 0)}


def test_testing_for_an_attribute_reads_it() -> None:
    """``hasattr`` and ``getattr`` read it, whether it exists or not, and no other attribute."""

    def ask(ctx: Any) -> None:
        hasattr(ctx, "later")
        getattr(ctx, "never", None)

    def later(ctx: Any) -> None:
        ctx.later = 1

    found = recorded(make, ask, later)
    assert reads(found, "ask") == {"ctx.later", "ctx.never"}
    assert ("later", "ask", 0) in orders(found)


def test_vars_reads_all_attributes() -> None:
    """Attributes set through it are recorded."""

    def through_vars(ctx: Any) -> None:
        held = vars(ctx)
        held["b"] = 1
        del held["a"]

    found = recorded(make, through_vars)
    assert reads(found, "through_vars") == {"ctx.a", "ctx.batch"}
    assert writes(found, "through_vars") == {"ctx.a", "ctx.b"}


def in_place(ctx: Any) -> None:
    """Modifies ``a``."""
    ctx.a.mul_(2)


def through_numpy(ctx: Any) -> None:
    """Modifies ``a`` without any operator."""
    ctx.a.numpy()[:] = 7


def through_data(ctx: Any) -> None:
    """Modifies ``a`` past its version counter."""
    ctx.a.data.zero_()


@pytest.mark.parametrize("change", [in_place, through_numpy, through_data])
def test_modifying_in_place_writes(change: Any) -> None:
    """By any means; it comes after tasks that read before."""

    def look(ctx: Any) -> None:
        float(ctx.a.sum())

    found = recorded(make, look, change)
    assert "ctx.a" in writes(found, change.__name__)
    assert (change.__name__, "look", 0) in orders(found)


def test_only_a_write_without_an_operator_is_noted() -> None:
    """The notes name task and attribute."""

    def remarks(found: Recording) -> list[str]:
        return [note for note in found.notes if "no operator says" in note]

    assert remarks(recorded(make, in_place)) == []
    assert remarks(recorded(make, through_data)) == []
    (remark,) = remarks(recorded(make, through_numpy))
    assert "'through_numpy' modified ctx.a," in remark


def view(ctx: Any) -> None:
    """``b`` is a part of ``a``."""
    ctx.b = ctx.a[:2]


def test_writing_a_view_writes_its_base() -> None:
    """Tasks that read the base come before."""

    def read_whole(ctx: Any) -> None:
        ctx.c = ctx.a + 1

    def write_part(ctx: Any) -> None:
        ctx.b.zero_()

    found = recorded(make, view, read_whole, write_part)
    assert writes(found, "write_part") == {"ctx.a", "ctx.b"}
    assert orders(found) == {
        ("view", "make", 0),
        ("read_whole", "make", 0),
        ("write_part", "view", 0),
        ("write_part", "read_whole", 0),
    }


def test_a_view_outlives_its_base_attribute() -> None:
    """Reads of a deleted attribute still come before the write of its view."""

    def read_whole(ctx: Any) -> None:
        ctx.c = ctx.a + 1

    def drop(ctx: Any) -> None:
        del ctx.a

    def write_part(ctx: Any) -> None:
        ctx.b.zero_()

    found = recorded(make, view, read_whole, drop, write_part)
    assert "ctx.a" in writes(found, "write_part")


def test_views_that_are_only_read_need_no_order() -> None:
    """Reading the base and taking a view of it can go in any order."""

    def read_whole(ctx: Any) -> None:
        ctx.c = ctx.a + 1

    assert orders(recorded(make, view, read_whole)) == {
        ("view", "make", 0),
        ("read_whole", "make", 0),
    }


def test_backward_reads_what_autograd_saved() -> None:
    """Backward reads a saved activation, so a task that overwrites it comes later."""
    weight = torch.ones(4, requires_grad=True)

    def forward(ctx: Any) -> None:
        ctx.hidden = weight * 2
        ctx.loss = (ctx.hidden * ctx.hidden).sum()

    def backward(ctx: Any) -> None:
        ctx.loss.backward()

    def recycle(ctx: Any) -> None:
        with torch.no_grad():
            ctx.hidden.zero_()

    found = recorded(forward, backward, recycle)
    assert "ctx.hidden" in reads(found, "backward")
    assert ("recycle", "backward", 0) in orders(found)


@dataclass
class Batch:
    """As users write them."""

    dense: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


def nested() -> Batch:
    """Two tensors, one of them deep inside."""
    return Batch(torch.ones(2), {"x": [torch.ones(3)]})


def test_a_tensor_deep_inside_a_batch_is_modified() -> None:
    """It writes the batch; the user's own batch is not changed."""

    def look(ctx: Any) -> None:
        ctx.y = ctx.batch.rest["x"][0] + 1

    def scale(ctx: Any) -> None:
        ctx.batch.rest["x"][0].mul_(3)

    batch = nested()
    found = recorded(look, scale, batch=batch)
    assert writes(found, "scale") == {"ctx.batch"}
    assert ("scale", "look", 0) in orders(found)
    assert batch.rest["x"][0].tolist() == [1, 1, 1]


def test_appending_to_a_container_modifies_it() -> None:
    """A list under two attributes is modified under both."""

    def share(ctx: Any) -> None:
        ctx.list = []
        ctx.box = SimpleNamespace(items=ctx.list)

    def look(ctx: Any) -> None:
        len(ctx.list)

    def append(ctx: Any) -> None:
        ctx.box.items.append(1)

    found = recorded(share, look, append)
    assert writes(found, "append") == {"ctx.list", "ctx.box"}
    assert ("append", "look", 0) in orders(found)


def test_the_gradient_of_an_attribute_belongs_to_it() -> None:
    """Backward writes the leaf that gets a gradient; tasks that read the gradient come after."""

    def leaf(ctx: Any) -> None:
        ctx.x = torch.ones(2, requires_grad=True)

    def backward(ctx: Any) -> None:
        (ctx.x * 2).sum().backward()

    def use(ctx: Any) -> None:
        ctx.norm = ctx.x.grad.norm()

    found = recorded(leaf, backward, use)
    assert writes(found, "backward") == {"ctx.x"}
    assert ("use", "backward", 0) in orders(found)


def test_sizes_are_bytes_of_what_each_task_sets() -> None:
    """Tensors at any depth, and bytes; a view counts its whole memory."""

    def sets(ctx: Any) -> None:
        ctx.tensors = [torch.zeros(10), {"x": torch.zeros(5, dtype=torch.float64)}]
        ctx.raw = b"12345"
        ctx.number = 3

    found = recorded(make, view, sets)
    assert found.sizes == {
        ("make", "a"): 16,
        ("view", "b"): 16,
        ("sets", "tensors"): 80,
        ("sets", "raw"): 5,
        ("sets", "number"): 0,
    }


def test_an_object_that_cannot_be_inspected_is_noted() -> None:
    """Changes in a plain object are not recorded: the notes name attribute and class."""

    class Opaque:
        pass

    def sets(ctx: Any) -> None:
        ctx.thing = [Opaque()]

    (note,) = [one for one in recorded(sets).notes if "Not inspected" in one]
    assert "ctx.thing (Opaque)" in note


@pytest.mark.parametrize("access", [getattr, setattr, delattr], ids=["get", "set", "delete"])
@pytest.mark.parametrize("name", ["batch", "a"], ids=["there", "missing"])
def test_a_context_may_get_its_class_back_within_an_access(
    access: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another thread ends the iteration's last task: the access goes on as it would."""
    outcomes = []
    for swapped in (False, True):
        ctx = recorded_class(IterContext)(5, 0)
        if swapped:

            def swap(ctx: Any) -> None:
                object.__setattr__(ctx, "__class__", IterContext)

            monkeypatch.setattr(recorded_context, "_log", swap)
        try:
            outcomes.append(access(ctx, name, *([7] if access is setattr else [])))
        except AttributeError as error:
            outcomes.append(str(error).partition("object")[2] or str(error))
        outcomes.append(object.__getattribute__(ctx, "__dict__"))
    assert outcomes[:2] == outcomes[2:]
