"""What torch's hooks show of tasks: which modules they call, and which optimizers step.

Only the run's own threads count: hooks that torch calls for the whole process ask for them. Worker
threads of a run have the caller's context variables; another loop's thread has not. Threads that
torch's autograd starts for a device have none of anybody's: they count for every trial, since an
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
