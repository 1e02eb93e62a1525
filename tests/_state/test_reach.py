"""What one task's code may change, and another's can reach, is found before either has run."""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import enum
import functools
import heapq
import io
import itertools
import os
import queue
import random
import struct
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from swpipe import PipelineTask
from swpipe._state.reach import reach_of, reaches_of
from swpipe._state.reached import Reach

Pair = tuple[Callable[[Any], object], Callable[[Any], object]]
PAIRS: dict[str, Callable[[], Pair]] = {}
RATE = 1.0

noise, bernoulli = torch.rand, torch.Tensor.bernoulli
numbers = types.SimpleNamespace(python=random.random, numpy=np.random.rand)
HELD = [1]


def pair(make: Callable[[], Pair]) -> Callable[[], Pair]:
    """A function that makes a task that changes a value now and then, and one that uses it."""
    PAIRS[make.__name__] = make
    return make


class Phase(enum.Enum):
    """Of training."""

    WARM = 1
    MAIN = 2


class Slotted:
    """A user's object without a dictionary."""

    __slots__ = ("__hidden", "rate")

    def __init__(self) -> None:
        self.rate, self.__hidden = 1.0, [0]

    def note(self, ctx: Any) -> None:
        """Change what no other class can name."""
        if ctx.loss < 1:
            self.__hidden[0] += 1

    def use(self, ctx: Any) -> int:
        """Read it."""
        return self.__hidden[0]


class Holder:
    """A user's object."""

    phase: Any = Phase.WARM
    made: ClassVar[Any] = None
    rate_a = 1.0

    def __init__(self) -> None:
        self._rate = 1.0

    @property
    def rate(self) -> float:
        """A number that a setter sets."""
        return self._rate

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value

    @classmethod
    def get(cls) -> Any:
        """The one object of the class."""
        if cls.made is None:
            cls.made = cls()
        return cls.made


def changing(
    value: Any, change: Callable[[Any, Any], object], use: Callable[[Any], object]
) -> Pair:
    """A pair over one value, which both functions reach through a closure."""

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            change(value, ctx)

    return note, lambda ctx: use(value)


@pair
def a_slot() -> Pair:
    def change(held: Slotted, ctx: Any) -> None:
        held.rate *= 0.5

    return changing(Slotted(), change, lambda held: held.rate)


@pair
def a_private_slot() -> Pair:
    held = Slotted()
    return held.note, held.use


@pair
def a_setter() -> Pair:
    def change(held: Holder, ctx: Any) -> None:
        held.rate = 2.0

    return changing(Holder(), change, lambda held: held.rate)


@pair
def a_default_of_a_class() -> Pair:
    def change(held: Holder, ctx: Any) -> None:
        held.phase = Phase.MAIN

    return changing(Holder(), change, lambda held: held.phase)


@pair
def an_object_of_a_class() -> Pair:
    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            Holder.get()._rate = 3.0

    return note, lambda ctx: Holder.get()._rate


@pair
def a_computed_name() -> Pair:
    def change(held: Holder, ctx: Any) -> None:
        setattr(held, f"rate_{'a'}", 2.0)

    return changing(Holder(), change, lambda held: held.rate_a)


@pair
def a_global_by_its_string() -> Pair:
    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            globals()["RATE"] *= 0.5

    return note, lambda ctx: RATE


@pair
def a_namespace() -> Pair:
    def change(held: Any, ctx: Any) -> None:
        held.rate *= 0.5

    return changing(types.SimpleNamespace(rate=1.0), change, lambda held: held.rate)


@pair
def an_attribute_of_a_function() -> Pair:
    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            note.calls = 1  # type: ignore[attr-defined]

    return note, lambda ctx: getattr(note, "calls", 0)


@pair
def an_item() -> Pair:
    best = [1.0]

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            best[0] = ctx.loss

    return note, lambda ctx: best[0]


@pair
def an_item_added_to() -> Pair:
    counts = {"rows": 0}

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            counts["rows"] += 1

    return note, lambda ctx: counts["rows"]


@pair
def an_item_of_an_item() -> Pair:
    counts: Any = {"rows": [0]}

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            counts["rows"].append(1)

    return note, lambda ctx: len(counts["rows"])


@pair
def a_heap() -> Pair:
    return changing([1.0], lambda heap, ctx: heapq.heappush(heap, 2.0), lambda heap: heap[0])


