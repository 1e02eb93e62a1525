"""Save the state of models, optimizers and generators, and restore it bit for bit.

State is restored into the same objects: tensors keep their identity and memory, so references to
them stay valid (an optimizer's to its parameters, a view's to its base).

- modules: parameters, buffers and other tensors among the attributes, their ``.grad`` or its
  absence, ``requires_grad``, the training flags, extra state;
- optimizers: parameters, their state, and the options of the groups;
- generators: the default ones of torch, Python and numpy, and those that were found;
- other objects: through ``state_dict`` and ``load_state_dict``.

Of plain objects within modules nothing is saved; a change of their tensors is told.

Copies are in host memory, so that a model that fills its device can be profiled. Lazy parameters
and buffers that are initialized after the snapshot keep their values.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe._state.copies import SavedTensors
from swpipe._state.generators import (
    default_generators,
    saved_state,
    set_back,
    set_default_generators,
)
from swpipe._state.owners import Found
from swpipe._state.unsaved import UnsavedTensors
from swpipe._tensors.pytree import nodes_in, parts_of, tensors_in
from swpipe._tensors.stateful import WHOLE, has_state_dict, modules_in
from swpipe.core.messages import listed
from swpipe.device import Device
from swpipe.errors import add_note

Restore: TypeAlias = Callable[[], object]
"""Restores what was saved when it was created; can be called repeatedly."""


class Snapshot:
    """The state of some objects, and of all default generators, at one moment.

    Args:
        owners: The objects.
        device: Where their tensors are.
        within: A task runs, which may have filled what modules hold beside parameters and buffers,
            such as a queue: their containers are left alone.
    """

    def __init__(self, owners: Sequence[Found], device: Device, *, within: bool = False) -> None:
        self._device = device
        device.synchronize()
        self._modules = [one.owner for one in owners if isinstance(one.owner, torch.nn.Module)]
        _reshard(self._modules)
        self._saved = tensors = SavedTensors()
        # Tensors after the containers and modules that hold them.
        wrapped = [one for found in owners for one in _wrapped(found)]
        saved = [_save(one, tensors, within) for one in (*owners, *wrapped)]
        self._restores: list[Restore] = [*saved, tensors.restore]
        self._restores += [partial(set_default_generators, device, default_generators(device))]
        self._unsaved = UnsavedTensors([] if within else _watched(owners), tensors)
        self._told: set[str] = set()
        self._fresh: list[tuple[weakref.ref[torch.optim.Optimizer], list[dict[str, Any]]]] = []
        self._addresses = tensors.addresses()
        self._registered = _registered_in(owners)
        self._optimizers = {id(one.owner) for one in (*owners, *wrapped)}
        self._in_others = {
            id(optimizer)
            for found in owners
            if not isinstance(found.owner, WHOLE) and has_state_dict(found.owner)
            for optimizer in optimizers_in(found.owner)
        }

    def restore(self) -> None:
        """Restore everything, after the device has finished its current work.

        Warns:
            RuntimeWarning: Tensors of plain objects within modules changed, and are not restored;
                each is named once.
        """
        self._device.synchronize()
        _reshard(self._modules)
        for restore in self._restores:
            restore()
        for reference, options in self._fresh:
            if (optimizer := reference()) is not None:
                optimizer.state.clear()
                for group, kept in zip(optimizer.param_groups, options, strict=False):
                    group.update(kept)
        if changed := [path for path in self._unsaved.changed() if path not in self._told]:
            self._told.update(changed)
            warnings.warn(
                f"{listed(changed)} changed and cannot be restored: plain objects within a module "
                "hold them. Make them buffers of the module, or let a task refer to an object "
                "whose state_dict and load_state_dict save and restore them",
                RuntimeWarning,
                stacklevel=3,
            )

    def add_fresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the options of one more optimizer, which has no state yet; it is not kept."""
        groups = optimizer.param_groups
        options = [{name: v for name, v in one.items() if name != "params"} for one in groups]
        self._fresh.append((weakref.ref(optimizer), options))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore one more optimizer, with its parameters, as it is now."""
        tensors = SavedTensors()
        restore = _save_optimizer(optimizer, tensors)
        self._restores += [restore, tensors.restore]
        self._addresses |= tensors.addresses()
        self._optimizers.add(id(optimizer))

    def saves(self, tensor: Tensor) -> bool:
        """Whether a tensor, or the memory that it shares, is restored."""
        if hasattr(tensor, "local_shards"):
            return all(self.saves(shard.tensor) for shard in tensor.local_shards())
        return (
            tensor in self._saved
            or id(tensor) in self._registered
            or any(
                part.layout is torch.strided
                and part.untyped_storage().data_ptr() in self._addresses
                for part in parts_of(tensor)
            )
        )

    def unsaved_of(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """What a step of an optimizer changes and is not restored: itself, or some parameters.

        An object with ``state_dict`` that holds the optimizer restores all of it.
        """
        if id(optimizer) in self._in_others:
            return []
        if id(optimizer) not in self._optimizers:
            return [optimizer]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return [parameter for parameter in parameters if not self.saves(parameter)]


def optimizers_in(owner: Any) -> Iterator[torch.optim.Optimizer]:
    """``owner``, if it is an optimizer, and those that it wraps, at any depth."""
    seen: dict[int, Any] = {}
    ahead = [owner]
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, torch.optim.Optimizer):
            yield one
        for value in dict(getattr(one, "__dict__", {})).values():
            items = [value, *(child for node in nodes_in(value) for child in node.children)]
            ahead += [item for item in items if isinstance(item, torch.optim.Optimizer)]


def _wrapped(found: Found) -> Iterator[Found]:
    """The optimizers that a saved optimizer wraps."""
    if isinstance(found.owner, torch.optim.Optimizer):
        yield from (
            Found(found.path, one) for one in optimizers_in(found.owner) if one is not found.owner
        )


def _registered_in(owners: Sequence[Found]) -> set[int]:
    """Ids of parameters and buffers of all modules that are restored, initialized or not."""
    roots = [module for one in owners for module in getattr(one.owner, "restored_modules", ())]
    roots += [one.owner for one in owners if isinstance(one.owner, torch.nn.Module)]
    modules = [module for root in roots for module in modules_in(root)]
    return {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}


def _reshard(roots: Sequence[torch.nn.Module]) -> None:
    """Let fully sharded modules release gathered parameters, and register the shards again.

    A forward without a backward leaves them gathered, with the values of then.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    for module in (module for root in roots for module in modules_in(root)):
        if isinstance(module, kind):
            module.reshard()


