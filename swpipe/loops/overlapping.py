"""A loop whose loader and first tasks run ahead of its body, made by one call of ``overlap``.

    @swpipe.task(pure=True)
    def decode(ctx): ...

    for ctx in swpipe.overlap(loader, [decode, forward, backward, step]):
        ...                                              # as after the tasks of a plain loop

The loader and the leading tasks that are declared pure run ahead, on threads of their own if they
have work on the host. All other tasks and the body stay on the caller's thread, in serial order.
So these tasks and the body see what they would see in a plain loop, bit for bit, also where the
body leaves the loop. For plans that overlap more, see ``swpipe.autotune``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from swpipe.accelerate_check import is_prepared
from swpipe.core.context import C
from swpipe.core.effects import Effects, undeclared_effects
from swpipe.core.loaders import draws_in_mid_pass, is_apart, why_not_apart
from swpipe.core.messages import listed, shown
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan
from swpipe.core.tables import wrapped
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import BatchCopy, Device, gives_pinned, on_cpu, resolve
from swpipe.errors import PlanError, Problem
from swpipe.loops.accelerate import AccelerateLoader
from swpipe.loops.ahead_tasks import HAND_OVER, AheadTasks
from swpipe.loops.loader_data import LoaderData
from swpipe.loops.loader_pass import LoaderPass
from swpipe.loops.pass_generators import PassGenerators
from swpipe.loops.pull_times import PullTimes
from swpipe.loops.pulled_loader import PulledLoader
from swpipe.loops.resumable import ResumableLoop
from swpipe.pipeline import SWPipeline
from swpipe.plans.prefetch import copy_before, prefetch_plan

if TYPE_CHECKING:
    from swpipe.loops.handed_over import HandOver

_GROUP = "loader"

_DEPTH = 3
"""The iterations in flight if only the loader is ahead: the body's batch, one that is ready, and
one that is being pulled. With 2, the two threads would wait for each other at every batch, and
whichever is late makes the other one late."""


@dataclass(frozen=True)
class Overlap:
    """The tasks that run ahead, and why all other tasks do not.

    Attributes:
        plan: The plan.
        ahead: The names of the tasks that run ahead of all others.
        loader_ahead: Whether the loader runs ahead.
        why: Sentences on what does not run ahead, and which declaration would allow it.
    """

    plan: PipelinePlan
    ahead: tuple[str, ...]
    loader_ahead: bool
    why: tuple[str, ...]

    def __str__(self) -> str:
        names = [*(["the loader"] if self.loader_ahead else []), *self.ahead]
        others = [n for n in self.plan.schedule if n not in (*self.ahead, HAND_OVER.name)]
        behind = [n for n in others if self.plan.schedule[n].thread_group != DEFAULT_GROUP]
        in_turn = [n for n in others if n not in behind]
        places = {"ahead": names or ["nothing"], "in turn": in_turn, "behind": behind}
        lines = [f"{place}: {listed(tasks)}" for place, tasks in places.items() if tasks]
        lines += [f"- {sentence}" for sentence in self.why]
        return "\n".join(map(wrapped, lines))


class OverlappedLoop(ResumableLoop[C]):
    """An iterable of contexts; each iteration makes one pass over the loader.

    Use the loop as a context manager, or call ``close``, to end its threads; they also end with
    each pass. A pass that is left early drops the batches that were pulled ahead; a loader that is
    an iterator gives them again in the next pass.

    Attributes:
        overlap: The tasks that run ahead, and why all other tasks do not.
        pipe: The pipeline, to profile or trace.
    """

    pipe: SWPipeline[C]
    _call = "overlap(loader, tasks, pull_ahead=True, draws=False)"

    def __init__(
        self,
        loader: Iterable[Any],
        overlap: Overlap,
        pipe: SWPipeline[C],
        ahead: AheadTasks,
        draws: bool | None,
    ) -> None:
        self.overlap = overlap
        self._ahead = ahead
        self._draws = draws if overlap.loader_ahead else True
        self._keep_nothing = draws is False
        super().__init__(pipe, loader)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {type(self._loader).__name__}>\n{self.overlap}"

    def _check_tasks(self) -> None:
        if self._ahead.drawn:
            names = listed({repr(name): None for name, _ in self._ahead.drawn.values()})
            raise RuntimeError(
                f"{names}: draws from a torch.Generator of its own, which is in no state of the "
                "loop, and would draw other numbers after resuming. Let the dataset draw, or the "
                "loader give a seed with each batch; or, if other numbers do not matter, or you "
                "save the generator between two passes yourself, save by state_dict(check=False)"
            )

    def _pulled_loader(self, generators: PassGenerators) -> PulledLoader:
        of = super()._pulled_loader(generators)
        if not self.overlap.loader_ahead:
            return of
        return replace(
            of,
            # A loader that is apart makes its batches elsewhere, or from data that nobody writes.
            # Draws are watched at run time: a generator of the loader's own is no obstacle here.
            data=None if is_apart(of.inner, draws_watched=True) else LoaderData(of.inner),
            times=PullTimes(only_pulls=self.pipe.plan.thread_groups == (DEFAULT_GROUP, _GROUP)),
        )

    def _begin(self, current: LoaderPass) -> None:
        first = self.pipe.next_iteration
        self._ahead.begin(current.begin_batch, first)
        current.begin(first)

    def _make_ready(self, current: LoaderPass) -> None:
        if not self.overlap.loader_ahead:
            return
        self._ahead.end_body()
        current.make_ready()
        # The body was seen to draw: all pulls are serial from now on, and the user should know why.
        if text := self._pulled.draws.warning(self._loader, self._call):
            warnings.warn(text, RuntimeWarning, stacklevel=self._frames)

    def _next(self, current: LoaderPass) -> C:
        # Two ways to the next batch: through the pipeline, whose threads pull ahead, or by a serial
        # pull on this thread when nothing is in flight. The iterator ends where the way changes.
        while not current.is_in_turn:
            try:
                return self.pipe.progress(current.iterator)
            except StopIteration:
                if not current.go_on():
                    self._ahead.run_again()
                    raise
        # A serial iteration is not checked by progress(), so the ranks compare their plans here.
        self.pipe.agree()
        batch = current.take()
        return self.pipe.run_one_serial_iter(batch)

    def _drop(self, current: LoaderPass, *, failed: bool) -> bool:
        dropped = super()._drop(current, failed=failed)
        self._ahead.drop()
        return dropped

    def close(self) -> None:
        """End the threads. Another loop may pull ahead from an iterator that was given."""
        self.pipe.close()
        _pulled.pop(id(self._loader), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


L = TypeVar("L", bound=OverlappedLoop[Any])

_pulled: weakref.WeakValueDictionary[int, OverlappedLoop[Any]] = weakref.WeakValueDictionary()
"""The loops that pull ahead from an iterator, by the iterator's id; each holds its iterator."""


