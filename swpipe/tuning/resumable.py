"""A loop over a pipeline that can be stopped and gone on with, whatever was pulled ahead.

    pulled           0  1  2  3  4  5
    handed out       0  1  2  3                  the body of the loop is at 3: a state is saved
    resumed                      4  5  6 ...     the loader is set back; numbers and draws go on

``LoaderPass`` knows how a loader is set back. ``_MeasuredPass`` adds how many batches the pipeline
was given, and which random generators the loader draws from: what these were after the pull of the
batch handed out last is where a resumed run goes on, and for others what they are when a state is
saved. The second pull tells, before any task runs: samplers draw their seed in the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from swpipe._engine.randomness import GeneratorAccess, TaskSeeds
from swpipe._engine.waiting import ProgressCounter
from swpipe._state.generators import changed_generators, default_generators
from swpipe._tensors.stateful import has_state_dict
from swpipe.core.messages import listed, shown
from swpipe.device import Device, resolve
from swpipe.inference.early_changes import early_changes
from swpipe.pipeline import SWPipeline
from swpipe.tuning.accelerate_loader import AccelerateLoader
from swpipe.tuning.live_workers import check_workers
from swpipe.tuning.loader_pass import LoaderPass, state_between_passes
from swpipe.tuning.loader_values import LoaderValues

__all__ = ["Resumable", "ResumableLoop"]

Out = TypeVar("Out", covariant=True)  # noqa: PLC0105 - as the other pipelines call it


@runtime_checkable
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
        if not isinstance(pipe, Resumable):
            raise TypeError(
                f"ResumableLoop takes a pipeline and its loader, and {shown(pipe)} is no pipeline"
            )
        self.pipe = pipe
        self._device = resolve(getattr(pipe, "device", None) if device is None else device)
        self._loader = loader
        if isinstance(loader, AccelerateLoader):
            loader.in_loop = True
        self._values = LoaderValues(loader)
        self._pass: LoaderPass | None = None
        self._rest: LoaderPass | None = None  # of the pass of a state that was loaded
        self._running: LoaderPass | None = None
        self._left = False  # early
        self._dropped = False  # what was in flight then

    def state_dict(self, *, rest: bool | None = None, check: bool = True) -> dict[str, Any]:
        """What to save beside models and optimizers, in the body of the loop or between passes.

        In the body it leads to the rest of this pass, between passes to a new one. It has numbers,
        strings and tensors: the pipeline's state, how many batches of this pass were handed out,
        the loader's state if it has one, what it keeps from pass to pass, and random generators.

        Args:
            rest: After a pass that was left early: whether to go on with the rest of it.
            check: Refuse what a state cannot have of the loader; False if other numbers, such as
                other augmentations in workers that live on, do not matter.

        Raises:
            RuntimeError: A run that goes on from here would not surely have the numbers of one that
                was never stopped; it says why, and what to do.
        """
        state = {"pipeline": self._pipeline_state()}
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
                values = self._values
                return state_between_passes(self._loader, self._device, values, check) | state
            if others := self._others_in_flight(current):
                raise RuntimeError(
                    f"iterations are in flight ({others}) that are not of this loop: finish their "
                    "iterator, or call drain(), before you save"
                )
            if isinstance(current, _MeasuredPass) and not current.ended:
                if not self._dropped:
                    current.count(state["pipeline"]["in_flight"])
                current.check_draws()
            if self.counted and self._is_complete(current):
                current.end()
            return current.state_dict(check) | state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was saved, in this process or another.

        Call it before the first pass, after models and optimizers are loaded. The pipeline may have
        another plan. A loader without a state of its own has to give the same batches again: those
        that were handed out are skipped. Random generators are set as they were.

        Raises:
            RuntimeError: A pass has not ended.
            ValueError: The loader has fewer batches than were handed out, or cannot be begun again;
                or the state is not that of such a loop.
        """
        self._refuse_running()
        if not (isinstance(state, Mapping) and {"at_start", "pipeline"} <= state.keys()):
            raise ValueError(
                f"the state is not one that {type(self).__name__}.state_dict() returned"
            )
        self.pipe.load_state_dict(state["pipeline"])
        self._pass = self._rest = self._begin(state)
        self._left = False

    def __iter__(self) -> Iterator[Out]:
        """What the pipeline returns for each batch.

        Raises:
            RuntimeError: Another pass has not ended.
        """
        # The rest of a pass is this iterator's even if nobody asks it for anything: Lightning does
        # not, when it goes on from the last batch of an epoch. A new pass begins when it is asked.
        rest, self._rest = self._rest, None
        return self._iterate(rest)

    def _iterate(self, rest: LoaderPass | None) -> Iterator[Out]:
        self._refuse_running()
        if self._left and not isinstance(self.pipe, SWPipeline):  # which refuses it itself
            self._refuse_left()
        if rest is not None and rest.is_of_another_epoch:
            rest = self._begin(rest.saved_anew())
        current = self._pass = rest or self._first_pass() or self._new_pass()
        iterator = current.iterator
        self._dropped = self._left = False
        self._running, failed = current, False
        try:
            while True:
                try:
                    out = self.pipe.progress(iterator)
                except StopIteration:
                    current.ended = True
                    if current.failure is not None:
                        raise current.failure from None
                    return
                except BaseException:
                    failed = True
                    raise
                self._hand_out(current)
                yield out
                del out
                self._take_back(current)
        finally:
            if self._running is current:
                self._end(current, failed=failed)

    def _end(self, current: LoaderPass, *, failed: bool) -> None:
        """The pass is over, or left."""
        self._running = None
        if isinstance(self._loader, AccelerateLoader):
            self._loader.leave()
        if not current.ended:
            self._leave(current, failed=failed)
            if self._is_complete(current):
                current.end()
        self._left = not current.ended

    def _is_complete(self, current: LoaderPass) -> bool:
        """Whether all was handed out, by the loader's length."""
        try:
            return current.handed_out == len(self)
        except TypeError:  # it has none
            return False

    def __len__(self) -> int:
        """The loader's length."""
        return len(self._loader)  # type: ignore[arg-type]

    def _begin(self, saved: Mapping[str, Any] | None) -> LoaderPass:
        before = self._pass.draws if isinstance(self._pass, _MeasuredPass) else None
        # What is not pulled ahead is drawn in the order of a plain loop.
        ahead = not isinstance(self.pipe, SWPipeline) or self.pipe.plan.depth > 1
        return _MeasuredPass(self._loader, self._device, saved, before, ahead, self._values)

    def _new_pass(self) -> LoaderPass:
        left = self._pass
        if self._left and left is not None and left.pulled > left.handed_out:
            check_workers(self._loader, "also for batches that were dropped when a pass was left")
        return self._begin(None)

    def _first_pass(self) -> LoaderPass | None:
        """A pass that was begun already, once."""
        return None

    def _hand_out(self, current: LoaderPass) -> None:
        """The body gets the next result."""
        current.hand_out()

    def _take_back(self, current: LoaderPass) -> None:
        """The body is done with it."""

    def _pipeline_state(self) -> dict[str, int]:
        return self.pipe.state_dict()

    def _leave(self, current: LoaderPass, *, failed: bool) -> None:
        """Drop what is in flight, if nothing can have changed by it."""
        pipe = self.pipe
        if not isinstance(pipe, SWPipeline) or self._others_in_flight(current):
            return
        if any(early_changes(pipe.plan, pipe.tasks)):
            return
        if isinstance(current, _MeasuredPass):
            current.count(pipe.in_flight)
        pipe.drop()
        self._dropped = True

    def _check_new_pass(self) -> None:
        if self._left and has_state_dict(self._loader):
            raise RuntimeError(
                "the loader has a state of its own, which leads to the rest of the pass that was "
                "left early: save in the body of the next pass"
            )

    def _refuse_left(self) -> None:
        if in_flight := self.pipe.state_dict()["in_flight"]:
            raise RuntimeError(
                f"batches of the pass that was left early are in flight ({in_flight}): call "
                "drain() before the next pass"
            )

    def _others_in_flight(self, current: LoaderPass) -> int:
        pipe = self.pipe
        return pipe.in_flight_of_others(current.iterator) if isinstance(pipe, SWPipeline) else 0

    def _refuse_running(self) -> None:
        if self._running is not None:
            raise RuntimeError(
                "a pass over this loop has not ended: leave its for, or close() its iterator, first"
            )


