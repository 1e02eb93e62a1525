"""Raise when tasks train something that a snapshot does not have.

    an optimizer, or parameters that it updates             before its first step
    leaves that require grad, and that only a deeper        after the block: they were modified
      search than that for state has found

Only steps on the run's own threads count (``swpipe._state.own_threads``). An optimizer that a task
makes in each iteration may step, if its parameters are restored: at its first step it has no state
yet. Parameters that a task makes are known where operators are recorded (``made``), and refused
elsewhere. Not detected: changes through ``Tensor.data`` and by kernels that torch does not know to
write; tensors that only C++ holds, or that no attribute or global leads to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from swpipe._state.copies import UNINITIALIZED
from swpipe._state.discovery import MAX_HOPS, Found, find_all
from swpipe._state.own_threads import before_steps
from swpipe._state.snapshot import Snapshot
from swpipe._tensors.pytree import tensors_in
from swpipe._tensors.stateful import has_state
from swpipe.core.task import PipelineTask
from swpipe.errors import UnsavedStateError

_FURTHER = MAX_HOPS + 4
"""How many attributes in a row are followed to find what the search for state did not."""


class TrainingGuard:
    """Within a ``with`` block, watches for training that a snapshot cannot undo.

    Args:
        tasks: The tasks that run within the block.
        snapshot: What is restored afterwards.
        made: Whether a tensor was made within the block.

    Raises:
        UnsavedStateError: From the step of an optimizer within the block, before it changes
            anything: the optimizer or one of its parameters is not in the snapshot. Or at the end
            of the block: tensors that require grad were modified without one.
    """

    def __init__(
        self,
        tasks: Iterable[PipelineTask],
        snapshot: Snapshot,
        made: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._tasks = tuple(tasks)
        self._snapshot = snapshot
        self._made = made
        self._watched: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._fresh: set[int] = set()  # ids of optimizers that had no state at their first step
        self._stack = ExitStack()

    def __enter__(self) -> TrainingGuard:
        self._watched = [
            (name, weakref.ref(tensor), tensor._version)
            for name, tensor in self._reachable()
            if _is_watched(tensor) and not self._snapshot.saves(tensor)
        ]
        self._stack.enter_context(before_steps(self._before_step))
        return self

    def __exit__(self, kind: object, *failure: object) -> None:
        self._stack.close()
        changed = [
            name
            for name, reference, version in self._watched
            if (tensor := reference()) is not None and tensor._version != version
        ]
        if changed and kind is None:
            raise UnsavedStateError(changed, "the tasks modify tensors in place")

    def _reachable(self) -> Iterator[tuple[str, Tensor]]:
        for found in find_all(self._tasks, _FURTHER):
            if isinstance(found.owner, Tensor):
                yield found.path, found.owner
            elif isinstance(found.owner, torch.nn.Module):
                named = (*found.owner.named_parameters(), *found.owner.named_buffers())
                yield from ((f"{found.path}.{name}", tensor) for name, tensor in named)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        unsaved = self._snapshot.unsaved_of(optimizer)
        if unsaved == [optimizer]:
            if not self._may_begin(optimizer):
                name = _name_of(optimizer, find_all(self._tasks, _FURTHER))
                raise UnsavedStateError([name], "the tasks call the step of an optimizer")
        elif unsaved := [one for one in unsaved if not self._may_change(one)]:
            known = {id(tensor): name for name, tensor in self._reachable()}
            names = [known.get(id(one)) or _described(one) for one in unsaved]
            raise UnsavedStateError(names, f"{type(optimizer).__name__} updates parameters")

    def _may_begin(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer that is not saved has nothing yet that a step would change for good.

        A scheduler, which nothing here would find, has left its mark in the options.
        """
        if id(optimizer) not in self._fresh:
            groups = optimizer.param_groups
            options = [{**group, "params": None} for group in groups]
            changes = [p for group in groups for p in group["params"]]
            changes += tensors_in((options, list(optimizer.state.values())))
            if any("initial_lr" in group for group in groups) or not all(
                map(self._may_change, changes)
            ):
                return False
            self._fresh.add(id(optimizer))
            self._snapshot.add_fresh(optimizer)
        return True

    def _may_change(self, parameter: Tensor) -> bool:
        return self._snapshot.saves(parameter) or self._made(parameter)


def _is_watched(tensor: Tensor) -> bool:
    """Whether it is a leaf that requires grad, and has a version counter."""
    return has_state(tensor) and not (isinstance(tensor, UNINITIALIZED) or tensor.is_inference())


def _described(tensor: Any) -> str:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(tensor.shape)}"


def _name_of(owner: Any, found: Iterable[Found]) -> str:
    path = next((one.path for one in found if one.owner is owner), "")
    return f"{path} ({type(owner).__name__})" if path else type(owner).__name__
