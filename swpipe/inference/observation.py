"""Runs an iteration serially and observes each task.

An observation is plain data and holds no tensor, so that it keeps no memory alive.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.reach import reaches_of
from swpipe._state.reached import PlaceId
from swpipe._tensors.containers import LEAF, kind_of
from swpipe._tensors.pytree import map_tensors, nodes_in, tensors_in
from swpipe._tensors.stateful import PLAIN
from swpipe.core.context import IterContext, TypedContext
from swpipe.core.errors import add_note
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.draw_recorder import states_set
from swpipe.inference.modes import ModeObserver, Modes
from swpipe.inference.operators import OperatorAccesses, OperatorRecorder
from swpipe.inference.reachable_state import Changes, ObjectId, ReachableState
from swpipe.inference.recorded_context import (
    AttributeLog,
    RecordedContext,
    recorded_class,
    set_log,
)
from swpipe.inference.state_items import StateItem
from swpipe.inference.storages import StorageId, Storages, nbytes, unsharded

IMMUTABLE = (*PLAIN, torch.Size, torch.device, torch.dtype, range, slice, type, FunctionType, Enum)
"""Types whose values cannot be modified in place, and so need not be inspected."""


class TaskObservation(NamedTuple):
    """One task in one iteration.

    Attributes:
        task: Its name.
        attributes: Accesses to attributes of the context.
        operators: Accesses by operators.
        objects: Attribute to the objects that it held when the task began.
        items: State item to its storages when the task began.
        changes: What changed from the task's beginning to its end.
        stepped: Names of the optimizers whose ``step`` ran.
        sizes: Attribute that it set to its bytes; 0 where it deleted it.
        opaque: Attribute that it set to the class of something in it that cannot be inspected.
        places: Places of Python values outside the context that changed.
        modes: Modules that it ran, or switched between training and evaluation.
    """

    task: str
    attributes: AttributeLog
    operators: OperatorAccesses
    objects: Mapping[str, frozenset[ObjectId]]
    items: Mapping[StateItem, frozenset[StorageId]]
    changes: Changes
    stepped: frozenset[str]
    sizes: Mapping[str, int]
    opaque: Mapping[str, str]
    places: frozenset[PlaceId]
    modes: Modes


class IterationObservation(NamedTuple):
    """One iteration.

    Attributes:
        tasks: In serial order.
        before: Storages that existed before it began, without the batch's.
        survivors: Storages that still existed after its context was released.
    """

    tasks: tuple[TaskObservation, ...]
    before: frozenset[StorageId]
    survivors: frozenset[StorageId]


class Observer:
    """Runs iterations of some tasks, given in serial order, and observes them.

    Attributes:
        reaches: Task to what its code could reach before the first iteration.
    """

    def __init__(
        self,
        tasks: Sequence[PipelineTask],
        device: Device,
        seeds: TaskSeeds,
        context: type[TypedContext] = IterContext,
    ) -> None:
        self.reaches = reaches_of(tasks)
        self.storages = Storages()
        self._modes = ModeObserver(tasks)
        self._tasks = tasks
        self._device = device
        self._seeds = seeds
        self._context = recorded_class(context)
        self._seen: frozenset[StorageId] = frozenset()
        self._alive: frozenset[StorageId] = frozenset()

    def run(self, batch: Any, iter_idx: int) -> IterationObservation:
        """Run one iteration on a copy of the batch: tensors found in it are cloned."""
        observed, at_begin, at_end = self._run(batch, iter_idx)
        before = self._alive | at_begin
        self._seen |= at_begin.union(*(one.operators.seen for one in observed))
        if any(self.storages.alive(number) for number in self._seen - before - at_end):
            gc.collect()  # memory that only reference cycles keep does not survive
        self._alive = frozenset(number for number in self._seen if self.storages.alive(number))
        return IterationObservation(observed, before, self._alive)

    def _run(
        self, batch: Any, iter_idx: int
    ) -> tuple[tuple[TaskObservation, ...], frozenset[StorageId], frozenset[StorageId]]:
        """The tasks' observations; the storages of all state items at the beginning and the end."""
        ctx = self._context(map_tensors(batch, _copy), iter_idx)
        before = self._snapshot(ctx)
        at_begin = before.storages()
        observed = []
        for task in self._tasks:
            values = self._values()
            with self._modes.observing() as modes, states_set() as drawn:
                log, operators, stepped = self._call(task, ctx)
            places = frozenset(p for p, value in self._values().items() if value != values[p])
            after = self._snapshot(ctx)
            log.compare(before.attributes, after.attributes)
            seen = _observation(task, log, operators, stepped, before, after)
            if not task.random:  # then it has states of its own
                generators = seen.changes.generators | drawn
                seen = seen._replace(changes=seen.changes._replace(generators=generators))
            observed.append(seen._replace(places=places, modes=modes))
            before = after
        return tuple(observed), at_begin, before.storages()

    def _snapshot(self, ctx: RecordedContext) -> ReachableState:
        return ReachableState(ctx, self._tasks, self.storages, self._device)

    def _values(self) -> dict[PlaceId, object]:
        """What there is now in all places that tasks can reach."""
        reaches = self.reaches.values()
        return {place: reach.value(place) for reach in reaches for place in reach.places}

    def _call(
        self, task: PipelineTask, ctx: RecordedContext
    ) -> tuple[AttributeLog, OperatorAccesses, set[int]]:
        log, operators = AttributeLog(), OperatorRecorder(self.storages)
        seeded = self._seeds.seeded(task.name, ctx.iter_idx) if task.random else nullcontext()
        try:
            on_device = self._device.on(self._device.current_stream())
            with on_device, seeded, _eager(), _optimizer_steps() as stepped, operators:
                set_log(ctx, log)
                task.fn(ctx)
        except BaseException as error:
            add_note(
                error,
                f"swpipe: raised by task {task.name!r}, iteration {ctx.iter_idx}, while its "
                "effects were being recorded; the state of models and optimizers was restored",
            )
            raise
        finally:
            set_log(ctx, None)
        return log, operators.accesses, stepped


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.clone().requires_grad_(tensor.requires_grad)


