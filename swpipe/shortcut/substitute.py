"""The outputs of a task from another source: a function of the user's, or given values.

The task's function is not called, so none of its effects outside the context happens::

    with_=function      function(ctx) in its place; what it returns, if anything, is given values
    with_=values        attribute to value, the same in each iteration

Given tensors that do not require grad are connected to the autograd graph like a replay's
(``swpipe.shortcut.graft``): to every attribute that requires grad, which then gets zeros.
Parameters that only the task uses get no gradient: only a run could show which ones they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe._values.fingerprint import is_fixed
from swpipe._values.walk import map_tensors, tensors_in
from swpipe.core.messages import listed, shown
from swpipe.shortcut.graft import connect

Substitute: TypeAlias = Callable[[Any], Any] | Mapping[str, Any]
"""A function of the context, or attributes to values."""


def substitute_of(tasks: Collection[str], given: Any) -> Callable[[Any], None]:
    """Return a function of the context that takes a task's place.

    Raises:
        TypeError: ``given`` is neither a function nor values.
        ValueError: The number of tasks is not one.
    """
    if len(tasks) != 1:
        named = listed([*tasks])
        raise ValueError(f"with_ replaces one task, and {len(tasks)} are given ({named})")
    (task,) = tasks
    if callable(given):
        return partial(_call, task, given)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"shortcut of task {task!r}: with_ is {shown(given)}: give a function of the context, "
            "or a dict of attributes and their values, such as {'x': tensor}"
        )
    _check_names(task, given)
    return partial(_set, given)


def _call(task: str, function: Callable[[Any], Any], ctx: Any) -> None:
    """Call the user's function, and set the values that it returns, if any."""
    values = function(ctx)
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            f"shortcut of task {task!r}: the function given as with_ returned {shown(values)}. It "
            "must set attributes of the context, or return a dict of attributes and their values"
        )
    _check_names(task, values or {})
    _set(values or {}, ctx)


def _check_names(task: str, values: Mapping[Any, Any]) -> None:
    """Raise TypeError for a name that is no attribute a task can set."""
    for name in values:
        if not (isinstance(name, str) and name.isidentifier()) or name == "iter_idx":
            raise TypeError(
                f"shortcut of task {task!r}: the values have the key {shown(name)}, which is not "
                "an attribute that a task can set"
            )


def _set(values: Mapping[str, Any], ctx: Any) -> None:
    """Set attributes to values of their own: a later task may modify them in place."""
    # A copy, since tasks on other threads may add attributes meanwhile.
    upstream = [t for t in tensors_in(vars(ctx).copy()) if t.requires_grad]

    def fresh(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            return tensor  # connected to a graph by its giver
        own = tensor.clone()
        # Only floating tensors can require grad, and without upstream there is nothing to connect
        # to.
        if not (torch.is_grad_enabled() and upstream and own.dtype.is_floating_point):
            return own
        return connect([own], upstream)[0]

    def unshared(value: Any) -> Any:
        # Each iteration gets a copy, as it would from the task.
        return value if is_fixed(value) else copy.deepcopy(value)

    for name, value in map_tensors(dict(values), fresh, unshared).items():
        setattr(ctx, name, value)
