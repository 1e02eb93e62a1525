"""How many batches an iterator has left, where that is known for sure."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

_SEQUENCES: tuple[Sequence[Any], ...] = ([], (), range(0), range(1 << 70))
_OF_SEQUENCES = tuple({type(iter(sequence)) for sequence in _SEQUENCES})
"""The iterators whose ``__length_hint__`` is no estimate."""


@runtime_checkable
class KnowsItsEnd(Protocol):
    """An iterator of swpipe's own that knows how many batches it has left.

    ``agreed`` says whether the ranks agree on its batches already.
    """

    @property
    def agreed(self) -> bool: ...

    def batches_left(self) -> int | None:
        """Return the number of batches; None if it is not known."""


def batches_left(iterator: Iterator[Any]) -> int | None:
    """Return how many batches ``iterator`` has left; None if that is not known.

    It is known of iterators over lists, tuples and ranges, of ``itertools.cycle``, and of torch's
    ``DataLoader`` over a map-style dataset, whose samplers say their length.
    """
    if isinstance(iterator, KnowsItsEnd):
        return iterator.batches_left()
    if isinstance(iterator, _OF_SEQUENCES):
        return operator.length_hint(iterator)
    if isinstance(iterator, itertools.cycle):
        return sys.maxsize  # an empty one ends at its first pull, which is an error on its rank
    if isinstance(iterator, _BaseDataLoaderIter):
        if iterator._dataset_kind != _DatasetKind.Map:
            return None  # its length is what the dataset says of itself, for each worker
        try:
            return max(0, len(iterator) - iterator._num_yielded)
        except TypeError:  # a sampler without a length
            return None
    return None
