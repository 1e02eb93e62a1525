"""One pass over a dataloader's iterator, with TorchRec's rules of where it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from swpipe.tasks.torchrec.uneven import EvenIterator


class Pass(Iterator[Any]):
    """The batches of an iterator up to StopIteration or None.

    Args:
        source: The user's iterator.
        keep_back: How many batches are read ahead, and dropped at the end of the data: what
            ``execute_all_batches=False`` means.
        limit: Hand out so many batches at most; the others stay in the iterator.

    Attributes:
        stopped: ``stop`` was called; not set by the end of the data.
    """

    def __init__(
        self, source: Iterator[Any], *, keep_back: int = 0, limit: int | None = None
    ) -> None:
        self.source = source
        self._keep_back = keep_back
        self._left = limit
        self._kept: deque[Any] = deque()
        self._ended = False
        self.stopped = False

    @property
    def kept(self) -> int:
        """Batches that were read and not handed out."""
        return len(self._kept)

    @property
    def waiting(self) -> int:
        """The same, and batches that an ``EvenIterator`` has pulled for later steps."""
        return self.kept + (self.source.waiting if isinstance(self.source, EvenIterator) else 0)

    def stop(self) -> None:
        """Read no further; batches that were read are still handed out."""
        self.stopped = True

    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        if not (self.stopped or self._ended):
            self._read_ahead()
        if not self._kept:
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        return self._kept.popleft()

    def _read_ahead(self) -> None:
        while len(self._kept) <= self._keep_back:
            batch = next(self.source, None)
            if batch is None:
                self._kept.clear()
                self._ended = True
                return
            self._kept.append(batch)
