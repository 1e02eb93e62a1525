"""Saving of the state of models, optimizers and generators, and restoring it bit for bit.

State is restored into the same objects: tensors keep their identity and memory, so references to
them stay valid (an optimizer's to its parameters, a view's to its base).

- modules: parameters, buffers and other tensors among the attributes, their ``.grad`` or its
  absence, ``requires_grad``, the training flags, extra state;
- optimizers: parameters, their state, and the options of the groups;
- generators: the default ones of torch, Python and numpy, and those that tasks use;
- other objects: through ``state_dict`` and ``load_state_dict``.

Plain objects within modules are not saved: a module has many, which share tensors with the module
or belong to a library. To have one restored, give it ``state_dict`` and ``load_state_dict``, and
give the object itself.

Copies are in host memory, so that a model that fills its device can be profiled. Lazy parameters
and buffers that are initialized after the snapshot keep their values.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module
from torch.optim import Optimizer

from swpipe._values.copies import SavedTensors
from swpipe._values.generators import (
    default_generators,
    set_back,
    set_default_generators,
    state_of,
)
from swpipe._values.stateful import (
    REGISTERED,
    WHOLE,
    Owner,
    has_state_dict,
    modules_in,
    modules_of,
    optimizers_in,
)
from swpipe._values.walk import nodes_in, tensors_in
from swpipe.device import Device
from swpipe.errors import UnsavedStateError, add_note

Restore: TypeAlias = Callable[[], object]
"""A function that restores what was saved when it was created; it can be called repeatedly."""


class Snapshot:
    """The state of some objects, and of all default generators, at one moment.

    Args:
        owners: The objects.
        device: The device of their tensors.

    Raises:
        UnsavedStateError: A module is one of TorchScript, whose state is not accessible.
    """

    def __init__(self, owners: Sequence[Owner], device: Device) -> None:
        self._device = device
        device.synchronize()
        self._modules = [*modules_of(owners)]
        _reshard(self._modules)
        tensors = SavedTensors()
        # An optimizer may wrap others, whose containers and tensors are saved as well.
        optimizers = [
            Owner(given.path, optimizer)
            for given in owners
            if isinstance(given.owner, Optimizer)
            for optimizer in optimizers_in(given.owner)
        ]
        others = [given for given in owners if not isinstance(given.owner, Optimizer)]
        saved = [_save(given, tensors) for given in (*others, *optimizers)]
        # Restored in this order: first the containers and modules, then the tensors in them, last
        # the generators, since restoring may run the user's code, which may draw.
        self._restores: list[Restore] = [*saved, tensors.restore]
        self._restores += [partial(set_default_generators, device, default_generators(device))]
        self._optimizers = {id(given.owner) for given in optimizers}
        self._optimizers |= {
            id(optimizer)  # restored by the object itself
            for given in others
            if not isinstance(given.owner, WHOLE) and has_state_dict(given.owner)
            for optimizer in optimizers_in(given.owner)
        }
        self._added: dict[object, list[Restore]] = {}

    def restore(self) -> None:
        """Restore everything, after the device has finished its current work."""
        self._device.synchronize()
        _reshard(self._modules)
        # The latest addition first: an object is restored to its state from before the earliest
        # run.
        for restore in chain(*reversed([*self._added.values()]), self._restores):
            restore()

    def add(self, given: Owner) -> None:
        """Save one more object as it is now, to be restored before everything saved earlier.

        A task is running, and may have filled containers that modules hold beside parameters and
        buffers, such as a queue: these containers are left alone. An optimizer is not kept alive.
        """
        self._device.synchronize()
        modules = [*modules_of([given])]
        _reshard(modules)
        self._modules += modules
        tensors = SavedTensors()
        added = self._added
        key: object = object()
        if isinstance(given.owner, Optimizer):
            # When the optimizer is freed, nothing is left to restore.
            key = weakref.ref(given.owner, lambda reference: added.pop(reference, None))
        added[key] = [_save(given, tensors, within=True), tensors.restore]

    def restores(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is restored."""
        return id(optimizer) in self._optimizers or weakref.ref(optimizer) in self._added


