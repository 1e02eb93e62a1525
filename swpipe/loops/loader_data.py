"""The data of a loader that is ahead, which the loop must not change: its lengths, its tensors.

A plain loop would go on with what a replay buffer has got in the meantime. A loader may change its
own length, in a pull; the tensors of a ``TensorDataset`` it does not write.
"""

from __future__ import annotations

from collections.abc import Sized
from time import thread_time
from typing import Any

from torch.utils.data import TensorDataset

_QUICK_S = 1e-3
"""A length that takes more of the thread's CPU time is not asked for again. By wall time a busy
machine would decide; 0.15 ms of CPU time were seen there for one that does nothing."""


class LoaderData:
    """The data of one loader; the thread that pulls asks for it.

    Attributes:
        changed: What somebody else has changed in this pass, in words; empty for nothing.
    """

    def __init__(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        parts: list[Any] = [loader, dataset]
        self._sized: list[Sized] = [part for part in parts if hasattr(type(part), "__len__")]
        self._tensors = dataset.tensors if type(dataset) is TensorDataset else ()
        self.begin()

    def begin(self) -> None:
        """A new pass begins."""
        self._after: dict[int, int] = {}
        self._versions = self._versions_now()
        self.changed = ""

    def before_pull(self) -> None:
        """Compare it with what it was after the pull before."""
        now = self._lengths_now()
        if any(self._after.get(part, length) != length for part, length in now.items()):
            self.changed = "the length of the loader or of its dataset"
        if self._versions_now() != self._versions:
            self.changed = "a tensor of the loader's dataset"

    def after_pull(self) -> None:
        """Note what it is."""
        self._after = self._lengths_now()

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors if not tensor.is_inference()]

    def _lengths_now(self) -> dict[int, int]:
        found = {}
        for part in self._sized[:]:
            begin_s = thread_time()
            try:
                found[id(part)] = len(part)
            except Exception:  # noqa: BLE001 - it has none
                self._sized.remove(part)
                continue
            if thread_time() - begin_s > _QUICK_S:
                self._sized.remove(part)
        return found
