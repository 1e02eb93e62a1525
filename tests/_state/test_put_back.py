"""What a task does to a value of any kind is undone, wherever the value lies."""

from __future__ import annotations

import array
import collections
import csv
import ctypes
import functools
import io
import itertools
import os
import queue
import sqlite3
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from swpipe import PipelineTask
from swpipe._state.values import SavedValues
from swpipe.core.errors import UnsavedStateError
from swpipe.inference import record

Change = Callable[[Any], object]
Look = Callable[[Any], object]


class Slots:
    """A user's object without a dictionary, one slot of which is empty."""

    __slots__ = ("__hidden", "late", "rate")

    def __init__(self) -> None:
        self.rate, self.__hidden = 1.0, 1

    def change(self) -> None:
        """Change all three."""
        self.rate, self.__hidden, self.late = 2.0, 2, 1

    def look(self) -> object:
        """What they hold."""
        return self.rate, self.__hidden, hasattr(self, "late")


class History(list[float]):
    """A list with attributes, and a method of its own."""

    total = 0.0

    def clear(self) -> None:
        """Refuse."""
        raise AssertionError("a user's method is not called")


class Key:
    """Can be referred to weakly."""


KEY = Key()


def of_key(held: Any) -> object:
    """What a weak dictionary has for the key."""
    return held[KEY]


def put_first_last(held: Any) -> None:
    """Change nothing but the order."""
    held.move_to_end(next(iter(held)))


def set_value(held: Any) -> None:
    """Change a value of ctypes."""
    held.value += 1


def set_item(held: Any) -> None:
    """Change an item, by its key or index."""
    held[0 if not hasattr(held, "keys") else KEY if KEY in held else "n"] = 5


def add_attribute(held: Any) -> None:
    """Change an attribute and add another."""
    held.total = 3.0
    held.more = 1


def set_rate(held: Any) -> None:
    """Change an attribute."""
    held.rate = 2.0


def attributes(held: Any) -> object:
    """A copy of them."""
    return dict(vars(held))


