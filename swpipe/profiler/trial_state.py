"""What is put back after a pipeline's tasks have run in a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swpipe._state.loop import LoopState
from swpipe.inference.operators import copied
from swpipe.inference.shown_state import shown_state
from swpipe.pipeline import SWPipeline


def trial_state(
    pipe: SWPipeline[Any], batch: Any, state: Any, copy: Callable[[Any], Any] | None = None
) -> LoopState:
    """What is put back after a trial of an idle pipeline's tasks.

    Args:
        pipe: The pipeline.
        batch: What its tasks run on, if the state is not given: they get copies.
        state: As given by the user; None for what is declared and shown.
        copy: Makes a copy of the batch; None to clone its tensors.

    Raises:
        BaseException: Whatever a task raised.
    """
    if state is None:
        with pipe.borrow():
            run = pipe.run_one_serial_iter
            state = shown_state(pipe.tasks, run, batch, pipe.device, copy or copied)
    return LoopState(pipe.tasks, state, pipe.device)
