"""All state of a training loop, saved before its tasks run in a trial, and restored afterwards.

    models, optimizers, generators, memory         given, declared, or shown; ``Snapshot``
    what tasks declare with capture and restore    captured before, and restored
    an optimizer that is shown later               saved at its first step; ``TrainingGuard``

Nothing else is restored: for a Python value that no ``DeclaredIO`` captures, or a file, a trial is
so many more iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module
from torch.optim import Optimizer

from swpipe._state.captured import Captured
from swpipe._state.guard import TrainingGuard, refuse_scheduled
from swpipe._state.owners import Found, Owners, given_state
from swpipe._state.snapshot import Snapshot
from swpipe._tensors.stateful import modules_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import UnsavedStateError


class LoopState:
    """The state that tasks change, at one moment.

    Attributes:
        owners: The objects that are restored.

    Args:
        tasks: The tasks.
        state: What to restore, as ``given_state`` takes it; ``Owners`` if it was only shown.
        device: Where the tasks work.

    Raises:
        TypeError: Something in ``state`` has no state that can be restored.
        UnsavedStateError: A module is one of TorchScript, which keeps its state to itself; or an
            optimizer that was only shown has a scheduler that is not restored.
        BaseException: What ``DeclaredIO.capture`` of a task raised.
    """

    def __init__(self, tasks: Iterable[PipelineTask], state: Any, device: Device) -> None:
        self._shown = isinstance(state, Owners)
        self.owners = given_state(state)
        refuse_scripted(self.owners)
        for one in self.owners if self._shown else ():
            if isinstance(one.owner, Optimizer):
                refuse_scheduled(one.owner, [other.owner for other in self.owners])
        self._captured = Captured(tasks)
        self._snapshot = Snapshot(self.owners, device)

    def restore(self) -> None:
        """Restore everything, after the device has finished its current work."""
        with ExitStack() as last_to_first:  # all, also if one of them fails
            last_to_first.callback(self.restore_training)
            last_to_first.callback(self._captured.restore)

    def restore_training(self) -> None:
        """Restore all but what tasks declare, between two measurements of one run.

        A counter goes on, so that what a task does every hundredth time is measured as well.
        """
        self._snapshot.restore()

    @contextmanager
    def trial(
        self, *, always: bool = False, made: Callable[[Tensor], bool] = lambda tensor: False
    ) -> Iterator[None]:
        """A block in which the tasks run; everything is restored at its end, also on failure.

        Training that would stay raises. Where the user has said what to restore, nothing is
        refused, unless ``always``.

        Args:
            always: Refuse in any case.
            made: Whether a tensor was made within the block.

        Raises:
            UnsavedStateError: As ``TrainingGuard`` does.
        """
        guards = self._shown or always
        try:
            with TrainingGuard(self._snapshot, made, adds=self._shown) if guards else nullcontext():
                yield
        finally:
            self.restore()


def refuse_scripted(found: Iterable[Found]) -> None:
    """Refuse modules of TorchScript, and those that have one as a part.

    Raises:
        UnsavedStateError: It names each once.
    """
    names: list[str] = []
    others: set[int] = set()
    for one in found:
        if isinstance(one.owner, Module) and id(one.owner) not in others:
            parts = list(modules_in(one.owner))
            if any(isinstance(part, ScriptModule) for part in parts):
                names.append(str(one))
            else:
                others.update(map(id, parts))
    if names:
        raise UnsavedStateError(
            tuple(dict.fromkeys(names)),
            "the tasks can change what TorchScript keeps",
            "Use the module itself, or torch.compile(module)",
        )
