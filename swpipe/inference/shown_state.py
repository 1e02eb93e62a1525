"""The state of a training loop, as torch shows it while the tasks run twice on one batch.

    a module is called           torch's global hook       all of the module
    an optimizer steps           torch's global hook       its state, options and parameters
    memory is written that       the operator's schema     the memory
      was there before
    a generator is drawn from    the operator's argument   its state

Each is saved at the moment at which it is shown first, and put back in the end, the last one first:
so the two iterations leave nothing, and whoever measures afterwards knows what to put back.

What torch does not show: other optimizers, schedulers, Python values; what a task changes only now
and then; a module's flags that a task sets before it calls the module. A tensor that each iteration
makes anew for the next one shows, but not who holds it: it is told.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from swpipe._state.captured import Captured
from swpipe._state.copies import SavedTensors
from swpipe._state.own_threads import before_calls, before_steps
from swpipe._state.owners import Found, Owners, declared_owners
from swpipe._state.snapshot import Snapshot
from swpipe._tensors.pytree import tensors_in
from swpipe._tensors.stateful import modules_in
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.draw_recorder import DrawRecorder, eager
from swpipe.inference.state_items import items_in
from swpipe.inference.storages import StorageId

_ITERATIONS = 2


def shown_state(
    tasks: Sequence[PipelineTask],
    run: Callable[[Any], object],
    batch: Any,
    device: Device,
    copy: Callable[[Any], Any],
) -> Owners:
    """What the tasks declare, and what torch shows while ``run`` runs an iteration on a copy.

    Warns:
        RuntimeWarning: The tasks hand a tensor from one iteration to the next that no trial can put
            back.
    """
    captured = Captured(tasks)
    with _Shown(declared_owners(tasks), device) as shown:
        try:
            for _ in range(_ITERATIONS):
                own = copy(batch)
                shown.begin(own)
                with eager():
                    run(own)
                del own
                shown.end()
        finally:
            captured.restore()
        owners, handed_on = shown.owners(), shown.handed_on()
    if handed_on and not any(io.capture for task in tasks for io in task.io):
        warnings.warn(
            f"a trial does not put back what tasks make in one iteration for the next: "
            f"{listed(handed_on)}. Tell what holds it: state=[...], for an object with state_dict "
            "and load_state_dict, or DeclaredIO(capture=..., restore=...) of the task",
            RuntimeWarning,
            stacklevel=4,
        )
    return owners


class _Recorder(DrawRecorder):  # type: ignore[no-untyped-call]
    """Calls ``write`` before memory is written, and ``draw`` before a generator is drawn from."""

    def __init__(
        self,
        device: Device,
        write: Callable[[StorageId, Tensor], None],
        draw: Callable[[Any], None],
    ) -> None:
        super().__init__(device)
        self._write, self._draw = write, draw

    def _record(self, value: Any, mode: str, replays: bool = False) -> None:
        super()._record(value, mode, replays)
        for tensor in tensors_in(value) if mode in ("w", "rw") else ():
            for number, _ in self.storages.add(tensor):
                if number not in self.storages.created:
                    self._write(number, tensor)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; a generator that is given is saved before."""
        if (generator := kwargs.get("generator")) is not None:
            self._draw(generator)
        return super().run(func, args, kwargs)


class _Shown:
    """Within the block, what torch shows is saved; at its end it is put back."""

    def __init__(self, declared: Iterable[Found], device: Device) -> None:
        self._device = device
        self._found: list[Found] = []
        self._saved: list[Snapshot | SavedTensors] = [Snapshot([], device)]
        self._modules: set[int] = set()
        self._optimizers: set[int] = set()
        self._memory: dict[StorageId, Tensor] = {}
        self._generators: set[int] = set()
        self._stack = ExitStack()
        self._operators = _Recorder(device, self._before_write, self._before_draw)
        self._kept: frozenset[StorageId] = frozenset()  # made in the iteration before
        self._handed_on: set[StorageId] = set()
        for one in declared:
            self._add(one)

    def __enter__(self) -> _Shown:
        self._stack.callback(self._put_back)
        self._stack.enter_context(before_calls(self._before_call))
        self._stack.enter_context(before_steps(self._before_step))
        self._stack.enter_context(self._operators)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stack.close()

    def _put_back(self) -> None:
        self._device.synchronize()
        for saved in reversed(self._saved):
            saved.restore()

    def begin(self, batch: Any) -> None:
        """An iteration begins on a batch, which is nobody else's."""
        accesses, storages = self._operators.accesses, self._operators.storages
        accesses.reads.clear()
        accesses.replays.clear()
        accesses.created.clear()
        for tensor in tensors_in(batch):
            storages.created |= storages.of(tensor)

    def end(self) -> None:
        """It has ended, and its context is gone."""
        accesses, storages = self._operators.accesses, self._operators.storages
        gc.collect()
        used = self._kept & accesses.all_reads
        self._handed_on |= {number for number in used if not storages.alive(number)}
        named = {n for one in items_in(self._found).tensors.values() for n in storages.of(one)}
        self._kept = frozenset(n for n in accesses.created if storages.alive(n)) - named

    def handed_on(self) -> list[str]:
        """What one iteration made and the next one read and replaced."""
        return sorted(map(self._operators.storages.description, self._handed_on))

    def owners(self) -> Owners:
        """All that was shown; memory that belongs to no module and no optimizer by itself."""
        inner = {
            id(part)
            for one in self._found
            if isinstance(one.owner, torch.nn.Module)
            for part in modules_in(one.owner)
            if part is not one.owner
        }
        found = [one for one in self._found if id(one.owner) not in inner]
        storages = self._operators.storages
        named = {n for one in items_in(found).tensors.values() for n in storages.of(one)}
        for number, tensor in self._memory.items():
            if number not in named:
                found.append(Found(storages.description(number), tensor))
        return Owners(found)

    def _add(self, one: Found) -> None:
        if isinstance(one.owner, torch.nn.Module):
            self._modules.update(map(id, modules_in(one.owner)))
        self._found.append(one)
        self._saved.append(Snapshot([one], self._device))

    def _name(self, owner: Any) -> str:
        kind = type(owner).__name__
        alike = sum(type(one.owner).__name__ == kind for one in self._found)
        return f"{kind} ({alike + 1})" if alike else kind

    def _before_call(self, module: torch.nn.Module) -> None:
        if id(module) not in self._modules:
            self._add(Found(self._name(module), module))

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers.add(id(optimizer))
            self._add(Found(self._name(optimizer), optimizer))

    def _before_write(self, number: StorageId, tensor: Tensor) -> None:
        if number in self._memory or tensor.is_meta or tensor.layout is not torch.strided:
            return
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage())
        self._memory[number] = whole
        saved = SavedTensors()
        saved.add(whole)
        self._saved.append(saved)

    def _before_draw(self, generator: Any) -> None:
        if generator._cdata not in self._generators:
            self._generators.add(generator._cdata)
            self._add(Found("Generator", generator))
