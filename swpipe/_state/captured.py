"""Python state that tasks declare with ``capture`` and ``restore``, kept during a trial."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from swpipe._tensors.content import is_fixed, replays_itself
from swpipe._tensors.pytree import map_tensors
from swpipe._tensors.stateful import WHOLE, has_state
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.errors import add_note


class Captured:
    """What the tasks' ``capture`` functions return now.

    Warns:
        RuntimeWarning: One raised, so that what it would capture is not restored.
    """

    def __init__(self, tasks: Iterable[PipelineTask]) -> None:
        self._kept: list[tuple[str, DeclaredIO, Any]] = []
        declared = [(task.name, io) for task in tasks for io in task.io if io.capture]
        for name, io in declared:
            try:
                self._kept.append((name, io, _copied(io.capture())))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - such as of what the first run makes
                warnings.warn(
                    f"task {name!r}: capture raised {type(error).__name__}: {error}, before a "
                    "trial, so what it captures is not restored afterwards. It is called before "
                    "the task has run: let it return what restore can put back even then",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def restore(self) -> None:
        """Give each value to ``restore``, the last task's first; it may be called repeatedly."""
        with ExitStack() as last_to_first:  # all, also if one of them fails
            for task, io, value in self._kept:
                last_to_first.callback(partial(_restore, task, io, value))


def _restore(task: str, io: DeclaredIO, value: Any) -> None:
    try:
        io.restore(_copied(value))  # type: ignore[misc]
    except Exception as error:
        add_note(error, f"swpipe: raised by a restore of task {task!r}, after a trial")
        raise


def _copied(value: Any) -> Any:
    """A copy that the tasks do not change; models, optimizers and generators are the same."""
    return map_tensors(value, _clone, _copied_object)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copied_object(value: Any) -> Any:
    if is_fixed(value) or replays_itself(value) or isinstance(value, WHOLE) or has_state(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - such as a handle, which restore only hands on
        return value
