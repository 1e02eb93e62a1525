"""Memory that tasks declare a state to lie in.

What lies there goes by the state's name, whatever else has a name for it: a parameter of a model, a
view that an object keeps, a shard. So what tasks were seen to do to it, and what they declare, is
said of one and the same thing, and a plan may allow it to be stale by the name that its author
knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from swpipe._tensors.containers import LEAF, kind_of
from swpipe._tensors.pytree import nodes_in
from swpipe.core.errors import PlanError, Problem
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.inference.slots import Slot, slots_of
from swpipe.inference.storages import StorageId, nbytes, unsharded

DECLARED = "declared"
"""The kind of slots in such memory; their root is the state."""


def by_declaration(
    slots: Mapping[Slot, Tensor], tasks: Iterable[PipelineTask]
) -> dict[Slot, Tensor]:
    """The same slots; those in declared memory belong to the states that lie there.

    Raises:
        PlanError: Two states are to lie in the same memory, or one in what is none.
    """
    state_of = _states(tasks)
    named = {}
    for slot, tensor in slots.items():
        state = next((state_of[n] for n in nbytes(tensor) if n in state_of), None)
        mine = slot if state is None else slot._replace(root=state, kind=DECLARED)
        named[mine] = tensor
    return named


def _states(tasks: Iterable[PipelineTask]) -> dict[StorageId, str]:
    """Storage to the state that is declared to lie there."""
    found: dict[StorageId, str] = {}
    for task in tasks:
        for io in task.io:
            for tensor in _tensors(task, io):
                for storage in nbytes(tensor):
                    other = found.setdefault(storage, str(io.state))
                    if other != io.state:
                        raise _refused(
                            task,
                            io,
                            f"a tensor of shape {list(tensor.shape)} that is state {other!r}'s "
                            "too: give it to one of them",
                        )
    return found


def _tensors(task: PipelineTask, io: DeclaredIO) -> Iterator[Tensor]:
    """Those that were given, those of modules, and this rank's shards of ShardedTensors."""
    for node in nodes_in([] if io.memory is None else [io.memory]):
        for item in node.children:
            if isinstance(item, torch.nn.Module):
                yield from (part for _, one in slots_of("", item) for part in unsharded(one))
            elif isinstance(item, Tensor) or hasattr(item, "local_shards"):
                yield from unsharded(item)
            elif kind_of(type(item)) is LEAF:
                raise _refused(task, io, f"{item!r}: give tensors, or modules with theirs")


def _refused(task: PipelineTask, io: DeclaredIO, what: str) -> PlanError:
    text = f"task {task.name!r} declares that state {io.state!r} lies in {what}"
    return PlanError([Problem(text, (task.name,))])
