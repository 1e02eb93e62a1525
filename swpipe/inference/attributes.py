"""Tensors that plain objects hold as attributes, put back where they were.

Modules and optimizers have ``swpipe._state.snapshot``. This is for the rest: a running mean, say,
that is
a new tensor after each iteration. Attributes that are no tensors stay as they are: an object that
prepares itself when it is first used would else come back half prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from swpipe._state.discovery import FOREIGN, WHOLE, find_all
from swpipe.core.task import PipelineTask

SKIPPED = (*WHOLE, FunctionType, MethodType, ModuleType, type)


def save_attributes(tasks: Iterable[PipelineTask]) -> Callable[[], None]:
    """Save the tensors that objects within reach have; what is returned puts them back."""
    saved = [
        (held, {name: v for name, v in held.items() if isinstance(v, Tensor)})
        for held in (_held(found.owner) for found in find_all(tasks))
        if held
    ]

    def put_back() -> None:
        for held, values in saved:
            held.update((n, v) for n, v in values.items() if isinstance(held.get(n), Tensor))

    return put_back


def _held(owner: Any) -> dict[str, Any]:
    if isinstance(owner, SKIPPED) or type(owner).__module__.partition(".")[0] in FOREIGN:
        return {}
    held = getattr(owner, "__dict__", {})
    return held if isinstance(held, dict) else {}