@pair
def a_function_of_a_dictionary() -> Pair:
    counts, functions = {"n": 0}, {}

    def count(ctx: Any) -> None:
        counts["n"] += 1

    functions["count"] = count

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            functions["count"](ctx)

    return note, lambda ctx: counts["n"]


@pair
def a_bound_method_of_a_list() -> Pair:
    held: list[int] = []
    add = held.append

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            add(1)

    return note, lambda ctx: len(held)


@pair
def a_bytearray() -> Pair:
    def change(held: bytearray, ctx: Any) -> None:
        held[0] = 1

    return changing(bytearray(2), change, lambda held: held[0])


@pair
def an_array() -> Pair:
    def change(held: Any, ctx: Any) -> None:
        held[0] += 1

    return changing(array.array("d", [0.0]), change, lambda held: held[0])


@pair
def an_array_of_numpy() -> Pair:
    return changing(np.zeros(3), lambda held, ctx: held.fill(1), lambda held: held.sum())


@pair
def a_number_of_ctypes() -> Pair:
    def change(held: Any, ctx: Any) -> None:
        held.value += 1

    return changing(ctypes.c_int(0), change, lambda held: held.value)


@pair
def a_counter_of_itertools() -> Pair:
    return changing(itertools.count(), lambda held, ctx: next(held), next)


@pair
def a_generator() -> Pair:
    return changing((n for n in range(9)), lambda held, ctx: next(held), next)


@pair
def a_flag() -> Pair:
    return changing(threading.Event(), lambda held, ctx: held.set(), lambda held: held.is_set())


@pair
def a_queue() -> Pair:
    return changing(queue.Queue(), lambda held, ctx: held.put(1), lambda held: held.qsize())


@pair
def a_file() -> Pair:
    return changing(io.StringIO(), lambda held, ctx: print(1, file=held), lambda held: held.tell())


@pair
def a_user_dict() -> Pair:
    def change(held: Any, ctx: Any) -> None:
        held["n"] += 1

    return changing(collections.UserDict(n=0), change, lambda held: held["n"])


@pair
def a_weak_reference() -> Pair:
    held = Holder()
    reference = weakref.ref(held)

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            reference()._rate = 2.0  # type: ignore[union-attr]

    return note, lambda ctx: held._rate


@pair
def an_environment_variable() -> Pair:
    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            os.environ["SWPIPE_TEST"] = "1"

    return note, lambda ctx: os.environ.get("SWPIPE_TEST")


@pair
def an_imported_module() -> Pair:
    def note(ctx: Any) -> None:
        import tests._state.test_reach as this  # noqa: PLW0406

        if ctx.loss < 1:
            this.RATE *= 0.5  # type: ignore[misc]

    return note, lambda ctx: RATE


@pair
def a_wrapped_function() -> Pair:
    counts = {"n": 0}

    @torch.no_grad()
    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            counts["n"] += 1

    return note, lambda ctx: counts["n"]


@pair
def a_context_manager() -> Pair:
    counts = {"n": 0}

    @contextlib.contextmanager
    def counting() -> Any:
        counts["n"] += 1
        yield

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            with counting():
                """Nothing."""

    return note, lambda ctx: counts["n"]


