"""Tensors that pulls use: the loop must not change them, nor use those that pulls write.

    pull 2      reads rows, writes mean        pull 3: have rows been changed since?
    body 2      reads mean: refused

Watched pulls (``swpipe.loops.draws``) and the bodies between them run alone, on the caller's
thread, so a change between two pulls was made by the loop. A function mode on that thread sees the
arguments of torch's functions. If a pull writes a tensor that is in no batch, the mode watches the
following bodies, too, and sees whether they use that tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from swpipe.loops.batch_memory import parts_of

_PLAIN = (Tensor, Parameter)

Uses = list[tuple[weakref.ref[Tensor], int]]
"""Tensors that were used, and their versions then."""


class PulledTensors(TorchFunctionMode):
    """A function mode that notes the tensors used by pulls; a pull is made within the block.

    Attributes:
        only_looks: Whether pipelines inside a pull may leave the mode off their other threads.
    """

    only_looks = True

    def __init__(self) -> None:
        super().__init__()
        self._watches = False  # whether a pull or a body is watched now
        self._noted: Uses = []  # what it has used so far
        # The tensors that pulls have used, with their versions after the last pull, and the
        # storages of those that pulls have written. All exist, and are in no batch.
        self._used: Uses = []
        self._written = set[int]()

    def begin_pull(self) -> None:
        """Watch a pull, which is made within the block."""
        self._watches = True

    def end_pull(self, batch: Any) -> None:
        """Keep the tensors of the pulls that still exist and are not in the last batch."""
        self._watches = False
        # Tensors of the batch belong to the body, which may use and change them.
        own = {_storage(buffer) for buffer in parts_of(batch)[0] if type(buffer) in _PLAIN}
        alive = {id(tensor): tensor for tensor, _ in _alive(self._used + self._noted)}
        used = [tensor for tensor in alive.values() if _storage(tensor) not in own]
        # Nothing but the pull ran since a tensor was noted. Tensor._version counts in-place writes;
        # torch has no public name for it.
        noted = _alive(self._noted)
        written = {_storage(tensor) for tensor, version in noted if tensor._version != version}
        self._written = (self._written | written) & {*map(_storage, used)}
        self._used = [(weakref.ref(tensor), tensor._version) for tensor in used]
        self._noted = []

    def begin_body(self) -> None:
        """Watch the body, if pulls have written a tensor that it could use."""
        if self._written and not self._watches:
            self._watches = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end_body(self) -> str:
        """Stop watching the body; describe a tensor that pulls write and it has used, if any.

        Under a mode that the body has left in place, this one stays, and does nothing.
        """
        if self._watches:
            self._watches = False
            # Modes form a stack, and only the top one can be removed. The two functions of torch._C
            # are private (torch 2.13): torch.overrides has no public way to look at the top.
            depth = torch._C._len_torch_function_stack()
            if depth and torch._C._get_function_stack_at(depth - 1) is self:
                self.__exit__(None, None, None)
        # By storage, since the body may use another view of the memory that was written.
        used = [tensor for tensor, _ in _alive(self._noted) if _storage(tensor) in self._written]
        self._noted = []
        return _described(used[0]) if used else ""

    def changed(self) -> str:
        """Return a description of a tensor that was changed since the last pull; empty for none."""
        for tensor, version in _alive(self._used):
            if tensor._version != version:
                return f"a tensor that the loader reads ({_described(tensor)})"
        return ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._watches:
            tensors = _tensors_in((*args, *kwargs.values()))
            self._noted += [(weakref.ref(tensor), tensor._version) for tensor in tensors]
        return func(*args, **kwargs)


def _alive(uses: Uses) -> list[tuple[Tensor, int]]:
    """Return the tensors that still exist, with the versions noted."""
    return [(tensor, version) for known, version in uses if (tensor := known()) is not None]


def _tensors_in(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        for part in arg if type(arg) is list or type(arg) is tuple else (arg,):
            if type(part) in _PLAIN and part.layout is torch.strided and not part.is_inference():
                yield part


def _storage(tensor: Tensor) -> int:
    # _cdata is the address of the C++ storage, which all views share (private, torch 2.13).
    return int(tensor.untyped_storage()._cdata)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
