"""State outside the context: parameters, gradients, optimizer state, tensors.

A state item keeps its name while its tensor may be replaced: ``model.net.weight``, its ``.grad``,
``optimizer: exp_avg of model.net.weight``, or a tensor by itself. The items are collected again
after each task, since optimizers create their state in their first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from swpipe._state.owners import Found
from swpipe._tensors.pytree import grad_or_none, tensors_in
from swpipe._tensors.stateful import PLAIN, is_generator, modules_in, named_modules_in
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
class StateItems:
    """What some objects hold.

    Attributes:
        tensors: Item to its tensor.
        options: Optimizer's name to its id and the options of its parameter groups.
        generators: Name to random number generator.
    """

    tensors: dict[StateItem, Tensor] = field(default_factory=dict)
    options: dict[str, tuple[int, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)


def items_in(owners: Iterable[Found]) -> StateItems:
    """Everything that some modules, optimizers, tensors and generators hold now."""
    found = StateItems()
    count: Counter[str] = Counter()
    names_of: dict[int, str] = {}
    optimizers: list[tuple[str, Optimizer]] = []
    covered: set[int] = set()

    def unique(name: str) -> str:
        count[name] += 1
        return name if count[name] == 1 else f"{name} ({count[name]})"

    for path, owner in owners:
        if id(owner) in covered:  # a module within one before it, with which its tensors came
            continue
        if isinstance(owner, torch.nn.Module):
            covered.update(map(id, modules_in(owner)))
        if is_generator(owner):
            found.generators[unique(path)] = owner
        elif isinstance(owner, Optimizer):
            optimizers.append((unique(path), owner))
        elif isinstance(owner, Tensor | torch.nn.Module):
            _add(found, names_of, items_of(unique(path), owner))
    for root, optimizer in optimizers:  # last: their state is named after parameters
        _add(found, names_of, _optimizer_items(root, optimizer, names_of))
        found.options[root] = (id(optimizer), _options(optimizer))
    return found


def _add(
    found: StateItems,
    names_of: dict[int, str],
    items: Iterable[tuple[StateItem, Tensor]],
) -> None:
    """Add items whose tensors have no item yet, and their gradients."""
    for item, tensor in ((item, part) for item, one in items for part in unsharded(one)):
        if id(tensor) in names_of or item in found.tensors:
            continue
        names_of[id(tensor)] = item.name
        found.tensors[item] = tensor
        grad = grad_or_none(tensor)
        if grad is not None and id(grad) not in names_of:
            names_of[id(grad)] = f"{item.name}.grad"
            found.tensors[StateItem(f"{item.name}.grad", item.owner, "gradients")] = grad


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