class Counting(nn.Module):
    """A user's module that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.held: list[int] = []

    def forward(self, x: Any) -> Any:
        """Count now and then."""
        if x.sum() > 1:
            self.calls += 1
            self.held.append(1)
        return x


@pair
def a_module() -> Pair:
    model = nn.Sequential(nn.Linear(2, 2), Counting())
    counting = model[1]
    return lambda ctx: model(ctx.x), lambda ctx: counting.calls


@pair
def a_hook() -> Pair:
    model, sums = nn.Linear(2, 2), {"n": 0}

    def hook(module: Any, given: Any, out: Any) -> None:
        if out.sum() > 1:
            sums["n"] += 1

    model.register_forward_hook(hook)
    return lambda ctx: model(ctx.x), lambda ctx: sums["n"]


@pair
def a_hook_in_another_tasks_backward() -> Pair:
    model, sums = nn.Linear(2, 2), {"n": 0}

    def hook(grad: Any) -> None:
        if grad.sum() > 1:
            sums["n"] += 1

    model.weight.register_hook(hook)
    return lambda ctx: ctx.loss.backward(), lambda ctx: (model(ctx.x), sums["n"])


@pair
def a_hook_of_an_activation_in_another_tasks_backward() -> Pair:
    model, norms = nn.Linear(2, 2), [0.0]

    def forward(ctx: Any) -> float:
        out = model(ctx.x)
        if out.sum() > 1:
            out.register_hook(lambda grad: norms.append(float(grad.norm())))
        return norms[-1]

    return lambda ctx: ctx.loss.backward(), forward


@pair
def what_a_checkpoint_runs_again_in_another_tasks_backward() -> Pair:
    counting = Counting()
    return lambda ctx: ctx.loss.backward(), lambda ctx: (
        checkpoint(counting, ctx.x),
        counting.calls,
    )


@pair
def an_option_of_a_library_module() -> Pair:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    drop = model[1]

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            drop.p = 0.5

    return note, lambda ctx: model(ctx.x)


class Scale(torch.autograd.Function):
    """A user's node of autograd's graph."""

    calls = 0
    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Count now and then."""
        if x.sum() > 1:
            Scale.calls += 1
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Likewise."""
        if grad.sum() > 1:
            Scale.backwards += 1
        return grad


@pair
def a_function_of_autograd() -> Pair:
    return lambda ctx: Scale.apply(ctx.x), lambda ctx: Scale.calls


@pair
def a_function_of_autograd_in_another_tasks_backward() -> Pair:
    return lambda ctx: ctx.loss.backward(), lambda ctx: (Scale.apply(ctx.x), Scale.backwards)


def kept_by(value: Any, change: Callable[[Any], object]) -> Pair:
    """A pair over one value, of which only the second function is given the value itself."""
    held = Holder()
    held._rate = value

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            change(held)

    return note, lambda ctx: sum(value)


@pair
def a_list_added_to() -> Pair:
    def change(held: Any) -> None:
        held._rate += [2.0]

    return kept_by([1.0], change)


@pair
def an_array_scaled() -> Pair:
    def change(held: Any) -> None:
        held._rate *= 0.5

    return kept_by(np.ones(3), change)


@pair
def a_list_under_a_condition() -> Pair:
    history = [1.0]

    def note(ctx: Any) -> None:
        log = history if ctx.loss < 1 else None
        if log is not None:
            log.append(2.0)

    return note, lambda ctx: sum(history)


@pair
def a_dictionary_or_another() -> Pair:
    counts = {"n": 0}

    def note(ctx: Any) -> None:
        mine = counts or {}
        if ctx.loss < 1:
            mine["n"] = 1

    return note, lambda ctx: counts["n"]


@pair
def a_list_that_a_call_returns() -> Pair:
    logs = {"a": [1.0]}

    def change(held: Any, ctx: Any) -> None:
        log = held.get("a")
        log += [2.0]

    return changing(logs, change, lambda held: sum(held["a"]))


@pair
def a_list_added_to_by_an_item() -> Pair:
    logs = {"a": [1.0]}
    (log,) = logs.values()

    def note(ctx: Any) -> None:
        new = [2.0]
        if ctx.loss < 1:
            logs["a"] += new

    return note, lambda ctx: sum(log)


@pair
def a_method_of_a_type() -> Pair:
    log = [1.0]

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            list.append(log, 2.0)

    return note, lambda ctx: sum(log)


@pair
def a_method_under_another_name() -> Pair:
    log, add = [1.0], list.append

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            add(log, 2.0)

    return note, lambda ctx: sum(log)


@pair
def an_array_that_a_function_writes_to() -> Pair:
    rates = np.ones(3)

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            np.multiply(rates, 0.5, out=rates)

    return note, lambda ctx: rates.sum()


@pair
def an_array_that_a_function_masks() -> Pair:
    return changing(np.ones(3), lambda held, ctx: np.putmask(held, held > 0, 2), np.sum)


@pair
def a_buffer_that_is_packed_into() -> Pair:
    return changing(bytearray(8), lambda held, ctx: struct.pack_into("d", held, 0, ctx.x), bytes)


@pair
def a_view_of_a_buffer() -> Pair:
    buffer = bytearray(8)
    view = memoryview(buffer).cast("d")

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            view[0] = 1.0

    return note, lambda ctx: bytes(buffer)


@pair
def a_view_of_an_array() -> Pair:
    rates = np.ones(3)
    first = rates[:1]

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            first[0] = 2.0

    return note, lambda ctx: rates.sum()


@pair
def a_vocabulary() -> Pair:
    ids: Any = collections.defaultdict(itertools.count().__next__)
    return lambda ctx: [ids[word] for word in ctx.words], lambda ctx: len(ids)


@pair
def a_cached_result() -> Pair:
    @functools.cache
    def counts() -> dict[str, int]:
        return {"n": 0}

    counts()

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            counts()["n"] += 1

    return note, lambda ctx: counts()["n"]


@pair
def a_result_in_a_cache_of_a_size() -> Pair:
    @functools.lru_cache(maxsize=4)
    def counts(name: str) -> dict[str, int]:
        return {"n": 0}

    counts("a")

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            counts("a")["n"] += 1

    return note, lambda ctx: counts("a")["n"]


class Masks:
    """A user's object that makes each of its masks once."""

    def __init__(self) -> None:
        self.made: list[int] = []

    @functools.lru_cache  # noqa: B019
    def get(self, rows: int) -> list[int]:
        """A new one."""
        self.made.append(rows)
        return [rows]


