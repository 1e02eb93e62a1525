"""Objects whose state a trial puts back: given by the user, declared by tasks, shown by torch.

Nothing is searched for: no object is asked for its attributes to find others behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from swpipe._tensors.pytree import nodes_in
from swpipe._tensors.stateful import has_state
from swpipe.core.task import PipelineTask


class Found(NamedTuple):
    """An object with state, and what to call it, such as "model" or "Linear"."""

    path: str
    owner: Any

    def __str__(self) -> str:
        kind = type(self.owner).__name__
        return self.path if self.path == kind or "(" in self.path else f"{self.path} ({kind})"


class Owners(tuple[Found, ...]):
    """What is restored though the user has not given it: whatever is shown besides is added."""

    __slots__ = ()


def given_state(state: Any) -> tuple[Found, ...]:
    """The objects that the user gave: one, several, or a mapping with names.

    Raises:
        TypeError: One of them has no state that can be restored.
    """
    if isinstance(state, Owners):
        return state
    if isinstance(state, torch.Tensor) or has_state(state):
        state = {"state": state}
    elif not isinstance(state, Mapping):
        state = {f"state[{index}]": owner for index, owner in enumerate(state)}
    found = tuple(Found(str(name), owner) for name, owner in state.items())
    for one in found:
        if not (isinstance(one.owner, torch.Tensor) or has_state(one.owner)):
            raise TypeError(
                f"{one} cannot be restored: give modules, optimizers, generators, tensors, or "
                "objects with state_dict and load_state_dict"
            )
    return found


def declared_owners(tasks: Iterable[PipelineTask]) -> Iterator[Found]:
    """Modules, tensors and objects with ``state_dict`` in the memory of declared states."""
    seen: set[int] = set()
    for io in (io for task in tasks for io in task.io if io.memory is not None):
        for child in (child for node in nodes_in([io.memory]) for child in node.children):
            shards = child.local_shards() if hasattr(child, "local_shards") else None
            for owner in [child] if shards is None else [shard.tensor for shard in shards]:
                restorable = isinstance(owner, torch.Tensor) or has_state(owner)
                if restorable and id(owner) not in seen:
                    seen.add(id(owner))
                    yield Found(str(io.state), owner)
