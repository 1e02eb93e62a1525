"""Raise when tasks train something that a snapshot does not have.

    what                                                    detected
    an optimizer, or parameters that it updates             before its first step
    parameters and other leaves that require grad           by ``check``: they were modified
    other tensors that the tasks lead to, deeper than       by ``check``: they were modified
      the search for what to save

So nothing is trained by more than one window of iterations before the error. Not detected: changes
through ``Tensor.data`` and by kernels that torch does not know to write; tensors that only C++
holds, and plain tensors that no attribute or global leads to.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swpipe._state.discovery import Found, find_all
from swpipe._state.snapshot import Snapshot
from swpipe._tensors.stateful import has_state
from swpipe.core.errors import UnsavedStateError
from swpipe.core.task import PipelineTask

MAX_HOPS = 6
"""How many attributes in a row are followed to find tensors to watch."""


class TrainingGuard:
    """Within a ``with`` block, watches for training that a snapshot cannot undo.

    Args:
        tasks: The tasks that run within the block.
        snapshot: What is restored afterwards.

    Raises:
        UnsavedStateError: From the step of an optimizer within the block, before it changes
            anything: the optimizer or one of its parameters is not in the snapshot.
    """

    def __init__(self, tasks: Iterable[PipelineTask], snapshot: Snapshot) -> None:
        self._tasks = tuple(tasks)
        self._snapshot = snapshot
        self._watched: list[_Watched] = []
        self._existing: set[int] = set()  # ids of tensors and optimizers
        self._hook: Any = None

    def __enter__(self) -> TrainingGuard:
        self._watched = list(self._unsaved_tensors())
        self._existing = {id(one) for one in _in_memory()}
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *failure: object) -> None:
        self._hook.remove()

    def check(self) -> None:
        """Check that no tensor outside the snapshot was modified; call this after a window.

        Raises:
            UnsavedStateError: Some were.
        """
        if changed := [watched.name for watched in self._watched if watched.modified()]:
            raise UnsavedStateError(changed, "the tasks modify tensors in place")

    def _unsaved_tensors(self) -> Iterator[_Watched]:
        seen: set[int] = set()
        for name, tensor in chain(self._reachable(), _leaves_in_memory()):
            if id(tensor) not in seen and _is_watched(tensor):
                seen.add(id(tensor))
                if not self._snapshot.saves(tensor):
                    yield _Watched(name, tensor)

    def _reachable(self) -> Iterator[tuple[str, Tensor]]:
        for found in find_all(self._tasks, MAX_HOPS):
            if isinstance(found.owner, Tensor):
                yield found.path, found.owner
            elif isinstance(found.owner, torch.nn.Module):
                for name, tensor in (
                    *found.owner.named_parameters(),
                    *found.owner.named_buffers(),
                ):
                    yield f"{found.path}.{name}", tensor

    def _before_step(self, optimizer: torch.optim.Optimizer, *given: object) -> None:
        unsaved = self._snapshot.unsaved_of(optimizer)
        if unsaved == [optimizer] and id(optimizer) not in self._existing:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            unsaved = [one for one in parameters if not self._snapshot.saves(one)]
        # What was made within the block is nobody else's.
        unsaved = [one for one in unsaved if id(one) in self._existing]
        if unsaved == [optimizer]:
            name = _name_of(optimizer, find_all(self._tasks, MAX_HOPS))
            raise UnsavedStateError([name], "the tasks call the step of an optimizer")
        if unsaved:
            known = {id(tensor): name for name, tensor in self._reachable()}
            names = [known.get(id(one)) or _described(one) for one in unsaved]
            raise UnsavedStateError(names, f"{type(optimizer).__name__} updates parameters")


class _Watched:
    """A tensor, not kept alive, and its version."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self._tensor = weakref.ref(tensor)
        self._version = tensor._version

    def modified(self) -> bool:
        tensor = self._tensor()
        return tensor is not None and tensor._version != self._version


def _in_memory() -> Iterator[Any]:
    """All tensors and optimizers in the process."""
    kinds = _watched_types()
    for one in gc.get_objects():
        if type(one) in kinds or issubclass(type(one), torch.optim.Optimizer):
            yield one


def _leaves_in_memory() -> Iterator[tuple[str, Tensor]]:
    """All tensors in the process that are leaves and require grad."""
    kinds = _watched_types()
    # There may be millions of objects: no call for each.
    for one in [value for value in gc.get_objects() if type(value) in kinds]:
        if _is_watched(one) and has_state(one):
            yield _described(one), one


def _watched_types() -> set[type]:
    """The types of tensors with a version counter; isinstance may run code of a proxy."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return {Tensor, torch.nn.Parameter, getattr(module, "DTensor", Tensor)}


def _is_watched(value: Any) -> bool:
    return type(value) in _watched_types() and not value.is_inference()


def _described(tensor: Any) -> str:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(tensor.shape)}"


def _name_of(owner: Any, found: Iterable[Found]) -> str:
    path = next((one.path for one in found if one.owner is owner), "")
    return f"{path} ({type(owner).__name__})" if path else type(owner).__name__