def _observation(
    task: PipelineTask,
    log: AttributeLog,
    operators: OperatorAccesses,
    stepped: set[int],
    before: ReachableState,
    after: ReachableState,
) -> TaskObservation:
    values = {name: after.attributes[name] for name in log.sets if name in after.attributes}
    deleted = log.deletes - after.attributes.keys()
    return TaskObservation(
        task=task.name,
        attributes=log,
        operators=operators,
        objects=before.objects,
        items=before.items,
        changes=before.changes_until(after),
        stepped=frozenset(after.optimizers[n] for n in stepped if n in after.optimizers),
        sizes={name: _size(value) for name, value in values.items()} | dict.fromkeys(deleted, 0),
        opaque={name: kind for name, value in values.items() if (kind := _opaque(value))},
        places=frozenset(),
        modes=Modes(),
    )


@contextmanager
def _optimizer_steps() -> Iterator[set[int]]:
    """Collects the ids of the optimizers whose ``step`` is called within the block."""
    stepped: set[int] = set()

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped.add(id(optimizer))

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(hook).remove)
        yield stepped


def _eager() -> Any:
    """Runs compiled functions eagerly: their kernels do not go through the dispatcher."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _size(value: Any) -> int:
    """Bytes of the tensors' storages, of bytes objects, and of whatever has ``nbytes``."""
    storages: dict[StorageId, int] = {}
    for tensor in tensors_in(value):
        for one in unsharded(tensor):
            storages |= nbytes(one)
    leaves = list(_leaves(value))
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, bytes | bytearray)]
    sizes += [leaf.nbytes for leaf in leaves if isinstance(getattr(leaf, "nbytes", None), int)]
    return sum(storages.values()) + sum(sizes)


def _opaque(value: Any) -> str:
    kinds = (type(leaf).__name__ for leaf in _leaves(value) if not isinstance(leaf, IMMUTABLE))
    return next(kinds, "")


def _leaves(value: Any) -> Iterator[Any]:
    inside = [value, *(child for node in nodes_in(value) for child in node.children)]
    return (one for one in inside if kind_of(type(one)) is LEAF)
