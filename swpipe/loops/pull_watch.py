"""What a pull does through torch's functions, on the thread that pulls, while others do the same.

    loader's thread     pull 3: stack, getitem, random_()       seen: it draws, and reads the rows
    caller's thread     body 2: dropout, step                   not seen
                        begins with batch 3: were the rows modified since?

A function mode, which is of one thread, sees each call of torch's Python functions. Those that may
draw run under ``DrawViews``. Of tensors that a pull reads ahead it is looked, before the loop
begins with the batch, whether others have modified them since: in the first 16 such pulls. What the
loader reads otherwise than by torch's functions, or writes itself, is its author's word.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from functools import cache
from multiprocessing.util import register_after_fork
from time import thread_time
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from swpipe.loops.draw_views import DrawViews, Turns
from swpipe.loops.loader_draws import KnownDraws

Reads = dict[int, tuple[weakref.ref[Tensor], int]]
"""Tensors by id, and their versions."""

_PLAIN = (Tensor, Parameter)

_FIRST = 16
"""So many pulls are watched in any case."""

_QUICK_S = 1e-3
"""A length that takes more of the thread's CPU time is not asked for again. By wall time a busy
machine would decide; 0.15 ms of CPU time were seen there for one that does nothing."""


class PullWatch(TorchFunctionMode):
    """Watches the pulls of one loader.

    Attributes:
        views: Give what draws its generator.
        changed: The length of the loader, or of its dataset, if others have changed it.

    Args:
        turns: Of the pipeline.
        loader: The loader; its length and its dataset's are looked at, if that is quick.
        known: What is known of its draws.
        kept: As for ``DrawViews``.
    """

    def __init__(self, turns: Turns, loader: Any, known: KnownDraws, *, kept: bool) -> None:
        super().__init__()
        self.views, self._turns = DrawViews(turns, known, kept=kept), turns
        sized = loader, getattr(loader, "dataset", None)
        self._sized: list[Any] = [one for one in sized if hasattr(type(one), "__len__")]
        self._active = self._reads = self._writing = False
        self._number = self._watched = 0  # of the pull; so many pulls
        self._read: Reads = {}  # in this pull
        self._ahead: deque[tuple[int, Reads]] = deque()  # what pulls have read ahead
        self._own: set[int] = set()  # storages that the loader writes
        register_after_fork(self, PullWatch._leave)
        self.begin()

    def begin(self) -> None:
        """A new pass begins."""
        self.views.begin()
        self._lengths: dict[int, int] = {}  # after the last pull
        self.changed = ""
        self._ahead.clear()
        self._own.clear()

    def pull(self, number: int) -> Self:
        """A pull is made within the block, by its number in the pass from 1."""
        now = self._lengths_now()
        if any(self._lengths.get(one, length) != length for one, length in now.items()):
            self.changed = "the length of the loader or of its dataset"
        self._number, self._reads = number, self._watched < _FIRST
        return self

    def begin_batch(self, number: int) -> str:
        """The loop comes to the batch of a pull: what others have changed of what it read."""
        self.views.begin_batch(number)
        while self._ahead and self._ahead[0][0] <= number:
            for reference, version in self._ahead[0][1].values():
                tensor = reference()
                if tensor is None or tensor._version == version:
                    continue
                if self._writing:  # perhaps the loader itself: look again later
                    return ""
                if _storage(tensor) not in self._own:
                    kind = str(tensor.dtype).removeprefix("torch.")
                    return f"a tensor that the loader reads ({kind} {list(tensor.shape)})"
            self._ahead.popleft()
        return ""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._active = True
        return self

    def __exit__(self, *failure: object) -> None:
        self._active = False
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._lengths = self._lengths_now()
        if self._read:
            self._watched += 1
            self._ahead.append((self._number, self._read))
            self._read = {}

    def _lengths_now(self) -> dict[int, int]:
        found = {}
        for one in self._sized[:]:
            begin_s = thread_time()
            try:
                found[id(one)] = len(one)
            except Exception:  # noqa: BLE001 - it has none
                self._sized.remove(one)
                continue
            if thread_time() - begin_s > _QUICK_S:
                self._sized.remove(one)
        return found

    def _leave(self) -> None:
        """A worker of the loader's, forked in a pull, has nothing to watch."""
        if self._active:
            torch._C._pop_torch_function_stack()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._reads or self._ahead):
            return self._called(func, args, kwargs)
        tensors = [*_tensors_of((*args, kwargs.get("out")))]
        if self._reads and not self._turns.is_in_turn:
            for one in tensors:
                self._read.setdefault(id(one), (weakref.ref(one), one._version))
        if not ("out" in kwargs or _may_write(func)):
            return self._called(func, args, kwargs)
        before = [one._version for one in tensors]
        self._writing = True
        try:
            return self._called(func, args, kwargs)
        finally:
            written = zip(tensors, before, strict=True)
            self._own.update(_storage(one) for one, then in written if one._version != then)
            self._writing = False

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _may_draw(func):
            with self.views:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _tensors_of(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for one in args:
        for each in one if type(one) is list or type(one) is tuple else (one,):
            if type(each) in _PLAIN and each.layout is torch.strided and not each.is_inference():
                yield each


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _may_write(func: Any) -> bool:
    """Whether it may modify a tensor that it is given, by its name, or as a Python function."""
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and (not name.endswith("__") or name[:3] in ("__i", "__s"))
    return in_place or hasattr(func, "__code__")


@cache
def _may_draw(func: Any) -> bool:
    """Whether an operator of the function's name draws, or none has its name: Python functions."""
    name = getattr(func, "__name__", "")
    operator = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    if operator is None:
        return hasattr(func, "__code__")
    tags = (getattr(operator, overload).tags for overload in operator.overloads())
    return any(torch.Tag.nondeterministic_seeded in found for found in tags)
