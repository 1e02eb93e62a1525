"""The state of a training loop, as torch shows it while the tasks run twice on one batch.

    a module is called           torch's global hook       all of the module
    an optimizer steps           torch's global hook       its state, options and parameters
    a leaf that requires grad    the operator's argument   it and its gradient
      is used
    memory is written that       the operator's schema     the memory
      was there before
    a generator is drawn from    the operator's argument   its state

Each object is saved when it first appears, and restored at the end, in reverse order. The two
iterations therefore leave nothing behind, and a later measurement knows which state to restore.

Torch does not show other optimizers, schedulers, Python values, state that a task changes only now
and then, or a module's flags that a task sets before it calls the module. A tensor that each
iteration makes anew for the next one is seen, but not the object that holds it: a warning says so.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._C import _has_storage as has_storage
from torch.optim import Optimizer

from swpipe._state.loop import Captured, declared_owners
from swpipe._state.torch_hooks import before_calls, before_steps, refuse_scheduled
from swpipe._values.snapshot import Snapshot
from swpipe._values.stateful import Owner, Owners, modules_of
from swpipe._values.storages import StorageId, described
from swpipe._values.walk import parts_of, tensors_in
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.operators import CREATED, OperatorRecorder, eager, tensors_of
from swpipe.inference.states import items_in

_ITERATIONS = 2


def shown_state(
    tasks: Sequence[PipelineTask],
    run: Callable[[Any], object],
    batch: Any,
    device: Device,
    copy: Callable[[Any], Any],
) -> Owners:
    """Return the declared owners of state, and those that torch shows in two iterations.

    ``run`` runs one iteration on a copy of the batch.

    Warns:
        RuntimeWarning: The tasks hand a tensor from one iteration to the next that no trial can
            restore.
    """
    captured = Captured(tasks)
    shown = _Shown(declared_owners(tasks), device)
    with ExitStack() as last_to_first:  # all, also if one of them fails
        last_to_first.callback(shown.saved.restore)
        # Declared captures are the caller's functions, no part of the snapshot.
        last_to_first.callback(captured.restore)
        with before_calls(shown.add), before_steps(shown.add), eager(), shown:
            for _ in range(_ITERATIONS):
                own = copy(batch)
                shown.begin(own)
                run(own)
                del own
                shown.end()
        owners = shown.owners()
        handed_on = shown.handed_on()
    # A declared capture is assumed to hold the handed-on tensors.
    if handed_on and not any(io.capture for task in tasks for io in task.io):
        warnings.warn(
            f"a trial does not restore what a task makes in one iteration for the next: "
            f"{listed(handed_on)}. Pass the object that holds it in state=[...], if it has "
            "state_dict and load_state_dict, or give the task DeclaredIO(capture=..., restore=...)",
            RuntimeWarning,
            stacklevel=4,
        )
    return owners


class _Shown(OperatorRecorder):  # type: ignore[no-untyped-call]
    """A recorder that saves each state when torch first shows it.

    Attributes:
        saved: The snapshot that restores all of them.
    """

    def __init__(self, declared: Iterable[Owner], device: Device) -> None:
        super().__init__(device)
        self._owners = [*declared]
        self.saved = Snapshot(self._owners, device)
        # Ids of modules and optimizers, and addresses of generators; _owners keeps all of them.
        self._known = {*map(id, modules_of(self._owners))}
        self._memory: dict[StorageId, Tensor] = {}
        self._leaves: dict[int, Tensor] = {}
        self._kept: frozenset[StorageId] = frozenset()  # made in the previous iteration
        self._handed_on: set[StorageId] = set()

    def _record(self, value: Any, mode: str, replays: bool = False) -> None:
        super()._record(value, mode, replays)
        for tensor in tensors_of(value) if mode != CREATED else ():
            # Three cases: a leaf may get a gradient from any use; other memory matters only when
            # written; memory that these iterations created needs no saving.
            if tensor.requires_grad and tensor.is_leaf and tensor._base is None:
                if id(tensor) not in self._leaves and self._existed(tensor):
                    self._leaves[id(tensor)] = tensor
                    self.saved.add(Owner("leaf", tensor))
            elif mode in ("w", "rw"):
                for part in filter(has_storage, parts_of(tensor)):
                    self._before_write(part)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; a generator among its arguments is saved first."""
        if (generator := kwargs.get("generator")) is not None:
            self.add(generator, generator._cdata)
        return super().run(func, args, kwargs)

    def begin(self, batch: Any) -> None:
        """Begin an iteration on its own copy of the batch."""
        accesses = self.accesses
        accesses.reads.clear()
        accesses.replays.clear()
        # The copy counts as created here: writing it needs no saving.
        accesses.created.update(*map(self.storages.of, tensors_in(batch)))

    def end(self) -> None:
        """Note the storages that outlive the iteration that has just ended; its context is gone."""
        accesses = self.accesses
        storages = self.storages
        # Reference cycles would keep memory of the iteration alive, which would then look handed on
        # to the next iteration.
        gc.collect()
        # Made in the previous iteration, read in this one, and no longer alive: replaced by a new
        # tensor.
        used = self._kept & accesses.all_reads
        self._handed_on |= {number for number in used if not storages.alive(number)}
        alive = frozenset(number for number in accesses.created if storages.alive(number))
        self._kept = alive - self._memory_of_owners()

    def handed_on(self) -> list[str]:
        """Return descriptions of the tensors that one iteration made for the next one.

        The next one read each of them and replaced it.
        """
        return sorted(map(self.storages.description, self._handed_on))

    def owners(self) -> Owners:
        """Return the owners of all state that torch showed, with unowned memory as tensors."""
        storages = self.storages
        named = self._memory_of_owners()
        leaves = [leaf for leaf in self._leaves.values() if not storages.of(leaf) <= named]
        owners = self._owners + [Owner(f"leaf ({described(leaf)})", leaf) for leaf in leaves]
        named = named.union(*map(storages.of, leaves))
        for number, tensor in self._memory.items():
            if number not in named and tensor.untyped_storage().nbytes():
                owners.append(Owner(f"memory ({storages.description(number)})", tensor))
        return Owners(owners)

    def _memory_of_owners(self) -> set[StorageId]:
        tensors = items_in(self._owners).tensors.values()
        return set[StorageId]().union(*map(self.storages.of, tensors))

    def add(self, owner: Any, number: int = 0) -> None:
        """Save the state of a module, optimizer or generator when it first appears.

        ``number`` identifies an object that several Python objects may stand for.
        """
        number = number or id(owner)
        if number in self._known:
            return
        named = Owner(type(owner).__name__, owner)
        if isinstance(owner, Optimizer):
            refuse_scheduled(owner, [other.owner for other in self._owners])
        parts = {*map(id, modules_of([named]))}
        self._known |= parts | {number}
        # A submodule may have been called, and saved, before the module that contains it.
        self._owners = [other for other in self._owners if id(other.owner) not in parts]
        self._owners.append(named)
        self.saved.add(named)

    def _existed(self, tensor: Tensor) -> frozenset[StorageId]:
        """Return the storages of a tensor that were there before these iterations."""
        return self.storages.of(tensor) - self.accesses.created

    def _before_write(self, tensor: Tensor) -> None:
        """Save memory that existed before and is about to be written."""
        for number in self._existed(tensor) - self._memory.keys():
            if tensor.layout is torch.strided and not tensor.is_meta:
                with torch.no_grad():
                    # The whole storage as bytes: the tensor at hand may be a view of a part of it.
                    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    self._memory[number] = whole.set_(tensor.untyped_storage())
                self.saved.add(Owner("memory", self._memory[number]))
