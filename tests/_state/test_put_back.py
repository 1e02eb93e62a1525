"""What a task does to a value of any kind is undone, wherever the value lies."""

from __future__ import annotations

import array
import collections
import csv
import ctypes
import enum
import functools
import io
import itertools
import mmap
import os
import queue
import sqlite3
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from swpipe import PipelineTask
from swpipe._state.kinds import is_unchanging
from swpipe._state.loop import LoopState
from swpipe._state.values import SavedValues
from swpipe.core.errors import UnsavedStateError
from swpipe.device import CpuDevice
from swpipe.inference import record

CPU = CpuDevice()
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


def set_factory(held: Any) -> None:
    """Let a default dictionary make something else."""
    held.default_factory = list


def call(held: Any) -> object:
    """What a function returns."""
    return held()


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


class Phase(enum.Enum):
    """A user's enumeration, whose members count."""

    WARM = 1

    def __init__(self, value: int) -> None:
        self.rate = 1.0


class Counted(nn.Module):
    """Keeps an iterator."""

    def __init__(self, ids: Any) -> None:
        super().__init__()
        self.ids = ids

    def number(self) -> Any:
        """The next one."""
        return next(self.ids)


class Ids(NamedTuple):
    """Keeps an iterator."""

    ids: Any


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
    "an array with a view": (
        lambda: memoryview(array.array("d", [1.0])), set_item, lambda held: held.tolist(),
    ),
    "bytes with a view": (
        lambda: memoryview(bytearray(16)).cast("d"), set_item, lambda held: held.tolist(),
    ),
    "mapped memory": (lambda: mmap.mmap(-1, 8), set_item, lambda held: (held[:], held.tell())),
    "a position in mapped memory": (
        lambda: mmap.mmap(-1, 8, access=mmap.ACCESS_READ), mmap.mmap.read_byte, mmap.mmap.tell,
    ),
    "a member of an enumeration": (lambda: Phase.WARM, set_rate, attributes),
    "a default dictionary's factory": (
        lambda: collections.defaultdict(int), set_factory, lambda held: held.default_factory,
    ),
    "a partial's keywords": (
        lambda: functools.partial(dict, rate=1.0), lambda held: held.keywords.clear(), call,
    ),
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


def within(held: Any, take: Callable[[Any], Any]) -> Callable[[], Any]:
    """Something that the code names has it."""
    return lambda: next(take(held))


def with_default(ids: Any) -> Callable[[], Any]:
    """A default argument has it."""

    def number(ids: Any = ids) -> Any:
        return next(ids)

    return number


def with_keyword(ids: Any) -> Callable[[], Any]:
    """A default argument that is given by its keyword has it."""

    def number(*, ids: Any = ids) -> Any:
        return next(ids)

    return number


def in_method(ids: Any) -> Callable[[], Any]:
    """An attribute has its method."""
    named = types.SimpleNamespace(number=ids.__next__)
    return lambda: named.number()


def in_factory(ids: Any) -> Callable[[], Any]:
    """New keys are numbered."""
    numbers: Any = collections.defaultdict(ids.__next__)
    return lambda: numbers[len(numbers)]


HOLDERS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "a default": with_default,
    "a keyword": with_keyword,
    "its method": lambda ids: ids.__next__,
    "its method in an object": in_method,
    "a factory": in_factory,
    "a partial": lambda ids: functools.partial(next, ids),
    "a partial of its method": lambda ids: functools.partial(ids.__next__),
    "a keyword of a partial": lambda ids: functools.partial(with_keyword(iter(())), ids=ids),
    "a tuple": lambda ids: within((1, (ids,)), lambda held: held[1][0]),
    "a named tuple": lambda ids: within(Ids(ids), lambda held: held.ids),
    "a deque": lambda ids: within(collections.deque([ids]), lambda held: held[0]),
    "a module": lambda ids: Counted(ids).number,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_who_leads_to_an_advanced_iterator_gets_it_back(name: str) -> None:
    """Counters went on from where a recording had left them, except those in lists and objects."""
    number = HOLDERS[name](itertools.count())
    saved = SavedValues([PipelineTask("count", lambda ctx: number())])
    for _ in range(2):
        assert [number(), number()] == [0, 1]
        saved.restore()
    assert number() == 0


def test_two_methods_of_an_iterator_still_share_it() -> None:
    """They get the same copy."""
    ids = itertools.count()
    first, other = ids.__next__, functools.partial(next, ids)
    saved = SavedValues([PipelineTask("count", lambda ctx: (first, other))])
    first()
    saved.restore()
    assert [first(), other(), first()] == [0, 1, 2]


def test_all_else_is_put_back_after_a_failure() -> None:
    """Models, and values that came later, stayed as a recording had left them."""
    buffer, counts, weight = bytearray(1), [1], torch.ones(1, requires_grad=True)
    state = LoopState([PipelineTask("change", lambda ctx: (buffer, counts, weight))], None, CPU)
    buffer.append(1)
    counts.append(2)
    weight.detach().add_(1)
    with memoryview(buffer), pytest.raises(BufferError):
        state.restore()
    assert (counts, weight.item()) == ([1], 1)


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


