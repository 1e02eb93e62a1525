"""A loop over a pipeline that can be stopped and gone on with, whatever was pulled ahead.

    pulled           0  1  2  3  4  5
    handed out       0  1  2  3                  the body of the loop is at 3: a state is saved
    resumed                      4  5  6 ...     the loader is set back; numbers and draws go on

``ResumablePass`` knows where a pass is and how to get there again; this loop tells it what the
pipeline has in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch

from swpipe._engine.randomness import GeneratorAccess, TaskSeeds
from swpipe._engine.waiting import ProgressCounter
from swpipe._state.discovery import has_state_dict
from swpipe.device import Device, resolve
from swpipe.inference.early_changes import early_changes
from swpipe.pipeline import SWPipeline
from swpipe.tuning.accelerate_loader import AccelerateLoader
from swpipe.tuning.resumable_pass import ResumablePass, state_between_passes

__all__ = ["Resumable", "ResumableLoop"]

Out = TypeVar("Out", covariant=True)  # noqa: PLC0105 - as the other pipelines call it


class Resumable(Protocol[Out]):
    """A pipeline: ``SWPipeline``, or one with TorchRec's names but ``StagedTrainPipeline``."""

    def progress(self, iterator: Iterator[Any], /) -> Out:
        """Return the next result; StopIteration at the end."""

    def state_dict(self) -> dict[str, int]:
        """As ``SWPipeline.state_dict``."""

    def load_state_dict(self, state: Mapping[str, int], /) -> None:
        """As ``SWPipeline.load_state_dict``."""