CASES: dict[str, tuple[Callable[[], Any], Change, Look]] = {
    "slots": (Slots, Slots.change, Slots.look),
    "a list's attributes": (lambda: History([1.0]), add_attribute, attributes),
    "a list's items": (lambda: History([1.0]), lambda held: held.append(2.0), list),
    "the order of a dictionary": (
        lambda: collections.OrderedDict(a=1, b=2), put_first_last, list,
    ),
    "a default dictionary": (
        lambda: collections.defaultdict(int), lambda held: held["n"], dict,
    ),
    "an array": (lambda: array.array("d", [1.0]), lambda held: held.append(2.0), list),
    "an array of numpy": (lambda: np.ones(3), set_item, lambda held: held.tolist()),
    "a view of numpy": (lambda: np.ones((3, 2))[:, 1], set_item, lambda held: held.tolist()),
    "a number of ctypes": (lambda: ctypes.c_int(1), set_value, lambda held: held.value),
    "a text in memory": (
        lambda: io.StringIO("ab"), lambda held: held.write("x"), io.StringIO.getvalue,
    ),
    "a queue": (queue.Queue, lambda held: held.put(1), queue.Queue.qsize),
    "a simple queue": (queue.SimpleQueue, lambda held: held.put(1), queue.SimpleQueue.qsize),
    "a flag": (threading.Event, lambda held: held.set(), threading.Event.is_set),
    "a namespace": (lambda: types.SimpleNamespace(rate=1.0), set_rate, attributes),
    "what a thread has": (threading.local, set_rate, lambda held: dict(vars(held))),
    "a user dictionary": (lambda: collections.UserDict(n=0), set_item, dict),
    "a chain of dictionaries": (lambda: collections.ChainMap({}, {"n": 0}), set_item, dict),
    "a weak dictionary": (lambda: weakref.WeakKeyDictionary({KEY: 1}), set_item, of_key),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_changed_value_is_put_back(name: str) -> None:
    """Into the same object."""
    make, change, look = CASES[name]
    held = make()
    before = look(held)
    task = PipelineTask("change", lambda ctx: change(held))
    saved = SavedValues([task])
    task(None)
    assert look(held) != before
    saved.restore()
    assert look(held) == before


@pytest.mark.parametrize(
    "make",
    [
        itertools.count,
        lambda: itertools.cycle([0, 1, 2]),
        lambda: iter([0, 1, 2]),
        lambda: enumerate(iter("abc")),
        lambda: map(str, [0, 1, 2]),
    ],
    ids=["count", "cycle", "list", "enumerate", "map"],
)
def test_an_iterator_that_was_advanced_begins_again(make: Callable[[], Any]) -> None:
    """Whoever held it holds a copy: closures, attributes, items; it can be put back again."""
    held, expected = make(), next(make())
    listed, named = [held], types.SimpleNamespace(it=held)
    task = PipelineTask("advance", lambda ctx: (next(held), listed, named))
    saved = SavedValues([task])
    for _ in range(2):
        task(None)
        saved.restore()
        assert listed[0] is held
        assert named.it is held
    assert next(held) == expected


def test_an_iterator_that_was_not_advanced_stays_itself() -> None:
    """Others may hold it as well."""
    held = itertools.count()
    first = held
    saved = SavedValues([PipelineTask("look", lambda ctx: held)])
    saved.restore()
    assert held is first


@pytest.mark.parametrize("cover", [lambda file: file, csv.writer], ids=["file", "csv writer"])
def test_what_is_written_to_a_file_is_cut_off(cover: Callable[[Any], Any]) -> None:
    """Its length and position are as before, also where only a writer leads to it."""
    with tempfile.TemporaryFile("w+") as file:
        file.write("begun\n")
        writer = cover(file)
        write = writer.writerow if hasattr(writer, "writerow") else writer.write
        task = PipelineTask("write", lambda ctx: write("abc"))
        saved = SavedValues([task])
        task(None)
        saved.restore()
        file.write("next\n")
        file.seek(0)
        assert file.read() == "begun\nnext\n"


def test_a_function_keeps_its_attributes_and_an_empty_cache() -> None:
    """A cache that had something before keeps all."""

    @functools.lru_cache
    def cached(key: int) -> list[int]:
        return [key]

    def counted(ctx: Any) -> None:
        counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
        cached(1)

    saved = SavedValues([PipelineTask("count", counted)])
    counted(None)
    saved.restore()
    assert not vars(counted)
    assert cached.cache_info().currsize == 0


def test_the_environment_is_put_back() -> None:
    """Variables that a task sets."""

    def change(ctx: Any) -> None:
        os.environ["SWPIPE_TEST"] = "1"

    saved = SavedValues([PipelineTask("change", change)])
    change(None)
    saved.restore()
    assert "SWPIPE_TEST" not in os.environ


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.append(nn.Linear(1, 1)),
        lambda model: model.__setitem__(1, nn.ReLU()),
        lambda model: model.__delitem__(1),
        lambda model: setattr(model, "forward", lambda x: x),
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
        lambda model: prune.l1_unstructured(model[0], "weight", 0.5),
        lambda model: model.register_buffer("seen", torch.zeros(1)),
        lambda model: setattr(model[1], "__class__", nn.ReLU),
    ],
)
def test_a_module_gets_its_parts_back(change: Callable[[nn.Module], object]) -> None:
    """Modules, parameters, attributes, its class."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def look() -> object:
        parts = [(type(one), [*vars(one)], [*one._forward_pre_hooks]) for one in model.modules()]
        tensors = [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]
        return parts, tensors, [*model.named_children()]

    before = look()
    record([PipelineTask("change", lambda ctx: change(model))], None, device="cpu", iterations=1)
    assert look() == before


class Trainer(nn.Module):
    """A module that keeps its optimizer, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.optimizer: Any = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def step(self, ctx: Any) -> None:
        """Step with the old optimizer, and with a new one."""
        self.layer(ctx.batch).sum().backward()
        self.optimizer.step()
        self.optimizer = torch.optim.Adam(self.layer.parameters())
        self.optimizer.step()


def test_an_optimizer_within_a_module_and_a_new_one_leave_no_trace() -> None:
    """The one is found and restored; the other belongs to nobody else."""
    trainer = Trainer()
    old, before = trainer.optimizer, trainer.layer.weight.tolist()
    record([PipelineTask("step", trainer.step)], torch.ones(1, 2), device="cpu")
    assert trainer.optimizer is old
    assert (trainer.layer.weight.tolist(), len(old.state)) == (before, 0)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: (n for n in range(9)), "generator"),
        (lambda: zip(range(3), (n for n in range(9)), strict=False), "zip"),
        (lambda: iter(torch.utils.data.DataLoader([1, 2])), "_SingleProcessDataLoaderIter"),
        (lambda: sqlite3.connect(":memory:"), "Connection"),
    ],
)
def test_what_nobody_can_put_back_is_refused(make: Callable[[], Any], kind: str) -> None:
    """Before anything runs, with the task, the value and the mend; unless the user says so."""
    held, runs = make(), []

    def use(ctx: Any) -> None:
        runs.append(held)

    with pytest.raises(UnsavedStateError, match=rf"held \({kind}\) of task 'use'.*use an object"):
        record([PipelineTask("use", use)], None, device="cpu")
    assert not runs
    record([PipelineTask("use", use)], None, device="cpu", state=[])
