"""The state that is restored after a trial: a profile, a measurement, a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from swpipe._state.loop import LoopState
from swpipe.inference.operators import copied
from swpipe.inference.shown_state import shown_state
from swpipe.pipeline import SWPipeline, borrowed


@contextmanager
def trial(
    pipe: SWPipeline[Any],
    batch: Any,
    state: Any = None,
    copy: Callable[[Any], Any] | None = None,
) -> Iterator[LoopState]:
    """Borrow an idle pipeline for the block, and restore the state of its tasks afterwards.

    See ``trial_state`` for the arguments and errors.
    """
    saved = trial_state(pipe, batch, state, copy)
    with saved.trial(), borrowed(pipe):
        yield saved


def trial_state(
    pipe: SWPipeline[Any], batch: Any, state: Any, copy: Callable[[Any], Any] | None = None
) -> LoopState:
    """Return the state to restore after a trial of an idle pipeline's tasks.

    Args:
        pipe: The pipeline.
        batch: If ``state`` is None, the tasks run on copies of this batch to find the state.
        state: The objects given by the user; None for the declared and detected ones.
        copy: Returns a copy of the batch; None to clone its tensors.

    Raises:
        BaseException: Any exception of a task.
    """
    if state is None:
        # A borrowed pipeline gets its iteration number back, and its shortcuts stay untouched.
        with borrowed(pipe):
            run = pipe.run_one_serial_iter
            state = shown_state(pipe.tasks, run, batch, pipe.device, copy or copied)
    return LoopState(pipe.tasks, state, pipe.device)
