"""A loop over results: functions run ahead of the loop's thread, on this thread and behind it.

An example, with the batch that each thread works on at the same time::

    for result in swpipe.through(loader, tokenize, on_caller(model), decode, write):
        ...                                             # uses results alone

    loader's thread    pull 4
    io                 tokenize 3
    caller             model 2     body of result 0
    behind decode      decode 1
    behind write       write 0

The plan and the loop are those of ``overlap``. The functions behind are tasks of a later stage,
each in its own thread group; ``handed_over`` defines how they run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from swpipe.core.context import IterContext
from swpipe.core.messages import listed, shown
from swpipe.device import Device, copy_task, resolve
from swpipe.loops.ahead_loop import batches_of, check_ahead, function_tasks
from swpipe.loops.ahead_tasks import HAND_OVER
from swpipe.loops.handed_over import HandOver
from swpipe.loops.loader_pass import LoaderPass
from swpipe.loops.overlapping import OverlappedLoop, is_elsewhere, loop_over

Result = TypeVar("Result")
Function = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class OnCaller:
    """A function that runs on the loop's thread; made by ``on_caller``."""

    function: Function
    to_host: bool


def on_caller(function: Function, *, to_host: bool = False) -> OnCaller:
    """Mark the function of ``through`` that runs on the loop's thread, such as a model or a step.

    Args:
        function: Takes a batch and returns what is handed over to the functions behind.
        to_host: Copy the tensors of what it returns into host memory of their own. From a device
            this does not wait: the functions behind begin when the copies are complete. For values
            that a later call changes in place, such as weights.

    Raises:
        TypeError: The function cannot be called.
    """
    if not callable(function):
        raise TypeError(f"on_caller() takes a function, and {shown(function)} cannot be called")
    return OnCaller(function, to_host)


