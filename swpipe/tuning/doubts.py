"""Why what runs ahead should not, by what the code can reach now.

What runs ahead is chosen once, when the tasks are recorded. Between two passes a script may change
what the choice depends on: it unfreezes a module that a task uses ahead, sets a transform that
draws, or lets the loader use what a task changes. So the doubts at the beginning of each pass are
compared with those of then: one that is new was not considered. Epochs, learning rates, weights and
the like raise none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swpipe._state.draws import modules_draw
from swpipe._state.generators import TORCH
from swpipe._state.reach import reach_of
from swpipe._state.reached import Reach
from swpipe._tensors.stateful import modules_in
from swpipe.core.effects import Effects, Location
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.inference.loader_code import LOADER
from swpipe.tuning.choice import (
    Overlap,
    assigned,
    reaches_of_undeclared,
    trainable,
    why_loader_waits,
)
from swpipe.tuning.loader_changes import LoaderChanges
from swpipe.tuning.reached_values import ReachedValues


class Doubts:
    """What the code can reach now.

    Attributes:
        reasons: Why what runs ahead should not, a sentence each.

    Args:
        loader: What is known of the loader.
        tasks: The tasks, in serial order.
        found: What runs ahead.
    """

    def __init__(
        self, loader: LoaderChanges, tasks: Sequence[PipelineTask], found: Overlap
    ) -> None:
        self.reasons = set[str]()
        self._loader = loader
        reaches = {one.name: reach_of(one) for one in tasks}
        self._ahead = {name: reaches[name] for name in found.ahead}
        if found.loader_ahead:
            loader.look()
            self._find(tasks, reaches, found)

    def values(self, iterator: Any) -> ReachedValues:
        """The values that the code that runs ahead can use, in a pass with this iterator."""
        self._loader.look(iterator)
        return ReachedValues([self._loader.reach, *self._ahead.values()], self._loader.generators)

    def _find(
        self, tasks: Sequence[PipelineTask], reaches: Mapping[str, Reach], found: Overlap
    ) -> None:
        own, undeclared = self._loader, reaches_of_undeclared(tasks, reaches)
        effects = {
            name: _with_draws(seen, undeclared[name]) if name in undeclared else seen
            for name, seen in found.recording.effects.items()
        }
        self.reasons |= {*why_loader_waits(tasks, reaches, effects, own)}
        others = {name: reach for name, reach in undeclared.items() if name not in self._ahead}
        ahead = {repr(name): reach for name, reach in self._ahead.items()}
        for code, reach in {LOADER: own.reach, **ahead}.items():
            self.reasons |= {*_of_code(code, reach), *_shared(code, reach, others)}
        for name, reach in self._ahead.items():
            self.reasons |= {f"{name!r} draws from {one}." for one in reach.draws}
            if places := assigned(reach):
                self.reasons.add(f"{name!r} changes {listed(sorted(places), most=3)}.")


def _with_draws(seen: Effects, reach: Reach) -> Effects:
    """With draws from generators that its code names, or that modules in training may do."""
    modules = [m for one in _modules(reach) for m in modules_in(one) if m.training]
    rates = modules_draw(one for one in modules if getattr(one, "p", 1))
    names = reach.draws | ({TORCH} if rates else set())
    return replace(seen, writes=seen.writes | {Location(name, True) for name in names})


def _modules(reach: Reach) -> list[torch.nn.Module]:
    found = [reach.holders[number] for number in reach.wholes]
    return [one for one in found if isinstance(one, torch.nn.Module)]


def _of_code(name: str, reach: Reach) -> Iterator[str]:
    """What code that runs ahead can reach of what is trained, or acts otherwise in training."""
    for one in trainable(reach):
        yield f"{name} can reach {one}, which is trained."
    for module in _modules(reach):
        called = min(reach.wholes[id(module)]) or type(module).__name__
        for path, inner in module.named_modules(prefix=called):
            if inner.training:
                yield f"{name} can reach {path}, which is in training mode."


def _shared(name: str, own: Reach, others: Mapping[str, Reach]) -> Iterator[str]:
    """What it can reach and another task may change."""
    tensors = _tensors(own)
    for task, reach in others.items():
        for place, path in own.places.items():
            if place in reach.places and place not in own.inner and reach.may_change(place):
                yield f"{name} can reach {path}, which {task!r} may change."
        both = tensors.keys() & _tensors(reach).keys() if reach.changes_tensors else ()
        for number in both:
            yield f"{name} can reach {tensors[number]}, which {task!r} may change."


def _tensors(reach: Reach) -> dict[int, str]:
    """The ids of tensors, and of those of modules, to what code calls the tensor or module."""
    found = dict[int, str]()
    for number, names in reach.wholes.items():
        one = reach.holders[number]
        inside = [*one.parameters(), *one.buffers()] if isinstance(one, torch.nn.Module) else [one]
        name = min(names) or type(one).__name__
        found |= {id(tensor): name for tensor in inside if isinstance(tensor, Tensor)}
    return found
