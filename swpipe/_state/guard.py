"""Raise when tasks train something that a snapshot does not have, or save it then.

    an optimizer, or parameters that it updates       before its first step
    leaves of modules that the tasks call, which      after the block: they were modified
      require grad

Only the run's own threads count: hooks that torch calls for the whole process ask for them. Worker
threads of a run have the caller's context variables; another loop's thread has not. Threads that
torch's autograd starts for a device have none of anybody's: they count for every trial, since an
optimizer can step in a hook of the backward.

An optimizer that a task makes in
each iteration may step, if its parameters are restored: at its first step it has no state yet.
Parameters that a task makes are known where operators are recorded (``made``), and refused
elsewhere. Not detected: changes through ``Tensor.data`` and by kernels that torch does not know to
write.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from swpipe._values.copies import UNINITIALIZED
from swpipe._values.snapshot import Snapshot
from swpipe._values.stateful import has_state
from swpipe._values.walk import tensors_in
from swpipe.errors import UnsavedStateError


class TrainingGuard:
    """Within a ``with`` block, watches for training that a snapshot cannot undo.

    Args:
        snapshot: What is restored afterwards.
        made: Whether a tensor was made within the block.
        adds: Whether an optimizer that the snapshot does not have is saved at its first step, with
            its parameters; modules are not watched then.

    Raises:
        UnsavedStateError: From the step of an optimizer within the block, before it changes
            anything: the optimizer or one of its parameters is not in the snapshot; or it is to be
            added, and has a scheduler, of which nothing is known. Or at the end of the block:
            tensors that require grad were modified without one.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        made: Callable[[Tensor], bool] = lambda tensor: False,
        *,
        adds: bool = False,
    ) -> None:
        self._snapshot = snapshot
        self._made = made
        self._adds = adds
        self._called: set[int] = set()
        self._restored: set[int] = set()  # ids of parameters that the snapshot may not have
        self._watched: list[tuple[str, weakref.ref[Tensor], int]] = []
        self._fresh: set[int] = set()  # ids of optimizers that had no state at their first step
        self._stack = ExitStack()

    def __enter__(self) -> TrainingGuard:
        self._stack.enter_context(before_steps(self._before_step))
        if not self._adds:
            self._stack.enter_context(before_calls(self._before_call))
        return self

    def __exit__(self, kind: object, *failure: object) -> None:
        self._stack.close()
        changed = [
            name
            for name, reference, version in self._watched
            if (tensor := reference()) is not None
            and tensor._version != version
            and id(tensor) not in self._restored
        ]
        if changed and kind is None:
            raise UnsavedStateError(changed, "the tasks modify tensors in place")

    def _before_call(self, module: Module) -> None:
        """Watch a module's leaves from its first call on."""
        if id(module) not in self._called:
            self._called.add(id(module))
            kind = type(module).__name__
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if _is_watched(tensor) and not self._snapshot.saves(tensor):
                    watched = (f"{kind}.{name}", weakref.ref(tensor), tensor._version)
                    self._watched.append(watched)

    def _before_step(self, optimizer: Optimizer) -> None:
        unsaved = self._snapshot.unsaved_of(optimizer)
        if not unsaved:  # an object that restores the optimizer restores what it trains
            self._restored |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        kind = type(optimizer).__name__
        if unsaved == [optimizer]:
            if self._may_begin(optimizer):
                return
            if not self._adds:
                raise UnsavedStateError([kind], "the tasks call the step of an optimizer")
            refuse_scheduled(optimizer, ())
            self._snapshot.add_optimizer(optimizer)
        elif unsaved := [one for one in unsaved if not self._may_change(one)]:
            raise UnsavedStateError([*map(_described, unsaved)], f"{kind} updates parameters")

    def _may_begin(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that is not saved has nothing yet that a step would change for good.

        A scheduler, of which nothing is known, has left its mark in the options.
        """
        if id(optimizer) not in self._fresh:
            groups = optimizer.param_groups
            options = [{**group, "params": None} for group in groups]
            changes = [p for group in groups for p in group["params"]]
            changes += tensors_in((options, list(optimizer.state.values())))
            scheduled = any("initial_lr" in group for group in groups)
            if scheduled or not all(map(self._may_change, changes)):
                return False
            self._fresh.add(id(optimizer))
            self._snapshot.add_fresh(optimizer)
        return True

    def _may_change(self, parameter: Tensor) -> bool:
        return self._snapshot.saves(parameter) or self._made(parameter)


def refuse_scheduled(optimizer: Optimizer, restored: Iterable[Any]) -> None:
    """Refuse an optimizer that was only shown if a scheduler of torch's is not restored with it.

    Raises:
        UnsavedStateError: A task may step the scheduler, which nothing shows.
    """
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # which torch's schedulers leave
    if scheduled and not any(getattr(one, "optimizer", None) is optimizer for one in restored):
        raise UnsavedStateError(
            [f"the scheduler of {type(optimizer).__name__}"],
            "the tasks may step a scheduler",
            "Name what is to be restored: state=[model, optimizer, scheduler], or state=[model, "
            "optimizer] if no task steps it",
        )


def _is_watched(tensor: Tensor) -> bool:
    """Whether it is a leaf that requires grad, and has a version counter."""
    return has_state(tensor) and not (isinstance(tensor, UNINITIALIZED) or tensor.is_inference())


def _described(tensor: Any) -> str:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(tensor.shape)}"


_trials: ContextVar[tuple[object, ...]] = ContextVar("swpipe_trials", default=())


def before_steps(call: Callable[[Optimizer], None]) -> AbstractContextManager[None]:
    """Within the block, ``call`` comes before each step of an optimizer in the tasks."""
    return _before(call, register_optimizer_step_pre_hook)


def before_calls(call: Callable[[Module], None]) -> AbstractContextManager[None]:
    """Within the block, ``call`` comes before each call of a module in the tasks."""
    return _before(call, register_module_forward_pre_hook)


@contextmanager
def _before(call: Callable[[Any], None], register: Callable[[Any], Any]) -> Iterator[None]:
    trial = object()

    def hook(of: Any, *given: Any) -> None:
        if trial in _trials.get() or _is_torchs(threading.current_thread()):
            call(of)

    token = _trials.set((*_trials.get(), trial))
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()
        _trials.reset(token)


def _is_torchs(thread: threading.Thread) -> bool:
    """Whether Python did not start the thread."""
    return isinstance(thread, threading._DummyThread)
