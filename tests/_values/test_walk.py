"""Tensors are found in any nesting, and values are rebuilt with all other contents."""

from __future__ import annotations

import gc
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swpipe._values.containers import KINDS
from swpipe._values.walk import map_tensors, nodes_in, record_stream, tensors_held, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Plain:
    x: Tensor
    more: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    name: str = "frozen"


@dataclass(frozen=True)
class FrozenDict:
    """A frozen dataclass with a ``__dict__``."""

    x: Tensor


@dataclass
class Output(OrderedDict[str, Any]):
    """A dictionary that is a dataclass too, like the outputs of some model libraries."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        vars(self)[key] = value


def output(x: Tensor) -> Output:
    made = Output()
    made["x"] = x
    return made


class AttrsStyle:
    """A class that looks as if attrs had made it."""

    __attrs_attrs__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Private:
    """A class with a slot whose name Python mangles."""

    __slots__ = ("__x", "unset")

    def __init__(self, x: Tensor) -> None:
        self.__x = x

    @property
    def x(self) -> Tensor:
        return self.__x

    def record_stream(self, stream: object) -> None:
        raise AssertionError("its tensors can be seen")


class Streamable:
    """A class with ``record_stream`` and an attribute besides its tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.cached: list[int] | None = None

    def record_stream(self, stream: object) -> None:
        raise AssertionError("its tensors can be seen")


@dataclass
class Failure(Exception):
    """A subclass of a class written in C, which ``object.__new__`` refuses."""

    x: Tensor


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Batch(list[Tensor]):
    """A list with an additional attribute."""

    label = "none"


class Sized(tuple[Tensor, ...]):
    """A tuple with a constructor of its own and an attribute."""

    def __new__(cls, first: Tensor, second: Tensor) -> Sized:
        made = super().__new__(cls, (first, second))
        made.label = "sized"
        return made

    label: str


class Registered:
    """A class that is registered with torch's pytree, and made from its children alone."""

    def __init__(self, x: Tensor, name: str) -> None:
        self.x, self.name = x, name


pytree.register_pytree_node(
    Registered,
    lambda value: ([[value.x]], value.name),
    lambda children, name: Registered(next(iter(children))[0], name),
)


def x(value: float = 1.0) -> Tensor:
    return torch.full((2,), value)


NESTINGS: dict[str, Any] = {
    "list": lambda t: [t],
    "tuple": lambda t: (t, 1),
    "dict": lambda t: {"a": t, 2: "b"},
    "ordered dict": lambda t: OrderedDict(a=t),
    "default dict": lambda t: defaultdict(list, a=[t]),
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset([t]),
    "deque": lambda t: deque([t], maxlen=3),
    "named tuple": lambda t: Pair(t, None),
    "typed named tuple": lambda t: Typed(t, "n"),
    "tuple with its own new": lambda t: Sized(t, t),
    "list subclass": lambda t: Batch([t]),
    "dataclass": lambda t: Plain(t),
    "frozen dataclass with slots": lambda t: Frozen(t),
    "frozen dataclass": FrozenDict,
    "dataclass built on a class in C": Failure,
    "dictionary and dataclass in one": output,
    "attrs class": AttrsStyle,
    "namespace": lambda t: types.SimpleNamespace(x=t),
    "user dict": lambda t: UserDict(x=t),
    "object with record_stream": Streamable,
    "private slot": Private,
    "registered with pytree": lambda t: Registered(t, "r"),
    "return type of torch": lambda t: torch.return_types.max((t, t)),
    "all at once": lambda t: {"a": [Pair(Plain(t, [t]), {"b": (Frozen(t),)})]},
}


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_a_tensor_is_found_and_replaced_in_any_nesting(nest: Any) -> None:
    """The result has the same type, with the new tensor instead of the old one, which is intact."""
    t, other = x(1), x(2)
    value = nest(t)
    assert list(map(id, tensors_in(value))) == [id(t)]
    new = map_tensors(value, lambda _: other)
    assert type(new) is type(value)
    assert new is not value
    assert list(map(id, tensors_in(new))) == [id(other)]
    assert list(map(id, tensors_in(value))) == [id(t)]


def test_other_contents_survive_a_rebuild() -> None:
    """These are attributes, default factories, lengths and labels."""
    streamable = Streamable(x())
    streamable.cached = [1, 2]
    assert map_tensors(streamable, Tensor.clone).cached == [1, 2]
    listing = Batch([x()])
    listing.label = "kept"
    assert map_tensors(listing, Tensor.clone).label == "kept"
    assert map_tensors(Sized(x(), x()), Tensor.clone).label == "sized"
    assert map_tensors(deque([x()], maxlen=3), Tensor.clone).maxlen == 3
    assert map_tensors(defaultdict(list, a=[x()]), Tensor.clone)["new"] == []
    assert map_tensors(Counter(a=2), Tensor.clone) == Counter(a=2)
    assert map_tensors(Registered(x(), "r"), Tensor.clone).name == "r"
    assert map_tensors(Private(x(3)), Tensor.clone).x[0] == 3
    assert map_tensors(output(x(3)), Tensor.clone)["x"][0] == 3


