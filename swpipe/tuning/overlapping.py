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

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Generic, Self

import torch

from swpipe.analysis import verify
from swpipe.core.context import C
from swpipe.core.effects import Effects, EffectTable, Location, conflicts
from swpipe.core.messages import listed
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, task
from swpipe.device import Device, resolve
from swpipe.inference import Recording
from swpipe.inference.generators import NUMPY, PYTHON, TORCH, generator_states
from swpipe.inference.reach import reach_of
from swpipe.inference.record_tasks import record_beside
from swpipe.pipeline import SWPipeline
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tuning.accelerate_loader import AccelerateLoader, is_prepared
from swpipe.tuning.loader_pass import LoaderPass

__all__ = ["Overlap", "OverlappedLoop", "overlap"]

LOADER = "the loader"
_KEYS = {TORCH: "torch", PYTHON: "python", NUMPY: "numpy"}
"""The generators' names in effects, and in saved states."""

_GROUP = "loader"

_HAND_OVER = PipelineTask("hand over", lambda ctx: None)
"""On the caller's thread, where all other tasks run ahead."""


@dataclass(frozen=True)
class Overlap:
    """What runs ahead, and why the rest does not.

    Attributes:
        plan: The plan.
        ahead: Names of the tasks that run ahead of the others.
        loader_ahead: Whether the loader does.
        why: Sentences on what does not.
        recording: What the tasks touch.
    """

    plan: PipelinePlan
    ahead: tuple[str, ...]
    loader_ahead: bool
    why: tuple[str, ...]
    recording: Recording

    def __str__(self) -> str:
        names = [*([LOADER] if self.loader_ahead else []), *self.ahead]
        return "\n".join([f"ahead: {listed(names) if names else 'nothing'}", *self.why])


class OverlappedLoop(Generic[C]):
    """An iterable of contexts, one pass over the loader each time.

    Use it as a context manager, or call ``close``, to end its threads; they also end with each
    pass. A pass that is left early drops the batches that were pulled ahead.

    Attributes:
        overlap: What runs ahead, and why the rest does not.
        pipe: The pipeline, to profile or trace.
        counted: As of ``ResumableLoop``: True for Lightning's Trainer.
    """

    counted = False

    def __init__(
        self,
        loader: Iterable[Any],
        begun: tuple[LoaderPass, Sequence[Any]],
        loader_draws: frozenset[str],
        overlap: Overlap,
        pipe: SWPipeline[C],
    ) -> None:
        self.overlap = overlap
        self.pipe = pipe
        self._loader = loader
        self._loader_draws = loader_draws
        self._pass, self._head = begun
        self._fresh = True  # the pass was not iterated over yet
        self._running = False

    def state_dict(self) -> dict[str, Any]:
        """What to save beside models and optimizers, in the body of the loop or between passes.

        Between passes it leads to a new pass, in the body to the rest of this one. It has numbers,
        strings and tensors: the number of the next iteration, the seed, how many batches of this
        pass were handed out, the loader's state if it has one, and the random generators.
        """
        if self.counted and self._pass.handed_out == len(self):
            next(self._pass.iterator, None)  # as a for does
            self._pass.ended = True
        # No task of an iteration in flight has changed any state.
        pipeline = self.pipe.state_dict(check=not self.pipe.in_flight)
        return {**self._pass.state_dict(), "pipeline": pipeline}

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
        self._pass = LoaderPass(self._loader, self.pipe.device, state, self._loader_draws)
        self._head, self._fresh = (), True

    def _refuse_running(self) -> None:
        if self._running:
            raise RuntimeError(
                "a pass over this loop has not ended: leave its for, or close() its iterator, first"
            )

    def __iter__(self) -> Iterator[C]:
        """Yield the context of each iteration; all its tasks have run.

        Raises:
            RuntimeError: Another pass has not ended.
        """
        self._refuse_running()
        if not self._fresh:
            self._pass, self._head = LoaderPass(self._loader, self.pipe.device), ()
        self._fresh, self._running = False, True
        iterator = chain(self._head, self._pass.iterator)
        try:
            while True:
                try:
                    ctx = self.pipe.progress(iterator)
                except StopIteration:
                    self._pass.ended = True
                    return
                self._pass.handed_out += 1
                yield ctx
                del ctx
        finally:
            self._running = False
            if isinstance(self._loader, AccelerateLoader):
                self._loader.leave()
            self.pipe.drop()  # no task of these iterations has changed any state

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
    reaching = _reaching(loader)
    if is_prepared(loader):
        loader = AccelerateLoader(loader)
        loader.in_loop = True
        given = loader.tasks(given)
    begun = LoaderPass(loader, where)
    try:
        head = [next(begun.iterator)]
    except StopIteration:
        raise ValueError(
            "the loader has no batch: overlap() records the tasks on the first one"
        ) from None
    recorded = record_beside([reaching], given, head[0], iterations, where, seed, context=context)
    found = _choose(recorded, given)
    drawn = _draws(where, begun.iterator, head) if found.loader_ahead else frozenset()
    _check_draws(drawn, found.recording.effects)
    verify(found.plan, found.recording.tasks, found.recording.effects, streams=where.has_streams)
    if not (found.ahead or found.loader_ahead):
        warnings.warn(f"nothing runs ahead: {' '.join(found.why)}", RuntimeWarning, stacklevel=2)
    pipe = SWPipeline(
        found.plan,
        found.recording.tasks,
        device=where,
        seed=seed,
        start_iteration=start_iteration,
        context=context,
        check_effects=check_effects,
    )
    draws = frozenset(_KEYS[name] for name in drawn)
    return OverlappedLoop(loader, (begun, head), draws, found, pipe)