def _watched(owners: Sequence[Found]) -> list[torch.nn.Module]:
    """All modules whose plain objects nobody restores.

    An object with state that does so for some modules names these in ``restored_modules``.
    """
    restored = {
        id(module)
        for one in owners
        for root in getattr(one.owner, "restored_modules", ())
        for module in modules_in(root)
    }
    roots = [one.owner for one in owners if isinstance(one.owner, torch.nn.Module)]
    return [m for root in roots for m in modules_in(root) if id(m) not in restored]


def _save(found: Found, tensors: SavedTensors, within: bool) -> Restore:
    owner = found.owner
    if isinstance(owner, Tensor):
        tensors.add(owner)
        return lambda: None
    if isinstance(owner, torch.nn.Module):
        return _save_module(owner, tensors, within)
    if isinstance(owner, torch.optim.Optimizer):
        return _save_optimizer(owner, tensors)
    if has_state_dict(owner):
        return _save_state_dict(found)
    return partial(set_back, owner, saved_state(owner))


def _save_optimizer(optimizer: torch.optim.Optimizer, tensors: SavedTensors) -> Restore:
    """Save which containers it has, which ``load_state_dict`` replaces, and what is in them."""
    held = {
        name: value
        for name, value in vars(optimizer).items()
        if name in ("state", "param_groups") or _holds_tensors(value)
    }
    refill = _save_containers((optimizer.state, optimizer.param_groups, held), tensors)
    return lambda: (vars(optimizer).update(held), refill())


def _save_module(root: torch.nn.Module, tensors: SavedTensors, within: bool) -> Restore:
    restores: list[Restore] = []
    modules = list(modules_in(root))
    for module in modules:
        # Attributes without tensors (hooks, counters, flags) are not restored.
        held = {name: value for name, value in vars(module).items() if _holds_tensors(value)}
        restores.append(partial(vars(module).update, held))
        restores.append(_save_registered(module, tensors))
        if not within:
            restores.append(_save_containers(held, tensors))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            restores.append(_save_extra_state(module))
    restores += [partial(setattr, module, "training", module.training) for module in modules]
    return lambda: [restore() for restore in restores]


def _holds_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def _save_registered(module: torch.nn.Module, tensors: SavedTensors) -> Restore:
    """Save parameters and buffers; those registered later stay."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for tensor in tensors_in((parameters, buffers)):
        tensors.add(tensor)

    def restore() -> None:
        module._parameters.update(parameters)
        module._buffers.update(buffers)

    return restore


def _save_extra_state(module: torch.nn.Module) -> Restore:
    state = copy.deepcopy(module.get_extra_state())
    return lambda: module.set_extra_state(copy.deepcopy(state))


def _save_state_dict(found: Found) -> Restore:
    try:
        state = copy.deepcopy(found.owner.state_dict())
    except Exception as error:
        add_note(
            error,
            f"swpipe: while saving the state of {found} to restore it later. If it need not be "
            "restored, name what has to be: state=[model, optimizer]",
        )
        raise
    return lambda: found.owner.load_state_dict(copy.deepcopy(state))


def _save_containers(value: Any, tensors: SavedTensors) -> Restore:
    """Save what each dict, list, set and deque in ``value`` holds, and all tensors."""
    for tensor in tensors_in(value):
        tensors.add(tensor)
    saved = [
        (node.value, copy.copy(node.value))
        for node in nodes_in(value)
        if isinstance(node.value, dict | list | set | deque)
    ]

    def restore() -> None:
        for container, content in saved:
            container.clear()
            if isinstance(container, dict | set):
                container.update(content)
            else:
                container.extend(content)

    return restore