class ThroughLoop(OverlappedLoop[IterContext], Generic[Result]):
    """An iterable of results, one pass over the loader each time; made by ``through``.

    Attributes:
        overlap: What runs ahead.
        pipe: The pipeline, to profile or trace: its tasks have the functions' names.
    """

    _frames = 4
    _call = "through(loader, ..., draws=False)"
    _handed: HandOver
    _left_pass: LoaderPass | None = None  # the last pass that was left before its end
    _late: BaseException | None = None

    def __iter__(self) -> Iterator[Result]:  # type: ignore[override]
        """Begin a pass, as a ``for`` does, and return the iterator over its results.

        Raises:
            Exception: A function behind has failed after the last pass was left.
        """
        self._raise_late()
        return batches_of(super().__iter__())

    def _begin(self, current: LoaderPass) -> None:
        # The function on the caller's thread has run on batches of which the body got no result.
        if current is self._left_pass:
            raise RuntimeError(
                f"the last pass over this iterator ({type(self._loader).__name__}) was left, and "
                "the results that were behind the loop's body were dropped: a loop that goes on "
                "with the iterator would miss them. Give a loader that begins each pass anew, such "
                "as a DataLoader, or take all results in one for"
            )
        super()._begin(current)
        self._handed.begin()

    def _next(self, current: LoaderPass) -> IterContext:
        ctx = super()._next(current)
        self._handed.take(ctx.iter_idx)
        return ctx

    def _changed_early(self, pipe: object) -> bool:
        """Return False, since iterations that were handed over are completed and never repeated."""
        return False

    def _end(self, current: LoaderPass, *, failed: bool) -> None:
        # An error known before finish() has been raised in the loop; a new one comes too late.
        raised = self._handed.failure
        try:
            self._handed.finish()
        finally:
            super()._end(current, failed=failed)
        if not current.ended:
            self._left_pass = current
        late = self._handed.failure
        if late is not raised:
            self._late = late
            warnings.warn(
                f"a function behind the loop has failed after the loop was left: {late!r}. The "
                "next pass, or close(), raises it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _raise_late(self) -> None:
        late = self._late
        self._late = None
        if late is not None:
            raise late

    def _place(self, rest: bool | None, check: bool) -> Mapping[str, Any]:
        # The caller's function has already changed its state for batches without a result.
        if self._handed.handed or (rest and self._pass is self._left_pass):
            raise RuntimeError(
                "results are behind the loop's body: the function on the caller's thread has run "
                "on batches of which the body has no result, and a state saved here would lead to "
                "these batches again. Save between two passes"
            )
        return super()._place(rest, check)

    def close(self) -> None:
        """Complete what was handed over, and end the threads.

        Raises:
            Exception: A function behind has failed after the last pass was left.
        """
        # The threads of the functions behind end with the pipeline, so they must be idle first.
        self._handed.finish()
        super().close()
        self._raise_late()


def through(
    loader: Iterable[Any],
    *functions: Function | OnCaller,
    ahead: int = 2,
    behind: int | None = None,
    workers: int | Mapping[Function, int] = 1,
    device: Device | torch.device | str | int | None = None,
    draws: bool | None = None,
    check_effects: bool | float | None = None,
) -> ThroughLoop[Any]:
    """Return the results of a loader's batches, with functions ahead of the loop and behind it.

    Each batch goes through all functions, and the results come in order. The functions before
    ``on_caller`` run ahead, as in ``ahead``. The function in ``on_caller`` runs on the loop's
    thread. Each function after it runs on its own thread, while the loop's thread works on the next
    batches. The results and all values that the functions write equal those of a plain loop, bit
    for bit.

    The loop's body may use the results only, and no state that the function on the caller's thread
    changes, because this function is up to ``behind`` batches ahead of the body. The functions
    behind may use their arguments and values that nothing else changes. Each may keep a state of
    its own, such as a file or a sum. They draw from no default generator, and do not change a value
    in place that the caller's thread has handed over.

    An error is raised in place of its result, when the results before it were given. The end of a
    pass waits for all functions. A pass that is left early, by ``break``, an error or an interrupt,
    waits until they have run on all that was handed over, and drops these results: a loader that is
    an iterator cannot be gone on with.

    Args:
        loader: As for ``ahead``.
        functions: Each takes what the one before has returned; the first one a batch. One of them
            may be ``on_caller(function)``; without it, all run ahead.
        ahead: How many batches are in the making before the one on the caller's thread; 1 or more,
            2 or more with functions, a device or a prepared loader.
        behind: How many results may be in the making behind it; 1 or more. None: one more than
            there are threads behind.
        workers: How many threads the functions have that run ahead, as for ``ahead``. Or a mapping
            from functions to numbers of threads; one that is behind and has 2 or more must keep
            nothing from batch to batch.
        device: Where the batches are copied before the caller's thread, as for ``ahead``.
        draws: As for ``overlap``.
        check_effects: As for ``SWPipeline``; False also stops the check that functions behind draw
            from no default generator.

    Raises:
        TypeError: A function cannot be called, or the loader cannot be iterated over.
        ValueError: Two functions are on the caller's thread, or ``ahead``, ``behind`` or
            ``workers`` is too small; or as for ``ahead``.
    """
    marked = _marked(functions)
    plain = [each.function if isinstance(each, OnCaller) else each for each in functions]
    place = functions.index(marked[0]) if marked else len(functions)
    threads = _threads(plain, place, workers)
    before = max(threads[:place], default=1)
    behind_threads = threads[place + 1 :]
    if behind is not None and (type(behind) is not int or behind < 1 or not behind_threads):
        rule = "give 1 or more" if behind_threads else "no function is behind: leave it out"
        raise ValueError(f"behind is {shown(behind)}: {rule}")
    # One result more than threads behind: each thread has work while one result waits.
    lag = 0 if not behind_threads else behind or sum(behind_threads) + 1
    where = resolve(device)
    tasks = function_tasks(plain)
    leading = tasks[:place]
    copies = device is not None and is_elsewhere(where)
    check_ahead("ahead", ahead, loader, tasks=bool(leading) or copies)
    depth = ahead + lag + max([before, *behind_threads])
    if copies:
        leading.append(copy_task(where, buffers=depth))
    handed = HandOver(
        tasks[place] if marked else HAND_OVER,
        tasks[place + 1 :],
        behind_threads,
        lag=lag,
        to_host=any(each.to_host for each in marked),
        device=where,
        watched=check_effects is not False,
    )
    loop = loop_over(
        ThroughLoop,
        loader,
        (*leading, *handed.given),
        pull_ahead=True,
        draws=draws,
        depth=depth,
        workers=before,
        handed=handed,
        device=where,
        check_effects=check_effects,
    )
    loop._handed = handed
    return loop


def _marked(functions: Sequence[Function | OnCaller]) -> list[OnCaller]:
    """Return the function on the caller's thread, if there is one."""
    for each in functions:
        if not (callable(each) or isinstance(each, OnCaller)):
            raise TypeError(
                "through() takes a loader and functions, of which one may be on_caller(function), "
                f"and {shown(each)} is neither"
            )
    marked = [each for each in functions if isinstance(each, OnCaller)]
    if len(marked) > 1:
        names = listed([shown(each.function) for each in marked])
        raise ValueError(
            f"{names} are all on_caller(), and there is one such place: make one function of them"
        )
    return marked


def _threads(
    functions: Sequence[Function], place: int, workers: int | Mapping[Function, int]
) -> list[int]:
    """Return the number of threads of each function, with 1 for the function at ``place``."""
    ahead = functions[:place]
    given = workers if isinstance(workers, Mapping) else dict.fromkeys(ahead, workers)
    others = (*ahead, *functions[place + 1 :])
    wrong = [count for count in given.values() if type(count) is not int or count < 1]
    unused = not ahead and given is not workers and workers != 1
    if wrong or unused or any(function not in others for function in given):
        raise ValueError(
            f"workers is {shown(workers)}: give the number of threads of the functions before "
            "the caller's, 1 or more, or a mapping from functions that are not on_caller() to "
            "their threads"
        )
    return [given.get(function, 1) for function in functions]
