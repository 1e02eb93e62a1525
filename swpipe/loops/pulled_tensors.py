"""Tensors that pulls use, and that the loop's body must not change, or use if pulls write them.

    pull 2      reads rows, writes mean        pull 3: has anybody changed rows since?
    body 2      reads mean: refused

Watched pulls (``swpipe.loops.draws``) and the bodies between them run alone, so that what changes
between two pulls the loop has changed. A function mode of the thread that pulls sees the arguments
of torch's functions. Where a pull writes a tensor that is in no batch, the bodies that follow run
under another one, which sees whether they use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from swpipe.loops.batch_memory import parts_of

_PLAIN = (Tensor, Parameter)


class PulledTensors(TorchFunctionMode):
    """The tensors that the pulls of a loop use; a pull is made within the block.

    Attributes:
        only_looks: A pipeline that a pull runs needs it on no other thread.
        written: Tensors that pulls have written, that are in no batch and still there; by storage.
    """

    only_looks = True

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, weakref.ref[Tensor]] = {}
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # and the version

    def changed(self) -> str:
        """A tensor that somebody has changed since the last pull, in words; empty for none."""
        for reference, version in self._used.values():
            tensor = reference()
            if tensor is not None and tensor._version != version:
                return f"a tensor that the loader reads ({_described(tensor)})"
        return ""

    def end_pull(self, batch: Any) -> None:
        """Note how a pull has left the tensors."""
        own = {_storage(buffer) for buffer in parts_of(batch)[0] if type(buffer) in _PLAIN}
        found = [reference() for reference, _ in self._used.values()]
        kept = [one for one in found if one is not None and _storage(one) not in own]
        self._used = {id(tensor): (weakref.ref(tensor), tensor._version) for tensor in kept}
        there = {_storage(tensor) for tensor in kept}
        self.written = {number: one for number, one in self.written.items() if number in there}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [*_tensors_in((*args, *kwargs.values()))]
        before = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        for tensor, version in zip(tensors, before, strict=True):
            self._used[id(tensor)] = weakref.ref(tensor), version
            if tensor._version != version:
                self.written[_storage(tensor)] = weakref.ref(tensor)
        return result


class BodyUse(TorchFunctionMode):
    """Sees whether the loop uses what pulls have written, from ``begin`` to ``end``.

    Attributes:
        found: What it has used, in words; empty for nothing.

    Args:
        written: Of the pulls.
    """

    only_looks = True

    def __init__(self, written: Mapping[int, weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.found = ""
        self._written = written
        self._active = False

    def begin(self) -> None:
        """The caller's body begins."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._active = True

    def end(self) -> None:
        """It has ended; a mode that it has left in place stays, and this one beneath it."""
        depth = torch._C._len_torch_function_stack()
        if self._active and depth and torch._C._get_function_stack_at(depth - 1) is self:
            self.__exit__(None, None, None)
        self._active = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._active:
            for tensor in _tensors_in((*args, *kwargs.values())):
                reference = self._written.get(_storage(tensor))
                written = None if reference is None else reference()
                if written is not None:
                    self.found = _described(written)
        return func(*args, **kwargs)


def _tensors_in(args: Iterable[Any]) -> Iterator[Tensor]:
    for one in args:
        for each in one if type(one) is list or type(one) is tuple else (one,):
            if type(each) in _PLAIN and each.layout is torch.strided and not each.is_inference():
                yield each


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
