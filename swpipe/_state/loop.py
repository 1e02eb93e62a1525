"""All state of a training loop, saved before its tasks run in a trial, and restored afterwards.

    models, optimizers, generators and the like    found, or given by the user; ``Snapshot``
    tensors that plain objects and globals hold    their content, and which tensor it is
    what tasks declare with capture and restore    captured before, and restored
    anything that an optimizer would train else    refused before its first step; ``TrainingGuard``

Nothing else is restored: for a Python value that no ``DeclaredIO`` captures, or a file, a trial is
so many more iterations. Tensors that belong to no module or optimizer are saved up to
``MAX_SAVED_BYTES`` each: larger ones are taken for data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from swpipe._state.captured import Captured
from swpipe._state.discovery import Found, find_all, find_state, given_state
from swpipe._state.guard import TrainingGuard
from swpipe._state.snapshot import Snapshot
from swpipe._tensors.stateful import WHOLE, is_foreign, modules_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import UnsavedStateError

MAX_SAVED_BYTES = 2**26
"""Larger tensors that belong to no module or optimizer are taken for data and not saved."""

_SKIPPED = (*WHOLE, FunctionType, MethodType, ModuleType, type)


class LoopState:
    """The state that tasks change, at one moment.

    Attributes:
        owners: The objects that are restored.

    Args:
        tasks: The tasks.
        given: What to restore, as ``given_state`` takes it; None to search for it.
        device: Where the tasks work.

    Raises:
        TypeError: Something in ``given`` has no state that can be restored.
        UnsavedStateError: A module is one of TorchScript, which keeps its state to itself.
        BaseException: What ``DeclaredIO.capture`` of a task raised.
    """

    def __init__(self, tasks: Iterable[PipelineTask], given: Any, device: Device) -> None:
        self._tasks = tuple(tasks)
        self._searched = given is None
        self.owners = tuple(find_owners(self._tasks)) if given is None else given_state(given)
        if scripted := _scripted([*self.owners, *find_all(self._tasks)]):
            raise UnsavedStateError(
                scripted,
                "the tasks can change what TorchScript keeps",
                "Use the module itself, or torch.compile(module)",
            )
        self._captured = Captured(self._tasks)
        self._snapshot = Snapshot(self.owners, device)
        self._restore_attributes = _save_tensor_attributes(self._tasks)

    def restore(self) -> None:
        """Restore everything, after the device has finished its current work."""
        with ExitStack() as last_to_first:  # all, also if one of them fails
            last_to_first.callback(self.restore_training)
            last_to_first.callback(self._captured.restore)

    def restore_training(self) -> None:
        """Restore all but what tasks declare, between two measurements of one run.

        A counter goes on, so that what a task does every hundredth time is measured as well.
        """
        self._restore_attributes()
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
        watches = self._searched or always
        try:
            with TrainingGuard(self._tasks, self._snapshot, made) if watches else nullcontext():
                yield
        finally:
            self.restore()


def find_owners(tasks: Sequence[PipelineTask]) -> Iterator[Found]:
    """Objects with state that tasks can reach, and tensors that are not too large."""
    found = find_state(tasks)
    yield from found
    known = {id(one.owner) for one in found}
    for one in find_all(tasks):
        tensor = one.owner
        new = isinstance(tensor, Tensor) and id(tensor) not in known
        if new and tensor.numel() * tensor.element_size() <= MAX_SAVED_BYTES:
            yield one


def _scripted(found: Iterable[Found]) -> tuple[str, ...]:
    """Modules of TorchScript, and those that have one as a part, each once."""
    names: list[str] = []
    others: set[int] = set()
    for one in found:
        if isinstance(one.owner, Module) and id(one.owner) not in others:
            parts = list(modules_in(one.owner))
            if any(isinstance(part, ScriptModule) for part in parts):
                names.append(str(one))
            else:
                others.update(map(id, parts))
    return tuple(dict.fromkeys(names))


def _save_tensor_attributes(tasks: Iterable[PipelineTask]) -> Callable[[], None]:
    """Save which tensors plain objects have as attributes; the result restores them.

    ``Snapshot`` covers modules and optimizers. Other objects may replace a tensor, such as a
    running mean, in each iteration. Their other attributes are left alone: an object that
    initialises itself on first use would otherwise be restored in part.
    """
    saved = [
        (held, {name: v for name, v in held.items() if isinstance(v, Tensor)})
        for held in (_attributes(found.owner) for found in find_all(tasks))
        if held
    ]

    def restore() -> None:
        for held, values in saved:
            held.update((n, v) for n, v in values.items() if isinstance(held.get(n), Tensor))

    return restore


def _attributes(owner: Any) -> dict[str, Any]:
    if isinstance(owner, _SKIPPED) or is_foreign(type(owner).__module__):
        return {}
    held = getattr(owner, "__dict__", {})
    return held if isinstance(held, dict) else {}
