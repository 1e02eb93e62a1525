"""A loop over a pipeline that can be stopped and resumed, whatever was pulled ahead.

    pulled           0  1  2  3  4  5
    handed out       0  1  2  3                  the body of the loop is at 3: a state is saved
    resumed                      4  5  6 ...     the loader is set back; numbers and draws go on

The state of a loop is that of its last pass, as drawn in ``loader_pass``, or a loaded state::

    (none) ── iter() ──> BEGUN ── next() ──> RUNNING ──> LEFT or ENDED ── iter() ──> BEGUN ...
       └── load_state_dict() ──> loaded ── iter() ──> BEGUN, at the place where it was saved

``LoaderPass`` sets a loader back. Generators that the loader draws from continue from their states
after the pull of the batch handed out last. All other generators continue from their states when
the loop's state was saved. Samplers draw their seed in the first pull, so the second pull, which
runs before any task, shows which generators the loader draws from.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from swpipe.core.loaders import LoaderAround, draws_nothing
from swpipe.core.messages import shown
from swpipe.device import Device, resolve
from swpipe.inference.early_changes import early_changes
from swpipe.loops.accelerate import AccelerateLoader
from swpipe.loops.draws import LoaderDraws
from swpipe.loops.loader_pass import LoaderPass
from swpipe.loops.pass_generators import PassGenerators, names_in_words
from swpipe.loops.place_in_pass import begun_at
from swpipe.loops.pulled_loader import PulledLoader
from swpipe.loops.saved_state import NEW_PASS, OF_PLACE, complete, why_not_loaded
from swpipe.pipeline import SWPipeline, in_flight_of_others, settle

Out = TypeVar("Out", covariant=True)  # noqa: PLC0105 - as the other pipelines call it


@runtime_checkable
class Resumable(Protocol[Out]):
    """A pipeline that ``ResumableLoop`` accepts: ``SWPipeline``, or one with TorchRec's names.

    ``StagedTrainPipeline`` is not supported.
    """

    def progress(self, iterator: Iterator[Any], /) -> Out:
        """Return the next result; raise StopIteration at the end."""

    def state_dict(self) -> dict[str, int]:
        """Return the pipeline's state, as ``SWPipeline.state_dict`` does."""

    def load_state_dict(self, state: Mapping[str, int], /) -> None:
        """Load a state, as ``SWPipeline.load_state_dict`` does."""


