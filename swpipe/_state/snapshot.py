"""Save the state of models, optimizers and generators, and put it back bit for bit.

What is put back is the same objects: tensors keep their identity and their memory, so that whoever
holds one (an optimizer its parameters, a view its base) goes on holding the right one.

- modules: parameters, buffers and other tensors among the attributes, their ``.grad`` (its absence
  too), ``requires_grad``, the training flags, extra state;
- optimizers: parameters and the state of each, and the options of the groups;
- generators: torch's, Python's and numpy's own ones, and those that were found;
- anything else by ``state_dict`` and ``load_state_dict``.

Copies lie in host memory, so that a model that fills its device can be profiled. Parameters and
buffers that a module makes at its first batch cannot be put back, and stay as that makes them.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe._state.copies import SavedTensors
from swpipe._state.discovery import Found, has_state_dict
from swpipe._tensors.pytree import nodes_in, tensors_in
from swpipe.device import Device

Restore: TypeAlias = Callable[[], object]
"""Puts back what was saved when it was made; can be called again and again."""


class Snapshot:
    """The state of some owners, and of all default generators, at one moment."""

    def __init__(self, owners: Iterable[Found], device: Device) -> None:
        self._device = device
        device.synchronize()
        tensors = SavedTensors()
        # Tensors last: their memory is filled when the objects are in their places again.
        self._restores = [*(_save(found, tensors) for found in owners), tensors.restore]
        self._restores += [_save_generators(device)]

    def restore(self) -> None:
        """Put everything back; once the device is done with what uses it now."""
        self._device.synchronize()
        for restore in self._restores:
            restore()


def _save(found: Found, tensors: SavedTensors) -> Restore:
    owner = found.owner
    if isinstance(owner, Tensor):
        tensors.add(owner)
        return _nothing
    if isinstance(owner, torch.nn.Module):
        return _save_module(owner, tensors)
    if isinstance(owner, torch.optim.Optimizer):
        return _save_containers((owner.state, owner.param_groups), tensors)
    if has_state_dict(owner):
        return _save_state_dict(found)
    return _save_generator(owner)


def _nothing() -> None:
    return None


# ------------------------------------------------------------------------------------- objects


def _save_module(root: torch.nn.Module, tensors: SavedTensors) -> Restore:
    restores: list[Restore] = []
    training = []
    for module in _modules_in(root):
        training.append((module, module.training))
        # Those without tensors stay as they are, whatever they become: hooks, counters, flags.
        held = {name: value for name, value in vars(module).items() if _holds_tensors(value)}
        restores.append(_save_attributes(module, held))
        restores.append(_save_registered(module, tensors))
        restores.append(_save_containers(held, tensors))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            restores.append(_save_extra_state(module))

    def restore() -> None:
        for put_back in restores:
            put_back()
        for module, flag in training:
            module.training = flag

    return restore


def _modules_in(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """``root`` and all modules below it, those in plain lists and dicts too."""
    seen = {id(root)}
    ahead = [root]
    while ahead:
        module = ahead.pop()
        yield module
        for value in list(vars(module).values()):
            items = [value, *(item for node in nodes_in(value) for item in node.children)]
            for item in items:
                if isinstance(item, torch.nn.Module) and id(item) not in seen:
                    seen.add(id(item))
                    ahead.append(item)


def _holds_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def _save_attributes(owner: Any, attributes: dict[str, Any]) -> Restore:
    def restore() -> None:
        vars(owner).update(attributes)

    return restore


def _save_registered(module: torch.nn.Module, tensors: SavedTensors) -> Restore:
    """Parameters and buffers; what is registered later stays, as the flag does that says it is."""
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
        error.add_note(
            f"swpipe: while saving the state of {found} to put it back later. Where it need not "
            "be put back, name what must be: state=[model, optimizer]"
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


# ---------------------------------------------------------------------------------- generators


def _save_generator(owner: Any) -> Restore:
    if isinstance(owner, torch.Generator):
        torch_state = owner.get_state()
        return lambda: owner.set_state(torch_state)
    if isinstance(owner, random.Random):
        state = owner.getstate()
        return lambda: owner.setstate(state)
    bits = owner.bit_generator if hasattr(owner, "bit_generator") else owner._bit_generator
    numpy_state = copy.deepcopy(bits.state)

    def restore() -> None:
        bits.state = numpy_state

    return restore


def _save_generators(device: Device) -> Restore:
    """Those that everyone shares: torch's, host and device, Python's, and numpy's if loaded."""
    torchs = device.generator_states()
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")
    array = None if numpy is None else numpy.get_state()

    def restore() -> None:
        device.set_generator_states(torchs)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(array)

    return restore
