"""All state of a training loop, saved before its tasks run in a trial, and restored afterwards.

    models, optimizers, generators, memory         given, declared, or shown; ``Snapshot``
    what tasks declare with capture and restore    captured before, and restored
    an optimizer that is shown later               saved before its first step

Nothing else is restored. A Python value that no ``DeclaredIO`` captures, or a file, ends up as if
the trial's iterations had been part of the training.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from swpipe._state.torch_hooks import before_steps, refuse_scheduled
from swpipe._values.fingerprint import is_fixed, replays_itself
from swpipe._values.snapshot import Snapshot
from swpipe._values.stateful import WHOLE, Owner, Owners, given_state, has_state
from swpipe._values.walk import map_tensors, nodes_in, unsharded
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.device import Device
from swpipe.errors import UnsavedStateError, add_note


class LoopState:
    """The state that tasks change, at one moment.

    Attributes:
        owners: The objects that are restored.

    Args:
        tasks: The tasks.
        state: The objects to restore, as for ``given_state``; ``Owners`` if torch only showed them.
        device: The device on which the tasks work.

    Raises:
        TypeError: Something in ``state`` has no state that can be restored.
        UnsavedStateError: A module is one of TorchScript, whose state is not accessible; or an
            optimizer that was only shown has a scheduler that is not restored.
        BaseException: The exception that a task's ``DeclaredIO.capture`` raised.
    """

    def __init__(self, tasks: Iterable[PipelineTask], state: Any, device: Device) -> None:
        self._shown = isinstance(state, Owners)
        self.owners = given_state(state)
        # Only for shown state: a user who names the state explicitly may leave a scheduler out on
        # purpose.
        for owner in self.owners if self._shown else ():
            if isinstance(owner.owner, Optimizer):
                refuse_scheduled(owner.owner, [other.owner for other in self.owners])
        self._captured = Captured(tasks)
        self._snapshot = Snapshot(self.owners, device)

    def restore(self) -> None:
        """Restore everything, after the device has finished its current work."""
        with ExitStack() as last_to_first:  # all, also if one of them fails
            last_to_first.callback(self.restore_training)
            # Runs first: what the restore functions change in modules and generators, the snapshot
            # then sets.
            last_to_first.callback(self._captured.restore)

    def restore_training(self) -> None:
        """Restore everything but what tasks declare, between two measurements of one run.

        A task's own counter continues, so that what the task does every hundredth time is measured
        too.
        """
        self._snapshot.restore()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Run a block in which the tasks run, and restore everything at its end.

        Everything is restored after a failure, too. An optimizer that steps within the block for
        the first time is restored with its parameters.

        Raises:
            UnsavedStateError: From the step of an optimizer that has a state and that the user has
                left out of what is to be restored; or that is not known and has a scheduler.
        """
        try:
            with before_steps(self._before_step):
                yield
        finally:
            self.restore()

    def _before_step(self, optimizer: Optimizer) -> None:
        """Save an optimizer that is about to step for the first time."""
        if self._snapshot.restores(optimizer):
            return
        kind = type(optimizer).__name__
        # With a state, it was in use before the trial, so the user has left it out by mistake.
        # Without a state it was made by the tasks, and is saved as it is now.
        if optimizer.state and not self._shown:
            raise UnsavedStateError(
                [kind],
                "the tasks call the step of an optimizer",
                "Add it to state=: state=[model, optimizer, ...]",
            )
        refuse_scheduled(optimizer, ())
        self._snapshot.add(Owner(kind, optimizer))


def declared_owners(tasks: Iterable[PipelineTask]) -> Iterable[Owner]:
    """Return the modules, tensors and objects with ``state_dict`` in declared memory, each once."""
    owners = {
        id(owner): Owner(str(io.state), owner)
        for _, io, owner in declared_memory(tasks)
        if isinstance(owner, Tensor) or has_state(owner)
    }
    return owners.values()


def declared_memory(
    tasks: Iterable[PipelineTask],
) -> Iterator[tuple[PipelineTask, DeclaredIO, Any]]:
    """Yield each task, declaration and object in declared memory, as this rank's shards."""
    for task, io in (
        (declaring, io) for declaring in tasks for io in declaring.io if io.memory is not None
    ):
        # In a list, so that a memory that is itself a tensor or a module is the child of a
        # container.
        for child in (child for node in nodes_in([io.memory]) for child in node.children):
            yield from ((task, io, owner) for owner in unsharded(child))


class Captured:
    """The values that the tasks' ``capture`` functions return now.

    Warns:
        RuntimeWarning: A function raised, so that what it would capture is not restored.
    """

    def __init__(self, tasks: Iterable[PipelineTask]) -> None:
        self._kept: list[tuple[str, DeclaredIO, Any]] = []
        declared = [(task.name, io) for task in tasks for io in task.io if io.capture]
        for name, io in declared:
            try:
                self._kept.append((name, io, _copied(io.capture())))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - for example if the first run makes it
                warnings.warn(
                    f"task {name!r}: capture raised {type(error).__name__}: {error}, before a "
                    "trial, so what it captures is not restored afterwards. It is called before "
                    "the task has run: let it return what restore can put back even then",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def restore(self) -> None:
        """Pass each value to ``restore``, the last task's first; it may be called repeatedly."""
        with ExitStack() as last_to_first:  # all, also if one of them fails
            for task, io, value in self._kept:
                last_to_first.callback(partial(_restore, task, io, value))


def _restore(task: str, io: DeclaredIO, value: Any) -> None:
    """Restore one captured value; an error gets a note that names the task."""
    try:
        # A copy, since restore is called again after the next trial, and may keep what it gets.
        io.restore(_copied(value))  # type: ignore[misc]
    except Exception as error:
        add_note(error, f"swpipe: raised by a restore of task {task!r}, after a trial")
        raise


def _copied(value: Any) -> Any:
    """Return a copy that the tasks do not change; models, optimizers and generators are shared."""
    return map_tensors(value, lambda tensor: tensor.detach().clone(), _copied_object)


def _copied_object(value: Any) -> Any:
    """Return a deep copy, or the object itself if it has a state or cannot be copied."""
    if is_fixed(value) or replays_itself(value) or isinstance(value, WHOLE) or has_state(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - such as a handle, which restore only passes on
        return value
