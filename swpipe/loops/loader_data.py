"""The data of a loader that is ahead, which the loop must not change: its lengths, its tensors.

A plain loop would go on with what a replay buffer has got in the meantime. A loader may change its
own length, in a pull; the tensors of a ``TensorDataset`` it does not write.
"""

from __future__ import annotations

from time import thread_time
from typing import Any

from torch.utils.data import TensorDataset

_QUICK_S = 1e-3
"""A length that takes more of the thread's CPU time is not asked for. By wall time a busy machine
would decide; 0.15 ms of CPU time were seen there for one that does nothing."""


class LoaderData:
    """The data of one loader; the thread that pulls asks for it.

    Attributes:
        changed: What somebody else has changed in this pass, in words; empty for nothing.
    """

    def __init__(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        self._parts: list[Any] = [loader, dataset]
        self._tensors = dataset.tensors if type(dataset) is TensorDataset else ()

    def begin(self) -> None:
        """A new pass begins, on the caller's thread."""
        self._parts = [part for part in self._parts if _has_quick_length(part)]
        self._lengths: list[int] | None = None  # after the pull before
        self._versions = self._versions_now()
        self.changed = ""

    def before_pull(self) -> None:
        """Compare it with what it was after the pull before."""
        lengths = self._lengths_now()
        if self._lengths is not None and lengths != self._lengths:
            self.changed = "the length of the loader or of its dataset"
        if self._versions_now() != self._versions:
            self.changed = "a tensor of the loader's dataset"

    def after_pull(self) -> None:
        """Note the lengths: a loader may change its own, in a pull."""
        self._lengths = self._lengths_now()

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors if not tensor.is_inference()]

    def _lengths_now(self) -> list[int]:
        try:
            return [len(part) for part in self._parts]
        except Exception:  # noqa: BLE001 - one that had a length has none any more
            self._parts = []
            self._lengths = None
            return []


def _has_quick_length(part: Any) -> bool:
    begin_s = thread_time()
    try:
        len(part)
    except Exception:  # noqa: BLE001 - it has none
        return False
    return thread_time() - begin_s <= _QUICK_S
