"""Objects whose state a trial puts back: given by the user, declared by tasks, shown by torch.

Nothing is searched for: no object is asked for its attributes to find others behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from swpipe._values.stateful import has_state, modules_in


class Owner(NamedTuple):
    """An object with state, and what to call it, such as "model" or "Linear"."""

    path: str
    owner: Any

    def __str__(self) -> str:
        kind = type(self.owner).__name__
        return self.path if self.path == kind or "(" in self.path else f"{self.path} ({kind})"


class Owners(tuple[Owner, ...]):
    """What is restored though the user has not given it: whatever is shown besides is added."""

    __slots__ = ()


def given_state(state: Any) -> tuple[Owner, ...]:
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
    found = tuple(Owner(str(name), owner) for name, owner in state.items())
    for one in found:
        if not (isinstance(one.owner, torch.Tensor) or has_state(one.owner)):
            raise TypeError(
                f"{one} cannot be restored: give modules, optimizers, generators, tensors, or "
                "objects with state_dict and load_state_dict"
            )
    return found


def modules_of(owners: Iterable[Owner]) -> Iterator[torch.nn.Module]:
    """The modules among some objects, and all modules below them."""
    for one in owners:
        if isinstance(one.owner, torch.nn.Module):
            yield from modules_in(one.owner)


def modules_restored_by(owners: Iterable[Owner]) -> Iterator[torch.nn.Module]:
    """The modules that an object with a state restores, as it says by ``restored_modules``."""
    for one in owners:
        for root in getattr(one.owner, "restored_modules", ()):
            yield from modules_in(root)
