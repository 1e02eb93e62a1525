"""A check that refuses loaders that Accelerate prepared, if batches are pulled ahead.

Accelerate's ``accumulate`` and ``gather_for_metrics`` ask the loader about the batch that was
pulled last. If batches are pulled ahead, that is a later batch than the one whose tasks run. A
prepared loader registers itself with Accelerate at its first pull, through any wrapper
(``enumerate``, a progress bar), so the registrations are compared once per iterator. A loader that
was begun earlier is recognised by its generator, if nothing wraps it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from swpipe._engine.iterations import PushedBatches

LIBRARY = "accelerate"


class PreparedCheck:
    """A check of the first pull of an iterator, made before that pull."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._pushed = isinstance(iterator, PushedBatches)
        frame = iterator.gi_frame if isinstance(iterator, GeneratorType) else None
        if frame is not None and is_prepared(frame.f_locals.get("self")):
            raise _refused()
        self._known = _in_use()

    def after_pull(self) -> None:
        """Raise an error if a prepared loader has come into use.

        Raises:
            RuntimeError: A prepared loader is in use; the message says what to do.
        """
        now = _in_use()
        if self._pushed and now:
            raise _refused()
        if len(now) > len(self._known):
            # Remove the loader again, so that Accelerate's state is as before the pull.
            _state().dataloader_references = [None, *self._known]
            raise _refused()


def _state() -> Any:
    kind: Any = getattr(sys.modules.get(f"{LIBRARY}.state"), "GradientState", None)
    # ``_shared_state`` is shared by all instances, and empty until the library is used. To make an
    # instance earlier would begin its use.
    return kind() if getattr(kind, "_shared_state", None) else None


def _in_use() -> list[Any]:
    """Return the loaders that Accelerate takes to be iterated over, innermost last."""
    state = _state()
    known = () if state is None else state.dataloader_references
    return [loader for loader in known if loader is not None]


def is_prepared(loader: Any) -> bool:
    """Return whether ``Accelerator.prepare`` returned the loader."""
    # Accelerate is never imported here: a prepared loader exists only if the user has imported it.
    module: Any = sys.modules.get(f"{LIBRARY}.data_loader")
    return module is not None and issubclass(type(loader), module.DataLoaderStateMixin)


def _refused() -> RuntimeError:
    return RuntimeError(
        "the batches come from a loader that Accelerate prepared, and the plan pulls them ahead of "
        "the tasks: accumulate() and gather_for_metrics() would see flags of a later batch, and "
        "gradients would be accumulated over other iterations. Give swpipe.overlap or "
        "ahead the loader itself, and not a generator or iterator over it, as in "
        "cycle(ahead(loader)); or give the plan the tasks of "
        "swpipe.loops.AccelerateLoader(loader).tasks(...), and iterate over "
        "swpipe.loops.ResumableLoop(pipe, that loader); or use a plan with a depth of 1"
    )
