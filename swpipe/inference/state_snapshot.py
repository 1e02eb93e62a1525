"""Snapshots of the context and of known state, and what changes from one to the next.

Snapshots are taken between tasks. They complement the recorded operators: however a task changes
something, it shows in which tensors there are, in version counters, or in the content of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from swpipe._state.generators import generator_states
from swpipe._state.owners import Found
from swpipe._tensors.content import same_node, version_of
from swpipe._tensors.pytree import Node, grad_or_none, nodes_in, tensors_in
from swpipe.core.context import TypedContext
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.declared import assign_declared
from swpipe.inference.recorded_context import attributes
from swpipe.inference.state_items import StateItem, items_in
from swpipe.inference.storages import StorageId, Storages, checksums, unsharded


class ObjectId(NamedTuple):
    """Identity of something that attributes can share and that can be modified in place.

    Attributes:
        kind: "storage", "container" or "tensor" (its ``requires_grad`` and ``grad``).
        number: The storage's number, or the object's ``id``.
    """

    kind: str
    number: int


class Changes(NamedTuple):
    """What changed between two snapshots.

    Attributes:
        items: State items that were added or removed, or whose tensor was replaced.
        objects: Containers and tensors of the context that were modified in place.
        storages: Storages with another content or version.
        silent: Those of them whose version counter did not change.
        generators: Names of generators that were drawn from.
        options: Names of optimizers whose options changed.
    """

    items: frozenset[StateItem]
    objects: frozenset[ObjectId]
    storages: frozenset[StorageId]
    silent: frozenset[StorageId]
    generators: frozenset[str]
    options: frozenset[str]


class _TensorState(NamedTuple):
    tensor: Tensor
    storages: frozenset[StorageId]
    version: int | None
    requires_grad: bool
    grad: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, storages: Storages) -> _TensorState:
        version, grad = version_of(tensor), grad_or_none(tensor)
        return cls(tensor, storages.of(tensor), version, tensor.requires_grad, grad)

    def replaced_by(self, later: _TensorState) -> bool:
        """Whether ``later`` is another tensor or in other memory; contents are not compared."""
        return (
            self.tensor is not later.tensor
            or self.storages != later.storages
            or self.requires_grad != later.requires_grad
        )


class StateSnapshot:
    """A snapshot of a context, and of the objects with state that are known by now.

    Attributes:
        attributes: The context's attributes.
        objects: Attribute to what it holds that can be modified in place.
        items: State item to the storages of its tensor.
        optimizers: An optimizer's id to its name.
    """

    def __init__(
        self,
        ctx: TypedContext,
        tasks: Iterable[PipelineTask],
        owners: Sequence[Found],
        storages: Storages,
        device: Device,
    ) -> None:
        device.synchronize()
        found = items_in(owners)
        tensors = assign_declared(found.tensors, tasks)
        self._items = {item: _TensorState.of(tensor, storages) for item, tensor in tensors.items()}
        self._nodes: dict[int, Node] = {}
        self._tensors: dict[int, _TensorState] = {}
        self.items = {item: state.storages for item, state in self._items.items()}
        self.attributes = attributes(ctx)
        known = {id(state.tensor) for state in self._items.values()}
        self.objects = {
            name: frozenset(self._objects_in(value, known, storages))
            for name, value in self.attributes.items()
        }
        self._sums: dict[StorageId, int] = {}
        for state in self._states():
            self._sums |= checksums(state.tensor) if state.storages - self._sums.keys() else {}
        self._generators = generator_states(device, found.generators)
        self.optimizers = {number: name for name, (number, _) in found.options.items()}
        self._options = {name: options for name, (_, options) in found.options.items()}

    def storages(self) -> frozenset[StorageId]:
        """The storages of all state items."""
        return frozenset[StorageId]().union(*self.items.values())

    def changes_until(self, later: StateSnapshot) -> Changes:
        """What changed until a later snapshot, which must be the present state."""
        sums = dict(later._sums)
        new_version = set[StorageId]()
        for state in self._states():
            if state.storages - sums.keys():
                sums |= checksums(state.tensor)
            if version_of(state.tensor) != state.version:
                new_version |= state.storages
        new_content = {s for s, content in self._sums.items() if sums.get(s, content) != content}
        kept = self._items.keys() & later._items.keys()
        replaced = {item for item in kept if self._items[item].replaced_by(later._items[item])}
        return Changes(
            items=frozenset((self._items.keys() ^ later._items.keys()) | replaced),
            objects=frozenset(self._modified()),
            storages=frozenset(new_content | new_version),
            silent=frozenset(new_content - new_version),
            # A generator that is new was just created, or its library imported.
            generators=_differing(self._generators, later._generators) & self._generators.keys(),
            options=_differing(self._options, later._options),
        )

    def _objects_in(self, value: object, known: set[int], storages: Storages) -> Iterator[ObjectId]:
        for node in nodes_in(value):
            self._nodes[id(node.value)] = node
            yield ObjectId("container", id(node.value))
        for tensor in (part for one in tensors_in(value) for part in unsharded(one)):
            # A parameter's gradient is a state item, and no part of the context.
            grad = None if id(tensor) in known else grad_or_none(tensor)
            for one in (tensor,) if grad is None else (tensor, grad):
                if id(one) not in known:
                    self._tensors.setdefault(id(one), _TensorState.of(one, storages))
                    yield ObjectId("tensor", id(one))
                yield from (ObjectId("storage", number) for number in storages.of(one))

    def _modified(self) -> Iterator[ObjectId]:
        for number, node in self._nodes.items():
            if not same_node(node, Node.of(node.value)):
                yield ObjectId("container", number)
        for number, state in self._tensors.items():
            tensor = state.tensor
            same_grad = grad_or_none(tensor) is state.grad
            if tensor.requires_grad != state.requires_grad or not same_grad:
                yield ObjectId("tensor", number)

    def _states(self) -> Iterator[_TensorState]:
        yield from self._items.values()
        yield from self._tensors.values()


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> frozenset[str]:
    kept = before.keys() & after.keys()
    # As items of a list, so that NaN equals itself.
    changed = {name for name in kept if [before[name]] != [after[name]]}
    return frozenset((before.keys() ^ after.keys()) | changed)
