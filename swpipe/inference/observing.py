"""Serial execution of an iteration, with an observation of each task.

Changes that operators and the context do not show are found by comparing the moments before and
after a task: every change shows in the set of tensors, in version counters, or in the content of
memory. An observation is plain data and holds no tensor, so that it keeps no memory alive.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.torch_hooks import before_steps
from swpipe._values.context_log import ContextWatch, attributes
from swpipe._values.fingerprint import is_fixed
from swpipe._values.generators import TORCH, generator_states
from swpipe._values.stateful import Owner, modules_in, modules_of
from swpipe._values.storages import MemoryPrint, StorageId, Storages
from swpipe._values.walk import grad_or_none, leaves_in, tensors_in, unsharded
from swpipe.core.context import IterContext, TypedContext
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import add_note
from swpipe.inference.operators import OperatorAccesses, OperatorRecorder, copied, eager
from swpipe.inference.states import StateItem, assign_declared, items_in
from swpipe.inference.watched_modes import ModuleModes


class TaskObservation(NamedTuple):
    """The observation of one task in one iteration.

    Attributes:
        task: The task's name.
        reads: Attributes of the context that the task read.
        sets: Attributes that the task set, deleted or modified in place.
        operators: Accesses by operators.
        held: Attribute to the storages that it held when the task began.
        items: State item to its storages when the task began.
        replaced: State items that were added or removed, or whose tensor was replaced.
        changed: Storages with another content or version.
        silent: Storages of ``changed`` whose version counter did not change.
        generators: Names of generators that were drawn from.
        options: Names of optimizers whose options changed.
        stepped: Names of the optimizers whose ``step`` ran.
        opaque: Attribute that the task set to the class of an object in it that cannot be
            inspected.
        ran: Names of the outermost modules that were called, in whole or in part.
        switched: Names of the outermost modules of which a part ran in the other mode, or was left
            in it.
    """

    task: str
    reads: frozenset[str]
    sets: frozenset[str]
    operators: OperatorAccesses
    held: Mapping[str, frozenset[StorageId]]
    items: Mapping[StateItem, frozenset[StorageId]]
    replaced: frozenset[StateItem]
    changed: set[StorageId]
    silent: set[StorageId]
    generators: frozenset[str]
    options: frozenset[str]
    stepped: frozenset[str]
    opaque: Mapping[str, str]
    ran: frozenset[str]
    switched: frozenset[str]

    @property
    def writes(self) -> set[StorageId]:
        """The storages that the task modified, by operators or otherwise."""
        return self.operators.writes | self.changed


class IterationObservation(NamedTuple):
    """The observation of one iteration.

    Attributes:
        tasks: In serial order.
        before: Storages that existed before the iteration began, without the batch's.
        survivors: Storages that still existed after the iteration's context was released.
    """

    tasks: tuple[TaskObservation, ...]
    before: frozenset[StorageId]
    survivors: frozenset[StorageId]


class IterationObserver:
    """Runner of iterations that observes each task.

    Attributes:
        storages: All storages that were seen.
        owners: The given objects with state, and the optimizers that have stepped since.
    """

    def __init__(
        self,
        tasks: Sequence[PipelineTask],
        device: Device,
        seeds: TaskSeeds,
        context: type[TypedContext] = IterContext,
        owners: Sequence[Owner] = (),
    ) -> None:
        self.storages = Storages()
        self.owners = [*owners]
        self._name_of: dict[int, str] = {}  # module's id to its outermost owner
        for path, owner in owners:
            if isinstance(owner, torch.nn.Module):
                for module in modules_in(owner):
                    self._name_of.setdefault(id(module), path)
        self._tasks = tasks
        self._device = device
        self._seeds = seeds
        self._context = context
        self._seen: frozenset[StorageId] = frozenset()
        self._alive: frozenset[StorageId] = frozenset()

    def run(self, batch: Any, iter_idx: int) -> IterationObservation:
        """Run one iteration on a copy of the batch: tensors found in the batch are cloned."""
        observed, at_begin, at_end = self._run(batch, iter_idx)
        before = self._alive | at_begin
        # Survivors are states. The context has been released here, since it was local to _run.
        self._seen |= at_begin.union(*(one.operators.seen for one in observed))
        # Collecting garbage is slow, so it runs only if memory of this iteration is still alive.
        if any(self.storages.alive(number) for number in self._seen - before - at_end):
            gc.collect()  # memory that only reference cycles keep does not survive
        self._alive = frozenset(number for number in self._seen if self.storages.alive(number))
        return IterationObservation(observed, before, self._alive)

    def _run(
        self, batch: Any, iter_idx: int
    ) -> tuple[tuple[TaskObservation, ...], frozenset[StorageId], frozenset[StorageId]]:
        """Return the observations of all tasks, and the storages of all state items.

        The first set of storages is from the beginning of the iteration, the second one from its
        end.
        """
        ctx = self._context(copied(batch), iter_idx)
        before = self._moment(ctx)
        at_begin = before.of_items()
        observed = []
        for task in self._tasks:
            # Each task gets recorders of its own, so that its accesses are not mixed with those of
            # other tasks.
            log = ContextWatch(ctx, objects=False)
            operators = OperatorRecorder(self._device, self.storages)
            modes = ModuleModes(modules_of(self.owners), eager=True)
            stepped = set[int]()
            with modes:
                self._call(task, ctx, log, operators, stepped)
            after = self._moment(ctx)
            sets = log.sets.union(log.deletes, log.produced, log.deleted)
            # Only attributes that the task set: an opaque value that it merely found is another
            # task's.
            values = {name: v for name, v in attributes(ctx).items() if name in sets}
            changed, silent = before.memory.changed_until(after.memory)
            generators = _differing(before.generators, after.generators)
            # A generator that is new was just created, or its library was imported: nothing was
            # drawn.
            generators &= before.generators.keys()
            # Number 0 stands for torch's default generators. A random task has states of its own.
            if operators.draws.keys() & {0} and not task.random:
                generators |= {TORCH}
            observed.append(
                TaskObservation(
                    task=task.name,
                    reads=frozenset(log.reads),
                    sets=frozenset(sets),
                    operators=operators.accesses,
                    held=before.held,
                    items={item: one.storages for item, one in before.items.items()},
                    replaced=before.replaced_until(after),
                    changed=changed,
                    silent=silent,
                    generators=generators,
                    options=_differing(before.options, after.options),
                    stepped=frozenset(
                        after.optimizers[number] for number in stepped & after.optimizers.keys()
                    ),
                    opaque={name: kind for name, v in values.items() if (kind := _opaque(v))},
                    ran=self._names(modes.ran),
                    switched=self._names(modes.switched),
                )
            )
            # The end of one task is the beginning of the next one, so each moment is taken once.
            before = after
        return tuple(observed), at_begin, before.of_items()

    def _moment(self, ctx: TypedContext) -> _Moment:
        """Return the present moment of a context."""
        return _Moment(ctx, self._tasks, self.owners, self.storages, self._device)

    def _names(self, modules: Iterable[int]) -> frozenset[str]:
        """Return the names of the outermost modules that contain some modules."""
        return frozenset(self._name_of[number] for number in modules if number in self._name_of)

    def _call(
        self,
        task: PipelineTask,
        ctx: TypedContext,
        log: ContextWatch,
        operators: OperatorRecorder,
        stepped: set[int],
    ) -> None:
        """Run a task under all recorders, and note which optimizers step."""

        def step(optimizer: torch.optim.Optimizer) -> None:
            stepped.add(id(optimizer))
            # An optimizer creates its state in its first step: from here on, its state counts too.
            if not any(one.owner is optimizer for one in self.owners):
                self.owners.append(Owner(type(optimizer).__name__, optimizer))

        with log, eager(), before_steps(step), operators:
            run_alone(task, ctx, self._device, self._seeds)


def run_alone(task: PipelineTask, ctx: TypedContext, device: Device, seeds: TaskSeeds) -> None:
    """Run a task on the current stream, seeded if the task is random.

    Raises:
        BaseException: The exception that the task raised, with a note of where.
    """
    seeded = seeds.seeded(task.name, ctx.iter_idx) if task.random else nullcontext()
    try:
        with device.on(device.current_stream()), seeded:
            task.fn(ctx)
    except BaseException as error:
        add_note(
            error,
            f"swpipe: raised by task {task.name!r}, iteration {ctx.iter_idx}, while its effects "
            "were being recorded; the state of models and optimizers was restored",
        )
        raise


class _Item(NamedTuple):
    """A state item's tensor, as it was at one moment."""

    tensor: Tensor
    storages: frozenset[StorageId]
    requires_grad: bool