class ResumableLoop(Generic[Out]):
    """An iterable of what ``progress`` returns, one pass over the loader each time.

    A pass that is left early, by ``break`` or an exception, drops what was pulled ahead if no task
    can have changed anything for it. Otherwise it stays in flight, for ``drain`` of the pipeline.

    Attributes:
        pipe: The pipeline.
        counted: Whether whoever iterates counts the batches, and does not ask for another one after
            the last, as Lightning's Trainer: set it to True, and the last batch ends the pass.

    Args:
        pipe: The pipeline. Tasks with ``random=True`` draw by the iteration's number; others may
            draw from the default generators if the loader does not.
        loader: As in ``for batch in loader``; an ``AccelerateLoader`` in place of a loader that
            Accelerate prepared.
        device: Whose default generators are saved besides the CPU's; None for the pipeline's, or
            else the machine's accelerator.
    """

    counted = False

    def __init__(
        self,
        pipe: Resumable[Out],
        loader: Iterable[Any],
        *,
        device: Device | torch.device | str | None = None,
    ) -> None:
        self.pipe = pipe
        self._device = resolve(getattr(pipe, "device", None) if device is None else device)
        self._loader = loader
        if isinstance(loader, AccelerateLoader):
            loader.in_loop = True
        self._pass: ResumablePass | None = None
        self._rest: ResumablePass | None = None  # of the pass of a state that was loaded
        self._running: ResumablePass | None = None
        self._left = False  # early
        self._dropped = False  # what was in flight then

    def state_dict(self, *, rest: bool | None = None) -> dict[str, Any]:
        """What to save beside models and optimizers, in the body of the loop or between passes.

        In the body it leads to the rest of this pass, between passes to a new one. It has numbers,
        strings and tensors: the pipeline's state, how many batches of this pass were handed out,
        the loader's state if it has one, and the random generators.

        Args:
            rest: After a pass that was left early: whether to go on with the rest of it.

        Raises:
            RuntimeError: A run that goes on from here would not surely have the numbers of one that
                was never stopped; it says why, and what to do.
        """
        state = {"pipeline": self.pipe.state_dict()}
        if self._left and rest is None:
            raise RuntimeError(
                "the last pass was left early, and a state could lead to the rest of it or to a "
                "new pass: save in the body of the loop, before you leave it, or say which by "
                "state_dict(rest=True) or state_dict(rest=False)"
            )
        current = self._pass
        # A task with random=True may be running, which has seeded the generators for itself.
        with GeneratorAccess(TaskSeeds(0, self._device), ProgressCounter()).exclusive():
            if current is None or (self._left and not rest):
                self._check_new_pass()
                return state_between_passes(self._loader, self._device) | state
            if others := self._others_in_flight(current):
                raise RuntimeError(
                    f"{others} iterations in flight are not of this loop: finish their iterator, "
                    "or call drain(), before you save"
                )
            if not current.ended:
                if not self._dropped:
                    current.count(state["pipeline"]["in_flight"])
                current.check_draws()
            if self.counted and self._is_complete(current):
                current.end()
            return current.state_dict() | state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was saved, in this process or another.

        Call it before the first pass, after models and optimizers are loaded. The pipeline may have
        another plan. A loader without a state of its own has to give the same batches again: those
        that were handed out are skipped. Random generators are set as they were.

        Raises:
            RuntimeError: A pass has not ended.
            ValueError: The loader has fewer batches than were handed out, or cannot be begun again;
                or the state is not that of a ``ResumableLoop``.
        """
        self._refuse_running()
        if "ahead" not in state:
            raise ValueError("the state is not one that ResumableLoop.state_dict() returned")
        self.pipe.load_state_dict(state["pipeline"])
        self._pass = self._rest = self._begin(state)
        self._left = False

    def __iter__(self) -> Iterator[Out]:
        """Yield what the pipeline returns for each batch.

        Raises:
            RuntimeError: Another pass has not ended.
        """
        self._refuse_running()
        if self._left and not isinstance(self.pipe, SWPipeline):  # which refuses it itself
            self._refuse_left()
        current = self._pass = self._rest or self._begin(None)
        self._rest = None
        self._dropped = self._left = False
        self._running = current
        try:
            while True:
                try:
                    out = self.pipe.progress(current.iterator)
                except StopIteration:
                    current.ended = True
                    return
                current.handed_out += 1
                yield out
                del out
        finally:
            if self._running is current:
                self._end(current)

    def _end(self, current: ResumablePass) -> None:
        """The pass is over, or left."""
        self._running = None
        if isinstance(self._loader, AccelerateLoader):
            self._loader.leave()
        if not current.ended:
            self._leave(current)
            if self._is_complete(current):
                current.end()
        self._left = not current.ended

    def _is_complete(self, current: ResumablePass) -> bool:
        """Whether all was handed out, by the loader's length."""
        try:
            return current.handed_out == len(self)
        except TypeError:  # it has none
            return False

    def __len__(self) -> int:
        """The loader's length."""
        return len(self._loader)  # type: ignore[arg-type]

    def _begin(self, saved: Mapping[str, Any] | None) -> ResumablePass:
        before = None if self._pass is None else self._pass.draws
        # What is not pulled ahead is drawn in the order of a plain loop.
        ahead = not isinstance(self.pipe, SWPipeline) or self.pipe.plan.depth > 1
        return ResumablePass(self._loader, self._device, saved, before, ahead)

    def _leave(self, current: ResumablePass) -> None:
        """Drop what is in flight, if nothing can have changed by it."""
        pipe = self.pipe
        if not isinstance(pipe, SWPipeline) or self._others_in_flight(current):
            return
        if any(early_changes(pipe.plan, pipe.tasks)):
            return
        current.count(pipe.in_flight)
        pipe.drop()
        self._dropped = True

    def _check_new_pass(self) -> None:
        if self._left and has_state_dict(self._loader):
            raise RuntimeError(
                "the loader has a state of its own, which leads to the rest of the pass that was "
                "left early: save in the body of the next pass"
            )

    def _others_in_flight(self, current: ResumablePass) -> int:
        run = self.pipe._driver.run if isinstance(self.pipe, SWPipeline) else None
        return 0 if run is None or run.admission.iterator is current.iterator else run.in_flight

    def _refuse_left(self) -> None:
        if in_flight := self.pipe.state_dict()["in_flight"]:
            raise RuntimeError(
                f"{in_flight} batches of the pass that was left early are in flight: call drain() "
                "before the next pass"
            )

    def _refuse_running(self) -> None:
        if self._running is not None:
            raise RuntimeError(
                "a pass over this loop has not ended: leave its for, or close() its iterator, first"
            )
