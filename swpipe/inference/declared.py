"""State that tasks declare by its memory (``DeclaredIO(memory=...)``).

Tensors in declared memory belong to the declared state, whatever else refers to them: a model's
parameter, a view that an object keeps, a shard. So observed and declared accesses are to the same
state, and a plan can allow it to be stale by the declared name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from swpipe._tensors.containers import LEAF, kind_of
from swpipe._tensors.pytree import nodes_in
from swpipe._tensors.stateful import has_state_dict
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.errors import PlanError, Problem
from swpipe.inference.state_items import StateItem, items_of
from swpipe.inference.storages import StorageId, nbytes, unsharded

DECLARED = "declared"
"""The kind of items in declared memory; their owner is the declared state."""


def assign_declared(
    items: Mapping[StateItem, Tensor], tasks: Iterable[PipelineTask]
) -> dict[StateItem, Tensor]:
    """The same items, with those in declared memory assigned to the states declared there.

    Raises:
        PlanError: Two states are declared in the same memory, or a declared memory is not tensors.
    """
    state_of = _declared_states(tasks)
    assigned = {}
    for item, tensor in items.items():
        state = next((state_of[n] for n in nbytes(tensor) if n in state_of), None)
        key = item if state is None else item._replace(owner=state, kind=DECLARED)
        assigned[key] = tensor
    return assigned


def _declared_states(tasks: Iterable[PipelineTask]) -> dict[StorageId, str]:
    """Storage to the state declared there."""
    found: dict[StorageId, str] = {}
    for task, io in ((one, io) for one in tasks for io in one.io):
        for tensor in _tensors(task, io):
            for storage in nbytes(tensor):
                other = found.setdefault(storage, str(io.state))
                if other != io.state:
                    raise _refused(
                        task,
                        io,
                        f"a tensor of shape {list(tensor.shape)} that also belongs to state "
                        f"{other!r}: declare it for one of them",
                    )
    return found


def declared_tensors(tasks: Iterable[PipelineTask]) -> Iterator[tuple[DeclaredIO, Tensor]]:
    """The tensors in declared memory, and who declares it."""
    for task, io in ((one, io) for one in tasks for io in one.io):
        yield from ((io, tensor) for tensor in _tensors(task, io))


def _tensors(task: PipelineTask, io: DeclaredIO) -> Iterator[Tensor]:
    """The given tensors, those of given modules, and this rank's shards of ShardedTensors."""
    for node in nodes_in([] if io.memory is None else [io.memory]):
        for item in node.children:
            if isinstance(item, torch.nn.Module):
                yield from (part for _, one in items_of("", item) for part in unsharded(one))
            elif isinstance(item, Tensor) or hasattr(item, "local_shards"):
                yield from unsharded(item)
            elif kind_of(type(item)) is LEAF and not has_state_dict(item):
                what = f"{item!r}: give tensors, modules, or objects with state_dict"
                raise _refused(task, io, what)


def _refused(task: PipelineTask, io: DeclaredIO, what: str) -> PlanError:
    text = f"task {task.name!r} declares that state {io.state!r} lies in {what}"
    return PlanError([Problem(text, (task.name,))])
