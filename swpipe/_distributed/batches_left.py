"""The number of batches that an iterator has left, if it is known for certain."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

_SEQUENCES: tuple[Sequence[Any], ...] = ([], (), range(0), range(1 << 70))
_OF_SEQUENCES = tuple({type(iter(sequence)) for sequence in _SEQUENCES})
"""The types of iterators whose ``__length_hint__`` is exact."""


@runtime_checkable
class KnowsItsEnd(Protocol):
    """The interface of swpipe's own iterators that know how many batches they have left.

    ``agreed`` tells whether the ranks have already agreed on its batches.
    """

    @property
    def agreed(self) -> bool: ...

    def batches_left(self) -> int | None:
        """Return the number of batches; None if it is not known."""


def batches_left(iterator: Iterator[Any]) -> int | None:
    """Return how many batches ``iterator`` has left; None if that is not known.

    The number is known for iterators over lists, tuples and ranges, for ``itertools.cycle``, and
    for torch's ``DataLoader`` over a map-style dataset whose sampler has a length.
    """
    if isinstance(iterator, KnowsItsEnd):
        return iterator.batches_left()
    if isinstance(iterator, _OF_SEQUENCES):
        return operator.length_hint(iterator)
    if isinstance(iterator, itertools.cycle):
        # An empty cycle ends at its first pull, which is an error on its rank.
        return sys.maxsize
    if isinstance(iterator, _BaseDataLoaderIter):
        if iterator._dataset_kind != _DatasetKind.Map:
            # An iterable dataset defines its own length, which need not be true, and each worker
            # iterates over it.
            return None
        try:
            # ``_BaseDataLoaderIter``, ``_dataset_kind`` and ``_num_yielded`` are private (torch
            # 2.13).
            return max(0, len(iterator) - iterator._num_yielded)
        except TypeError:  # a sampler without a length
            return None
    return None