def overlap(
    loader: Iterable[Any],
    tasks: Iterable[PipelineTask | Callable[[Any], None]],
    *,
    pull_ahead: bool | None = None,
    draws: bool | None = None,
    device: Device | torch.device | str | int | None = None,
    seed: int | None = None,
    start_iteration: int = 0,
    context: type[C] | None = None,
    check_effects: bool | float | None = None,
    keep: Sequence[str] | None = None,
    run_ahead: int | None = None,
    workers: int = 1,
) -> OverlappedLoop[C]:
    """Run tasks over a loader, with the loader and the tasks that allow it ahead of all others.

    Nothing is run or pulled before the ``for``. The numbers are those of the plain loop, bit for
    bit, if all declarations are true.

    Args:
        loader: The iterable of batches.
        tasks: The tasks in the order of the plain loop. A function is a task with the function's
            name. The leading tasks that are pure run ahead.
        pull_ahead: Whether batches are pulled ahead. None: yes if the loader is a list, tuple or
            range, or torch's own ``DataLoader`` with workers and torch's samplers; the workers are
            assumed to read no file and no shared memory that the loop writes. True declares, for
            any other loader, that it does not read what the loop changes; that nobody asks it for
            more than its batches, such as its state in mid-pass; and that it begins each pass anew,
            or is an iterator. False: never. Two batches are pulled ahead, or three if tasks run
            ahead.
        draws: Whether the loader uses the default random generators of torch, numpy or Python after
            the first batch of a pass, even if it seeds one and sets it back. False: it does not;
            some pulls are checked. True: it does, and the loop's tasks and body do not; this is
            checked. None: nothing is declared. Then batches are pulled serially with the body as
            soon as the loader or the body is seen to draw, unless the loader is known not to draw:
            a loader that runs ahead if ``pull_ahead`` is None, or torch's ``DataLoader`` without
            workers over a ``TensorDataset``, list, tuple or range.
        device: The device, as for ``SWPipeline``. If a device other than the CPU is given, a task
            "copy" before all others moves ``ctx.batch`` there (``swpipe.device.copy_task``), from
            pinned memory; if the loader is ahead, the copy runs ahead of the loop on a stream of
            its own. If batches come pinned (``DataLoader(pin_memory=True)``) and nothing else runs
            ahead, the caller's thread pulls and launches the copies, one batch ahead.
        seed: The seed for tasks with ``random=True``, as for ``SWPipeline``.
        start_iteration: The number of the first iteration, which has the loader's first batch.
        context: The class of the contexts, as for ``SWPipeline``.
        check_effects: Whether to check that the tasks do what they declare, as for ``SWPipeline``.
            The body of the loop is not watched.
        keep: The attributes that the body reads; all others are deleted as soon as no task can use
            them any more, as for ``PipelinePlan.keep``. None: all stay.
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.
        workers: The number of threads for the tasks that run ahead, each with batches of its own;
            each further thread adds one batch in flight. Useful if these tasks take longer than the
            rest of the loop.

    Raises:
        ValueError: ``workers`` is below 1; or ``pull_ahead`` is True over an iterator that another
            loop pulls from; or ``start_iteration`` is no number of an iteration; or ``device`` is
            not on this machine.
        PlanError: There are no tasks, or two have the same name; or a task is called "copy", and
            ``device`` adds a task of that name.
        TypeError: One of the tasks is neither a task nor a function with a name, or the loader
            cannot be iterated over, or ``draws`` is neither True, False nor None.

    Warns:
        RuntimeWarning: Nothing can run ahead; the message says what to do. Or, in a pass, once for
            each loader: its batches are pulled serially because the body draws; the message says
            what to declare.
    """
    if pull_ahead is not None and type(pull_ahead) is not bool:
        raise TypeError(f"pull_ahead is {pull_ahead!r}: give True, False or None")
    given = tuple(each if isinstance(each, PipelineTask) else task(each) for each in refs_in(tasks))
    if not given:
        raise PlanError([Problem("there are no tasks: give at least one")])
    where = resolve(device)
    if device is not None and is_elsewhere(where):
        given = (copy_before(given, where), *given)
    loop: OverlappedLoop[C] = loop_over(
        OverlappedLoop,
        loader,
        given,
        pull_ahead=pull_ahead,
        draws=draws,
        keep=keep,
        device=where,
        seed=seed,
        start_iteration=start_iteration,
        context=context,
        check_effects=check_effects,
        run_ahead=run_ahead,
        workers=workers,
    )
    # pull_ahead=True declares that the loader begins each pass anew, its workers included.
    loop._keep_nothing |= pull_ahead is True
    return loop