@pair
def a_cached_method() -> Pair:
    masks = Masks()
    made = masks.made
    return lambda ctx: masks.get(ctx.rows), lambda ctx: len(made)


@pair
def a_result_of_a_cached_method() -> Pair:
    masks = Masks()
    mask = masks.get(3)

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            masks.get(3).append(4)

    return note, lambda ctx: mask[0]


@pair
def a_weak_proxy() -> Pair:
    held = Holder()
    proxy = weakref.proxy(held)

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            proxy._rate = 2.0

    return note, lambda ctx: held._rate


@pair
def a_singleton() -> Pair:
    class Registry:
        made: Any = None

        def __new__(cls) -> Any:
            if cls.made is None:
                cls.made = super().__new__(cls)
                cls.made.best = 0.0
            return cls.made

    registry = Registry()

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            Registry().best = 1.0

    return note, lambda ctx: registry.best


@pair
def a_singleton_by_its_metaclass() -> Pair:
    class Single(type):
        made: ClassVar[dict[Any, Any]] = {}

        def __call__(cls) -> Any:
            if cls not in cls.made:
                cls.made[cls] = super().__call__()
            return cls.made[cls]

    class Registry(metaclass=Single):
        def __init__(self) -> None:
            self.best = 0.0

    registry = Registry()

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            Registry().best = 1.0

    return note, lambda ctx: registry.best


class PerObject:
    """A descriptor that keeps the values itself."""

    def __init__(self) -> None:
        self.values: Any = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, cls: Any) -> Any:
        return self.values.get(owner, 1.0)

    def __set__(self, owner: Any, value: Any) -> None:
        self.values[owner] = value


class Described:
    """A user's object with one."""

    rate = PerObject()


@pair
def a_value_of_a_descriptor() -> Pair:
    def change(held: Described, ctx: Any) -> None:
        held.rate = 2.0

    return changing(Described(), change, lambda held: held.rate)


class OfTheObject:
    """A descriptor that keeps the value in an attribute of the object."""

    def __init__(self) -> None:
        self.unit = 1.0

    def __get__(self, owner: Any, cls: Any) -> Any:
        return owner.kept * self.unit

    def __set__(self, owner: Any, value: Any) -> None:
        owner.kept = value


class Keeping:
    """A user's object with one."""

    rate = OfTheObject()

    def __init__(self) -> None:
        self.kept = 1.0


@pair
def a_descriptor_of_an_attribute() -> Pair:
    held = Keeping()

    def note(ctx: Any) -> None:
        if ctx.loss < 1:
            held.rate = 2.0

    return note, lambda ctx: held.kept


def reaches(note: Callable[[Any], object], use: Callable[[Any], object]) -> tuple[Reach, Reach]:
    """What the two functions reach, as tasks of one loop."""
    found = reaches_of([PipelineTask("note", note), PipelineTask("use", use)])
    return found["note"], found["use"]


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_what_may_be_changed_is_shared(make: Callable[[], Pair]) -> None:
    """Whatever kind of value it is, and although it was not changed yet."""
    note, use = reaches(*make())
    assert [place for place in note.places.keys() & use.places.keys() if note.may_change(place)]


