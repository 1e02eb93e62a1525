"""Named places outside the context that tensors lie in: parameters, gradients, optimizer state.

A *slot* is a place that keeps its name while its tensor may change: ``model.net.weight``, its
``.grad``, ``optimizer: exp_avg of model.net.weight``, or a tensor that an object or a closure
holds. Slots are found by what the tasks' functions can reach (``swpipe._state.discovery``), anew
each time:
an optimizer makes its state when it first steps.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from swpipe._state.discovery import PLAIN, Found, find_all, is_generator
from swpipe._tensors.pytree import grad_or_none, nodes_in, tensors_in
from swpipe.core.task import PipelineTask
from swpipe.inference.storages import unsharded


class Slot(NamedTuple):
    """A place for a tensor.

    Attributes:
        name: "model.net.weight".
        root: The object that it belongs to: "model".
        kind: "parameters", "buffers", "gradients", "state" of an optimizer, or "" for a tensor that
            belongs to neither a module nor an optimizer.
    """

    name: str
    root: str
    kind: str


@dataclass
class Reached:
    """What lay within reach at one moment.

    Attributes:
        tensors: Slot to its tensor.
        options: Optimizer's name to its id, and what its groups say beside the parameters.
        generators: Name to a generator of random numbers.
        plain: Path to a plain Python value, or to how long a container is.
    """

    tensors: dict[Slot, Tensor] = field(default_factory=dict)
    options: dict[str, tuple[int, Any]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


def reached_by(tasks: Iterable[PipelineTask]) -> Reached:
    """All that the tasks can reach now."""
    reached = Reached()
    names = _Names()
    names_of: dict[int, str] = {}
    optimizers: list[tuple[str, Optimizer]] = []
    for found in find_all(tasks):
        if is_generator(found.owner) or isinstance(found.owner, random.Random):
            reached.generators[names.unique(_pretty(found))] = found.owner
        elif isinstance(found.owner, Optimizer):
            optimizers.append((names.unique(_pretty(found)), found.owner))
        elif isinstance(found.owner, Tensor | torch.nn.Module):
            _add(reached, names_of, slots_of(names.unique(_pretty(found)), found.owner))
        elif isinstance(found.owner, PLAIN):
            reached.plain[names.unique(_pretty(found))] = found.owner
        elif isinstance(found.owner, list | dict | set):
            reached.plain[names.unique(f"the length of {_pretty(found)}")] = len(found.owner)
    for root, optimizer in optimizers:  # last: their state is named after parameters
        _add(reached, names_of, _parameters_of(root, optimizer, names_of))
        _add(reached, names_of, _state_of(root, optimizer, names_of))
        reached.options[root] = (id(optimizer), _options(optimizer))
    return reached


class _Names:
    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        self._count[name] += 1
        return name if self._count[name] == 1 else f"{name} ({self._count[name]})"


def _pretty(found: Found) -> str:
    path = found.path.replace(".[", "[")
    while path.startswith("self.") or path == "self":
        path = path[5:]
    return path or type(found.owner).__name__


def _add(reached: Reached, names_of: dict[int, str], slots: Iterable[tuple[Slot, Tensor]]) -> None:
    """Add slots whose tensors are not in one yet, and their gradients."""
    for slot, tensor in ((slot, part) for slot, one in slots for part in unsharded(one)):
        if id(tensor) in names_of or slot in reached.tensors:
            continue
        names_of[id(tensor)] = slot.name
        reached.tensors[slot] = tensor
        grad = grad_or_none(tensor)
        if grad is not None and id(grad) not in names_of:
            names_of[id(grad)] = f"{slot.name}.grad"
            reached.tensors[Slot(f"{slot.name}.grad", slot.root, "gradients")] = grad


def slots_of(root: str, owner: Any) -> Iterator[tuple[Slot, Tensor]]:
    """A tensor, or all that lie in a module, in plain lists and dicts of its attributes too."""
    if isinstance(owner, Tensor):
        yield Slot(root, root, ""), owner
        return
    modules = list(_modules_in(root, owner))
    # Registered ones first: these have the better names for what wrappers keep lists of, too.
    for path, module in modules:
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                kind = "parameters" if name in module._parameters else "buffers"
                yield Slot(f"{path}.{name}", root, kind), tensor
    for path, module in modules:
        for name, value in vars(module).items():
            if name not in _REGISTERED:
                yield from _numbered(f"{path}.{name}", root, "buffers", value)


_REGISTERED = ("_parameters", "_buffers", "_modules")

_WRAPPED = ("_dmp_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""What wrappers call the module in them; names go without."""


def _modules_in(root: str, owner: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and those below it, those in plain lists and dicts too, by their paths."""
    seen = {id(owner)}
    ahead: deque[tuple[str, torch.nn.Module]] = deque([(root, owner)])
    while ahead:
        path, module = ahead.popleft()
        yield path, module
        for name, value in list(vars(module).items()):
            for key, item in value.items() if name == "_modules" else [(name, value)]:
                inside = key in _WRAPPED or (key == "module" and isinstance(module, _PARALLEL))
                for where, child in _modules(path if inside else f"{path}.{key}", item):
                    if id(child) not in seen:
                        seen.add(id(child))
                        ahead.append((where, child))


_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def _numbered(path: str, root: str, kind: str, value: Any) -> Iterator[tuple[Slot, Tensor]]:
    if isinstance(value, (*PLAIN, Optimizer)):
        return
    for index, tensor in enumerate(tensors_in(value)):
        known = "parameters" if isinstance(tensor, torch.nn.Parameter) else kind
        yield Slot(path if tensor is value else f"{path}[{index}]", root, known), tensor


def _modules(path: str, value: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module, or those in a plain list or dict."""
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif not isinstance(value, (*PLAIN, Tensor)):
        for node in nodes_in(value):
            for index, item in enumerate(node.children):
                if isinstance(item, torch.nn.Module):
                    yield f"{path}[{node.keys[index] if node.keys else index}]", item


def _parameters_of(
    root: str, optimizer: Optimizer, names_of: dict[int, str]
) -> Iterator[tuple[Slot, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        if id(parameter) not in names_of:
            yield Slot(f"{root}: parameter {index}", root, "parameters"), parameter


def _state_of(
    root: str, optimizer: Optimizer, names_of: dict[int, str]
) -> Iterator[tuple[Slot, Tensor]]:
    for index, (parameter, state) in enumerate(optimizer.state.items()):
        of = names_of.get(id(parameter), f"parameter {index}")
        for key, value in state.items() if isinstance(state, dict) else [("state", state)]:
            yield from _numbered(f"{root}: {key} of {of}", root, "state", value)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _numbered(f"{root}: {key} of group {number}", root, "state", value)


def _options(optimizer: Optimizer) -> Any:
    return [
        [(key, value) for key, value in group.items() if isinstance(value, (*PLAIN, tuple))]
        for group in optimizer.param_groups
    ]
