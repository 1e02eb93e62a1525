"""The modules that tasks call, and the optimizers that step, as torch's hooks show them.

Only the run's own threads count: torch calls these hooks for the whole process. Worker threads of a
run have the caller's context variables; another loop's thread does not. Threads that torch's
autograd starts for a device have no context variables at all: they count for every trial, since an
optimizer can step in a hook of the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from swpipe.errors import UnsavedStateError

# The trials that this thread belongs to; trials can be nested.
_trials: ContextVar[tuple[object, ...]] = ContextVar("swpipe_trials", default=())


def before_steps(call: Callable[[Optimizer], None]) -> AbstractContextManager[None]:
    """Call ``call`` before each step of an optimizer in the tasks, within the block."""
    return _before(call, register_optimizer_step_pre_hook)


def before_calls(call: Callable[[Module], None]) -> AbstractContextManager[None]:
    """Call ``call`` before each call of a module in the tasks, within the block."""
    return _before(call, register_module_forward_pre_hook)


@contextmanager
def _before(call: Callable[[Any], None], register: Callable[[Any], Any]) -> Iterator[None]:
    """Register a hook of torch's that calls ``call`` for this run's threads, within the block."""
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
    """Return whether a thread was not started by Python."""
    # Private in Python's threading: the stand-in for a thread that Python did not start.
    return isinstance(thread, threading._DummyThread)


def refuse_scheduled(optimizer: Optimizer, restored: Iterable[Any]) -> None:
    """Refuse an optimizer that was only shown if its torch scheduler is not restored with it.

    Raises:
        UnsavedStateError: A task may step the scheduler, which no hook shows.
    """
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # set by torch's schedulers
    if scheduled and not any(
        getattr(scheduler, "optimizer", None) is optimizer for scheduler in restored
    ):
        raise UnsavedStateError(
            [f"the scheduler of {type(optimizer).__name__}"],
            "the tasks may step a scheduler",
            "Name what is to be restored: state=[model, optimizer, scheduler], or state=[model, "
            "optimizer] if no task steps it",
        )
