"""Accesses to attributes of the context, and memory that passes between tasks without one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe import IterContext
from swpipe._values import context_log
from swpipe._values.context_log import AttributeLog
from tests.inference.helpers import orders, reads, recorded, writes

Task = Callable[[Any], None]


def named(name: str, function: Callable[[Any], object]) -> Task:
    """Return a task of this name."""

    def task(ctx: Any) -> None:
        function(ctx)

    task.__name__ = name
    return task


def sets(name: str, value: Callable[[Any], Any]) -> Task:
    """Return a task that sets an attribute, and is named after it."""
    return named(f"set {name}", lambda ctx: setattr(ctx, name, value(ctx)))


def make(ctx: Any) -> None:
    """Set ``a``."""
    ctx.a = torch.ones(4)


def look(ctx: Any) -> None:
    """Read ``a``."""
    float(ctx.a.sum())


def view(ctx: Any) -> None:
    """Set ``b`` to a view of ``a``."""
    ctx.b = ctx.a[:2]


def write_part(ctx: Any) -> None:
    """Modify that view."""
    ctx.b.zero_()


READ_AND_WRITTEN: dict[str, tuple[list[Task], str, str]] = {
    "get": ([make, named("t", lambda ctx: ctx.a + ctx.iter_idx)], "ctx.a", ""),
    "its own": ([named("t", lambda ctx: (setattr(ctx, "a", 1), ctx.a))], "", "ctx.a"),
    "hasattr": ([named("t", lambda ctx: hasattr(ctx, "never"))], "ctx.never", ""),
    "getattr": ([named("t", lambda ctx: getattr(ctx, "never", 1))], "ctx.never", ""),
    "rebind": ([make, named("t", lambda ctx: setattr(ctx, "a", None))], "", "ctx.a"),
    "delete": ([make, named("t", lambda ctx: delattr(ctx, "a"))], "", "ctx.a"),
    "vars": (
        [make, named("t", lambda ctx: vars(ctx).update(b=vars(ctx).pop("a")))],
        "ctx.a ctx.batch",
        "ctx.a ctx.b",
    ),
    "a list under two names": (
        [
            sets("list", lambda ctx: []),
            sets("box", lambda ctx: SimpleNamespace(items=ctx.list)),
            named("t", lambda ctx: ctx.box.items.append(1)),
        ],
        "ctx.box",
        "ctx.box ctx.list",
    ),
    "a view": ([make, view, named("t", write_part)], "ctx.b", "ctx.a ctx.b"),
    "a gradient": (
        [
            sets("x", lambda ctx: torch.ones(2, requires_grad=True)),
            named("t", lambda ctx: (ctx.x * 2).sum().backward()),
        ],
        "ctx.x",
        "ctx.x",
    ),
}


@pytest.mark.parametrize(
    ("tasks", "read", "written"), READ_AND_WRITTEN.values(), ids=READ_AND_WRITTEN
)
def test_what_a_task_does_to_attributes(tasks: list[Task], read: str, written: str) -> None:
    """Only the last task's reads and writes count, without ``iter_idx`` and what it set itself."""
    found = recorded(*tasks)
    assert reads(found, "t") == set(read.split())
    assert writes(found, "t") == set(written.split())


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda ctx: ctx.a.mul_(2),
    "through numpy": lambda ctx: ctx.a.numpy().fill(7),
    "through data": lambda ctx: ctx.a.data.zero_(),
    "rebound": lambda ctx: setattr(ctx, "a", None),
    "deleted": lambda ctx: delattr(ctx, "a"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_comes_after_those_who_read_before(how: str) -> None:
    """The change may be of any kind; a note names changes that no operator shows."""
    found = recorded(make, look, named("change", CHANGES[how]))
    assert "ctx.a" in writes(found, "change")
    assert orders(found) == {("look", "make", 0), ("change", "look", 0)}
    notes = [note for note in found.notes if "no operator says" in note]
    assert ["'change' modified ctx.a," in note for note in notes] == [True] * (
        how == "through numpy"
    )


def test_writing_a_view_comes_after_reads_of_its_base() -> None:
    """This holds if the base's attribute was deleted; views that are only read need no order."""

    def drop(ctx: Any) -> None:
        del ctx.a

    assert orders(recorded(make, view, look)) == {("view", "make", 0), ("look", "make", 0)}
    found = recorded(make, view, look, write_part)
    assert {("write_part", "view", 0), ("write_part", "look", 0)} < orders(found)
    assert ("write_part", "look", 0) in orders(recorded(make, view, look, drop, write_part))


def test_an_object_that_cannot_be_inspected_is_noted() -> None:
    """Changes in a plain object are not recorded: the notes name attribute and class."""

    class Opaque:
        pass

    (note,) = [one for one in recorded(sets("x", lambda _: [Opaque()])).notes if "inspected" in one]
    assert "ctx.x (Opaque)" in note


@pytest.mark.parametrize(
    ("access", "name"), [(getattr, "batch"), (getattr, "a"), (setattr, "a"), (delattr, "batch")]
)
def test_a_context_may_get_its_class_back_within_an_access(
    access: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may end the iteration's last task: the access continues as usual."""
    outcomes = []
    for swapped in (False, True):
        ctx = IterContext(5, 0)
        log = AttributeLog(ctx)
        log.__enter__()
        if swapped:

            def get(key: Any, default: Any, ctx: Any = ctx) -> Any:
                object.__setattr__(ctx, "__class__", IterContext)
                return ()

            monkeypatch.setattr(context_log, "_LOGS", SimpleNamespace(get=get))
        try:
            outcomes.append(access(ctx, name, *([7] if access is setattr else [])))
        except AttributeError as error:
            outcomes.append(str(error).partition("object")[2] or str(error))
        outcomes.append(object.__getattribute__(ctx, "__dict__"))
    assert outcomes[:2] == outcomes[2:]


# --------------------------------------------------------------------------------- transfers


class Hidden:
    """An object whose tensor no recording finds."""

    def __init__(self, tensor: Tensor) -> None:
        self.get = lambda: tensor


def test_a_gradient_in_a_hidden_leaf_is_a_transfer() -> None:
    """The step is cut in two: backward writes no attribute that the rest reads.

    When planned without this order, tables were updated before their gradients existed.
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
    (note,) = [note for note in found.notes if "no attribute shows" in note]
    assert note.startswith("'backward' and 'go_on' use the same memory (float32 [4]), and one of")
    (needed,) = [each for each in found.dependences().needed if each.consumer == "go_on"]
    assert str(needed) == f'("go_on", "backward") in deps, for {place}'


def test_hidden_writes_are_ordered_with_reads_and_reads_with_none() -> None:
    """Readers stay before or after the write; two readers can run in any order."""
    fill = sets("box", lambda ctx: Hidden(torch.ones(4)))
    first, last = (named(n, lambda ctx: float(ctx.box.get().sum())) for n in ("first", "last"))
    change = named("change", lambda ctx: ctx.box.get().add_(1))
    read = {("first", "set box", 0), ("last", "set box", 0)}
    assert orders(recorded(fill, first, last)) == read
    assert orders(recorded(fill, first, change, last)) == {
        ("first", "set box", 0),
        ("change", "first", 0),
        ("last", "change", 0),
    }
