"""Loaders that Accelerate prepared, pulled ahead.

A prepared loader knows whether its batch is the last one of the pass, and how many samples were
added to fill that batch. ``Accelerator.accumulate`` and ``gather_for_metrics`` ask for both through
``accelerate.state.GradientState``, which knows the loader that is iterated over. If the loader is
pulled ahead, it answers for a later batch, or ``GradientState`` does not know it any more::

    pull thread       pull 8    pull 9 (the last)    the end
    tasks                       7                    8            9    whose flag is asked for

So the flags are read at the pull and go with the batch. Before the tasks that may ask, a task of
the iteration shows the flags to Accelerate, on the thread of these tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from swpipe.accelerate_check import is_prepared
from swpipe.core.loaders import LoaderAround
from swpipe.core.task import DeclaredIO, PipelineTask

STATE = "<Accelerate's GradientState>"


class PulledBatch(NamedTuple):
    """A batch, with the flags of its loader at the pull."""

    batch: Any
    end_of_dataloader: bool
    remainder: int


def _unpack(ctx: Any) -> None:
    ctx.batch, *ctx.pulled_flags = ctx.batch


class AccelerateLoader(LoaderAround):
    """A prepared loader whose flags go with its batches.

    ``swpipe.overlap`` wraps a prepared loader in one. For a plan of your own, pass it to
    ``swpipe.loops.ResumableLoop``, and ``tasks`` to the plan.

    Attributes:
        prepared: The loader.
        in_loop: Whether a loop iterates over it that calls ``leave`` after each pass.

    Args:
        loader: The result of ``Accelerator.prepare`` for a ``DataLoader``.

    Raises:
        TypeError: Accelerate did not prepare the loader.
        ValueError: The loader sends batches from one process to all others.
    """

    unpack = PipelineTask("unpack batch", _unpack, pure=True)
    """The task that takes the batch and its flags apart."""

    def __init__(self, loader: Any) -> None:
        # Accelerate is looked up in sys.modules: nobody can have a prepared loader without it.
        dispatcher = getattr(sys.modules.get("accelerate.data_loader"), "DataLoaderDispatcher", ())
        if isinstance(loader, dispatcher):
            raise ValueError(
                "the loader is Accelerate's DataLoaderDispatcher, which sends batches to the other "
                "processes: a batch that is pulled ahead would exchange them while tasks do. Let "
                "each process read its own: DataLoaderConfiguration(dispatch_batches=False)"
            )
        if not is_prepared(loader):
            raise TypeError(
                f"AccelerateLoader takes a loader that Accelerator.prepare returned, not a "
                f"{type(loader).__name__}, which SWPipeline takes as it is"
            )
        self.in_loop = False
        self.loader = loader
        self.prepared = loader
        self._gradient_state = loader.gradient_state
        self._shown = _ShownLoader(loader)

    def __len__(self) -> int:
        return len(self.prepared)

    def __iter__(self) -> Iterator[PulledBatch]:
        """Begin a pass, and return the iterator over batches and flags, which the tasks split.

        Raises:
            RuntimeError: No loop would let Accelerate forget the pass at its end.
        """
        if not self.in_loop:
            raise RuntimeError(
                "an AccelerateLoader is iterated over by a loop that lets Accelerate forget the "
                "pass at its end: for ctx in swpipe.loops.ResumableLoop(pipe, loader)"
            )
        return self._pulled_batches()

    def _pulled_batches(self) -> Iterator[PulledBatch]:
        loader = self.prepared
        # When a pass begins, the loader adds itself to its gradient_state, of which Accelerate asks
        # the flags. While the loader is pulled ahead, an empty object takes the state's place.
        loader.gradient_state = _Apart()
        try:
            for batch in loader:
                yield PulledBatch(batch, loader.end_of_dataloader, loader.remainder)
        finally:
            loader.gradient_state = self._gradient_state

    def tasks(self, given: Sequence[PipelineTask]) -> tuple[PipelineTask, ...]:
        """Return the tasks, after two that take batch and flags apart and show the flags.

        Undeclared tasks come after the flags are shown. A task that names states in its ``io`` and
        asks Accelerate has to name ``swpipe.loops.accelerate.STATE``, too.
        """
        shows = DeclaredIO(state=STATE, mode="w")
        asks = DeclaredIO(state=STATE, mode="r")
        return (
            self.unpack,
            replace(self.show, io=[shows]),
            *(replace(t, io=[*t.io, asks]) if t.undeclared else t for t in given),
        )

    @property
    def show(self) -> PipelineTask:
        """The task that shows the flags to Accelerate."""
        return PipelineTask("show end_of_dataloader", self._show)

    def leave(self) -> None:
        """Let Accelerate forget the pass."""
        # A private method of GradientState (Accelerate 1.15), as the loader calls it at its end.
        self._gradient_state._remove_dataloader(self._shown)

    def _show(self, ctx: Any) -> None:
        # Added once a pass, before the first task that may ask; leave() removes it at the end.
        shown = self._shown
        known = self._gradient_state.dataloader_references
        # Only tasks of this iteration ask until the next show task: both are on the same thread.
        shown.end_of_dataloader, shown.remainder = ctx.pulled_flags
        if not any(loader is shown for loader in known):
            self._gradient_state._add_dataloader(shown)


class _ShownLoader:
    """The loader as Accelerate sees it, with the flags of the iteration that runs."""

    end_of_dataloader = False
    remainder = -1

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Apart:
    """A stand-in for ``GradientState``, which the loader calls from the thread that pulls."""

    # The two private methods that a prepared loader calls on its gradient_state (Accelerate 1.15).
    def _add_dataloader(self, loader: Any) -> None:
        """Do nothing: a task shows the loader."""

    def _remove_dataloader(self, loader: Any) -> None:
        """Do nothing: tasks of earlier batches may still ask."""
