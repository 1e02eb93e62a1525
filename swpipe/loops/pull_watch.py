"""What a pull does through torch's functions, on the thread that pulls, while others do the same.

    loader's thread     pull: stack, getitem, random_()     seen: it draws, and reads the rows
    caller's thread     dropout, step                       not seen

That states of generators change during a pull does not tell who has drawn. A function mode, which
is of one thread, does: it sees each call of torch's Python functions; those that may draw run under
a ``DrawRecorder``. A tensor that a pull reads again, and somebody has modified since the pull
before, is one that the loop changes.

The first 16 pulls that run beside others are watched. Later ones are if the loop was seen to draw,
or somebody, for their draws: a loader that draws while the loop does not does no harm.

Assumptions
    - The first draws of the loop and of the loader, if they come so late, do not both fall into the
      time for which one batch is ahead.
    - What the loader seeds, it seeds before its first batch. What it reads otherwise than by
      torch's functions is its author's word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from multiprocessing.util import register_after_fork
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from swpipe.device import Device
from swpipe.inference.draw_recorder import DrawRecorder

_PLAIN = (Tensor, Parameter)


_FIRST = 16
"""So many pulls are watched in any case."""

_QUICK_S = 1e-4
"""A length that takes longer is not asked for again."""


class PullWatch(TorchFunctionMode):
    """Watches the pulls of one loader.

    Attributes:
        drawn: The devices of torch's default generators that watched pulls drew from.
        changed: What others have changed since the pull before: a tensor that a pull has read, or a
            length.

    Args:
        device: Whose default generator counts, beside the CPU's.
        loader: The loader; its length and its dataset's are looked at, if that is quick.
    """

    def __init__(self, device: Device, loader: Any) -> None:
        super().__init__()
        self.drawn: set[str] = set()
        self.changed = ""
        sized = loader, getattr(loader, "dataset", None)
        self._sized: list[Any] = [one for one in sized if hasattr(type(one), "__len__")]
        self._lengths: dict[int, int] = {}  # after the last pull
        self._device, self._active = device, False
        self._watched = 0  # so many pulls
        self._state: Tensor | None = None  # of the CPU's generator, after the last pull
        self._loop_draws = self._reads = False
        self._read: dict[int, weakref.ref[Tensor]] = {}  # by id, in this pull
        self._before: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # and versions after it
        register_after_fork(self, PullWatch._leave)

    def begin(self) -> None:
        """A new pass begins."""
        self._state = None
        self._lengths = {}
        self.changed = ""
        self._before.clear()

    @contextmanager
    def watching(self, *, alone: bool) -> Iterator[None]:
        """A pull is made within the block; ``alone``, while nobody else does anything."""
        before = torch.get_rng_state()
        if self._state is not None and not torch.equal(before, self._state):
            self._loop_draws = True
        now = self._lengths_now()
        if any(self._lengths.get(number, length) != length for number, length in now.items()):
            self.changed = "the length of the loader or of its dataset"
        self._reads = not alone and self._watched < _FIRST
        watched = self._reads or (self._loop_draws and not alone)
        self._watched += self._reads
        if not self._reads:
            self._before.clear()
        try:
            with self if watched else nullcontext():
                yield
        finally:
            self._state = torch.get_rng_state()
            self._lengths = self._lengths_now()
            if not (watched or alone) and not torch.equal(before, self._state):
                self._loop_draws = True  # or the loader does

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._active = True
        return self

    def __exit__(self, *failure: object) -> None:
        self._active = False
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        alive = ((number, kept, kept()) for number, kept in self._read.items())
        self._before = {n: (kept, one._version) for n, kept, one in alive if one is not None}
        self._read.clear()

    def _lengths_now(self) -> dict[int, int]:
        found = {}
        for one in self._sized[:]:
            begin = perf_counter()
            try:
                found[id(one)] = len(one)
            except Exception:  # noqa: BLE001 - it has none
                begin = 0.0
            if perf_counter() - begin > _QUICK_S:
                self._sized.remove(one)
        return found

    def _leave(self) -> None:
        """A worker of the loader's, forked in a pull, has nothing to watch."""
        if self._active:
            torch._C._pop_torch_function_stack()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._reads:
            for one in _tensors_of(args):
                if id(one) not in self._read and not one.is_inference():
                    self._read_first(one)
        if _may_draw(func):
            return self._recorded(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _read_first(self, tensor: Tensor) -> None:
        reference, version = self._before.get(id(tensor), (None, 0))
        if reference is not None and reference() is tensor and tensor._version != version:
            kind = str(tensor.dtype).removeprefix("torch.")
            self.changed = f"a tensor that the loader reads ({kind} {list(tensor.shape)})"
        self._read[id(tensor)] = weakref.ref(tensor)

    def _recorded(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        before = self._device.generator_states()
        recorder = DrawRecorder(self._device)
        with recorder:
            result = func(*args, **kwargs)
        if 0 in recorder.draws:
            now = self._device.generator_states()
            self.drawn |= {name for name in now if not torch.equal(before[name], now[name])}
        return result


def _tensors_of(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for one in args:
        if type(one) in _PLAIN:
            yield one
        elif type(one) is list or type(one) is tuple:
            yield from (each for each in one if type(each) in _PLAIN)


@cache
def _may_draw(func: Any) -> bool:
    """Whether an operator of the function's name draws, or none has its name: Python functions."""
    name = getattr(func, "__name__", "")
    operator = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    if operator is None:
        return hasattr(func, "__code__")
    tags = (getattr(operator, overload).tags for overload in operator.overloads())
    return any(torch.Tag.nondeterministic_seeded in found for found in tags)
