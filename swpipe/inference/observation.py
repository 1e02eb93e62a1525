"""Runs an iteration serially and observes each task.

An observation is plain data and holds no tensor, so that it keeps no memory alive.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.generators import TORCH
from swpipe._state.own_threads import before_steps
from swpipe._state.owners import Found
from swpipe._tensors.content import is_fixed
from swpipe._tensors.pytree import leaves_in, tensors_in
from swpipe.core.context import IterContext, TypedContext
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import add_note
from swpipe.inference.draw_recorder import DrawRecorder, copied, eager
from swpipe.inference.modes import ModeObserver, Modes
from swpipe.inference.operators import OperatorAccesses
from swpipe.inference.recorded_context import (
    AttributeLog,
    recorded_class,
    set_log,
)
from swpipe.inference.state_items import StateItem
from swpipe.inference.state_snapshot import Changes, ObjectId, StateSnapshot
from swpipe.inference.storages import StorageId, Storages, nbytes, unsharded


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
    modes: Modes

    @property
    def touched(self) -> frozenset[object]:
        """What it touched; memory of the iteration itself does not count."""
        log, operators, changes = self.attributes, self.operators, self.changes
        used = operators.all_reads | operators.writes | changes.storages
        items = [item for item, storages in self.items.items() if storages & used]
        return frozenset(
            {(item.owner, item.kind) for item in (*items, *changes.items)}
            | {*log.reads, *log.sets, *log.deletes, *self.stepped, *changes.options}
            | {*changes.generators, *self.modes.ran, *self.modes.switched}
            | ({"memory"} if operators.writes - operators.created else frozenset())
        )


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


class IterationObserver:
    """Runs iterations of some tasks, given in serial order, and observes them.

    Attributes:
        storages: All that was seen.
        owners: What has state, the given ones and optimizers that have stepped besides.
    """

    def __init__(
        self,
        tasks: Sequence[PipelineTask],
        device: Device,
        seeds: TaskSeeds,
        context: type[TypedContext] = IterContext,
        owners: Sequence[Found] = (),
    ) -> None:
        self.storages = Storages()
        self.owners = [*owners]
        self._modes = ModeObserver(owners)
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
        ctx = self._context(copied(batch), iter_idx)
        before = self._snapshot(ctx)
        at_begin = before.storages()
        observed = []
        for task in self._tasks:
            with self._modes.observing() as modes:
                log, operators, stepped = self._call(task, ctx)
            after = self._snapshot(ctx)
            log.compare(before.attributes, after.attributes)
            seen = _observation(task, log, operators.accesses, stepped, before, after)
            if operators.draws.keys() & {0} and not task.random:  # then it has states of its own
                generators = seen.changes.generators | {TORCH}
                seen = seen._replace(changes=seen.changes._replace(generators=generators))
            observed.append(seen._replace(modes=modes))
            before = after
        return tuple(observed), at_begin, before.storages()

    def _snapshot(self, ctx: TypedContext) -> StateSnapshot:
        return StateSnapshot(ctx, self._tasks, self.owners, self.storages, self._device)

    def _call(
        self, task: PipelineTask, ctx: TypedContext
    ) -> tuple[AttributeLog, DrawRecorder, set[int]]:
        log, operators = AttributeLog(), DrawRecorder(self._device, self.storages)
        seeded = self._seeds.seeded(task.name, ctx.iter_idx) if task.random else nullcontext()
        try:
            on_device = self._device.on(self._device.current_stream())
            stepped: set[int] = set()

            def step(optimizer: torch.optim.Optimizer) -> None:
                stepped.add(id(optimizer))
                if not any(one.owner is optimizer for one in self.owners):
                    self.owners.append(Found(type(optimizer).__name__, optimizer))

            with on_device, seeded, eager(), before_steps(step), operators:
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
        return log, operators, stepped


def _observation(
    task: PipelineTask,
    log: AttributeLog,
    operators: OperatorAccesses,
    stepped: set[int],
    before: StateSnapshot,
    after: StateSnapshot,
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
        modes=Modes(),
    )


def _size(value: Any) -> int:
    """Bytes of the tensors' storages, of bytes objects, and of whatever has ``nbytes``."""
    storages: dict[StorageId, int] = {}
    for tensor in tensors_in(value):
        for one in unsharded(tensor):
            storages |= nbytes(one)
    leaves = list(leaves_in(value))
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, bytes | bytearray)]
    sizes += [leaf.nbytes for leaf in leaves if isinstance(getattr(leaf, "nbytes", None), int)]
    return sum(storages.values()) + sum(sizes)


def _opaque(value: Any) -> str:
    kinds = (type(leaf).__name__ for leaf in leaves_in(value) if not is_fixed(leaf))
    return next(kinds, "")
