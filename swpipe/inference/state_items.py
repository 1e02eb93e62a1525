"""State outside the context that tasks can reach: parameters, gradients, optimizer state, tensors.

A state item keeps its name while its tensor may be replaced: ``model.net.weight``, its ``.grad``,
``optimizer: exp_avg of model.net.weight``, or a tensor that an object or a closure refers to. The
items are collected again after each task, since optimizers create their state in their first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from swpipe._state.discovery import Found, find_all
from swpipe._tensors.pytree import grad_or_none, tensors_in
from swpipe._tensors.stateful import PLAIN, is_generator, modules_in, named_modules_in
from swpipe.core.task import PipelineTask
from swpipe.inference.storages import unsharded


class StateItem(NamedTuple):
    """Names one piece of state.

    Attributes:
        name: "model.net.weight".
        owner: The object that it belongs to: "model".
        kind: "parameters", "buffers", "gradients", "state" of an optimizer, "options" of an
            optimizer, "mode" of a module, "declared", or "" for anything that belongs to neither a
            module nor an optimizer.
    """

    name: str
    owner: str
    kind: str


@dataclass
class ReachableItems:
    """What tasks can reach.

    Attributes:
        tensors: Item to its tensor.
        options: Optimizer's name to its id and the options of its parameter groups.
        generators: Name to random number generator.
        plain: Path to a plain Python value, or to the length of a container.
    """

    tensors: dict[StateItem, Tensor] = field(default_factory=dict)
    options: dict[str, tuple[int, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


def reachable_items(tasks: Iterable[PipelineTask], *, gradients: bool = True) -> ReachableItems:
    """Everything that the tasks can reach now.

    While another thread trains, torch may crash where ``parameter.grad`` is read: then only the
    others are safe to look at.
    """
    reached = ReachableItems()
    count: Counter[str] = Counter()
    names_of: dict[int, str] = {}
    optimizers: list[tuple[str, Optimizer]] = []
    covered: set[int] = set()

    def unique(name: str) -> str:
        count[name] += 1
        return name if count[name] == 1 else f"{name} ({count[name]})"

    for found in find_all(tasks):
        owner, path = found.owner, _path(found)
        if id(owner) in covered:  # a module within one before it, with which its tensors came
            continue
        if isinstance(owner, torch.nn.Module):
            covered.update(map(id, modules_in(owner)))
        if is_generator(owner):
            reached.generators[unique(path)] = owner
        elif isinstance(owner, Optimizer):
            optimizers.append((unique(path), owner))
        elif isinstance(owner, Tensor | torch.nn.Module):
            _add(reached, names_of, items_of(unique(path), owner), gradients)
        elif isinstance(owner, PLAIN):
            reached.plain[unique(path)] = owner
        elif isinstance(owner, list | dict | set):
            reached.plain[unique(f"the length of {path}")] = len(owner)
    for root, optimizer in optimizers:  # last: their state is named after parameters
        _add(reached, names_of, _optimizer_items(root, optimizer, names_of), gradients)
        reached.options[root] = (id(optimizer), _options(optimizer))
    return reached


def _path(found: Found) -> str:
    path = found.path.replace(".[", "[")
    while path.startswith("self.") or path == "self":
        path = path[5:]
    return path or type(found.owner).__name__


def _add(
    reached: ReachableItems,
    names_of: dict[int, str],
    items: Iterable[tuple[StateItem, Tensor]],
    gradients: bool,
) -> None:
    """Add items whose tensors have no item yet, and their gradients, if wanted."""
    for item, tensor in ((item, part) for item, one in items for part in unsharded(one)):
        if id(tensor) in names_of or item in reached.tensors:
            continue
        names_of[id(tensor)] = item.name
        reached.tensors[item] = tensor
        grad = grad_or_none(tensor) if gradients else None
        if grad is not None and id(grad) not in names_of:
            names_of[id(grad)] = f"{item.name}.grad"
            reached.tensors[StateItem(f"{item.name}.grad", item.owner, "gradients")] = grad


def items_of(root: str, owner: Any) -> Iterator[tuple[StateItem, Tensor]]:
    """The tensor, or all tensors of a module, also those in plain lists and dicts."""
    if isinstance(owner, Tensor):
        yield StateItem(root, root, ""), owner
        return
    modules = list(named_modules_in(root, owner))
    # Registered tensors first: their names are better than those of a wrapper's lists.
    for path, module in modules:
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                kind = "parameters" if name in module._parameters else "buffers"
                yield StateItem(f"{path}.{name}", root, kind), tensor
    for path, module in modules:
        for name, value in [*vars(module).items()]:  # a task may run meanwhile, and add one
            if name not in _REGISTERED:
                yield from _indexed(f"{path}.{name}", root, "buffers", value)


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _indexed(path: str, root: str, kind: str, value: Any) -> Iterator[tuple[StateItem, Tensor]]:
    if isinstance(value, (*PLAIN, Optimizer)):
        return
    for index, tensor in enumerate(tensors_in(value)):
        of_kind = "parameters" if isinstance(tensor, torch.nn.Parameter) else kind
        yield StateItem(path if tensor is value else f"{path}[{index}]", root, of_kind), tensor


def _optimizer_items(
    root: str, optimizer: Optimizer, names_of: dict[int, str]
) -> Iterator[tuple[StateItem, Tensor]]:
    """Parameters that have no name yet, then the optimizer's state, named after parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if id(parameter) not in names_of:
            yield StateItem(f"{root}: parameter {index}", root, "parameters"), parameter
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        of = names_of.get(id(parameter), f"parameter {index}")
        for key, value in state.items() if isinstance(state, dict) else [("state", state)]:
            yield from _indexed(f"{root}: {key} of {of}", root, "state", value)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _indexed(f"{root}: {key} of group {number}", root, "state", value)


def _options(optimizer: Optimizer) -> Any:
    return [
        [(key, value) for key, value in group.items() if isinstance(value, (*PLAIN, tuple))]
        for group in optimizer.param_groups
    ]
