"""Records which storages torch operators read and write, also while autograd runs backward.

A dispatch mode sees every operator below autograd. The operator's schema says which arguments it
writes (``alias_info``) and which ones the result may be a view of; it reads the others.

Not recorded: code that does not use torch's dispatcher (numpy, kernels launched directly), other
threads that a task starts, and writes that a schema does not declare. Their writes are detected
afterwards, by comparing memory contents (``swpipe.inference.state_snapshot``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe.inference.storages import StorageId, Storages

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that communicate."""

OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")
"""Operators that write an argument without reading it."""

RUNNING = ("running_mean", "running_var")
"""Arguments that every batch norm writes in training, although its schema does not say so."""

ALIASED = "aliased"
"""Argument mode: the result is usually a view of it; ``to`` and ``reshape`` may copy instead."""

CREATED = "created"
"""Mode of a result, and of the tensor that ``torch.tensor`` has just created."""


class OperatorAccesses:
    """Storages that operators accessed during one task.

    Attributes:
        reads: Storages whose content was read by operators that Python code called.
        replays: Storages that autograd's engine read by itself during backward: tensors saved by
            forward.
        writes: Storages that were written.
        seen: All storages of arguments and results.
        created: Storages first seen in the result of an operator.
        collectives: Names of the operators that communicate.
    """

    def __init__(self) -> None:
        self.reads: set[StorageId] = set()
        self.replays: set[StorageId] = set()
        self.writes: set[StorageId] = set()
        self.seen: set[StorageId] = set()
        self.created: set[StorageId] = set()
        self.collectives: set[str] = set()

    @property
    def all_reads(self) -> set[StorageId]:
        """Storages that were read in either way."""
        return self.reads | self.replays


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the accesses of operators while it is active, in ``accesses``.

    Attributes:
        only_watches: Threads that run without it compute the same, so a task may run a pipeline.
    """

    only_watches = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps its compiler off ``__torch_dispatch__``; it would load it, in 1 s."""
        return False

    def __init__(self, storages: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.accesses = OperatorAccesses()
        self._storages = storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by torch: compiled functions stay compiled; an older torch runs them eagerly."""
        return True

    # Not torch's own: these also set flags of the whole process, which threads would set in turns.
    def __enter__(self) -> OperatorRecorder:
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    def __exit__(self, *failure: object) -> None:
        torch._C._pop_torch_dispatch_stack(None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aliased: list[Tensor] = []
        replays = _called_by_the_engine(sys._getframe().f_back)
        for value, mode in self._arguments(func, args, kwargs):
            self._record(value, mode, replays)
            if mode == ALIASED:
                aliased.extend(tensors_of(value))
        if func.namespace in COLLECTIVES:
            self.accesses.collectives.add(str(func))
        result = self.run(func, args, kwargs)
        self._record(result, CREATED, replays)
        if aliased:  # what the result does not view was read and copied
            self.accesses.reads |= self._of(aliased) - self._of(tensors_of(result))
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def _of(self, tensors: Iterable[Tensor]) -> set[StorageId]:
        return {number for tensor in tensors for number in self._storages.of(tensor)}

    def _record(self, value: Any, mode: str, replays: bool = False) -> None:
        accesses = self.accesses
        reads = accesses.replays if replays else accesses.reads
        for tensor in tensors_of(value):
            for storage, new in self._storages.add(tensor):
                accesses.seen.add(storage)
                if new and mode == CREATED:
                    accesses.created.add(storage)
                    self._storages.created.add(storage)
                if mode in ("r", "rw"):
                    reads.add(storage)
                if mode in ("w", "rw"):
                    accesses.writes.add(storage)

    def _arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Any, str]]:
        """Each argument and its mode: "r", "w", "rw", ALIASED, CREATED, or "" (shape only)."""
        modes = _modes(func)
        given = dict(zip(modes, args, strict=False)) | kwargs
        training = bool(given.get("training", given.get("train", False)))
        for name, value in given.items():
            mode = modes.get(name, "r")
            yield value, "rw" if mode == "r" and training and name in RUNNING else mode
        yield from ((value, "r") for value in args[len(modes) :])


def _called_by_the_engine(caller: FrameType | None) -> bool:
    """Whether autograd's engine runs the operator, with no other Python frame in between.

    ``caller`` called the mode; in the engine's own threads it may be None.
    """
    while caller is not None and caller.f_globals.get("__name__") in _AROUND_MODES:
        caller = caller.f_back
    return caller is None or caller.f_code is _ENGINE


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""The function that enters the engine from Python."""

_AROUND_MODES = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules whose wrappers disable torch's compiler around dispatch modes."""


@cache
def _modes(func: Any) -> Mapping[str, str]:
    """Argument to mode, in order; empty for an operator without a schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}
    name = schema.name.partition("::")[2]
    if func.namespace in COLLECTIVES:  # their schemas do not declare what they write
        return {argument.name: "rw" for argument in schema.arguments}
    if name == "lift_fresh":
        return {"self": CREATED}
    only_shape = name.startswith("new_") or name.endswith("_like")
    return {a.name: "" if only_shape else _mode(name, a) for a in schema.arguments}


def _mode(operator: str, argument: Any) -> str:
    alias = argument.alias_info
    if alias is None:
        return "r"
    if not alias.is_write:
        return ALIASED
    return "w" if operator in OVERWRITES or argument.is_out else "rw"


def tensors_of(value: Any) -> Iterable[Tensor]:
    """The tensors of an operator's argument or result that have memory, or may have."""
    if isinstance(value, Tensor):
        return () if is_lazy(value) else (value,)
    if isinstance(value, torch.Size | str) or not isinstance(value, list | tuple):
        return ()
    return (tensor for item in value for tensor in tensors_of(item))
