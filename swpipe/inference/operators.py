"""Which storages torch's operators read and write, those that autograd runs backward included.

A dispatch mode sees every operator below autograd. The schema of each says which arguments it
writes (``alias_info``) and which it makes a view of; the rest is read.

Not seen: what does not go through torch's dispatcher (numpy, kernels launched by themselves), what
other threads do that a task starts, and writes that a schema hides. What was written in these ways
is noticed by its content when the task is done (``swpipe.inference.moment``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe.inference.storages import StorageId, Storages

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that communicate."""

OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")
"""Operators that write without reading what was there."""

RUNNING = ("running_mean", "running_var")
"""Written by every batch norm in training, whatever its schema says."""


ALIASED = "aliased"
"""The mode of an argument that the result views, as a rule; ``to`` and ``reshape`` may copy."""

MADE = "made"
"""The mode of a result, and of the tensor that ``torch.tensor`` has just made."""


class Touched:
    """What operators did within one task.

    Attributes:
        reads: Storages whose content was read.
        replays: Those that autograd's engine read by itself, going backward; what they are, forward
            has saved.
        writes: Storages that were written.
        met: All storages among arguments and results.
        made: Those that no one had met before they came out of an operator.
        collectives: Names of the operators that communicate.
    """

    def __init__(self) -> None:
        self.reads: set[StorageId] = set()
        self.replays: set[StorageId] = set()
        self.writes: set[StorageId] = set()
        self.met: set[StorageId] = set()
        self.made: set[StorageId] = set()
        self.collectives: set[str] = set()


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what operators touch while it is on.

    Attributes:
        touched: Where it notes; exchange it from task to task.
    """

    def __init__(self, storages: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched = Touched()
        self._storages = storages
        self._modes: dict[Any, Mapping[str, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aliased: list[Tensor] = []
        replays = _called_by_the_engine(sys._getframe().f_back)
        for value, mode in self._arguments(func, args, kwargs):
            self._note(value, mode, replays)
            if mode == ALIASED:
                aliased.extend(_tensors(value))
        if func.namespace in COLLECTIVES:
            self.touched.collectives.add(str(func))
        result = func(*args, **kwargs)
        self._note(result, MADE)
        if aliased:
            self._note_copied(aliased, result)
        return result

    def _note_copied(self, aliased: list[Tensor], result: Any) -> None:
        """What might have been viewed, and lies elsewhere in the result, was read to be copied."""
        viewed = {number for one in _tensors(result) for number in self._storages.of(one)}
        copied = {number for one in aliased for number in self._storages.of(one)} - viewed
        self.touched.reads |= copied

    def _note(self, value: Any, mode: str, replays: bool = False) -> None:
        touched = self.touched
        reads = touched.replays if replays else touched.reads
        for tensor in _tensors(value):
            for storage, new in self._storages.meet(tensor):
                touched.met.add(storage)
                if new and mode == MADE:
                    touched.made.add(storage)
                if mode in ("r", "rw"):
                    reads.add(storage)
                if mode in ("w", "rw"):
                    touched.writes.add(storage)

    def _arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Any, str]]:
        """Each argument with how it is used: "r", "w", "rw", "" for its shape alone, or else."""
        modes = self._modes.get(func)
        if modes is None:
            modes = self._modes[func] = _modes(func)
        given = dict(zip(modes, args, strict=False)) | kwargs
        training = bool(given.get("training", given.get("train", False)))
        for name, value in given.items():
            mode = modes.get(name, "r")
            yield value, "rw" if mode == "r" and training and name in RUNNING else mode
        yield from ((value, "r") for value in args[len(modes) :])


def _called_by_the_engine(caller: FrameType | None) -> bool:
    """Whether an operator runs backward, with no Python between it and autograd's engine.

    Args:
        caller: Who called the mode; in the engine's own threads there may be nobody.
    """
    while caller is not None and caller.f_globals.get("__name__") in _AROUND_MODES:
        caller = caller.f_back
    return caller is None or caller.f_code is _ENGINE


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""Where the engine is entered from Python."""

_AROUND_MODES = ("torch._compile", "torch._dynamo.eval_frame")
"""Where torch keeps its compiler out of dispatch modes."""


def _modes(func: Any) -> dict[str, str]:
    """Argument to how an operator uses it, in order; none for an operator without a schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}
    name = schema.name.partition("::")[2]
    if func.namespace in COLLECTIVES:  # these write their arguments, and do not say so
        return {argument.name: "rw" for argument in schema.arguments}
    if name == "lift_fresh":
        return {"self": MADE}
    only_shape = name.startswith("new_") or name.endswith("_like")
    return {a.name: "" if only_shape else _mode(name, a) for a in schema.arguments}


def _mode(operator: str, argument: Any) -> str:
    alias = argument.alias_info
    if alias is None:
        return "r"
    if not alias.is_write:
        return ALIASED
    return "w" if operator in OVERWRITES or argument.is_out else "rw"


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, torch.Size | str) or not isinstance(value, list | tuple):
        return ()
    return (tensor for item in value for tensor in _tensors(item))