def test_what_is_shared_stays_shared() -> None:
    """A shared tensor or list is mapped once and shared in the result."""
    t = x()
    inner = [t]
    calls: list[Tensor] = []

    def clone(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return tensor.clone()

    new = map_tensors({"a": t, "b": inner, "c": Frozen(t), "d": inner}, clone)
    assert new["a"] is new["b"][0] is new["c"].x
    assert new["b"] is new["d"]
    assert len(calls) == 1
    assert len(list(tensors_in({"a": t, "b": inner}))) == 1


def test_containers_are_new_and_other_objects_are_leaves() -> None:
    """Modules, plain objects, arrays, iterators and classes are neither searched nor copied."""
    module = torch.nn.Linear(2, 2)
    for leaf in (module, Opaque(x()), x().numpy(), iter([x()]), Plain, Streamable, lambda: x()):
        assert list(tensors_in([leaf])) == []
        assert map_tensors([leaf], Tensor.clone)[0] is leaf
    value: dict[str, Any] = {"list": [1], "fixed": (1, "a")}
    new = map_tensors(value, Tensor.clone)
    new["list"].append(2)
    assert value["list"] == [1]
    assert new["fixed"] is value["fixed"]


class Movable:
    """An object with a ``to`` method."""

    __slots__ = ()

    def to(self, place: Any) -> Any:
        """Raise an error: nothing may move the object."""
        raise AssertionError(place)


class Slotted(Movable):
    """A subclass without a dictionary of attributes."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Averages(Movable):
    """An object with a state; restoring it needs the same object."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"x": self.x}


def test_objects_with_to_are_never_made_anew() -> None:
    """Most are no containers; their tensors are found by a search that only looks."""
    t = x()
    for value in (Slotted(t), Averages([t]), Averages({"a": Slotted(t)})):
        assert map_tensors([value], Tensor.clone)[0] is value
        assert list(tensors_in([value])) == []
        assert list(map(id, tensors_held([value]))) == [id(t)]
    assert not any(list(tensors_held([value])) for value in (t.untyped_storage(), nn.Linear(2, 2)))


def test_a_registered_class_with_to_is_opened_as_registered() -> None:
    """It is moved by its ``to`` if that is asked for, as is a dataclass or a dict with ``to``."""

    class Late(Movable):
        def __init__(self, x: Tensor) -> None:
            self.x, self.made = x, True

    pytree.register_pytree_node(Late, lambda v: ([v.x], None), lambda c, _: Late(*c))

    class Encoding(dict[str, Any]):
        def to(self, place: Any) -> Any:
            return place

    assert map_tensors(Late(x(1)), lambda t: t + 1).x[0] == 2
    values = [Late(x()), Encoding(x=x()), Slotted(x()), Slotted(1), nn.Linear(2, 2)]
    moved = map_tensors(values, lambda t: t, own=lambda value: type(value).__name__)
    assert moved == ["Late", "Encoding", "Slotted", "Slotted", values[-1]]


def test_cycles_are_safe() -> None:
    """A list that holds itself, also through tuples, is walked once and keeps its shape."""
    loop: list[Any] = [x()]
    loop.append(loop)
    loop.append((loop, "fixed"))
    assert len(list(tensors_in(loop))) == 1
    assert len(list(nodes_in(loop))) == 2
    new = map_tensors(loop, Tensor.clone)
    assert new[1] is new
    assert new[2][0] is new
    assert new is not loop
    start: Any = ([x()],)
    start[0].append(start)
    new = map_tensors(start, Tensor.clone)
    assert new[0][1] is new


def test_children_created_by_flatten_are_kept_apart() -> None:
    """Two registered nodes that make their children when asked do not take each other's."""
    value = [Registered(x(n), str(n)) for n in range(20)]
    assert [t[0].item() for t in tensors_in(value)] == list(range(20))
    new = map_tensors(value, Tensor.clone)
    assert [node.x[0].item() for node in new] == list(range(20))


def test_a_class_registered_late_is_opened_from_then_on() -> None:
    """It is not remembered as a leaf."""

    class Late:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    value = Late(x())
    assert list(tensors_in(value)) == []
    pytree.register_pytree_node(Late, lambda v: ([v.x], None), lambda c, _: Late(*c))
    assert len(list(tensors_in(value))) == 1
    assert Late in KINDS


def test_nodes_have_names_and_children() -> None:
    """Each container is shown once, with its keys and contents."""
    t = x()
    value = {"a": [t], "b": Frozen(t)}
    outer, listing, frozen = nodes_in(value)
    assert outer.keys == ("a", "b")
    assert listing.keys == ()
    assert listing.children[0] is t
    assert frozen.keys == ("x", "name")


# ------------------------------------------------------------------ record_stream


class OnDevice(Tensor):
    """A tensor that claims to be on an accelerator, and notes the streams recorded on it."""

    recorded: list[str]
    is_cpu = False  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Tensor) -> OnDevice:
        made = values.as_subclass(cls)
        made.recorded = []
        return made

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def test_every_tensor_on_the_device_is_recorded_once_per_stream() -> None:
    """Nested and shared tensors are recorded for all streams; those on the host are not."""
    t = OnDevice.of(x())
    value = {
        "a": [t, x()],
        "b": Frozen(t),
        "c": Streamable(t),
        "meta": torch.empty(1, device="meta"),
    }
    record_stream(value, "s1", "s2")
    assert t.recorded == ["s1", "s2"]


