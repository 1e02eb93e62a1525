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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Generic, Self

import torch

from swpipe._engine.randomness import GeneratorAccess, TaskSeeds, this_thread
from swpipe._engine.waiting import ProgressCounter
from swpipe._tensors.pytree import tensors_in
from swpipe.analysis import verify
from swpipe.core.context import C
from swpipe.core.effects import EffectTable, Location
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask, task
from swpipe.device import Device, resolve
from swpipe.inference.generators import NUMPY, PYTHON, TORCH, generator_states
from swpipe.inference.reach import reach_of
from swpipe.inference.record_tasks import record_beside
from swpipe.pipeline import SWPipeline
from swpipe.shortcut.contents import Content, same_bits
from swpipe.tuning.accelerate_loader import AccelerateLoader, is_prepared
from swpipe.tuning.ahead_tasks import AheadTasks
from swpipe.tuning.choice import Overlap, choose, runs_beside, serial
from swpipe.tuning.loader_parts import reaching
from swpipe.tuning.loader_pass import LoaderPass
from swpipe.tuning.pulled_values import Beside

__all__ = ["Overlap", "OverlappedLoop", "overlap"]

_KEYS = {TORCH: "torch", PYTHON: "python", NUMPY: "numpy"}
"""The generators' names in effects, and in saved states."""


