"""Serial execution of an iteration, with an observation of each task.

Operators and the context show most of what a task does. Other changes are found by comparing the
moments before and after the task: every change shows in the set of tensors, in version counters, or
in the content of memory. An observation is plain data and holds no tensor, so that it keeps no
memory alive.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

from swpipe._engine.randomness import TaskSeeds
from swpipe._state.torch_hooks import before_steps
from swpipe._values.context_log import ContextWatch, attributes
from swpipe._values.fingerprint import is_fixed
from swpipe._values.generators import TORCH, generator_states
from swpipe._values.stateful import Owner, modules_in, modules_of
from swpipe._values.storages import MemoryPrint, StorageId, Storages
from swpipe._values.walk import grad_or_none, leaves_in, tensors_in, unsharded
from swpipe.core.context import TypedContext
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import add_note
from swpipe.inference.operators import OperatorAccesses, OperatorRecorder, copied, eager
from swpipe.inference.places import READ, READ_WRITE, WRITE, Access
from swpipe.inference.states import StateItem, assign_declared, items_in, mode_of, options_of
from swpipe.inference.watched_modes import ModuleModes

_Key = TypeVar("_Key")


class TaskObservation(NamedTuple):
    """The observation of one task in one iteration.

    Attributes:
        task: The task's name.
        reads: Attributes of the context that the task read.
        sets: Attributes that the task set, deleted or modified in place.
        operators: Accesses by operators.
        held: Attribute to the storages that it held when the task began.
        items: State item to its storages when the task began.
        states: Accesses that are not to memory: to generators, to options of optimizers, to modes
            of modules, and to items that were added, removed or replaced.
        changed: Storages with another content or version.
        opaque: Attribute that the task set to the class of an object in it that cannot be
            inspected.
    """

    task: str
    reads: frozenset[str]
    sets: frozenset[str]
    operators: OperatorAccesses
    held: Mapping[str, frozenset[StorageId]]
    items: Mapping[StateItem, frozenset[StorageId]]
    states: Mapping[StateItem, Access]
    changed: set[StorageId]
    opaque: Mapping[str, str]

    @property
    def writes(self) -> set[StorageId]:
        """The storages that the task created or modified, by operators or otherwise."""
        return self.operators.all_writes | self.changed

    @property
    def silent(self) -> set[StorageId]:
        """The storages that changed although no operator wrote them."""
        return self.changed - self.operators.writes

    @property
    def reached(self) -> frozenset[StorageId]:
        """The storages of the attributes that the task read."""
        return frozenset[StorageId]().union(*(self.held.get(name, ()) for name in self.reads))


class IterationObservation(NamedTuple):
    """The observation of one iteration.

    Attributes:
        tasks: In serial order.
        before: Storages that were known before the iteration began, without the batch's.
        lasting: These, and the storages that still existed after the iteration's context was
            released.
    """

    tasks: tuple[TaskObservation, ...]
    before: frozenset[StorageId]
    lasting: frozenset[StorageId]


@dataclass
class IterationObserver:
    """Runner of iterations that observes each task.

    Attributes:
        tasks: The tasks, in serial order.
        device: The device on which they work.
        seeds: The seeds of random tasks.
        context: The class of the contexts.
        owners: The given objects with state, and the optimizers that have stepped since.
        storages: All storages that were seen.
    """

    tasks: Sequence[PipelineTask]
    device: Device
    seeds: TaskSeeds
    context: type[TypedContext]
    owners: list[Owner]
    storages: Storages = field(default_factory=Storages)

    def run(self, batch: Any, iter_idx: int) -> IterationObservation:
        """Run one iteration on a copy of the batch: tensors found in the batch are cloned."""
        storages = self.storages
        known = storages.known()
        observed, named = self._run(batch, iter_idx)
        before = known.union(*observed[0].items.values())
        # The context has been released here, since it was local to _run. What is left is state.
        new = storages.known() - before
        # Collecting garbage is slow, so it runs only if memory of this iteration is still alive.
        if any(map(storages.alive, new - named)):
            gc.collect()  # memory that only reference cycles keep does not survive
        return IterationObservation(observed, before, before.union(filter(storages.alive, new)))

    def _run(
        self, batch: Any, iter_idx: int
    ) -> tuple[tuple[TaskObservation, ...], frozenset[StorageId]]:
        """Return the observations of all tasks, and the storages of all state items at the end."""
        ctx = self.context(copied(batch), iter_idx)
        before = _Moment(ctx, self)
        observed = []
        for task in self.tasks:
            # Each task gets recorders of its own, so that its accesses are not mixed with those of
            # other tasks.
            log = ContextWatch(ctx, objects=False)
            operators = OperatorRecorder(self.device, self.storages)
            modes = ModuleModes(modules_of(self.owners), eager=True)
            stepped: list[Optimizer] = []
            with modes, log, eager(), before_steps(stepped.append), operators:
                run_alone(task, ctx, self.device, self.seeds)
            # An optimizer creates its state in its first step: from here on, its state counts too.
            for optimizer in stepped:
                if all(owner is not optimizer for _, owner in self.owners):
                    self.owners.append(Owner(type(optimizer).__name__, optimizer))
            after = _Moment(ctx, self)
            sets = log.sets.union(log.deletes, log.produced, log.deleted)
            # Only attributes that the task set: an opaque value that it merely found is another
            # task's.
            opaque = {name: _opaque(v) for name, v in attributes(ctx).items() if name in sets}
            states = before.accesses_until(after)
            used = [options_of(after.optimizers[id(optimizer)]) for optimizer in stepped]
            for item in (*used, *map(mode_of, self._names(modes.ran))):
                states[item] |= READ
            changed = [*map(mode_of, self._names(modes.switched))]
            # Number 0 stands for torch's default generators. A random task has states of its own.
            if 0 in operators.draws and not task.random:
                changed.append(StateItem.alone(TORCH))
            for item in changed:
                states[item] |= READ_WRITE
            observed.append(
                TaskObservation(
                    task=task.name,
                    reads=frozenset(log.reads),
                    sets=frozenset(sets),
                    operators=operators.accesses,
                    held=before.held,
                    items=before.items,
                    states=states,
                    changed=before.memory.changed_until(after.memory),
                    opaque={name: kind for name, kind in opaque.items() if kind},
                )
            )
            # The end of one task is the beginning of the next one, so each moment is taken once.
            before = after
        return tuple(observed), frozenset[StorageId]().union(*before.items.values())

    def _names(self, modules: Collection[Module]) -> list[str]:
        """Return the names of the owners that contain any of some modules."""
        return [
            path
            for path, owner in self.owners
            if isinstance(owner, Module) and any(part in modules for part in modules_in(owner))
        ]


def run_alone(task: PipelineTask, ctx: TypedContext, device: Device, seeds: TaskSeeds) -> None:
    """Run a task on the current stream, seeded if the task is random.

    Raises:
        BaseException: The exception that the task raised, with a note of where.
    """
    seeded = seeds.seeded(task.name, ctx.iter_idx) if task.random else nullcontext()
    try:
        with device.on(device.current_stream()), seeded:
            task.fn(ctx)
    # Also Ctrl-C: the note says that the state is restored.
    except BaseException as error:
        add_note(
            error,
            f"swpipe: raised by task {task.name!r}, iteration {ctx.iter_idx}, while its effects "
            "were being recorded; the state of models and optimizers was restored",
        )
        raise


class _Moment:
    """The context and the known objects with state, between two tasks.

    Attributes:
        held: Attribute to the storages of the tensors in it.
        items: State item to the storages of its tensor.
        optimizers: Id of an optimizer to its name.
        memory: Fingerprint of the memory of all these tensors, which it keeps alive.
    """

    def __init__(self, ctx: TypedContext, observer: IterationObserver) -> None:
        storages = observer.storages
        # Contents are compared, so all launched work has to be done.
        observer.device.synchronize()
        state = items_in(observer.owners)
        tensors = assign_declared(state.tensors, observer.tasks)
        inside = [*tensors.values()]
        self.items = {item: storages.of(tensor) for item, tensor in tensors.items()}
        # An item is replaced if it has another tensor, other memory, or another requires_grad.
        self._values: dict[StateItem, object] = {
            item: (id(tensor), self.items[item], tensor.requires_grad)
            for item, tensor in tensors.items()
        }
        self._values |= {options_of(name): of for name, (_, of) in state.options.items()}
        self._generators = generator_states(observer.device, state.generators)
        self.optimizers = {number: name for name, (number, _) in state.options.items()}
        known = {*map(id, inside)}
        self.held: dict[str, frozenset[StorageId]] = {}
        for name, value in attributes(ctx).items():
            held = [part for tensor in tensors_in(value) for part in unsharded(tensor)]
            # A parameter's gradient is a state item, and no part of the context.
            grads = [grad_or_none(tensor) for tensor in held if id(tensor) not in known]
            held += [grad for grad in grads if grad is not None]
            self.held[name] = frozenset[StorageId]().union(*map(storages.of, held))
            inside += held
        self.memory = MemoryPrint(inside, storages)

    def accesses_until(self, later: _Moment) -> dict[StateItem, Access]:
        """Return the accesses between two moments that show in something else than memory."""
        states: dict[StateItem, Access] = defaultdict(Access)
        for item in _differing(self._values, later._values):
            states[item] |= WRITE
        # A generator that is new was just created, or its library was imported: nothing was drawn.
        drawn = _differing(self._generators, later._generators) & self._generators.keys()
        for name in drawn:
            states[StateItem.alone(name)] |= READ_WRITE
        return states


def _differing(before: Mapping[_Key, object], after: Mapping[_Key, object]) -> frozenset[_Key]:
    """Return the keys that only one of the mappings has, or whose values differ."""
    both = before.keys() & after.keys()
    # Compared as items of a list, so that a NaN equals itself.
    changed = {name for name in both if [before[name]] != [after[name]]}
    return frozenset((before.keys() ^ after.keys()) | changed)


def _opaque(value: Any) -> str:
    """Return the class name of the first object in a value that cannot be inspected, or ""."""
    kinds = (type(leaf).__name__ for leaf in leaves_in(value) if not is_fixed(leaf))
    return next(kinds, "")