def is_elsewhere(device: Device) -> bool:
    """Return whether a device is another one than the CPU, so that batches are copied there."""
    return not on_cpu(torch.device(device.name))


def loop_over(
    kind: type[L],
    loader: Any,
    given: tuple[PipelineTask, ...],
    *,
    pull_ahead: bool | None,
    draws: bool | None,
    depth: int | None = None,
    keep: Sequence[str] | None = None,
    run_ahead: int | None = None,
    workers: int = 1,
    handed: HandOver | None = None,
    **options: Any,
) -> L:
    """Return a loop of a class, made from the arguments of ``overlap`` or ``ahead``.

    Args:
        kind: The loop's class.
        loader: The loader, as for ``overlap``.
        given: All tasks.
        pull_ahead: As for ``overlap``.
        draws: As for ``overlap``.
        depth: As in a plan; None for the default.
        keep: As in a plan.
        run_ahead: As in a plan.
        workers: As for ``overlap``.
        handed: The tasks behind the caller's thread, as for ``through``.
        options: Of the pipeline.
    """
    _check_loader(loader, draws)
    unknown = why_not_apart(loader, draws_watched=True) if pull_ahead is None else None
    ahead = unknown is None if pull_ahead is None else pull_ahead
    if ahead and id(loader) in _pulled:
        raise ValueError(
            f"another loop pulls ahead from this iterator ({type(loader).__name__}), and has "
            "batches of it that this one would miss: an iterator is pulled ahead by one loop. "
            "close() the other one, or go on with it"
        )
    # A random task seeds torch's default generators while it runs, and all threads share these:
    # the body, or another task, may draw from them at the same time. So it does not run ahead.
    leading = tuple(takewhile(lambda t: t.pure and not t.random, given)) if ahead else ()
    behind = given[len(leading) :]
    why = (*_why_in_turn(loader, pull_ahead, unknown), *_why_behind(behind, ahead))
    if not ahead and pull_ahead is None:
        warnings.warn(f"nothing runs ahead: {' '.join(why)}", RuntimeWarning, stacklevel=3)
    # Accelerate's flags go with each batch: the first task ahead splits them off, and the first
    # task behind shows them to Accelerate.
    if ahead and is_prepared(loader):
        loader = AccelerateLoader(loader)
        leading = (loader.unpack, *leading)
        behind = (loader.show, *behind)
    if ahead and not behind:  # a plan needs one task for the leading tasks to run ahead of
        behind = (HAND_OVER,)
    given = (*leading, *behind)
    if workers != 1 and not leading:
        why = (*why, f"workers={shown(workers)} are not used: no task runs ahead.")
    plan = _plan(leading, behind, loader, workers, ahead=ahead)
    if (keep, depth, run_ahead) != (None, None, None):
        depth = depth or plan.pipeline_depth
        plan = replace(plan, keep=keep, pipeline_depth=depth, run_ahead=run_ahead)
    functions = AheadTasks(given, len(leading), pulled_ahead=ahead, workers=workers)
    tasks = functions.tasks
    if handed is not None:
        why = ()
        plan = handed.plan(plan)
        tasks = handed.tasks(tasks, leading)
    overlapped = Overlap(plan, tuple(t.name for t in leading), ahead, why)
    pulls = Effects() if ahead else undeclared_effects()
    pipe = SWPipeline(plan, tasks, effects={PULL: pulls}, **options)
    loop = kind(loader, overlapped, pipe, functions, draws)
    # A second loop over this iterator would miss the batches that this loop has pulled.
    if ahead and loop._pulled.goes_on:
        _pulled[id(loader)] = loop
    return loop


