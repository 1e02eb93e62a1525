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
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Self

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
from swpipe.tuning.resumable import ResumableLoop

__all__ = ["Overlap", "OverlappedLoop", "overlap"]

_KEYS = {TORCH: "torch", PYTHON: "python", NUMPY: "numpy"}
"""The generators' names in effects, and in saved states."""


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
    ) -> None:
        super().__init__(pipe, loader)
        self.overlap = overlap
        self._loader_draws = loader_draws
        self._pass = begun
        self._beside = begun.values.beside if overlap.loader_ahead else None
        self._ahead = ahead
        self._fresh = True  # the pass was not iterated over yet

    def _first_pass(self) -> LoaderPass | None:
        """The pass that was begun to record the tasks, or one over an iterator, which goes on.

        Raises:
            RuntimeError: The loop's caller has changed what was used ahead.
        """
        current, fresh = self._pass, self._fresh
        self._fresh = False
        if not (fresh or current.goes_on()):
            return None
        if changed := current.values.changed_since(used=current.is_ahead):
            if current.goes_on():
                raise _changed(changed)
            return None
        current.values.hide()
        if not self.overlap.loader_ahead and current.pulled < 2:
            current.values.stop()  # tasks may change them
        return current

    def _begin(self, saved: Mapping[str, Any] | None) -> LoaderPass:
        self._fresh = False
        return LoaderPass(
            self._loader,
            self.pipe.device,
            self._beside,
            saved,
            self._loader_draws if saved else frozenset(),
        )

    def _pipeline_state(self) -> dict[str, int]:
        # No task of an iteration in flight has changed any state.
        return self.pipe.state_dict(check=not self.pipe.in_flight)

    def _hand_out(self, current: LoaderPass) -> None:
        with self._generators():
            current.hand_out()
            self._ahead.values.show()

    def _take_back(self, current: LoaderPass) -> None:
        values, used = [current.values, self._ahead.values], current.is_ahead
        with self._generators():
            changed = set[str]().union(*(each.changed_since(used=used) for each in values))
            if changed:
                raise _changed(changed)
            for each in values:
                each.hide()

    def _leave(self, current: LoaderPass, *, failed: bool) -> None:
        self.pipe.drop()  # no task of these iterations has changed any state
        self._ahead.drop_later()
        current.leave(failed=failed)

    def _generators(self) -> AbstractContextManager[None]:
        """A block in which no random task that runs ahead has put other states in place."""
        if not self._pass.values.beside.seeded or this_thread.access is not None:
            return nullcontext()
        seeds = TaskSeeds(0, self.pipe.device)
        return GeneratorAccess(seeds, ProgressCounter()).exclusive()

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
        loader.in_loop = True
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
