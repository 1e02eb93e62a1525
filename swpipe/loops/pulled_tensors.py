"""Tensors that pulls use: the loop must not change them, nor use those that pulls write.

    pull 2      reads rows, writes mean        pull 3: have rows been changed since?
    body 2      reads mean: refused

Watched pulls (``swpipe.loops.draws``) and the bodies between them run alone, so a change between
two pulls was made by the loop. A function mode on the thread that pulls sees the arguments of
torch's functions. If a pull writes a tensor that is in no batch, the following bodies run under
another function mode, which sees whether they use that tensor.
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
    """A function mode that notes the tensors used by pulls; a pull is made within the block.

    Attributes:
        only_looks: Whether pipelines inside a pull may leave the mode off their other threads.
        written: Tensors that pulls have written, that are in no batch and still exist, by storage.
    """

    only_looks = True

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, weakref.ref[Tensor]] = {}
        # The tensors that pulls have used, and their versions after the last pull, by id.
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def changed(self) -> str:
        """Return a description of a tensor that was changed since the last pull; empty for none."""
        for reference, version in self._used.values():
            tensor = reference()
            if tensor is not None and tensor._version != version:
                return f"a tensor that the loader reads ({_described(tensor)})"
        return ""

    def end_pull(self, batch: Any) -> None:
        """Keep the tensors of a pull that still exist and are not in its batch."""
        # Tensors of the batch belong to the body, which may use and change them.
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
        # Tensor._version counts in-place writes; torch has no public name for it.
        before = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        for tensor, version in zip(tensors, before, strict=True):
            self._used[id(tensor)] = weakref.ref(tensor), version
            if tensor._version != version:
                self.written[_storage(tensor)] = weakref.ref(tensor)
        return result


class BodyUse(TorchFunctionMode):
    """A function mode that sees whether the body uses tensors that pulls have written.

    It is active from ``begin`` to ``end``, on the caller's thread.

    Attributes:
        found: The description of a tensor that the body has used; empty for none.

    Args:
        written: The tensors that pulls have written, by storage.
    """

    only_looks = True

    def __init__(self, written: Mapping[int, weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.found = ""
        self._written = written
        self._active = False

    def begin(self) -> None:
        """Start to watch the caller's body."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._active = True

    def end(self) -> None:
        """Stop watching; under a mode that the body has left in place, this one stays, inactive."""
        # Modes form a stack, and only the top one can be removed. The two functions of torch._C are
        # private (torch 2.13): torch.overrides has no public way to look at the top.
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
                # By storage, since the body may use another view of the memory that was written.
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
    # _cdata is the address of the C++ storage, which all views share (private, torch 2.13).
    return int(tensor.untyped_storage()._cdata)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
