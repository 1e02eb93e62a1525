"""The data of a loader that is ahead, which the loop must not change: its lengths, its tensors.

If a replay buffer grew during the loop, a plain loop would use the new rows. A loader may change
its own length in a pull; it does not write the tensors of a ``TensorDataset``.
"""

from __future__ import annotations

from time import thread_time
from typing import Any

from torch.utils.data import TensorDataset

_QUICK_S = 1e-3
"""Seconds of the thread's CPU time: a ``len()`` that takes more is not called again. Wall time
would depend on how busy the machine is; 0.15 ms of CPU time were seen there for a trivial one."""


class LoaderData:
    """The data of one loader, checked by the thread that pulls.

    Attributes:
        changed: What other code has changed in this pass, in words; empty for nothing.
    """

    def __init__(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", None)
        self._sized: list[Any] = [loader, dataset]
        self._tensors = dataset.tensors if type(dataset) is TensorDataset else ()

    def begin(self) -> None:
        """Note the data at the beginning of a pass, on the caller's thread."""
        self._sized = [part for part in self._sized if _has_quick_length(part)]
        self._lengths: list[int | None] | None = None  # the lengths after the previous pull
        self._versions = self._versions_now()
        self.changed = ""

    def before_pull(self) -> None:
        """Compare the data with its state after the previous pull."""
        if self._lengths is not None and [*map(_length, self._sized)] != self._lengths:
            self.changed = "the length of the loader or of its dataset"
        if self._versions_now() != self._versions:
            self.changed = "a tensor of the loader's dataset"

    def after_pull(self) -> None:
        """Note the lengths after a pull, since a loader may change its own in a pull."""
        self._lengths = [*map(_length, self._sized)]

    def _versions_now(self) -> list[int]:
        return [tensor._version for tensor in self._tensors if not tensor.is_inference()]


def _length(part: Any) -> int | None:
    try:
        return len(part)
    except Exception:  # noqa: BLE001 - of the user's code: it has none, or none any more
        return None


def _has_quick_length(part: Any) -> bool:
    begin_s = thread_time()
    return _length(part) is not None and thread_time() - begin_s <= _QUICK_S
