"""Loaders that Accelerate prepared: what they tell of a batch is that of the batch pulled last.

``accumulate`` and ``gather_for_metrics`` ask for it while the tasks of an earlier batch run, where
batches are pulled ahead. Such a loader makes itself known to Accelerate when it is first asked for
a batch, through whatever wraps it (``enumerate``, a progress bar): this is looked at once per
iterator. One that was begun before is known by its generator, if nothing wraps it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from swpipe._engine.iterations import PushedBatches

LIBRARY = "accelerate"


class PreparedCheck:
    """A check of the first pull of an iterator; made before it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._pushed = isinstance(iterator, PushedBatches)
        frame = iterator.gi_frame if isinstance(iterator, GeneratorType) else None
        if frame is not None and _is_prepared(frame.f_locals.get("self")):
            raise _refused()
        self._known = _in_use()

    def after_pull(self) -> None:
        """Refuse the iterator if a prepared loader has come into use.

        Raises:
            RuntimeError: It names the loader's library, and what to do.
        """
        now = _in_use()
        if self._pushed and now:
            raise _refused()
        if len(now) > len(self._known):
            _state().dataloader_references = [None, *self._known]  # as before the pull
            raise _refused()


def _state() -> Any:
    kind: Any = getattr(sys.modules.get(f"{LIBRARY}.state"), "GradientState", None)
    # Shared by all its instances; empty until the library is used, which is not begun here.
    return kind() if getattr(kind, "_shared_state", None) else None


def _in_use() -> list[Any]:
    """The loaders that Accelerate takes to be iterated over, innermost last."""
    state = _state()
    known = () if state is None else state.dataloader_references
    return [one for one in known if one is not None]


def _is_prepared(loader: Any) -> bool:
    module: Any = sys.modules.get(f"{LIBRARY}.data_loader")
    return module is not None and isinstance(loader, module.DataLoaderStateMixin)


def _refused() -> RuntimeError:
    return RuntimeError(
        "the batches come from a loader that Accelerate prepared, and the plan pulls them ahead of "
        "the tasks: accumulate() and gather_for_metrics() would be told of a later batch, and "
        "gradients would be accumulated over other iterations. Give swpipe.overlap or "
        "ahead the loader itself, and not a generator or iterator over it, as in "
        "cycle(ahead(loader)); or give the plan the tasks of "
        "swpipe.loops.AccelerateLoader(loader).tasks(...), and iterate over "
        "swpipe.loops.ResumableLoop(pipe, that loader); or use a plan with a depth of 1"
    )