def test_a_function_keeps_its_attributes() -> None:
    """Those that a task adds are removed."""

    def counted(ctx: Any) -> None:
        counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]

    saved = SavedValues([PipelineTask("count", counted)])
    counted(None)
    saved.restore()
    assert not vars(counted)


def noise(key: int) -> list[float]:
    """What a cache keeps for a key."""
    return [torch.rand(1).item()]


def in_class(cached: Any) -> Callable[[int], Any]:
    """A method that has a cache."""
    held: Any = type("Held", (), {"__module__": __name__, "get": staticmethod(cached)})()
    return lambda key: held.get(key)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("held", [lambda cached: cached, in_class], ids=["function", "method"])
def test_a_cache_has_what_it_had(held: Callable[[Any], Callable[[int], Any]], before: int) -> None:
    """Draws of a recording stayed in it, if it had any of before, or belonged to a class."""
    cached = functools.cache(noise)
    get = held(cached)
    kept = [cached(key) for key in range(before)]
    saved = SavedValues([PipelineTask("get", lambda ctx: get(1))])
    get(1)
    saved.restore()
    assert cached.cache_info().currsize == before
    assert all(cached(key) is one for key, one in enumerate(kept))


@pytest.mark.parametrize("size", [None, 8])
def test_what_a_cache_keeps_is_put_back(size: int | None) -> None:
    """A function without arguments whose result is kept is a common way to have only one."""
    once = functools.lru_cache(size)(lambda: {"n": [0]})
    once()
    saved = SavedValues([PipelineTask("count", lambda ctx: once)])
    once()["n"].append(1)
    saved.restore()
    assert once() == {"n": [0]}
    assert once.cache_info().currsize == 1


def test_a_cache_that_is_full_has_the_right_results() -> None:
    """It cannot be put back, and is left alone."""
    cached = functools.lru_cache(1)(lambda key: [key])
    cached(0)
    saved = SavedValues([PipelineTask("get", lambda ctx: cached(1))])
    cached(1)
    saved.restore()
    assert (cached(0), cached(1)) == ([0], [1])


def test_members_of_a_librarys_enumeration_stay_as_they_are() -> None:
    """They have attributes, too, such as a phrase."""
    assert is_unchanging(HTTPStatus.OK)
    assert not is_unchanging(Phase.WARM)


def draws_kept() -> Any:
    """A cache that has some of before, and cannot be put back."""
    cached = functools.lru_cache(noise)
    cached(0)
    return cached


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


def count_on(tensor: Any) -> None:
    """Change attributes of a tensor: a number, a list, a tensor, another tensor, a new one."""
    tensor.seen += 1
    tensor.norms.append(1.0)
    tensor.total.add_(1)
    tensor.main_grad = torch.ones(1)
    tensor.best = 1.0
    tensor._dynamo_static_input_type = "guarded"


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(1, 1).weight,
        lambda: torch.zeros(1),
        lambda: torch.zeros(1, requires_grad=True),
    ],
    ids=["parameter", "data", "leaf"],
)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a module"])
def test_a_tensor_keeps_its_attributes(make: Callable[[], Any], alone: bool) -> None:
    """Only its values and its gradient were put back. What torch.compile marks stays marked."""
    tensor, module = make(), nn.Module()
    module.register_buffer("tensor", tensor)
    tensor.seen, tensor.norms, tensor.total = 0, [], torch.zeros(1)
    main = tensor.main_grad = torch.zeros(1)
    held = tensor if alone else module
    task = PipelineTask("count", lambda ctx: count_on(getattr(held, "tensor", held)))
    record([task], None, device="cpu")
    assert (tensor.seen, tensor.norms, tensor.total.item()) == (0, [], 0.0)
    assert tensor.main_grad is main
    assert not hasattr(tensor, "best")
    assert hasattr(tensor, "_dynamo_static_input_type")


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("given", [None, ()], ids=["searched", "given"])
@pytest.mark.parametrize("script", [lambda model: model, nn.Sequential], ids=["itself", "a part"])
def test_a_module_of_torchscript_is_refused(script: Callable[[Any], Any], given: Any) -> None:
    """It ended in an AttributeError of the restore, after the first task."""
    model = script(torch.jit.script(nn.Linear(1, 1)))
    runs: list[int] = []
    task = PipelineTask("forward", lambda ctx: runs.append(model(ctx.batch)))
    with pytest.raises(UnsavedStateError, match=r"TorchScript keeps.*: model \(.*torch.compile"):
        record([task], torch.ones(1, 1), device="cpu", state=given)
    assert not runs


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: (n for n in range(9)), "generator"),
        (lambda: zip(range(3), (n for n in range(9)), strict=False), "zip"),
        (lambda: iter(torch.utils.data.DataLoader([1, 2])), "_SingleProcessDataLoaderIter"),
        (lambda: sqlite3.connect(":memory:"), "Connection"),
        (draws_kept, "_lru_cache_wrapper"),
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
