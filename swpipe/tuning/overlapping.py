"""One call from a plain loop to an overlapped one.

    for ctx in swpipe.overlap(loader, [decode, forward, backward, step]):
        ...                                              # as after the tasks of a plain loop

A recording tells which tasks use no state outside the context that a task or the body of the loop
may change, such as a model. These and the loader run ahead, on threads of their own; the others
stay on the caller's thread, in order, and so does the body. So what the body sees, and where it
leaves the loop, is as in a plain loop, bit for bit. For plans that overlap more, see
``swpipe.autotune``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

import torch

from swpipe._state.generators import (
    NUMPY,
    PYTHON,
    TORCH,
    changed_generators,
    default_generators,
    set_default_generators,
)
from swpipe._state.reach import reach_of
from swpipe._state.reached import PlaceId, Reach
from swpipe._tensors.content import Content, same_bits
from swpipe._tensors.pytree import tensors_in
from swpipe.analysis import verify
from swpipe.core.context import C
from swpipe.core.effects import EffectTable, Location
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import Device, resolve
from swpipe.inference import Recording
from swpipe.inference.loader_code import reaching
from swpipe.inference.record_tasks import record_beside
from swpipe.pipeline import SWPipeline
from swpipe.tuning.accelerate_loader import AccelerateLoader, is_prepared
from swpipe.tuning.ahead_tasks import AheadTasks
from swpipe.tuning.choice import Overlap, choose, reaches_of_undeclared, serial
from swpipe.tuning.doubts import Doubts
from swpipe.tuning.live_workers import end_workers
from swpipe.tuning.loader_changes import LoaderChanges
from swpipe.tuning.loader_parts import keeps_in_variable
from swpipe.tuning.loader_pass import LoaderPass
from swpipe.tuning.reached_values import ReachedValue
from swpipe.tuning.resumable import ResumableLoop
from swpipe.tuning.shown_values import ShownValues

__all__ = ["Overlap", "OverlappedLoop", "overlap"]

_PLACES = {
    "torch": Location(TORCH, True),
    "python": Location(PYTHON, True),
    "numpy": Location(NUMPY, True),
}
"""Name of a generator in saved states to its name in effects."""


class OverlappedLoop(ResumableLoop[C]):
    """An iterable of contexts, one pass over the loader each time.

    Use it as a context manager, or call ``close``, to end its threads; they also end with each
    pass. A pass that is left early drops the batches that were pulled ahead; a loader that is an
    iterator gives them again in the next one.

    Attributes:
        overlap: What runs ahead, and why the rest does not.
        pipe: The pipeline, to profile or trace.
    """

    pipe: SWPipeline[C]
    _pass: LoaderPass

    def __init__(
        self,
        loader: Iterable[Any],
        begun: LoaderPass,
        loader_draws: frozenset[str],
        overlap: Overlap,
        pipe: SWPipeline[C],
        ahead: AheadTasks,
        looked: LoaderChanges,
        tasks: Sequence[PipelineTask],
    ) -> None:
        super().__init__(pipe, loader)
        self._values = begun.values
        self.overlap = overlap
        self._loader_draws = loader_draws
        self._pass = begun
        # A plain loop begins at its for: what comes before it finds nothing begun, and may count.
        self._after_begun = default_generators(pipe.device)
        begun.shown.show(0)
        set_default_generators(pipe.device, begun.at_start)
        self._ahead = ahead
        self._looked, self._tasks = looked, tasks
        doubts = self._find_doubts()
        self._considered = doubts.reasons
        self._used_ahead = doubts.values(begun.batches)
        looked.forget()
        # What the code ahead can use is now; then, when the body began.
        self._shown = self._used_ahead.read()
        self._fresh = True  # the pass was not iterated over yet

    def _find_doubts(self) -> Doubts:
        return Doubts(self._looked, self._tasks, self.overlap)

    def _iterate(self, rest: LoaderPass | None) -> Iterator[C]:
        self._check_choice()
        yield from super()._iterate(rest)

    def _check_choice(self) -> None:
        """Look whether what runs ahead still may.

        Raises:
            RuntimeError: Something has changed, and it may not.
        """
        new = sorted(self._find_doubts().reasons - self._considered)
        self._looked.forget()
        if new:
            raise RuntimeError(
                "what runs ahead was chosen by overlap(), and something has changed since. Now it "
                f"finds: {' '.join(new[:3])} Call overlap() again after such a change"
            )

    def _first_pass(self) -> LoaderPass | None:
        """The pass that was begun to record the tasks, or one over an iterator, which goes on.

        Raises:
            RuntimeError: The loader cannot be begun again, and its batches would be others now.
        """
        begun, fresh, device = self._pass, self._fresh, self.pipe.device
        self._fresh = False
        if not fresh:
            return self._rest_of(begun)
        drawn = changed_generators(begun.at_start, default_generators(device))
        if not (drawn or begun.is_of_another_epoch or self._used_ahead.changed(self._shown)):
            begun.shown.hide()
            set_default_generators(device, self._after_begun)
            return begun
        if begun.goes_on() and self._loader_draws:
            raise RuntimeError(
                "random numbers were drawn between overlap() and the for, and the loader is an "
                "iterator that draws, too, and has begun: call overlap() just before the for"
            )
        end_workers(self._loader)
        return self._rest_of(begun)

    def _rest_of(self, begun: LoaderPass) -> LoaderPass | None:
        if not begun.goes_on():
            return None
        begun.shown.hide()
        return begun

    def _begin(self, saved: Mapping[str, Any] | None) -> LoaderPass:
        self._fresh = False
        draws = self._loader_draws if saved else frozenset[str]()
        shown = ShownValues({}, {}, lambda: self._look(begun))
        begun = LoaderPass(self._loader, self.pipe.device, saved, draws, shown, self._values)
        begun.is_used_ahead = self.overlap.loader_ahead
        return begun

    def _look(self, begun: LoaderPass) -> dict[PlaceId, ReachedValue]:
        """What the loader may change with each batch, of the objects that this pass has."""
        if not self.overlap.loader_ahead:
            return {}
        self._used_ahead = self._find_doubts().values(begun.batches)
        values = self._looked.shown_values()
        self._looked.forget()
        return values

    def _pipeline_state(self) -> dict[str, int]:
        # No task of an iteration in flight has changed any state.
        return self.pipe.state_dict(check=not self.pipe.in_flight)

    def _hand_out(self, current: LoaderPass) -> None:
        super()._hand_out(current)
        self._shown = self._used_ahead.read() if current.is_ahead else {}

    def _take_back(self, current: LoaderPass) -> None:
        """The body is done.

        Raises:
            RuntimeError: It has changed what the loader or a task has used for later batches.
        """
        if changed := self._used_ahead.changed(self._shown):
            raise RuntimeError(
                f"the body of the loop changed {listed(sorted(changed.values()), most=3)}, which "
                "the loader or a task that runs ahead can use: they have gone on without the "
                "change. Make it in a task, and the loop runs serially, or between two passes"
            )
        current.shown.hide()

    def _leave(self, current: LoaderPass, *, failed: bool) -> None:
        self.pipe.drop()  # no task of these iterations has changed any state
        self._ahead.drop()
        current.leave(failed=failed)

    def close(self) -> None:
        """End the threads."""
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def overlap(
    loader: Iterable[Any],
    tasks: Iterable[PipelineTask | Callable[[Any], None]],
    *,
    device: Device | torch.device | str | None = None,
    seed: int | None = None,
    start_iteration: int = 0,
    iterations: int | None = 2,
    context: type[C] | None = None,
    check_effects: bool | float = False,
) -> OverlappedLoop[C]:
    """Run tasks over a loader, with the loader and the tasks that allow it ahead of the others.

    The first one or two batches are pulled and the tasks are recorded on the first one; all state
    is then restored. The numbers are those of the plain loop, bit for bit.

    Args:
        loader: As in ``for batch in loader``.
        tasks: In the order of the plain loop. A function is a task of the function's name.
        device: As for ``SWPipeline``.
        seed: For tasks with ``random=True``; as for ``SWPipeline``.
        start_iteration: The number of the first iteration, that of the loader's first batch.
        iterations: How many to record; None for as many as bring something new.
        context: The class of the contexts; as for ``SWPipeline``.
        check_effects: As for ``SWPipeline``: whether the tasks do what was recorded. The body of
            the loop is not watched.

    Raises:
        ValueError: The loader has no batch, draws random numbers between two draws of a task,
            changes a value that a task can use, or keeps a batch that a task modifies in place.
            Or ``start_iteration`` is no number of an iteration.
        PlanError: There are no tasks, or two have the same name.
        TypeError: One of the tasks is neither a task nor a function with a name.
        BaseException: Whatever the loader or a task raised.

    Warns:
        RuntimeWarning: Nothing can run ahead, and why.
    """
    given = tuple(each if isinstance(each, PipelineTask) else task(each) for each in refs_in(tasks))
    where = resolve(device)
    original = loader
    if is_prepared(loader):
        loader = AccelerateLoader(loader)
        loader.in_loop = True
        given = loader.tasks(given)
    looked = LoaderChanges(original, where)
    begun = LoaderPass(loader, where)
    head = _pull_first(begun, looked)
    reading = reaching(original, begun.batches)
    recorded = record_beside([reading], given, head[0], iterations, where, seed, context=context)
    looked.renew()
    reaches = {each.name: reach_of(each) for each in given}
    found = choose(recorded, given, reaches, looked, head[0])
    drawn = frozenset[str]()
    if found.loader_ahead:
        found, drawn = _pull_second(found, begun, where, head, looked)
        _check_tasks(reaches_of_undeclared(given, reaches), recorded, looked, head[0])
    verify(found.plan, found.recording.tasks, found.recording.effects, streams=where.has_streams)
    if not (found.ahead or found.loader_ahead):
        warnings.warn(f"nothing runs ahead: {' '.join(found.why)}", RuntimeWarning, stacklevel=2)
    begun.put_back(head)
    if found.loader_ahead:
        begun.shown, begun.is_used_ahead = looked.shown(), True
    ahead = AheadTasks(found.recording.tasks, found.ahead)
    pipe = SWPipeline(
        found.plan,
        ahead.tasks,
        device=where,
        seed=seed,
        start_iteration=start_iteration,
        context=context,
        check_effects=check_effects,
    )
    return OverlappedLoop(loader, begun, drawn, found, pipe, ahead, looked, given)


def _pull_first(begun: LoaderPass, looked: LoaderChanges) -> list[Any]:
    head = list(islice(begun.iterator, 1))
    if begun.failure is not None:
        raise begun.failure
    if not head:
        raise ValueError("the loader has no batch: overlap() records the tasks on the first one")
    looked.note_batch(begun.batches)
    return head


def _pull_second(
    found: Overlap, begun: LoaderPass, device: Device, head: list[Any], looked: LoaderChanges
) -> tuple[Overlap, frozenset[str]]:
    """Pull the second batch; returns what may run ahead after all, and the generators drawn from.

    The first pull is before all tasks, as in a plain loop: samplers draw their seed in it.

    Raises:
        ValueError: It draws from a generator that a task draws from.
    """
    first, content = copy.deepcopy(head[0]), Content(head[0])
    before = default_generators(device)
    head.extend(islice(begun.iterator, 1))
    drawn = changed_generators(before, default_generators(device))
    looked.note_batch(begun.batches)
    _check_draws(drawn, found.recording.effects)
    pairs = zip(tensors_in(head[0]), tensors_in(first), strict=False)
    if content.modified() or not all(same_bits(*pair) for pair in pairs):
        head[0] = first
        why = (
            "The loader uses the memory of a batch for the next one, so a batch is pulled after it."
        )
        return serial(found.recording, (why,)), drawn
    return found, drawn


def _check_tasks(
    reaches: Mapping[str, Reach], recorded: Recording, looked: LoaderChanges, batch: Any
) -> None:
    """Refuse what shows only when the second batch has been pulled, before any task."""
    for user, name in looked.used_by(reaches).items():
        raise ValueError(
            f"the loader changes {name!r} with each batch, and {user!r} can use it: the task would "
            "find the value of a batch that was pulled ahead. Let the loader give the value with "
            "its batch"
        )
    modifying = [name for name, attribute in recorded.modified if attribute == "batch"]
    if modifying and keeps_in_variable(looked.reach, batch):
        raise ValueError(
            f"{modifying[0]!r} modifies the batch in place, and the loader keeps it while it makes "
            "the next one, before the task has run: let the task make a new tensor"
        )


def _check_draws(drawn: frozenset[str], effects: EffectTable) -> None:
    shared = {_PLACES[name] for name in drawn}
    for name, touched in effects.items():
        if both := shared & touched.writes:
            raise ValueError(
                f"the loader and {name!r} both draw from {_listed(both)}: a batch cannot be pulled "
                "ahead of the task and be the same. Let the loader's workers draw "
                f"(DataLoader(num_workers=1)), or give {name!r} random numbers of its own "
                "(PipelineTask(..., random=True))"
            )


def _listed(places: Iterable[Location]) -> str:
    return listed(sorted(map(str, places)), most=3)
