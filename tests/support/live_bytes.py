"""Counts the bytes that tasks have made and that are still there, while a pipeline runs.

It knows nothing of recordings, plans or timelines: a dispatch mode in each task sees what operators
make, and weak references say what is left of it, at each of them and before and after each task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swpipe import IterContext, PipelineTask
from swpipe._values.walk import leaves_in, tensors_in


class _ArrayReference(NamedTuple):
    array: ReferenceType[Any]

    def expired(self) -> bool:
        return self.array() is None


@dataclass(eq=False)
class _Memory:
    reference: StorageWeakRef | _ArrayReference
    size: int


class LiveBytes:
    """What is alive of what was made, without what is still there in the end.

    Args:
        at_operator: Called at each operator that makes something.

    Attributes:
        operators: How many there were.
    """

    def __init__(self, at_operator: Callable[[], object] = lambda: None) -> None:
        self.operators = 0
        self.at_operator = at_operator
        self._lock = threading.RLock()
        self._made: dict[int, _Memory] = {}
        self._changes: list[tuple[_Memory | None, int]] = []
        self._bytes: dict[ReferenceType[IterContext], int] = {}

    @property
    def peak(self) -> int:
        """The most that was found."""
        self.look()
        left = {*self._made.values()}
        return max(accumulate(more for made, more in self._changes if made not in left))

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._made:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                made = _Memory(reference, storage.nbytes())
                self._made[storage._cdata] = made
                self._changes.append((made, made.size))

    def look(self) -> None:
        """Note what is gone."""
        with self._lock:
            for number, made in list(self._made.items()):
                if made.reference.expired():
                    self._changes.append((made, -made.size))
                    del self._made[number]
            for ctx in [ctx for ctx in self._bytes if ctx() is None]:
                self._changes.append((None, -self._bytes.pop(ctx)))

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches that are counted when they are pulled."""
        return map(self._counted, batches)

    def _counted(self, batch: Any) -> Any:
        self.look()
        self._add_all(batch)
        return batch

    def watched(self, tasks: Iterable[PipelineTask]) -> list[PipelineTask]:
        """The tasks, with what they make counted."""
        return [replace(task, fn=self._watched(task.fn)) for task in tasks]

    def _watched(self, fn: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(ctx: IterContext) -> None:
            self._add_bytes(ctx)
            self.look()
            with _Made(self):
                fn(ctx)
            self.look()
            self._add_all(list(vars(ctx).values()))

        return run

    def _add_bytes(self, ctx: IterContext) -> None:
        """Bytes of a batch have no weak references: they go with their context."""
        with self._lock:
            if ref(ctx) not in self._bytes:
                leaves = tree_leaves(vars(ctx).get("batch"))
                self._bytes[ref(ctx)] = sum(len(leaf) for leaf in leaves if isinstance(leaf, bytes))
                self._changes.append((None, self._bytes[ref(ctx)]))

    def _add_all(self, value: Any) -> None:
        for leaf in (*tensors_in(value), *leaves_in(value)):
            if isinstance(leaf, Tensor):
                self.add(leaf)
            elif isinstance(leaf, np.ndarray):
                self._add_array(leaf)

    def _add_array(self, array: Any) -> None:
        """Count what an array is a view of, once; a tensor it may be."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        if isinstance(array.base, Tensor):
            self.add(array.base)
            return
        with self._lock:
            if id(array) not in self._made:
                self._made[id(array)] = made = _Memory(_ArrayReference(ref(array)), array.nbytes)
                self._changes.append((made, made.size))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    only_watches = True

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made and not {leaf.untyped_storage()._cdata for leaf in made} <= known:
            self._live.look()
            for leaf in made:
                self._live.add(leaf)
            del leaf
            self._live.operators += 1
            self._live.at_operator()
        return result
