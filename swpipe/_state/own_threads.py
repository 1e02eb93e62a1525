"""Which threads run the tasks of a trial: hooks that torch calls for the whole process ask here.

Worker threads of a run have the caller's context variables; another loop's thread has not. Threads
that torch's autograd starts for a device have none of anybody's: they count for every trial, since
an optimizer can step in a hook of the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_trials: ContextVar[tuple[object, ...]] = ContextVar("swpipe_trials", default=())


@contextmanager
def before_steps(call: Callable[[Optimizer], None]) -> Iterator[None]:
    """Within the block, ``call`` comes before each step of an optimizer in the tasks."""
    trial = object()

    def hook(optimizer: Optimizer, *given: Any) -> None:
        if trial in _trials.get() or _is_torchs(threading.current_thread()):
            call(optimizer)

    token = _trials.set((*_trials.get(), trial))
    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        _trials.reset(token)


def _is_torchs(thread: threading.Thread) -> bool:
    """Whether Python did not start the thread."""
    return isinstance(thread, threading._DummyThread)
