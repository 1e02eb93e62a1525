"""One line for a plain loop: its batches are made ahead, while its body runs.

The line, and who does what at the same time::

    for x, y in swpipe.ahead(loader, decode, device="cuda"):
        ...                                              # the body as it is

    loader's thread    pull 2       pull 3       pull 4
    io                 decode 1     decode 2     decode 3     and the copy to the device
    caller             body 0       body 1       body 2

What is said of it is said of ``overlap``, whose plan and loop it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import torch
from torch.utils.data import DataLoader

from swpipe.core.context import IterContext
from swpipe.core.keywords import suggests_keywords
from swpipe.core.messages import shown
from swpipe.core.task import PipelineTask
from swpipe.device import Device, copy_task, on_cpu, resolve
from swpipe.loops.accelerate import is_prepared
from swpipe.loops.ahead_tasks import HAND_OVER
from swpipe.loops.overlapping import OverlappedLoop, loop_over

Batch = TypeVar("Batch")

_ASKED_BY_PREPARE = "_is_accelerate_prepared"


class AheadLoop(OverlappedLoop[IterContext], Generic[Batch]):
    """An iterable of batches, one pass over the loader each time.

    What the loader has beside its batches can be read here: ``batch_size``, ``dataset``,
    ``sampler``, ``set_epoch``.

    Attributes:
        overlap: What runs ahead.
        pipe: The pipeline, to profile or trace: its tasks have the functions' names.
    """

    _frames = 4
    _call = "ahead(loader, draws=False)"

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """The batches. The pass begins now, as that of a ``for``."""
        return _batches(super().__iter__())

    def __getattr__(self, name: str) -> Any:
        loader = self.__dict__.get("_given")
        if loader is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == _ASKED_BY_PREPARE and not hasattr(loader, name):
            raise TypeError(
                "Accelerator.prepare() was given what ahead() returned, and would make a plain "
                "loader of it: give it the loader, and what it returns to ahead()"
            )
        return getattr(loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it where it is: what the loader has and this has not, there."""
        loader = self.__dict__.get("_given")
        own = loader is None or name in self.__dict__ or hasattr(AheadLoop, name)
        if not own and hasattr(loader, name):
            setattr(loader, name, value)
        else:
            object.__setattr__(self, name, value)


class AheadDataLoader(AheadLoop[Batch], DataLoader[Batch]):  # type: ignore[misc]
    """The same, for whoever asks whether it is a ``DataLoader``."""


def _batches(contexts: Iterator[IterContext]) -> Iterator[Any]:
    yield from map(attrgetter("batch"), contexts)  # which keeps nothing that the body drops


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


@suggests_keywords
def ahead(
    loader: Iterable[Any],
    *functions: Callable[[Any], Any],
    device: Device | torch.device | str | int | None = None,
    prefetch: int = 2,
    workers: int = 1,
    draws: bool | None = None,
    check_effects: bool | float | None = None,
) -> AheadLoop[Any]:
    """The batches of a loader, made ahead of the loop's body, on threads of their own.

    To use it is to say that the loader and the functions use nothing that the body may change, and
    change nothing that it uses, as with any prefetcher. What of this torch's operators and the
    random generators show to be untrue is an error. The numbers are those of the plain loop, bit
    for bit. A loader that draws random numbers, or may, beside a body that does makes its batches
    in turn with the body, unless ``draws`` says otherwise.

    Threads start with a pass and end with it. A pass that is left early drops the batches that were
    made ahead; a loader that is an iterator gives them again in the next one.

    It belongs around the loader that a framework has prepared, and inside a generator such as
    ``cycle(ahead(loader))``. Save its ``state_dict``, and not that of the loader, which is ahead of
    the body.

    Args:
        loader: As in ``for batch in loader``. It reads no Python value, such as a level of
            difficulty, a list of hard examples or a replay buffer that keeps its length, that the
            body changes in a pass.
        functions: Each takes a batch and returns one, in this order; they are watched like tasks
            that are declared pure. One that draws random numbers has a ``torch.Generator`` of its
            own, and ``workers=1``.
        device: Where the batches are copied after the functions, from pinned memory and on a
            stream of its own. None, or a CPU: nowhere. Where batches come pinned and there are no
            functions, the caller's thread pulls and launches the copies.
        prefetch: How many batches are in the making beside the one that the body has; 1 or more, 2
            or more with functions, a device or a prepared loader. One more for each further worker.
        workers: How many threads the functions have, each for batches of its own: for functions
            that take longer than the body. They gain where these wait, or leave the interpreter
            lock, as reading and decoding do. With 2 or more, the functions run on several threads
            at once, and must be safe there: they keep nothing from batch to batch, and use no
            buffer or flag that another call uses. The first 4 batches go through them twice, to
            compare what they return.
        draws: Whether the loader uses the default random generators of torch, numpy or Python; as
            for ``overlap``.
        check_effects: As for ``SWPipeline``: whether the functions do what they should.

    Returns:
        An iterable with the loader's attributes and length, ``state_dict`` and ``load_state_dict``
        as ``ResumableLoop`` has. It is a ``DataLoader`` if the loader is one.

    Raises:
        TypeError: A function cannot be called, or the loader cannot be iterated over, or ``draws``
            is neither True, False nor None.
        ValueError: ``prefetch`` is too small; or ``workers`` is below 1, or has no functions; or
            another loop pulls ahead from the iterator; or ``device`` is not on this machine.
    """
    for one in functions:
        if not callable(one):
            raise TypeError(
                f"ahead() takes a loader and functions from a batch to a batch, and {shown(one)} "
                "cannot be called"
            )
    if type(workers) is not int or workers < 1 or (workers > 1 and not functions):
        raise ValueError(
            f"workers is {shown(workers)}: give how many threads the functions have, 1 or more, "
            "and functions; what the loader does itself has DataLoader(num_workers=)"
        )
    where = resolve(device)
    tasks = function_tasks(functions)
    if device is not None and not on_cpu(torch.device(where.name)):
        tasks.append(copy_task(where, buffers=prefetch + workers))
    least = 2 if tasks or is_prepared(loader) else 1
    if type(prefetch) is not int or prefetch < least:
        beside = " with functions, a device or a prepared loader" if least > 1 else ""
        raise ValueError(f"prefetch is {shown(prefetch)}: give {least} or more{beside}")
    kind = AheadDataLoader if isinstance(loader, DataLoader) else AheadLoop
    loop = loop_over(
        kind,
        loader,
        tuple(tasks) or (HAND_OVER,),
        pull_ahead=True,
        draws=draws,
        keep_nothing=draws is False,
        depth=prefetch + workers,
        keep=None,
        workers=workers,
        device=where,
        check_effects=check_effects,
    )
    loop.__dict__["_given"] = loader
    return loop


def function_tasks(functions: Iterable[Callable[[Any], Any]]) -> list[PipelineTask]:
    """Return a task for each function, by its name; with a number from the second of a name on."""
    found = []
    known = Counter[str]()
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        known[name] += 1
        if known[name] > 1:
            name = f"{name} {known[name]}"
        found.append(PipelineTask(name, _on_batch(function), pure=True))
    return found


def _on_batch(function: Callable[[Any], Any]) -> Callable[[Any], None]:
    @wraps(function)
    def run(ctx: Any) -> None:
        ctx.batch = function(ctx.batch)

    run.may_draw = True  # type: ignore[attr-defined]  # from a generator of its own
    return run
