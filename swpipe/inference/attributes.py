"""Attributes of plain objects: tensors and plain Python values, put back where they were.

Modules and optimizers have ``swpipe.snapshot``. This is for the rest: a counter, a running mean
that is a new tensor after each iteration. What lies in lists, dicts and closures stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from swpipe.reach import FOREIGN, PLAIN, WHOLE, find_all
from swpipe.task import PipelineTask

SKIPPED = (*WHOLE, FunctionType, MethodType, ModuleType, type)


def save_attributes(tasks: Iterable[PipelineTask]) -> Callable[[], None]:
    """Save the attributes of all objects within reach; what is returned puts them back."""
    saved = [
        (held, {name: v for name, v in held.items() if isinstance(v, (Tensor, *PLAIN))})
        for held in (_held(found.owner) for found in find_all(tasks))
        if held
    ]

    def put_back() -> None:
        for held, values in saved:
            held.update((n, v) for n, v in values.items() if held.get(n, saved) is not v)

    return put_back


def _held(owner: Any) -> dict[str, Any]:
    if isinstance(owner, SKIPPED) or type(owner).__module__.partition(".")[0] in FOREIGN:
        return {}
    held = getattr(owner, "__dict__", {})
    return held if isinstance(held, dict) else {}
