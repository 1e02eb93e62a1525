"""Lets tasks forget what they keep for iterations that are dropped."""

from __future__ import annotations

from collections.abc import Iterable

from swpipe.core.task import PipelineTask
from swpipe.errors import add_note


def reset_states(tasks: Iterable[PipelineTask], failure: BaseException | None) -> None:
    """Call every ``DeclaredIO.reset``, all of them, whatever one raises.

    Args:
        tasks: Whose iterations are dropped.
        failure: What dropped them, which gets a note of what a reset raises.

    Raises:
        Exception: What the first reset to fail raised, where there is no failure to note it on.
    """
    first: Exception | None = None
    for task in tasks:
        for index, io in enumerate(task.io):
            if io.reset is None:
                continue
            try:
                io.reset()
            except Exception as error:  # noqa: BLE001 - noted or raised below
                text = f"in the reset of io[{index}] of task {task.name!r}"
                if failure is not None:
                    add_note(failure, f"swpipe: {type(error).__name__} {text}: {error}")
                elif first is None:
                    add_note(error, f"swpipe: {text}")
                    first = error
    if first is not None:
        raise first
