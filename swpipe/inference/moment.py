"""How all within sight stands between two tasks, and what differs from one moment to the next.

This is the second witness, beside the operators: whatever a task did, by whichever means, shows in
what lies where, in version counters, or in the content of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from swpipe._tensors.pytree import Node, grad_or_none, nodes_in, tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.declared import by_declaration
from swpipe.inference.generators import states
from swpipe.inference.recorded_context import RecordedContext, attributes
from swpipe.inference.slots import Slot, reached_by
from swpipe.inference.storages import StorageId, Storages, checksums, unsharded
from swpipe.shortcut.changes import same_node


class Entry(NamedTuple):
    """Something that several attributes may share, and that can be modified in place.

    Attributes:
        kind: "storage", "container" or "tensor" (whose gradient, say, may be another one).
        number: Its identity.
    """

    kind: str
    number: int


class Difference(NamedTuple):
    """What is otherwise than it was.

    Attributes:
        slots: That came or went, or whose tensor is another one.
        items: Containers and tensors of the context, modified in place.
        storages: With other content, or with another version.
        silent: Those among them whose version counter does not tell.
        generators: That moved on; their names.
        options: Optimizers whose options changed; their names.
        plain: Paths to plain Python values that changed.
    """

    slots: frozenset[Slot]
    items: frozenset[Entry]
    storages: frozenset[StorageId]
    silent: frozenset[StorageId]
    generators: frozenset[str]
    options: frozenset[str]
    plain: frozenset[str]


class _State(NamedTuple):
    tensor: Tensor
    storages: frozenset[StorageId]
    version: int | None
    requires_grad: bool
    grad: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, storages: Storages) -> _State:
        return cls(
            tensor,
            frozenset(storages.of(tensor)),
            _version(tensor),
            tensor.requires_grad,
            grad_or_none(tensor),
        )


class Moment:
    """What lies where.

    Attributes:
        attributes: Of the context.
        items: Attribute to what it holds that can be modified in place.
        slots: Slot to the storages of its tensor.
        optimizers: An optimizer's id to its name.
    """

    def __init__(
        self,
        ctx: RecordedContext,
        tasks: Iterable[PipelineTask],
        storages: Storages,
        device: Device,
    ) -> None:
        device.synchronize()
        reached = reached_by(tasks)
        slots = by_declaration(reached.tensors, tasks)
        self._slots = {slot: _State.of(tensor, storages) for slot, tensor in slots.items()}
        self._nodes: dict[int, Node] = {}
        self._tensors: dict[int, _State] = {}
        self.slots = {slot: state.storages for slot, state in self._slots.items()}
        self.attributes = attributes(ctx)
        known = {id(state.tensor) for state in self._slots.values()}
        self.items = {
            name: frozenset(self._items(value, known, storages))
            for name, value in self.attributes.items()
        }
        self._sums: dict[StorageId, int] = {}
        for state in self._states():
            self._sums |= checksums(state.tensor) if state.storages - self._sums.keys() else {}
        self._generators = states(device, reached.generators)
        self.optimizers = {number: name for name, (number, _) in reached.options.items()}
        self._options = {name: options for name, (_, options) in reached.options.items()}
        self._plain = reached.plain

    def stored(self) -> frozenset[StorageId]:
        """The storages of all slots."""
        return frozenset[StorageId]().union(*self.slots.values())

    def until(self, later: Moment) -> Difference:
        """What differs at a later moment, which is now."""
        sums = dict(later._sums)
        moved = set[StorageId]()
        for state in self._states():
            if state.storages - sums.keys():
                sums |= checksums(state.tensor)
            if _version(state.tensor) != state.version:
                moved |= state.storages
        changed = {s for s, content in self._sums.items() if sums.get(s, content) != content}
        return Difference(
            slots=frozenset(
                slot
                for slot in self._slots.keys() | later._slots.keys()
                if not _same_slot(self._slots.get(slot), later._slots.get(slot))
            ),
            items=frozenset(self._modified()),
            storages=frozenset(changed | moved),
            silent=frozenset(changed - moved),
            # One that is new was made, or its library loaded: nobody has drawn from it yet.
            generators=_differing(self._generators, later._generators) & self._generators.keys(),
            options=_differing(self._options, later._options),
            plain=_differing(self._plain, later._plain),
        )

    def _items(self, value: object, known: set[int], storages: Storages) -> Iterator[Entry]:
        for node in nodes_in(value):
            self._nodes[id(node.value)] = node
            yield Entry("container", id(node.value))
        for tensor in (part for one in tensors_in(value) for part in unsharded(one)):
            # A parameter's gradient is in a slot too, and not the context's.
            grad = None if id(tensor) in known else grad_or_none(tensor)
            for one in (tensor,) if grad is None else (tensor, grad):
                if id(one) not in known:
                    self._tensors.setdefault(id(one), _State.of(one, storages))
                    yield Entry("tensor", id(one))
                yield from (Entry("storage", number) for number in storages.of(one))

    def _modified(self) -> Iterator[Entry]:
        for number, node in self._nodes.items():
            if not same_node(node, Node.of(node.value)):
                yield Entry("container", number)
        for number, state in self._tensors.items():
            tensor = state.tensor
            same_grad = grad_or_none(tensor) is state.grad
            if tensor.requires_grad != state.requires_grad or not same_grad:
                yield Entry("tensor", number)

    def _states(self) -> Iterator[_State]:
        yield from self._slots.values()
        yield from self._tensors.values()


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_slot(before: _State | None, after: _State | None) -> bool:
    """Whether a slot has the same tensor in the same memory; its content is another matter."""
    if before is None or after is None:
        return before is after
    return (
        before.tensor is after.tensor
        and before.storages == after.storages
        and before.requires_grad == after.requires_grad
    )


def _differing(before: dict[str, object], after: dict[str, object]) -> frozenset[str]:
    missing = object()
    return frozenset(
        name
        for name in before.keys() | after.keys()
        if not _equal(before.get(name, missing), after.get(name, missing))
    )


def _equal(before: object, after: object) -> bool:
    return before is after or before == after  # NaN is the same as itself
