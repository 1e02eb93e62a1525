"""A count of the bytes that tasks have made and that still exist, while a pipeline runs.

It uses no recordings, plans or timelines: a dispatch mode in each task sees what operators make,
and weak references show what still exists, at each operator and around each task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swpipe import IterContext, PipelineTask
from swpipe._values.walk import tensors_in


@dataclass(eq=False)
class _Memory:
    reference: StorageWeakRef
    size: int


class LiveBytes:
    """The live bytes of the tensors that tasks have made, without those that remain in the end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: dict[int, _Memory] = {}
        self._changes: list[tuple[_Memory, int]] = []

    @property
    def peak(self) -> int:
        """The largest number of live bytes."""
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
        """Record which memory is gone."""
        with self._lock:
            for number, made in list(self._made.items()):
                if made.reference.expired():
                    self._changes.append((made, -made.size))
                    del self._made[number]

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator whose batches are counted when they are pulled."""
        return map(self._counted, batches)

    def _counted(self, batch: Any) -> Any:
        self.look()
        self._add_all(batch)
        return batch

    def watched(self, tasks: Iterable[PipelineTask]) -> list[PipelineTask]:
        """Return the tasks with their tensors counted."""
        return [replace(task, fn=self._watched(task.fn)) for task in tasks]

    def _watched(self, fn: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(ctx: IterContext) -> None:
            self.look()
            with _Made(self):
                fn(ctx)
            self.look()
            self._add_all(list(vars(ctx).values()))

        return run

    def _add_all(self, value: Any) -> None:
        for tensor in tensors_in(value):
            self.add(tensor)


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
        return result