def _draws(device: Device, iterator: Iterator[Any], head: list[Any]) -> frozenset[str]:
    """Pull the second batch; returns the generators that this draws from.

    The first pull is before all tasks, as in a plain loop: samplers draw their seed in it.
    """
    before = generator_states(device, {})
    head.extend(islice(iterator, 1))
    after = generator_states(device, {})
    return frozenset(name for name in before if before[name] != after.get(name))


def _reaching(loader: Iterable[Any]) -> PipelineTask:
    """A task that does nothing, and whose code leads to the loader."""

    def reach(ctx: Any, leads_to: object = loader) -> None:
        """Nothing."""

    return PipelineTask(LOADER, reach)


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


def _choose(recorded: Recording, tasks: Sequence[PipelineTask]) -> Overlap:
    effects = {name: touched for name, touched in recorded.effects.items() if name != LOADER}
    own = recorded.effects[LOADER]
    places = own.reads | own.writes
    why = [
        f"The loader and {name!r} may both use {_listed(shared)}, so a batch is pulled after it."
        for name, touched in effects.items()
        if (shared := {p for p in touched.writes & places if p.persistent})
    ]
    recording = replace(recorded, tasks=tuple(tasks), effects=effects)
    if why:
        return Overlap(PipelinePlan.serial(tasks), (), False, tuple(why), recording)
    ahead, reasons = _stateless(effects, tasks)
    compute = [name for name in effects if name not in ahead]
    if not compute:  # the body of the loop is what they run ahead of
        compute = [_HAND_OVER.name]
        effects = {**effects, _HAND_OVER.name: Effects()}
        recording = replace(recording, tasks=(*tasks, _HAND_OVER), effects=effects)
    if ahead:
        plan = prefetch_plan(ahead, compute, pull_group=_GROUP)
    else:
        plan = replace(PipelinePlan.serial(tasks), pull_group=_GROUP, pipeline_depth=None)
    return Overlap(plan, ahead, True, tuple(reasons), recording)


def _stateless(
    effects: EffectTable, tasks: Sequence[PipelineTask]
) -> tuple[tuple[str, ...], list[str]]:
    """The tasks that use no state that a task or the body of the loop changes, directly or not."""
    changed = {place for each in effects.values() for place in each.writes if place.persistent}
    behind: dict[str, str] = {}
    for one in tasks:
        touched = effects[one.name]
        if shared := (touched.reads | touched.writes) & changed:
            behind[one.name] = f"{one.name!r} uses {_listed(shared)}."
        elif trained := _trained(one):
            behind[one.name] = f"{one.name!r} can reach {trained}, which the loop's body may train."
    orders = [conflict for conflict in conflicts(effects) if not conflict.place.persistent]
    for _ in effects:
        for edge in orders:
            if edge.producer in behind and edge.consumer not in behind:
                place = _listed({edge.place})
                behind[edge.consumer] = (
                    f"{edge.consumer!r} comes after {edge.producer!r} ({place})."
                )
    return tuple(name for name in effects if name not in behind), list(behind.values())


def _trained(task: PipelineTask) -> str:
    """What the task's code can reach of what training changes; empty if nothing."""
    reach = reach_of(task)
    for number, names in reach.wholes.items():
        one = reach.holders[number]
        tensors = one.parameters() if isinstance(one, torch.nn.Module) else [one]
        if isinstance(one, torch.optim.Optimizer) or any(
            isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
        ):
            return min(names) or type(one).__name__
    return ""


def _listed(places: Iterable[Location]) -> str:
    return listed(sorted(map(str, places)), most=3)
