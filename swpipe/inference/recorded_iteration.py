"""Runs one iteration serially, with everybody watching."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.discovery import PLAIN
from swpipe._tensors.containers import LEAF, kind_of
from swpipe._tensors.pytree import map_tensors, nodes_in, tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.facts import IterationFacts, TaskFacts
from swpipe.inference.moment import Moment
from swpipe.inference.operators import OperatorWatch, Touched
from swpipe.inference.recorded_context import AttributeLog, RecordedContext, keep_log
from swpipe.inference.storages import StorageId, Storages, nbytes, unsharded

IMMUTABLE = (*PLAIN, torch.Size, torch.device, torch.dtype, range, slice, type, FunctionType, Enum)
"""What nobody can modify in place, so that it need not be looked into."""


class Recorder:
    """Runs iterations of some tasks, and tells what it saw.

    Args:
        tasks: In serial order.
        device: That the tasks use.
        seeds: For tasks with ``random=True``.
    """

    def __init__(self, tasks: Sequence[PipelineTask], device: Device, seeds: TaskSeeds) -> None:
        self.storages = Storages()
        self._tasks = tasks
        self._device = device
        self._seeds = seeds
        self._met: frozenset[StorageId] = frozenset()
        self._alive: frozenset[StorageId] = frozenset()

    def run(self, batch: Any, iter_idx: int) -> IterationFacts:
        """Run one iteration on a copy of the batch, as far as there are tensors in it.

        Raises:
            BaseException: Whatever a task raised, with a note of where.
        """
        facts, stored, left = self._run(batch, iter_idx)
        before = self._alive | stored
        self._met |= stored.union(*(one.met for one in facts))
        if any(self.storages.alive(number) for number in self._met - before - left):
            gc.collect()  # what only cycles hold does not survive
        self._alive = frozenset(number for number in self._met if self.storages.alive(number))
        return IterationFacts(facts, before, self._alive)

    def _run(
        self, batch: Any, iter_idx: int
    ) -> tuple[tuple[TaskFacts, ...], frozenset[StorageId], frozenset[StorageId]]:
        """What was seen of each task; the storages of all slots at the beginning and the end."""
        ctx = RecordedContext(map_tensors(batch, _copy), iter_idx)
        before = self._moment(ctx)
        stored = before.stored()
        facts = []
        for task in self._tasks:
            log, touched, stepped = self._call(task, ctx)
            after = self._moment(ctx)
            log.compare(before.attributes, after.attributes)
            facts.append(_facts(task, log, touched, stepped, before, after))
            before = after
        return tuple(facts), stored, before.stored()

    def _moment(self, ctx: RecordedContext) -> Moment:
        return Moment(ctx, self._tasks, self.storages, self._device)

    def _call(
        self, task: PipelineTask, ctx: RecordedContext
    ) -> tuple[AttributeLog, Touched, set[int]]:
        log, watch = AttributeLog(), OperatorWatch(self.storages)
        seeded = self._seeds.seeded(task.name, ctx.iter_idx) if task.random else nullcontext()
        try:
            with seeded, _eager(), _steps() as stepped, watch:
                keep_log(ctx, log)
                task.fn(ctx)
        except BaseException as error:
            error.add_note(
                f"swpipe: at task {task.name!r}, iteration {ctx.iter_idx}, while its effects were "
                "being recorded; the state of models and optimizers was put back"
            )
            raise
        finally:
            keep_log(ctx, None)
        return log, watch.touched, stepped


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.clone().requires_grad_(tensor.requires_grad)


def _facts(
    task: PipelineTask,
    log: AttributeLog,
    touched: Touched,
    stepped: set[int],
    before: Moment,
    after: Moment,
) -> TaskFacts:
    values = {name: after.attributes[name] for name in log.sets if name in after.attributes}
    gone = log.deletes - after.attributes.keys()
    return TaskFacts(
        task=task.name,
        reads=frozenset(log.reads - {"iter_idx"}),
        sets=frozenset(log.sets),
        deletes=frozenset(log.deletes),
        held=before.items,
        slots=before.slots,
        read=frozenset(touched.reads | touched.replays),
        replayed=frozenset(touched.replays - touched.reads),
        written=frozenset(touched.writes),
        met=frozenset(touched.met),
        made=frozenset(touched.made),
        difference=before.until(after),
        stepped=frozenset(after.optimizers[n] for n in stepped if n in after.optimizers),
        collectives=frozenset(touched.collectives),
        sizes={name: _size(value) for name, value in values.items()} | dict.fromkeys(gone, 0),
        opaque={name: kind for name, value in values.items() if (kind := _opaque(value))},
    )


@contextmanager
def _steps() -> Iterator[set[int]]:
    """Gathers the ids of the optimizers whose ``step`` is called within the block."""
    stepped: set[int] = set()

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped.add(id(optimizer))

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(note).remove)
        yield stepped


def _eager() -> Any:
    """Compiled functions run as they are written: their kernels go past the dispatcher."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _size(value: Any) -> int:
    """Bytes of the memory that a value holds: of tensors, of bytes, of what tells its nbytes."""
    storages: dict[StorageId, int] = {}
    for tensor in tensors_in(value):
        for one in unsharded(tensor):
            storages |= nbytes(one)
    return sum(storages.values()) + sum(_plain_size(leaf) for leaf in _leaves(value))


def _plain_size(leaf: Any) -> int:
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    told = getattr(leaf, "nbytes", 0)
    return told if isinstance(told, int) else 0


def _opaque(value: Any) -> str:
    kinds = (type(leaf).__name__ for leaf in _leaves(value) if not isinstance(leaf, IMMUTABLE))
    return next(kinds, "")


def _leaves(value: Any) -> Iterator[Any]:
    inside = [value, *(child for node in nodes_in(value) for child in node.children)]
    return (one for one in inside if kind_of(type(one)) is LEAF)
