"""Arrays of numpy that share memory with a tensor: whoever uses the one uses the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from swpipe._state.reached import Reach
from swpipe.device import on_cpu
from swpipe.inference.accesses import Access
from swpipe.inference.state_items import ReachableItems, StateItem


def accesses_by_arrays(reach: Reach, reached: ReachableItems) -> Iterator[tuple[StateItem, Access]]:
    """The state items that a task's code may use through an array of numpy, and how.

    Args:
        reach: What the code can reach.
        reached: All state items.
    """
    numpy: Any = sys.modules.get("numpy")
    arrays = [
        (place, _whole(reach.holders[place.holder], numpy))
        for place in reach.places
        if not place.name and numpy and isinstance(reach.holders[place.holder], numpy.ndarray)
    ]
    if not arrays:
        return
    tensors = [one for one in reached.tensors.items() if _is_in_host_memory(one[1])]
    storages = [tensor.untyped_storage() for _, tensor in tensors]
    begin = numpy.array([storage.data_ptr() for storage in storages], dtype=numpy.uint64)
    end = begin + numpy.array([storage.nbytes() for storage in storages], dtype=numpy.uint64)
    for place, array in arrays:
        low = array.ctypes.data
        for index in numpy.flatnonzero((begin < low + array.nbytes) & (end > low)):
            yield tensors[index][0], Access(True, reach.may_change(place))


def _whole(array: Any, numpy: Any) -> Any:
    """The array of which it is a view: its memory is in one piece."""
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


def _is_in_host_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and on_cpu(tensor)