def _check_loader(loader: Any, draws: object) -> None:
    if draws is not None and type(draws) is not bool:
        raise TypeError(f"draws is {shown(draws)}: give True, False or None")
    if isinstance(loader, ResumableLoop):
        raise TypeError("the loader is a loop itself: give all tasks or functions to one call")
    if not isinstance(loader, Iterable) and not hasattr(type(loader), "__getitem__"):
        raise TypeError(f"the loader is {shown(loader)}: give an iterable of batches")
    if draws is False and (name := draws_in_mid_pass(loader)):
        raise ValueError(
            f"draws=False says that the loader uses no default generator, and its {name} draws "
            "from torch's for each batch (generator=torch.default_generator): give it a "
            "torch.Generator() of its own, or leave draws= out"
        )


def _plan(
    leading: Sequence[PipelineTask],
    behind: Sequence[PipelineTask],
    loader: Any,
    workers: int,
    *,
    ahead: bool,
) -> PipelinePlan:
    if not leading:
        plan = PipelinePlan.serial(behind)
        # If the loader runs ahead, a thread of its own pulls for the serial plan.
        return replace(plan, pull_group=_GROUP, pipeline_depth=_DEPTH) if ahead else plan
    copies = len(leading) == 1 and isinstance(leading[0].fn, BatchCopy)
    if copies and workers == 1 and gives_pinned(loader):
        # The copy is only launched. A thread would cost the loop more than it takes off it, since
        # the two threads compete for one interpreter lock.
        return prefetch_plan(leading, behind, group=DEFAULT_GROUP, pull_group=None, depth=2)
    return prefetch_plan(leading, behind, pull_group=_GROUP, workers=workers)


def _why_in_turn(
    loader: Any, pull_ahead: bool | None, unknown: tuple[str, str] | None
) -> Iterator[str]:
    if pull_ahead is False:
        yield "The loader is pulled in turn (pull_ahead=False)."
    elif unknown is not None:
        what, mend = unknown
        yield (
            f"The loader ({type(loader).__name__}) {what}, so it is pulled in turn. {mend}; or "
            "pass pull_ahead=True, if it does not read what the loop changes, and nobody asks it "
            "for more than its batches."
        )


def _why_behind(given: Sequence[PipelineTask], pulled: bool) -> Iterator[str]:
    behind = [t for t in given if t is not HAND_OVER and not isinstance(t.fn, BatchCopy)]
    undeclared = [repr(t.name) for t in behind if t.undeclared]
    random = [repr(t.name) for t in behind if t.pure and t.random]
    pure = [repr(t.name) for t in behind if t.pure and not t.random]
    if undeclared:
        yield (
            f"{listed(undeclared)}: of what they touch nothing is said, so they keep their order "
            "with the body of the loop."
        )
        # A single task cannot follow this advice: the leading tasks need it to run ahead of.
        if behind[0].undeclared and len(behind) > 1:
            name = behind[0].name
            yield (
                f"If {name!r} uses its context and what nobody changes while the loop runs, no "
                "model that is trained, and changes its context only, it may run ahead: declare "
                "that by @swpipe.task(pure=True)."
            )
    if random and pulled:
        yield (
            f"{listed(random)}: random, and draws from torch's default generators, as the body of "
            "the loop may. Let it draw from a torch.Generator of its own, seeded by ctx.iter_idx."
        )
    if pure and pulled:
        yield (
            f"{listed(pure)}: pure, and comes after {behind[0].name!r}, which runs in turn: what "
            "it uses of that is not known."
        )