class Row:
    """A user's object that tasks make."""

    def __init__(self, value: Any) -> None:
        self.value = self.scale = value


CONFIG: Any = {"scale": 2.0, "names": ["a"]}


def reading_only() -> dict[str, Pair]:
    """Pairs of functions of which none changes what both use."""
    settings, table = types.SimpleNamespace(scale=2.0), np.ones(3)
    groups: Any = collections.defaultdict(list)
    device = torch.device("cpu")

    def fill(ctx: Any) -> None:
        out = {}
        out["x"] = ctx.batch * CONFIG["scale"]
        rows = [name.upper() for name in CONFIG["names"]]
        rows.append("b")
        ctx.out, ctx.rows = out, rows
        ctx.features["y"] = table[0] + settings.scale
        mine = [] if ctx.x is None else {}
        mine += rows
        total = sum(ctx.rows)
        total += len(rows)
        into = np.empty(3)
        np.add(table, 1, out=into)
        ctx.sums["n"] += Row(total).value + len(groups.get(0, []))

    def read(ctx: Any) -> object:
        ctx.moved = ctx.batch.to(device)
        ctx.group, ctx.row = groups.get(1), Row(2).value
        return CONFIG["scale"], CONFIG["names"], table.sum(), settings.scale

    return {"a configuration": (fill, read)}


@pytest.mark.parametrize("name", reading_only())
def test_what_is_only_read_is_not_taken_for_changed(name: str) -> None:
    """A decoder that fills lists and dictionaries of its own keeps no order."""
    note, use = reaches(*reading_only()[name])
    shared = note.places.keys() & use.places.keys()
    assert not [note.places[p] for p in shared if note.may_change(p) or use.may_change(p)]


@pytest.mark.parametrize(
    ("draw", "generator"),
    [
        (lambda ctx: random.random(), "Python's default generator"),
        (lambda ctx: np.random.rand(), "numpy's default generator"),
        (lambda ctx: torch.randn(2), "torch's default generators"),
        (lambda ctx: ctx.x.bernoulli_(), "torch's default generators"),
        (lambda ctx: nn.Linear(1, 1), "torch's default generators"),
        (lambda ctx: noise(2), "torch's default generators"),
        (lambda ctx: drop(ctx.x), "torch's default generators"),
        (lambda ctx: bernoulli(ctx.x), "torch's default generators"),
        (lambda ctx: numbers.python(), "Python's default generator"),
        (lambda ctx: numbers.numpy(2), "numpy's default generator"),
        (lambda ctx: attend(ctx.x, ctx.x, ctx.x, dropout_p=0.1), "torch's default generators"),
    ],
)
def test_code_that_draws_is_known(draw: Callable[[Any], object], generator: str) -> None:
    """By the names of modules, functions and methods; other code draws from none."""
    drawing, other = reaches(draw, lambda ctx: attend(ctx.x, ctx.x, ctx.x, dropout_p=0.0))
    assert generator in drawing.draws
    assert other.draws == set()


VALUES = TensorDataset(torch.arange(4.0))
SEEDED = torch.Generator()


@pytest.mark.parametrize(
    ("held", "draws"),
    [
        (DataLoader(VALUES), True),
        (DataLoader(VALUES, generator=SEEDED), False),
        (RandomSampler(VALUES), True),
        (RandomSampler(VALUES, generator=SEEDED), False),
        (BatchSampler(RandomSampler(VALUES), 2, False), True),
        (SequentialSampler(VALUES), False),
    ],
)
def test_a_pass_over_a_loader_draws_a_seed(held: Any, draws: bool) -> None:
    """Unless it has a generator of its own; to look at the loader draws nothing."""
    passing, looking = reaches(lambda ctx: list(held), lambda ctx: len(held))
    assert passing.begins is draws
    assert not looking.begins


@pytest.mark.parametrize("caching", [functools.cache, functools.lru_cache(maxsize=4)])
def test_a_cache_of_a_function_is_no_state_that_tasks_share(caching: Any) -> None:
    """Its function is searched, and so are the results that it holds."""
    table = caching(lambda row: [row, *HELD])
    task = PipelineTask("task", lambda ctx: table(ctx.row))

    def containers() -> set[int]:
        return {place.holder for place in reach_of(task).places if not place.name}

    assert containers() == {id(HELD)}
    result = table(1)
    assert containers() == {id(HELD), id(result)}