class _MeasuredPass(LoaderPass):
    """A pass that knows what the pipeline was given, and which generators the loader draws from.

    Attributes:
        draws: Names of these generators; None where that is not known yet.
        fed: How many batches the pipeline was given.

    Args:
        loader: As for ``LoaderPass``.
        device: As for ``LoaderPass``.
        saved: As for ``LoaderPass``.
        draws: As found in an earlier pass.
        ahead: Whether batches are pulled ahead of tasks.
        values: As for ``LoaderPass``.
    """

    def __init__(
        self,
        loader: Any,
        device: Device,
        saved: Mapping[str, Any] | None,
        draws: frozenset[str] | None,
        ahead: bool,
        values: LoaderValues,
    ) -> None:
        self._after_pull: dict[str, Any] = {}
        if saved is not None and (found := saved.get("loader_draws")) is not None:
            draws = (draws or frozenset()) | frozenset(found)
        self.draws = draws
        ahead_then = saved is not None and saved.get("ahead", 0) > 0
        known = (ahead_then and draws) or frozenset[str]()
        super().__init__(loader, device, saved, known, values=values)
        self.fed = self.handed_out
        pulls = self._measured(self.iterator) if ahead and draws is None else self.iterator
        self.iterator = self._feed(pulls)

    def state_dict(self, check: bool) -> dict[str, Any]:
        """As ``LoaderPass.state_dict``, with what was pulled ahead and what the loader draws."""
        found = super().state_dict(check)
        ahead = 0 if self.ended else self.pulled - self.handed_out
        draws = None if self.draws is None else sorted(self.draws)
        return found | {"ahead": ahead, "loader_draws": draws}

    def count(self, in_flight: int) -> None:
        """Set how many batches were handed out, ``drain`` included."""
        self.handed_out = self.fed - in_flight

    def check_draws(self) -> None:
        """Refuse to save where the loader and others draw in turn, and it has drawn ahead."""
        if not self.draws or self.pulled == self.handed_out:
            return
        changed = (
            changed_generators(self._after_pull, default_generators(self._device)) & self.draws
        )
        if changed:
            raise RuntimeError(
                f"the loader and something else, a task or the body of the loop, draw from the "
                f"default random generators of {listed(sorted(changed))}, and the loader has drawn "
                "ahead: call drain() before you save, let the loader's workers draw "
                "(DataLoader(num_workers=1)), or give tasks random=True"
            )

    def _advance(self) -> bool:
        found = super()._advance()
        if found and self.draws:
            self._after_pull = default_generators(self._device)
        return found

    def _measured(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; the first two are pulled together."""
        head = [*islice(batches, 1)]
        before = default_generators(self._device)
        head += islice(batches, 1)
        self._after_pull = default_generators(self._device)
        self.draws = changed_generators(before, self._after_pull)
        yield from chain(head, batches)

    def _feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.fed += 1
            yield batch
