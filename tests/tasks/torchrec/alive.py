"""The bytes that a pipeline has made and that are still there, by storage, as operators run.

Batches are large beside all else, all of one size, and copied: on a CPU, their copies are what a
device would hold. A period is a call of ``progress``; its figure is the most at any operator. A
thread of gloo may hold a buffer a little longer than its exchange takes, so of several periods,
which all do the same, the least counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tasks.torchrec.models import DENSE, ROWS, TABLES, Batch, KeyedJaggedTensor

ROW_IDS, BATCH_ROWS = 40, 64


@dataclass
class CopiedBatch(Batch):
    """A batch whose copy to the CPU is one."""

    def to(self, device: torch.device, non_blocking: bool = False) -> CopiedBatch:
        ids = KeyedJaggedTensor(
            self.ids.keys(),
            self.ids.values().clone(),
            lengths=self.ids.lengths().clone(),
            stride=self.ids.stride(),
        )
        copied = CopiedBatch(self.dense.clone(), ids, self.labels.clone())
        Alive.add_all([copied.dense, ids.values(), ids.lengths(), copied.labels])
        return copied


def large_batches(count: int) -> list[CopiedBatch]:
    """This rank's batches."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.full((TABLES * BATCH_ROWS,), ROW_IDS)
    return [
        CopiedBatch(
            torch.rand(BATCH_ROWS, DENSE, generator=draws),
            KeyedJaggedTensor.from_lengths_sync(
                [f"f{t}" for t in range(TABLES)],
                torch.randint(0, ROWS, (int(lengths.sum()),), generator=draws),
                lengths,
            ),
            torch.randint(0, 2, (BATCH_ROWS,), generator=draws).float(),
        )
        for _ in range(count)
    ]


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered; ``peak`` is the most while it measures, since it was set to 0."""

    only_watches = True
    _entered: Alive | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.measures = False
        self.peak = 0
        self._made: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> Alive:
        Alive._entered = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        Alive._entered = None
        super().__exit__(*failure)

    @classmethod
    def add_all(cls, tensors: list[Tensor]) -> None:
        """Count tensors that another thread has made, perhaps."""
        if cls._entered is not None:
            for tensor in tensors:
                cls._entered._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._add(tensor)
        if made and self.measures:
            self.peak = max(self.peak, self._bytes())
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made:
            self._made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _bytes(self) -> int:
        found = 0
        for number, reference in list(self._made.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._made[number]
            else:
                found += storage.nbytes()  # 0 where TorchRec has emptied it
        return found


CALLS = 6
STEADY = (1, 2)
"""The calls of ``progress`` in which all stages of every class work on a batch."""


def peak(pipeline: Any) -> int:
    """The least of the peaks of steady periods of one pass."""
    data, peaks = iter(large_batches(CALLS)), []
    with Alive() as alive:
        for call in range(CALLS):
            alive.peak, alive.measures = 0, call in STEADY
            pipeline.progress(data)
            peaks.append(alive.peak)
    return min(peaks[call] for call in STEADY)