class OverlappedLoop(Generic[C]):
    """An iterable of contexts, one pass over the loader each time.

    Use it as a context manager, or call ``close``, to end its threads; they also end with each
    pass. A pass that is left early drops the batches that were pulled ahead.

    Attributes:
        overlap: What runs ahead, and why the rest does not.
        pipe: The pipeline, to profile or trace.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        begun: LoaderPass,
        loader_draws: frozenset[str],
        overlap: Overlap,
        pipe: SWPipeline[C],
        ahead: AheadTasks,
    ) -> None:
        self.overlap = overlap
        self.pipe = pipe
        self._loader = loader
        self._loader_draws = loader_draws
        self._pass = begun
        self._beside = begun.values.beside if overlap.loader_ahead else None
        self._ahead = ahead
        self._fresh = True  # the pass was not iterated over yet
        self._running = False

    def state_dict(self) -> dict[str, Any]:
        """What to save beside models and optimizers, in the body of the loop or between passes.

        Between passes it leads to a new pass, in the body to the rest of this one. It has numbers,
        strings and tensors: the number of the next iteration, the seed, how many batches of this
        pass were handed out, the loader's state if it has one, and the random generators.
        """
        return {**self._pass.state_dict(), "pipeline": self.pipe.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state was saved, in this process or another.

        Call it before the first pass, after models and optimizers are loaded. A loader without a
        state of its own has to give the same batches again: those that were handed out are
        skipped. Random generators are set as they were.

        Raises:
            RuntimeError: A pass has not ended.
            ValueError: The loader has fewer batches than were handed out.
        """
        self._refuse_running()
        self.pipe.load_state_dict(state["pipeline"])
        self._pass = self._new_pass(state, self._loader_draws)
        self._fresh = True

    def _refuse_running(self) -> None:
        if self._running:
            raise RuntimeError(
                "a pass over this loop has not ended: leave its for, or close() its iterator, first"
            )

    def _new_pass(self, *resume: Any) -> LoaderPass:
        return LoaderPass(self._loader, self.pipe.device, self._beside, *resume)

    def __iter__(self) -> Iterator[C]:
        """Yield the context of each iteration; all its tasks have run.

        Raises:
            RuntimeError: Another pass has not ended, or the body has changed what is used ahead.
        """
        self._refuse_running()
        self._begin()
        self._running, failed = True, False
        try:
            while True:
                try:
                    ctx = self.pipe.progress(self._pass.iterator)
                except StopIteration:
                    self._pass.ended = True
                    if self._pass.failure is not None:
                        raise self._pass.failure from None
                    return
                except BaseException:
                    failed = True
                    raise
                with self._generators():
                    self._pass.hand_out()
                    self._ahead.values.show()
                yield ctx
                del ctx
                self._take_back()
        finally:
            self._running = False
            if isinstance(self._loader, AccelerateLoader):
                self._loader.leave()
            self.pipe.drop()  # no task of these iterations has changed any state
            self._ahead.drop_later()
            if not self._pass.ended:
                self._pass.leave(failed=failed)

    def _begin(self) -> None:
        """Begin a pass, or go on with one."""
        if self._fresh or self._pass.goes_on():
            changed = self._pass.values.changed_since(used=self._pass.is_ahead)
            if changed and self._pass.goes_on():
                raise _changed(changed)
            if not changed:
                self._pass.values.hide()
                if not self.overlap.loader_ahead and self._pass.pulled < 2:
                    self._pass.values.stop()  # tasks may change them
                self._fresh = False
                return
        self._pass, self._fresh = self._new_pass(), False

    def _take_back(self) -> None:
        """The body is done with its context."""
        values, used = [self._pass.values, self._ahead.values], self._pass.is_ahead
        with self._generators():
            changed = set[str]().union(*(each.changed_since(used=used) for each in values))
            if changed:
                raise _changed(changed)
            for each in values:
                each.hide()

    def _generators(self) -> AbstractContextManager[None]:
        """A block in which no random task that runs ahead has put other states in place."""
        if not self._pass.values.beside.seeded or this_thread.access is not None:
            return nullcontext()
        seeds = TaskSeeds(0, self.pipe.device)
        return GeneratorAccess(seeds, ProgressCounter()).exclusive()

    def __len__(self) -> int:
        """The loader's length."""
        return len(self._loader)  # type: ignore[arg-type]

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
    check_effects: bool = False,
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
        ValueError: The loader has no batch, or it draws random numbers between two draws of a
            task, or ``start_iteration`` is no number of an iteration.
        PlanError: There are no tasks, or two have the same name.
        TypeError: One of the tasks is neither a task nor a function with a name.
        BaseException: Whatever the loader or a task raised.

    Warns:
        RuntimeWarning: Nothing can run ahead, and why.
    """
    given = tuple(each if isinstance(each, PipelineTask) else task(each) for each in tasks)
    where = resolve(device)
    original = loader
    if is_prepared(loader):
        loader = AccelerateLoader(loader)
        given = loader.tasks(given)
    begun = LoaderPass(loader, where, Beside())
    head = list(islice(begun.iterator, 1))
    if begun.failure is not None:
        raise begun.failure
    if not head:
        raise ValueError("the loader has no batch: overlap() records the tasks on the first one")
    reading = reaching(original, begun.batches)
    recorded = record_beside([reading], given, head[0], iterations, where, seed, context=context)
    begun.values.renew()
    reaches = {each.name: reach_of(each) for each in given}
    found = choose(recorded, given, reaches, begun.values, head[0])
    drawn: frozenset[str] = frozenset()
    if found.loader_ahead:
        found, drawn = _pull_second(found, begun, where, head)
    verify(found.plan, found.recording.tasks, found.recording.effects, streams=where.has_streams)
    if not (found.ahead or found.loader_ahead):
        warnings.warn(f"nothing runs ahead: {' '.join(found.why)}", RuntimeWarning, stacklevel=2)
    begun.values.show(0)
    begun.values.run_beside(runs_beside(found, reaches) or Beside())
    begun.put_back(head)
    ahead = AheadTasks(found.recording.tasks, found.ahead, reaches)
    pipe = SWPipeline(
        found.plan,
        ahead.tasks,
        device=where,
        seed=seed,
        start_iteration=start_iteration,
        context=context,
        check_effects=check_effects,
    )
    draws = frozenset(_KEYS[name] for name in drawn)
    return OverlappedLoop(loader, begun, draws, found, pipe, ahead)


def _pull_second(
    found: Overlap, begun: LoaderPass, device: Device, head: list[Any]
) -> tuple[Overlap, frozenset[str]]:
    """Pull the second batch; returns what may run ahead after all, and the generators drawn from.

    The first pull is before all tasks, as in a plain loop: samplers draw their seed in it.

    Raises:
        ValueError: It draws from a generator that a task draws from.
    """
    first, content, before = copy.deepcopy(head[0]), Content(head[0]), generator_states(device, {})
    head.extend(islice(begun.iterator, 1))
    after = generator_states(device, {})
    drawn = frozenset(name for name in before if before[name] != after.get(name))
    _check_draws(drawn, found.recording.effects)
    pairs = zip(tensors_in(head[0]), tensors_in(first), strict=False)
    if content.modified() or not all(same_bits(*pair) for pair in pairs):
        head[0] = first
        why = (
            "The loader uses the memory of a batch for the next one, so a batch is pulled after it."
        )
        return serial(found.recording, (why,)), drawn
    return found, drawn


def _changed(names: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"the body of the loop changed {listed(sorted(names), most=3)}, which the loader or a task "
        "that runs ahead can use: they have gone on without the change. Make it in a task, and the "
        "loop runs serially, or between two passes"
    )


def _check_draws(drawn: frozenset[str], effects: EffectTable) -> None:
    shared = {Location(name, True) for name in drawn}
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