class _Moment:
    """The context and the known objects with state, between two tasks.

    Attributes:
        held: Attribute to the storages of the tensors in it.
        items: State item to its tensor.
        memory: Fingerprint of the memory of all these tensors.
        generators: Name of a generator to its state.
        options: Name of an optimizer to its options.
        optimizers: Id of an optimizer to its name.
    """

    def __init__(
        self,
        ctx: TypedContext,
        tasks: Iterable[PipelineTask],
        owners: Sequence[Owner],
        storages: Storages,
        device: Device,
    ) -> None:
        # Contents are compared, so all launched work has to be done.
        device.synchronize()
        found = items_in(owners)
        self.items = {
            item: _Item(tensor, storages.of(tensor), tensor.requires_grad)
            for item, tensor in assign_declared(found.tensors, tasks).items()
        }
        known = {id(one.tensor) for one in self.items.values()}
        self.held: dict[str, frozenset[StorageId]] = {}
        tensors = [one.tensor for one in self.items.values()]
        for name, value in attributes(ctx).items():
            inside = [part for one in tensors_in(value) for part in unsharded(one)]
            # A parameter's gradient is a state item, and no part of the context.
            grads = [grad_or_none(one) for one in inside if id(one) not in known]
            inside += [grad for grad in grads if grad is not None]
            self.held[name] = frozenset[StorageId]().union(*map(storages.of, inside))
            tensors += inside
        self.memory = MemoryPrint(tensors, storages)
        self.generators = generator_states(device, found.generators)
        self.optimizers = {number: name for name, (number, _) in found.options.items()}
        self.options = {name: options for name, (_, options) in found.options.items()}

    def of_items(self) -> frozenset[StorageId]:
        """Return the storages of all state items."""
        return frozenset[StorageId]().union(*(one.storages for one in self.items.values()))

    def replaced_until(self, later: _Moment) -> frozenset[StateItem]:
        """Return the state items that were added, removed or replaced until a later moment.

        An item is replaced if it has another tensor, other memory, or another ``requires_grad``.
        """
        replaced = {
            item
            for item in self.items.keys() & later.items.keys()
            if self.items[item].tensor is not later.items[item].tensor
            or self.items[item][1:] != later.items[item][1:]
        }
        return frozenset((self.items.keys() ^ later.items.keys()) | replaced)


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> frozenset[str]:
    """Return the keys that only one of the mappings has, or whose values differ."""
    kept = before.keys() & after.keys()
    # Compared as items of a list, so that a NaN equals itself.
    changed = {name for name in kept if [before[name]] != [after[name]]}
    return frozenset((before.keys() ^ after.keys()) | changed)


def _opaque(value: Any) -> str:
    """Return the class name of the first object in a value that cannot be inspected, or ""."""
    kinds = (type(leaf).__name__ for leaf in leaves_in(value) if not is_fixed(leaf))
    return next(kinds, "")
