"""A plain loop whose batches are made ahead while its body runs, by one call of ``ahead``.

The line, and what each thread does at the same time::

    for x, y in swpipe.ahead(loader, decode, device="cuda"):
        ...                                              # the body as it is

    loader's thread    pull 2       pull 3       pull 4
    io                 decode 1     decode 2     decode 3     and the copy to the device
    caller             body 0       body 1       body 2

Plan and loop are those of ``overlap``, whose documentation applies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import torch
from torch.utils.data import DataLoader

from swpipe.accelerate_check import is_prepared
from swpipe.core.context import IterContext
from swpipe.core.messages import shown
from swpipe.core.task import PipelineTask
from swpipe.device import Device, copy_task, resolve
from swpipe.loops.ahead_tasks import HAND_OVER
from swpipe.loops.overlapping import OverlappedLoop, is_elsewhere, loop_over

Batch = TypeVar("Batch")


class AheadLoop(OverlappedLoop[IterContext], Generic[Batch]):
    """An iterable of batches; each iteration makes one pass over the loader.

    The loader's other attributes can be read and set here: ``batch_size``, ``dataset``,
    ``sampler``, ``set_epoch``.

    Attributes:
        overlap: The tasks that run ahead.
        pipe: The pipeline, to profile or trace; its tasks have the functions' names.
    """

    _frames = 4  # one more than in OverlappedLoop: the generator of batches
    _call = "ahead(loader, draws=False)"

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Begin a pass, as a ``for`` does, and return the iterator over its batches."""
        return batches_of(super().__iter__())

    def __getattr__(self, name: str) -> Any:
        loader = self.__dict__.get("_given")
        # Until ahead() has set _given, and in copy and pickle, there is no loader to ask.
        if loader is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Accelerate's prepare() would take this loop for a DataLoader and rebuild it silently. It
        # asks for this private attribute first (seen in 1.15).
        if name == "_is_accelerate_prepared" and not hasattr(loader, name):
            raise TypeError(
                "Accelerator.prepare() was given what ahead() returned, and would make a plain "
                "loader of it: give it the loader, and what it returns to ahead()"
            )
        return getattr(loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader if only the loader has it; else one of this loop."""
        loader = self.__dict__.get("_given")
        # An attribute of this class, or one that is already set here, stays here.
        own = loader is None or name in self.__dict__ or hasattr(AheadLoop, name)
        if not own and hasattr(loader, name):
            setattr(loader, name, value)
        else:
            object.__setattr__(self, name, value)


class AheadDataLoader(AheadLoop[Batch], DataLoader[Batch]):  # type: ignore[misc]
    """An ``AheadLoop`` that is also a ``DataLoader``, for code that asks by ``isinstance``.

    ``DataLoader.__init__`` is never called: attributes are looked up in the given loader.
    """


def batches_of(contexts: Iterator[IterContext]) -> Iterator[Any]:
    """Yield the batch of each context."""
    # A map, since a generator's local variable would keep a batch that the body has dropped.
    yield from map(attrgetter("batch"), contexts)


@overload
def ahead(
    loader: Iterable[Batch],
    *,
    device: Device | torch.device | str | int | None = None,
    prefetch: int = 2,
    draws: bool | None = None,
    check_effects: bool | float | None = None,
) -> AheadLoop[Batch]: ...


@overload
def ahead(
    loader: Iterable[Any],
    *functions: Callable[[Any], Any],
    device: Device | torch.device | str | int | None = None,
    prefetch: int = 2,
    workers: int = 1,
    draws: bool | None = None,
    check_effects: bool | float | None = None,
) -> AheadLoop[Any]: ...


def ahead(
    loader: Iterable[Any],
    *functions: Callable[[Any], Any],
    device: Device | torch.device | str | int | None = None,
    prefetch: int = 2,
    workers: int = 1,
    draws: bool | None = None,
    check_effects: bool | float | None = None,
) -> AheadLoop[Any]:
    """Return a loop over a loader whose batches are made ahead of its body, on other threads.

    The call declares that the loader and the functions use nothing that the body may change, and
    change nothing that the body uses, as with any prefetcher. The loop raises an error if torch
    detects a violation, for example an in-place write or a random draw. The numbers are those of
    the plain loop, bit for bit. If the body draws random numbers, and the loader does or may, the
    batches are made serially with the body, unless ``draws`` says otherwise.

    Threads start with a pass and end with it. A pass that is left early drops the batches that were
    made ahead; a loader that is an iterator gives them again in the next pass.

    Apply ``ahead`` to the loader that a framework has prepared, and inside a generator such as
    ``cycle(ahead(loader))``. Save the loop's ``state_dict``, and not the loader's, which is ahead
    of the body.

    Args:
        loader: The iterable of batches. It must not read any Python value that the body changes in
            a pass, such as a level of difficulty, a list of hard examples or a replay buffer of
            constant length.
        functions: Functions that each take a batch and return one, in this order; they are checked
            like tasks that are declared pure. A function that draws random numbers needs a
            ``torch.Generator`` of its own, and ``workers=1``.
        device: The device to which batches are copied after the functions, from pinned memory and
            on a stream of its own. None, or a CPU: no copy. If batches come pinned and there are no
            functions, the caller's thread pulls and launches the copies.
        prefetch: How many batches are made ahead of the body's batch; 1 or more, and 2 or more with
            functions, a device or a prepared loader. Each further worker adds one batch.
        workers: The number of threads for the functions, each with batches of its own; useful if
            the functions take longer than the body. More threads help if the functions wait, or
            release the interpreter lock, as reading and decoding do. With 2 or more, the functions
            run on several threads at once, and must be safe there: they keep nothing from batch to
            batch, and share no buffer or flag between calls. The first 4 batches go through them
            twice, to compare the results.
        draws: Whether the loader uses the default random generators of torch, numpy or Python, as
            for ``overlap``.
        check_effects: Whether to check that the functions are pure, as for ``SWPipeline``.

    Returns:
        An iterable with the loader's attributes and length, and with ``state_dict`` and
        ``load_state_dict`` as in ``ResumableLoop``. It is a ``DataLoader`` if the loader is one.

    Raises:
        TypeError: A function cannot be called, or the loader cannot be iterated over, or ``draws``
            is neither True, False nor None.
        ValueError: ``prefetch`` is too small; or ``workers`` is below 1, or above 1 without
            functions; or another loop pulls ahead from the iterator; or ``device`` is not on this
            machine.
    """
    for function in functions:
        if not callable(function):
            raise TypeError(
                "ahead() takes a loader and functions from a batch to a batch, and "
                f"{shown(function)} cannot be called"
            )
    if type(workers) is not int or workers < 1 or (workers > 1 and not functions):
        raise ValueError(
            f"workers is {shown(workers)}: give the number of threads for the functions, 1 or "
            "more, and at least one function; for work of the loader itself, use "
            "DataLoader(num_workers=)"
        )
    where = resolve(device)
    tasks = function_tasks(functions)
    copies = device is not None and is_elsewhere(where)
    check_ahead("prefetch", prefetch, loader, tasks=bool(tasks) or copies)
    if copies:
        tasks.append(copy_task(where, buffers=prefetch + workers))
    # Frameworks ask isinstance(loader, DataLoader) before they use its sampler or batch size.
    kind = AheadDataLoader if isinstance(loader, DataLoader) else AheadLoop
    loop = loop_over(
        kind,
        loader,
        tuple(tasks) or (HAND_OVER,),
        pull_ahead=True,
        draws=draws,
        depth=prefetch + workers,
        workers=workers,
        device=where,
        check_effects=check_effects,
    )
    # Through __dict__, since __setattr__ would look for the loader that is only given here.
    loop.__dict__["_given"] = loader
    return loop


def check_ahead(name: str, count: int, loader: object, *, tasks: bool) -> None:
    """Raise an error if a number of batches ahead is too small.

    Args:
        name: The name of the argument.
        count: The number.
        loader: The loader.
        tasks: Whether tasks run ahead: they need a batch in the making besides the one that is
            being pulled.
    """
    least = 2 if tasks or is_prepared(loader) else 1
    if type(count) is not int or count < least:
        beside = " with functions, a device or a prepared loader" if least > 1 else ""
        raise ValueError(f"{name} is {shown(count)}: give {least} or more{beside}")


def function_tasks(functions: Iterable[Callable[[Any], Any]]) -> list[PipelineTask]:
    """Return a task for each function, by its name; with a number from the second of a name on."""
    tasks = []
    known = Counter[str]()
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        known[name] += 1
        if known[name] > 1:
            name = f"{name} {known[name]}"
        tasks.append(PipelineTask(name, _on_batch(function), pure=True))
    return tasks


def _on_batch(function: Callable[[Any], Any]) -> Callable[[Any], None]:
    @wraps(function)
    def run(ctx: Any) -> None:
        ctx.batch = function(ctx.batch)

    # The function is allowed to draw from a torch.Generator of its own.
    run.may_draw = True  # type: ignore[attr-defined]  # from a generator of its own
    return run