def _reshard(modules: Iterable[Module]) -> None:
    """Make fully sharded modules free gathered parameters and register their shards again.

    A forward without a backward leaves the parameters gathered, with the values of that time.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    for module in modules:
        if isinstance(module, kind):
            module.reshard()


def _save(given: Owner, tensors: SavedTensors, *, within: bool = False) -> Restore:
    """Save the state of one object, and return the function that restores it."""
    owner = given.owner
    if isinstance(owner, Tensor):
        tensors.add(owner)
        return lambda: None
    if isinstance(owner, Module):
        return _save_module(given, tensors, within)
    if isinstance(owner, Optimizer):
        return _save_optimizer(owner, tensors)
    if has_state_dict(owner):
        return _save_state_dict(given)
    return partial(set_back, owner, state_of(owner))


def _save_optimizer(optimizer: Optimizer, tensors: SavedTensors) -> Restore:
    """Save which containers an optimizer has, and their contents.

    ``load_state_dict`` replaces the containers, so that both have to be restored.
    """
    attributes = vars(optimizer)  # a reference to the optimizer would keep it alive
    held = {
        name: value
        for name, value in attributes.items()
        if name in ("state", "param_groups") or _holds_tensors(value)
    }
    refill = _save_containers((optimizer.state, optimizer.param_groups, held), tensors)
    # Its old containers first, then their old contents.
    return lambda: (attributes.update(held), refill())


def _save_module(given: Owner, tensors: SavedTensors, within: bool) -> Restore:
    """Save a module and all modules below it, and return the function that restores them."""
    restores: list[Restore] = []
    modules = list(modules_in(given.owner))
    if any(isinstance(module, ScriptModule) for module in modules):
        raise UnsavedStateError(
            [str(given)],
            "the tasks can change what TorchScript keeps",
            "Use the module itself, or torch.compile(module)",
        )
    for module in modules:
        # Parameters and buffers that are registered later stay.
        for registered in (module._parameters, module._buffers):
            for tensor in tensors_in(registered):
                tensors.add(tensor)
            restores.append(partial(registered.update, dict(registered)))
        # Attributes without tensors (hooks, counters, flags) are not restored.
        held = {
            name: value
            for name, value in vars(module).items()
            if name not in REGISTERED and _holds_tensors(value)
        }
        restores.append(partial(vars(module).update, held))
        if not within:
            restores.append(_save_containers(held, tensors))
        # Module's own get_extra_state raises; only classes that override it have extra state.
        if type(module).get_extra_state is not Module.get_extra_state:
            extra = copy.deepcopy(module.get_extra_state())
            restores.append(partial(_set_extra_state, module, extra))
    restores += [partial(setattr, module, "training", module.training) for module in modules]
    return lambda: [restore() for restore in restores]


def _holds_tensors(value: Any) -> bool:
    """Return whether there is a tensor anywhere in a value."""
    return next(tensors_in(value), None) is not None


def _set_extra_state(module: Module, state: Any) -> None:
    """Set a module's extra state to a copy, so that the saved state can be used again."""
    module.set_extra_state(copy.deepcopy(state))


def _save_state_dict(given: Owner) -> Restore:
    """Save an object through its ``state_dict``, and return the function that restores it."""
    try:
        state = copy.deepcopy(given.owner.state_dict())
    except Exception as error:
        add_note(
            error,
            f"swpipe: while saving the state of {given} to restore it later. If it need not be "
            "restored, name what has to be: state=[model, optimizer]",
        )
        raise
    # A copy each time, since the object may keep and modify what it loads.
    return lambda: given.owner.load_state_dict(copy.deepcopy(state))


def _save_containers(value: Any, tensors: SavedTensors) -> Restore:
    """Save the contents of each dict, list, set and deque in ``value``, and all tensors."""
    for tensor in tensors_in(value):
        tensors.add(tensor)
    # Shallow copies: nested containers are nodes of their own and get a copy each.
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
