"""Finds each sharded module's input: the path of an attribute of the batch.

- **trace**: torch.fx traces the forward (see ``traced``). The trace shows what each sharded module
  is called with, and whether the model computes it.
- **direct**: matches the batch's attributes by type with the first parameter of ``input_dist``. It
  works with any forward, but the user guarantees that the forward passes that attribute unchanged,
  once.

The user may also name an input: module name to the attribute's path within the batch.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from swpipe.tasks.torchrec._torchrec import (
    ArgInfo,
    ArgInfoStepFactory,
    CallArgs,
    GetAttrArgInfoStep,
    GetItemArgInfoStep,
    ScalarArgInfoStep,
    ShardedModule,
)


class RewriteError(ValueError):
    """The model cannot be pipelined; the message names the module and the fix."""


@dataclass(frozen=True, slots=True)
class Source:
    """What the inputs of one batch are picked from.

    Attributes:
        batch: The batch on the device.
        results: What modules of the model have computed from it ahead of the forward, by name.
    """

    batch: Any
    results: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OfBatch:
    """The first step to an input: from the source to its batch."""

    def process(self, source: Source) -> Any:
        """The batch."""
        return source.batch


@dataclass(frozen=True, slots=True)
class OfModule:
    """The first step to an input: from the source to the result of one module."""

    name: str

    def process(self, source: Source) -> Any:
        """The result."""
        return source.results[self.name]


@dataclass(frozen=True, slots=True)
class Found:
    """How to get one module's input from a batch, or why that is unknown."""

    args: Any = None
    why: str = ""

    def __str__(self) -> str:
        return self.why or ", ".join(
            [_path(arg) for arg in self.args.args]
            + [f"{name}={_path(arg)}" for name, arg in self.args.kwargs.items()]
        )


def direct_inputs(batch: Any, sharded: Mapping[str, nn.Module]) -> dict[str, Found]:
    """The attribute of the batch whose type matches the first parameter of ``input_dist``.

    Where several do, ``labels`` is left out.
    """
    attributes = dict(getattr(batch, "__dict__", {}))
    return {name: _match(module, attributes, batch) for name, module in sharded.items()}


def _match(module: Any, attributes: Mapping[str, Any], batch: Any) -> Found:
    wanted = _input_types(module)
    if not wanted:
        return Found(
            why=f"the first parameter of {type(module).__name__}.input_dist says no type to match "
            "the batch's attributes with: annotate it, or name its input"
        )
    fitting = [name for name, value in attributes.items() if isinstance(value, wanted)]
    if len(fitting) > 1:  # labels may be jagged too, and are not looked up
        fitting = [name for name in fitting if name != "labels"]
    if len(fitting) == 1:
        return named_input(fitting[0])
    kinds = " or ".join(kind.__name__ for kind in wanted)
    have = f"{len(fitting)} ({', '.join(fitting)})" if fitting else "none"
    return Found(
        why=f"of the attributes of {type(batch).__name__}, {have} is a {kinds}, which "
        'its input_dist takes: name the right one, inputs={"module": "attribute"}'
    )


def _input_types(module: Any) -> tuple[type, ...]:
    """The annotated types of the parameter that follows the module's context."""
    names = list(inspect.signature(module.input_dist).parameters)
    hint = typing.get_type_hints(type(module).input_dist).get(names[1]) if names[1:] else None
    return tuple(kind for kind in typing.get_args(hint) or (hint,) if isinstance(kind, type))


def named_input(path: str) -> Found:
    """The input at a path within the batch, such as "features" or "user.ids"."""
    steps = [ArgInfoStepFactory.get_attr(part) for part in path.split(".")]
    return Found(CallArgs([ArgInfo([OfBatch(), *steps])], {}))


def sharded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name to sharded module, without those inside another one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        within = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if isinstance(module, ShardedModule) and not within:
            found[name] = module
    return found


def _path(arg: Any) -> str:
    text = "batch"
    for step in arg.steps:
        if isinstance(step, OfModule):
            text = f"{step.name}(...)"
        elif isinstance(step, ScalarArgInfoStep):
            text = repr(step.value)
        elif isinstance(step, GetAttrArgInfoStep):
            text += f".{step.attr_name}"
        elif isinstance(step, GetItemArgInfoStep):
            text += f"[{step.item_index!r}]"
    return text