class ResumableLoop(Generic[Out]):
    """An iterable of the results of ``progress``; each iteration makes one pass over the loader.

    A pass begins at ``iter(loop)``, as in a plain loop; batches are pulled when they are asked for.
    If a pass is left early, by ``break`` or an exception, the batches pulled ahead are dropped if
    no task can have changed any state for them; a loader that is an iterator gives them again in
    the next pass. Otherwise they stay in flight, for ``drain`` of the pipeline.

    Attributes:
        pipe: The pipeline.
        counted: Whether the code that iterates counts batches and does not ask for another one
            after the last, as Lightning's Trainer does. If True, the last batch ends the pass.

    Args:
        pipe: The pipeline. Tasks with ``random=True`` draw by the iteration's number; other tasks
            may draw from the default generators if the loader does not.
        loader: The iterable of batches; an ``AccelerateLoader`` in place of a loader that
            Accelerate prepared.
        device: The device whose default generators are saved besides the CPU's; None for the
            pipeline's device, or else the machine's accelerator.
    """

    counted = False
    _draws: bool | None = True  # the user declares that nothing else uses the loader's generators
    _keep_nothing = True  # the user declares that persistent workers draw and count nothing
    _warned_lost = False
    _warned_live = False
    _frames = 3  # the stack frames between a warning and the code that iterates

    def __init__(
        self,
        pipe: Resumable[Out],
        loader: Iterable[Any],
        *,
        device: Device | torch.device | str | int | None = None,
    ) -> None:
        if not isinstance(pipe, Resumable):
            raise TypeError(
                f"ResumableLoop takes a pipeline and its loader, and {shown(pipe)} is no pipeline"
            )
        self.pipe = pipe
        self._loader: Any = loader
        if isinstance(loader, AccelerateLoader):
            loader.in_loop = True
        where = resolve(getattr(pipe, "device", None) if device is None else device)
        self._pulled = self._pulled_loader(PassGenerators(loader, where))
        self._pass: LoaderPass | None = None  # the last pass that has begun
        self._running: LoaderPass | None = None  # the pass that is under way
        self._loaded: Mapping[str, Any] | None = None  # the state that the next pass resumes from

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {type(self._loader).__name__}>\n{self.pipe!r}"

    def _pulled_loader(self, generators: PassGenerators) -> PulledLoader:
        # A pipeline of depth 1 pulls nothing ahead, so all draws have the order of a plain loop.
        pipe = self.pipe
        ahead = not isinstance(pipe, SWPipeline) or pipe.plan.depth > 1
        own = generators.own if ahead else ()
        loader = self._loader
        draws = LoaderDraws(generators, own, declared=self._draws, known=draws_nothing(loader))
        return PulledLoader(loader, generators, draws, ahead)

    # ------------------------------------------------------------------------------ states

    def state_dict(self, *, rest: bool | None = None, check: bool = True) -> dict[str, Any]:
        """Return the loop's state, in the body of the loop or between passes.

        Save it with the models and optimizers. In the body, the state leads to the rest of this
        pass; between passes, to a new pass. The state has numbers, strings and tensors: the
        pipeline's state, how many batches of this pass were handed out, the loader's state if it
        has one, and the states of random generators: the default generators, and those that a
        loader of torch's or torchdata's, its samplers and its dataset have as attributes. It also
        has checksums of the last batches: a loader that does not give these batches again is
        refused when the loop is resumed.

        Args:
            rest: After a pass that was left early: whether to resume with the rest of that pass.
            check: Whether to refuse if the state may not lead to the same numbers, now or when it
                is loaded. Pass False if the loader gives the same batches whenever it is begun, or
                if different batches do not matter.

        Raises:
            RuntimeError: A run that resumes here might not have the numbers of a run that was never
                stopped; the message says why, and what to do.
        """
        pipe = self.pipe
        if self._pulled.times is not None and isinstance(pipe, SWPipeline):
            # Tasks that run ahead change no state, so the iterations in flight need no check, and
            # the save does not wait for a pull.
            pipeline = pipe.state_dict(check=not pipe.in_flight)
        else:
            pipeline = pipe.state_dict()
        if rest is None and self._pass is not None and self._pass.is_left:
            raise RuntimeError(
                "the last pass was left early, and a state could lead to the rest of it or to a "
                "new pass: save in the body of the loop, before you leave it; or save by "
                "state_dict(rest=True) for the rest, or state_dict(rest=False) for a new pass"
            )
        if check:
            self._check_tasks()
        # A task with random=True may be running on another thread, with generators it has seeded.
        with self._pulled.generators.exclusive():
            return complete(pipeline, self._place(rest, check))

    def _check_tasks(self) -> None:
        """Raise an error if tasks keep values that are in no state; subclasses implement this."""

    def _place(self, rest: bool | None, check: bool) -> Mapping[str, Any]:
        """Return the part of a state that leads to a place in a pass."""
        current = self._pass
        # A state was loaded and no pass has begun since: the next state is the same place.
        if self._loaded is not None and current is None:
            return {name: self._loaded[name] for name in OF_PLACE}
        if current is None or (current.is_left and not rest):
            return self._between_passes(check)
        # A pass that was left in the body of its last batch has a rest, if an empty one.
        if not (rest and current.left and current.ended):
            pipe = self.pipe
            others = 0
            if isinstance(pipe, SWPipeline):
                others = in_flight_of_others(pipe, current.iterator)
            if others:
                raise RuntimeError(
                    f"iterations are in flight ({others}) that are not of this loop: finish their "
                    "iterator, or call drain(), before you save"
                )
            if not current.ended:
                self._count(current)
            # A caller that counts batches makes no request after the last one: the pass ends here.
            if self.counted and self._is_complete(current):
                current.end()
            if current.ended:
                return self._between_passes(check)
        self._check_place(current, check)
        return current.state_dict(check=check)

    def _check_place(self, current: LoaderPass, check: bool) -> None:
        """Raise an error in mid-pass if no state leads back to the same batches and draws."""
        current.compare_draws()
        if shared := current.drawn_by_others():
            raise RuntimeError(
                "the loader and something else, a task or the body of the loop, draw from "
                f"{names_in_words(shared)}, or may, and the loader has drawn ahead: call drain() "
                "before you save, let the loader's workers draw (DataLoader(num_workers=1)), or "
                "give tasks random=True"
            )
        if check and current.handed_out and not self._pulled.has_place:
            raise RuntimeError(
                f"the loader ({type(self._loader).__name__}) is neither a sequence nor torch's "
                "DataLoader over a map-style dataset, and does not say where it is in its pass: "
                "give it state_dict and load_state_dict; or, if its iterators have a state, as "
                "grain's have, put a swpipe.loops.StatefulLoader around it; or save between two "
                "passes; or, if it gives the same batches whenever it is begun, by "
                "state_dict(check=False)"
            )
        if check:
            self._check_loader(live=current.record.had_live_workers)

    def _check_loader(self, *, live: bool) -> None:
        """Raise an error if the loader keeps values that are in no state.

        Args:
            live: Whether worker processes of an earlier pass are in use.
        """
        if live:
            raise RuntimeError(
                "the loader's workers live on from pass to pass, and what they have drawn or "
                "counted is in no state: let each pass have new ones, by "
                "DataLoader(persistent_workers=False); or, if they draw and count nothing, save by "
                "state_dict(check=False)"
            )
        if self._pulled.lives_on and not self._warned_live:
            self._warned_live = True
            warnings.warn(
                "the loader's workers will live on in the next pass, in which no state can be "
                "saved: let each pass have new ones, by DataLoader(persistent_workers=False); or, "
                "if they draw and count nothing, save by state_dict(check=False)",
                RuntimeWarning,
                stacklevel=5,
            )
        if self._pulled.is_prepared_with_state:
            raise RuntimeError(
                "Accelerate prepared the loader with use_stateful_dataloader=True: it begins a "
                "pass before the first one is asked for, and its state does not lead back to the "
                "same batches, in swpipe or without: leave it out of DataLoaderConfiguration, and "
                "this loop is resumed without; or, if other batches do not matter, save by "
                "state_dict(check=False)"
            )

    def _between_passes(self, check: bool) -> dict[str, Any]:
        """Return the part of a state that leads to a new pass.

        Raises:
            RuntimeError: ``check`` is True, and the new pass might not have the same numbers.
        """
        of = self._pulled
        if self._pass is not None and self._pass.is_left and of.has_state:
            raise RuntimeError(
                "the loader has a state of its own, which leads to the rest of the pass that was "
                "left early: save in the body of the next pass"
            )
        if check:
            self._check_loader(live=of.has_live_workers)
        now = of.generators.read()
        return {
            **NEW_PASS,
            "at_start": now,
            "generators": now,
            "loader": of.loader.state_dict() if of.has_state else None,
            **of.draws.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, check: bool = True) -> None:
        """Let the next pass resume where a state was saved, in this process or another one.

        Call this method before the first pass, after models and optimizers are loaded. The pipeline
        may have another plan. Random generators are set to their saved states. When the pass
        begins, a loader without a state of its own is begun again, and the batches that were handed
        out are skipped. A loader with a state is set back; if it does not give the last batches
        again, it is begun again, too.

        Args:
            state: The state that ``state_dict`` returned on this rank.
            check: Whether to refuse a loader that does not give the last batches again, when the
                pass begins; and a state of another number of ranks, on which a loader has other
                batches.

        Raises:
            RuntimeError: A pass has not ended; or the last pass was left, tasks that ran ahead have
                modified the batches dropped then, and the loader still has these batches.
            ValueError: The state was not saved by a loop of this kind.
        """
        self._refuse_running()
        of = self._pulled
        if why := why_not_loaded(state, of, same_ranks=check):
            raise ValueError(
                f"the state is not one that {type(self).__name__}.state_dict() returned for such a "
                f"loop: {why}"
            )
        if self._pass is not None:
            self._pass.record.check_modified()
        of.draws.load_state_dict(state)
        # Live workers have drawn and counted since the save; the resumed pass starts new ones.
        of.end_workers()
        self._pass = None
        self._loaded = None
        # A pass had begun, if only by iter(loop): after_pull is None only between passes.
        if state["batches"] or state["after_pull"] is not None:
            again = state["again"] if check else [(before, None) for before, _ in state["again"]]
            self._loaded = {**state, "again": again}
        elif state["loader"] is not None:
            begun_at(of.loader, state["loader"])
        # Last, because begun_at() may draw from the generators.
        of.generators.write(state["generators"])
        self.pipe.load_state_dict(state["pipeline"])

    # ------------------------------------------------------------------------------ passes

    def __iter__(self) -> Iterator[Out]:
        """Begin a pass, as a ``for`` does, and return the iterator over the pipeline's results.

        The first batch is pulled when it is asked for. If another pass has not ended, this pass
        begins at its first batch.

        Raises:
            RuntimeError: At the first batch: another pass has not ended.
            ValueError: A state was loaded, and the loader has fewer batches than were handed out
                before, does not give the last of these again, or cannot be begun again.
        """
        running = self._running
        # All batches were handed out, and the iterator was not asked for more: its pass has ended.
        if running is not None and self._is_complete(running):
            self._end(running, failed=False)
        contexts = self._iterate()
        # Run the generator to its first yield, so that the pass begins now and not at next().
        next(contexts)
        return contexts

    def _begun(self) -> LoaderPass:
        """Begin the next pass: from a loaded state, the rest of a pass that was left, or anew."""
        current = self._pass
        # SWPipeline itself refuses batches of another iterator.
        left = current is not None and current.is_left and not isinstance(self.pipe, SWPipeline)
        if left and (in_flight := self.pipe.state_dict()["in_flight"]):
            raise RuntimeError(
                f"batches of the pass that was left early are in flight ({in_flight}): call "
                "drain() before the next pass"
            )
        if self._loaded is not None:
            current = LoaderPass(self._pulled, self._loaded)
        elif current is None or not current.is_continued():
            if current is not None:
                self._check_lost(current)
                current.await_pull()
            current = LoaderPass(self._pulled)
        current.left = False
        self._pass = current
        return current

    def _iterate(self) -> Iterator[Out]:
        begun = self._begun() if self._running is None else None
        current = None
        failed = False
        try:
            yield None  # type: ignore[misc]  # taken by __iter__
            self._refuse_running()
            current = begun or self._begun()
            self._pass = current
            self._running = current
            self._loaded = None
            self._begin(current)
            while True:
                self._make_ready(current)
                try:
                    out = self._next(current)
                except StopIteration:
                    current.ended = True
                    if current.failure is not None:
                        raise current.failure from None
                    return
                except BaseException:
                    failed = True
                    raise
                current.hand_out()
                yield out
                del out  # this frame must not keep a context while the next one is computed
                if self._running is not current:  # a new pass has ended this one
                    return
        finally:
            if current is not None and self._running is current:
                self._end(current, failed=failed)
            # A trainer only tests for iterability: what has begun without a request is undone.
            elif current is None and begun is not None and not self._pulled.goes_on:
                begun.release()
                begun.record.undo()
                if self._pass is begun:
                    self._pass = None

    def _begin(self, current: LoaderPass) -> None:
        """Prepare a pass that begins or continues, before its first request."""
        # The second pull, before any task, shows which generators the loader draws from.
        current.pull_first_alone()

    def _make_ready(self, current: LoaderPass) -> None:
        """Prepare for the next iteration; subclasses implement this."""

    def _next(self, current: LoaderPass) -> Out:
        """Return the pipeline's next result; raise StopIteration at the end."""
        return self.pipe.progress(current.iterator)

    def _end(self, current: LoaderPass, *, failed: bool) -> None:
        """End a pass that is over, or that was left."""
        self._running = None
        self._pulled.draws.tensors.end_body()
        if isinstance(self._loader, LoaderAround):
            self._loader.leave()
        complete = self._is_complete(current)
        dropped = False
        if not current.ended:
            current.left = True
            dropped = self._drop(current, failed=failed)
            if complete and self.counted:
                current.end()
        if current.ended:
            current.release()
        elif dropped and (drawn := current.leave(failed=failed)):
            warnings.warn(
                f"the pass was left, and the loader has drawn ahead from {names_in_words(drawn)}, "
                "from which the loop draws, too, or may: what is drawn from now on is not what a "
                "plain loop draws. If the loader alone draws, pass draws=True",
                RuntimeWarning,
                stacklevel=3,
            )
        # A pass that was left in the body of its last batch counts as ended from here on, but
        # state_dict(rest=True) may still ask for its rest, which is empty.
        current.ended = current.ended or complete
        times = self._pulled.times
        # A part of a pass says little about the loader's share.
        if current.ended and times is not None:
            times.end(self._pulled.draws.who_draws)

    def _drop(self, current: LoaderPass, *, failed: bool) -> bool:
        """Drop the batches in flight, and return True, if no task can have changed state for them.

        Otherwise they stay in flight.
        """
        pipe = self.pipe
        if not isinstance(pipe, SWPipeline):
            return False
        if self._changed_early(pipe) or in_flight_of_others(pipe, current.iterator):
            return False
        if self.counted and self._is_complete(current) and not pipe.closed:
            settle(pipe)  # this lets the pipeline find the end of the loader
        if not failed:  # an error has already dropped them, and leave() counts its iteration
            self._count(current)
        pipe.drop()
        return True

    def _changed_early(self, pipe: SWPipeline[Any]) -> bool:
        """Return whether tasks may have changed something for iterations in flight."""
        return any(early_changes(pipe.plan, pipe.tasks))

    def _check_lost(self, left: LoaderPass) -> None:
        """Refuse a new pass after a pass that was left, if the dropped batches change its numbers.

        If it is not known whether the dropped batches matter, this method warns once.

        Raises:
            RuntimeError: Live workers have made dropped batches, and may draw or count.
        """
        if not left.record.lost:
            return
        if self._pulled.may_keep_rows and not self._warned_lost:
            self._warned_lost = True
            warnings.warn(
                "the last pass was left, and the batches that were pulled ahead were dropped. If "
                "the loader goes on where it stopped, as a stream does, or a collate_fn that keeps "
                "rows, a plain loop would get them now: give its iterator, of which none is "
                "dropped (ahead(iter(loader))), or let a worker make them "
                "(DataLoader(num_workers=1)). If each pass begins anew, nothing is lost",
                RuntimeWarning,
                stacklevel=self._frames + 2,
            )
        if not self._keep_nothing and self._pulled.has_live_workers:
            raise RuntimeError(
                "the last pass was left, and the loader's workers, which live on, have made "
                "batches that were pulled ahead and dropped: what they draw or count would not be "
                "that of a plain loop. Let each pass have new ones, by "
                "DataLoader(persistent_workers=False); or, if they draw and count nothing, pass "
                "draws=False"
            )

    def _count(self, current: LoaderPass) -> None:
        """Set the number of batches handed out, including those taken by ``drain``."""
        pipe = self.pipe
        # Batches pulled beside the body are handed out by this loop only.
        if self._pulled.times is not None:
            return
        if isinstance(pipe, SWPipeline):
            if not pipe.closed:
                settle(pipe)
            current.handed_out = current.fed - pipe.in_flight
        else:
            current.handed_out = current.fed - pipe.state_dict()["in_flight"]

    def _is_complete(self, current: LoaderPass) -> bool:
        """Return whether all batches were handed out, according to the loader's length."""
        return current.handed_out == self._pulled.length

    def _refuse_running(self) -> None:
        if self._running is not None:
            raise RuntimeError(
                "a pass over this loop has not ended: leave its for, or close() its iterator, first"
            )

    def __len__(self) -> int:
        """Return the loader's length."""
        return len(self._loader)
