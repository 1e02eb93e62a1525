"""What was seen of each task in each recorded iteration: plain data, without a tensor in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from swpipe.inference.moment import Difference, Entry
from swpipe.inference.slots import Slot
from swpipe.inference.storages import StorageId


class TaskFacts(NamedTuple):
    """One task in one iteration.

    Attributes:
        task: Its name.
        reads: Attributes that it asked for.
        sets: Attributes that it set.
        deletes: Attributes that it deleted.
        held: Attribute to what it held when the task began.
        slots: Slot to its storages when the task began.
        read: Storages that operators read.
        replayed: Those that only autograd's engine read, by itself: what forward saved.
        written: Storages that operators wrote.
        met: Storages that operators met at all.
        made: Storages that came out of an operator first.
        difference: Between the task's beginning and its end.
        stepped: Optimizers whose ``step`` ran; their names.
        collectives: Names of operators that communicate.
        sizes: Attribute that it set to its bytes; 0 where it deleted it.
        opaque: Attribute that it set to the class of something in it that cannot be looked into.
    """

    task: str
    reads: frozenset[str]
    sets: frozenset[str]
    deletes: frozenset[str]
    held: Mapping[str, frozenset[Entry]]
    slots: Mapping[Slot, frozenset[StorageId]]
    read: frozenset[StorageId]
    replayed: frozenset[StorageId]
    written: frozenset[StorageId]
    met: frozenset[StorageId]
    made: frozenset[StorageId]
    difference: Difference
    stepped: frozenset[str]
    collectives: frozenset[str]
    sizes: Mapping[str, int]
    opaque: Mapping[str, str]


class IterationFacts(NamedTuple):
    """One iteration.

    Attributes:
        tasks: In serial order.
        before: Storages that were there before it began, the batch's left out.
        survivors: Storages that were there when all that the context held was gone.
    """

    tasks: tuple[TaskFacts, ...]
    before: frozenset[StorageId]
    survivors: frozenset[StorageId]
