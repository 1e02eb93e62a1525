"""The batches that were pulled ahead of the loop's body, with their contents at the pull."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from swpipe._values.fingerprint import same_node
from swpipe._values.walk import ValueNode, nodes_in
from swpipe.core.loaders import are_same
from swpipe.loops.batch_memory import Parts, content_of, described, parts_of
from swpipe.loops.live_loaders import goes_on


class BatchAsPulled:
    """A batch, with its contents at the pull.

    Attributes:
        number: The number of its pull in the pass, from 1.
        batch: The batch, if it may be given again; else None.
        parts: The checksums of its contents at the pull.

    Args:
        batch: The batch.
        keep: Whether it may be given again, as the same object.
        number: The number of its pull.
    """

    def __init__(self, batch: Any, *, keep: bool, number: int = 0) -> None:
        self.number = number
        self.batch = batch if keep else None
        buffers, structure = parts_of(batch)
        # Buffers are referenced weakly: a batch that is only compared must not keep its memory.
        self._buffers = [described(buffer) for buffer in buffers]
        self._nodes = [*nodes_in(batch)] if keep and not isinstance(batch, Tensor) else []
        samples = zip(buffers, self._buffers, strict=True)
        self.parts = Parts(
            structure, [(one.shape, one.dtype, buffer.content[1]) for one, buffer in samples]
        )

    def is_used_again_by(self, later: BatchAsPulled) -> bool:
        """Return whether a later batch is in memory of this one, with other contents.

        A buffer that is gone does not count: its memory is free for new batches.
        """
        for reference, content, begin, end in self._buffers:
            for _, _, later_begin, later_end in later._buffers:
                if later_begin < end and begin < later_end:
                    buffer = reference()
                    if buffer is not None and content_of(buffer) != content:
                        return True
        return False

    def is_as_pulled(self, batch: Any) -> bool:
        """Return whether the batch has the same structure, numbers and contents of buffers."""
        buffers, structure = parts_of(batch)
        contents = [buffer.content for buffer in self._buffers]
        return structure == self.parts.structure and contents == [*map(content_of, buffers)]

    def is_refilled(self, batch: Any) -> bool:
        """Return whether the batch has other containers, numbers or strings than it had."""
        return parts_of(batch)[1] != self.parts.structure

    def renew(self) -> None:
        """Compare with the current contents from now on."""
        there = ((one, one.reference()) for one in self._buffers)
        self._buffers = [
            one._replace(content=content_of(now)) for one, now in there if now is not None
        ]

    def written(self) -> list[Any]:
        """Return the tensors and arrays that were written since, and still exist."""
        there = ((one.content, one.reference()) for one in self._buffers)
        return [now for content, now in there if now is not None and content_of(now) != content]

    def changed(self) -> list[Any]:
        """Return the buffers that were written, and the containers that hold other values now."""
        now = [(node, ValueNode.of(node.value)) for node in self._nodes]
        return self.written() + [node.value for node, after in now if not same_node(node, after)]


class BatchesAhead:
    """The batches of one pass that were pulled ahead, oldest first.

    The pass calls the methods from one thread at a time.

    Args:
        loader: The loader.
        made_here: Whether the loader's code in this process makes the batches.
        most: The maximum number of batches ahead; 0 if no check needs them.
    """

    def __init__(self, loader: Any, *, made_here: bool, most: int) -> None:
        self._kind = type(loader).__name__
        self._makes = made_here
        self._keeps = goes_on(loader) or type(loader) in (list, tuple)  # may give a batch again
        self._looks = most > 0 and (made_here or self._keeps)
        self._batches: deque[BatchAsPulled] = deque(maxlen=most)
        self._of_body: list[BatchAsPulled] = []
        self._in_use: tuple[BatchAsPulled, ...] = ()  # the batches in use when the last pull began
        # A function for each part that was dropped and modified: whether all references are gone.
        self._gone: list[Callable[[], bool]] = []

    def as_pulled(self, batch: Any, number: int) -> BatchAsPulled | None:
        """Return a batch with its current contents; None if no check needs it."""
        return BatchAsPulled(batch, keep=self._keeps, number=number) if self._looks else None

    def begin_pull(self) -> None:
        """Note the batches in use when a pull begins: the pull must not write them.

        They are noted at the beginning because the body may be done with them at the end.
        """
        self._in_use = (*self._of_body, *self._batches) if self._makes else ()

    def add(self, pulled: BatchAsPulled | None) -> None:
        """Add a batch that was pulled.

        Raises:
            RuntimeError: The batch is in memory of an earlier batch that is still in use.
        """
        if pulled is None:
            return
        for earlier in self._in_use:
            if earlier.is_used_again_by(pulled):
                raise RuntimeError(
                    "the loader has made a batch in the memory of an earlier one, which was "
                    "pulled ahead and is still in use: let it make a new tensor for each batch"
                )
        self._batches.append(pulled)

    def check_as_pulled(self, batch: Any, number: int) -> None:
        """Raise an error if a batch was written since the loader has made it."""
        if not self._makes:
            return
        for pulled in self._batches:
            if pulled.number == number and not pulled.is_as_pulled(batch):
                raise RuntimeError(
                    "a batch that was pulled ahead is not any more what the loader made: its "
                    "memory was written, or its parts replaced, before the loop came to it. Let "
                    f"the loader ({self._kind}) make new tensors, arrays and containers for each "
                    "batch, and write none of them after it has handed it out"
                )

    def end_body(self) -> None:
        """Note that the body has ended, and with it the use of its batch."""
        self._of_body = []

    def hand_out(self) -> None:
        """Give the oldest batch to the body."""
        self._of_body = [self._batches.popleft()] if self._batches else []

    def are_those_of(self, batches: list[Any], begin: int) -> bool:
        """Return whether a list still has these batches, from index ``begin`` on."""
        now = batches[begin : begin + len(self._batches)]
        return are_same([pulled.batch for pulled in self._batches], now)

    def leave(self, count: int) -> Iterator[Any]:
        """Keep ``count`` batches, which were dropped when the pass was left, and return them."""
        while len(self._batches) > count:
            self._batches.popleft()  # handed out by drain()
        # Tasks that ran ahead may have modified these: noted here, refused in a new pass.
        self._gone = [_gone(part) for pulled in self._batches for part in pulled.changed()]
        return (pulled.batch for pulled in self._batches)

    def clear(self) -> None:
        """Forget all batches."""
        self._batches.clear()
        self._of_body.clear()
        self._in_use = ()

    def check_modified(self) -> None:
        """Raise an error if the loader may give batches again that were dropped and modified.

        A batch to which no reference is left cannot come again: the loader makes a new one.
        """
        # Weak references tell whether the loader still has the modified parts.
        if all(gone() for gone in self._gone):
            return
        gc.collect()  # free reference cycles, which would look as if the loader had the parts
        if not all(gone() for gone in self._gone):
            raise RuntimeError(
                "tasks that ran ahead have modified batches that were dropped when the last pass "
                f"was left, and the loader ({self._kind}) would give them again: they would be "
                "modified twice. Let the tasks make new tensors, or the loader new batches in each "
                "pass"
            )


def _gone(part: Any) -> Callable[[], bool]:
    """Return a function that tells whether no reference to a part is left.

    A number or string may be shared by any code, and never counts as gone.
    """
    # The storage counts, not the tensor: a view in the loader keeps the memory alive. A sparse
    # tensor has no storage: torch._C._has_storage tells (private, torch 2.13).
    if isinstance(part, Tensor) and torch._C._has_storage(part):
        expired: Callable[[], bool] = StorageWeakRef(part.untyped_storage()).expired  # type: ignore[no-untyped-call]
        return expired
    if not type(part).__weakrefoffset__:
        return lambda: False
    while isinstance(getattr(part, "base", None), type(part)):  # a view of an array
        part = part.base
    reference = weakref.ref(part)
    return lambda: reference() is None