def test_the_gradient_of_a_leaf_is_recorded_with_it_and_that_of_a_parameter_is_not() -> None:
    """It is read through its tensor; another iteration may be training a parameter.

    torch may crash where two threads use ``grad``.
    """

    class Watched(torch.nn.Parameter):
        @property
        def grad(self) -> None:  # type: ignore[override]
            raise AssertionError

    leaf = x().requires_grad_()
    gradient = OnDevice.of(x())
    leaf.grad = gradient
    record_stream([leaf, Watched(x())], "s")
    assert gradient.recorded == ["s"]


class Hiding:
    """An object with tensors that the walk does not find."""

    def __init__(self, shown: object) -> None:
        self.hidden = Opaque(x())
        self.shown = shown
        self.recorded: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.recorded.append(stream)


def test_an_object_that_hides_its_tensors_records_for_itself() -> None:
    """Its own method is called if no tensor can be seen in it, and only then.

    An empty list that is met again does not show tensors.
    """
    empty: list[int] = []
    hiding, twice, showing = Hiding(None), Hiding([empty, empty]), Hiding([x()])
    record_stream([hiding, twice, showing], "s1", "s2")
    assert hiding.recorded == twice.recorded == ["s1", "s2"]
    assert showing.recorded == []


def _sparse_tensors() -> Iterator[Tensor]:
    dense = torch.eye(4)
    yield dense.to_sparse_coo()
    yield dense.to_sparse_csr()
    yield dense.to_sparse_csc()
    yield dense.to_sparse_bsr((2, 2))
    yield dense.to_sparse_bsc((2, 2))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_made_of_others_are_recorded_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices and values of sparse tensors, and the inside of wrappers, own the memory."""
    monkeypatch.setattr(Tensor, "is_cpu", False)
    recorded: list[torch.layout] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda self, _: recorded.append(self.layout))
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor in (*_sparse_tensors(), jagged):
        recorded.clear()
        record_stream(tensor, "s")
        assert len(recorded) >= 2
        assert set(recorded) == {torch.strided}


# ------------------------------------------------------------------------ torchrec


def test_a_keyed_jagged_tensor_keeps_its_cached_fields() -> None:
    """All tensors are mapped, and what was computed on the host need not be computed again."""
    torchrec = pytest.importorskip("torchrec")
    kjt = torchrec.KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(5),
        lengths=torch.tensor([1, 2, 0, 2]),
        weights=torch.ones(5),
        inverse_indices=(["f", "g"], torch.zeros(2, 2, dtype=torch.long)),
    )
    kjt.offset_per_key()
    kjt.offsets()
    new = map_tensors(kjt, Tensor.clone)
    assert type(new) is type(kjt)
    assert new.keys() == ["f", "g"]
    assert new._offset_per_key == [0, 3, 5]
    assert new._stride == kjt._stride
    assert new.inverse_indices()[0] == ["f", "g"]
    for name in ("_values", "_weights", "_lengths", "_offsets"):
        assert getattr(new, name) is not getattr(kjt, name)
        assert torch.equal(getattr(new, name), getattr(kjt, name))
    assert new["g"].values().tolist() == [3, 4]


def test_a_tensordict_is_rebuilt_whole() -> None:
    """Nested tensor dicts keep batch size, keys and whether they are locked."""
    tensordict = pytest.importorskip("tensordict")
    value = tensordict.TensorDict({"a": x(1), "n": {"b": x(2)}}, batch_size=[2]).lock_()
    new = map_tensors(value, Tensor.clone)
    assert type(new) is type(value)
    assert new.batch_size == value.batch_size
    assert new.is_locked
    assert torch.equal(new["n", "b"], x(2))
    assert new["a"] is not value["a"]


def test_what_was_walked_over_is_held_by_nobody() -> None:
    """They are freed without the collector: a batch may be on the device."""
    gc.collect()
    gc.disable()
    try:
        value = {"x": [x()]}
        gone = weakref.ref(value["x"][0])
        new = map_tensors(value, Tensor.clone)
        assert len([*tensors_in(new), *nodes_in(new), *tensors_held(value)]) == 4
        del value
        assert gone() is None
    finally:
        gc.enable()


def test_a_module_is_a_leaf_even_if_it_is_a_dataclass() -> None:
    """It has its own state, and is never rebuilt."""

    @dataclass(eq=False)
    class Layer(torch.nn.Module):
        scale: float = 2.0

        def __post_init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

    layer = Layer()
    assert [*tensors_in([layer])] == []
    assert map_tensors([layer], torch.zeros_like)[0] is layer
