"""Recording of what torch operators read, write and draw from, also while autograd runs backward.

A dispatch mode sees every operator below autograd. The operator's schema says which arguments it
writes (``alias_info``) and which ones the result may be a view of; it reads all other arguments.

Not recorded: code that does not use torch's dispatcher (numpy, kernels launched directly), other
threads that a task starts, and writes that a schema does not declare. A recording detects these
writes afterwards, by comparing memory contents (``swpipe.inference.observing``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from swpipe._values.storages import StorageId, Storages
from swpipe._values.walk import map_tensors
from swpipe.device import Device, on_cpu

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of operators that communicate."""

OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")
"""The operators that write an argument without reading it."""

RUNNING = ("running_mean", "running_var")
"""The arguments that every batch norm writes in training, although its schema does not say so."""

ALIASED = "aliased"
"""The mode of an argument that the result usually views; ``to`` and ``reshape`` may copy it."""

CREATED = "created"
"""The mode of a result, and of the tensor that ``torch.tensor`` has just created."""


_RANGE = torch.ops.profiler._record_function_enter_new.default
"""The operator that marks a range for profilers."""


@dataclass
class OperatorAccesses:
    """The storages that operators accessed during one task.

    Attributes:
        reads: Storages whose content was read by operators that Python code called.
        replays: Storages that autograd's engine read by itself during backward: tensors saved by
            forward.
        writes: Storages that were written.
        created: Storages first seen in the result of an operator.
        collectives: Names of the operators that communicate.
        on_device: A tensor was on a device.
    """

    reads: set[StorageId] = field(default_factory=set)
    replays: set[StorageId] = field(default_factory=set)
    writes: set[StorageId] = field(default_factory=set)
    created: set[StorageId] = field(default_factory=set)
    collectives: set[str] = field(default_factory=set)
    on_device: bool = False

    @property
    def all_reads(self) -> set[StorageId]:
        """The storages that were read by Python code or by autograd's engine."""
        return self.reads | self.replays

    @property
    def all_writes(self) -> set[StorageId]:
        """The storages that were created or written."""
        return self.created | self.writes


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records operators while it is active.

    Args:
        device: The device whose default generators count.
        storages: All storages seen so far.

    Attributes:
        only_watches: Threads that run without this mode compute the same, so a task may run a
            pipeline.
        accesses: The accesses of the recorded operators.
        storages: All storages seen so far, with those that the operators used.
        draws: A generator's number to the generator; 0 to None for torch's default generators.
        clears: Whether an optimizer's ``zero_grad`` was called.
    """

    only_watches = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return whether torch keeps its compiler off ``__torch_dispatch__``.

        True would make torch load the compiler, which takes 1 s.
        """
        return False

    def __init__(self, device: Device, storages: Storages | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.accesses = OperatorAccesses()
        self.storages = Storages() if storages is None else storages
        self.draws: dict[int, torch.Generator | None] = {}
        self.clears = False
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions stay compiled.

        torch calls this method; an older torch does not, and runs compiled functions eagerly.
        """
        return True

    # Not torch's own methods: these also set flags of the whole process, which several threads
    # would overwrite. The stack that is used instead is per thread, and private in torch 2.13
    # (_push_on_torch_dispatch_stack, _pop_torch_dispatch_stack).
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
        for value, mode in self.arguments(func, args, kwargs):
            self._record(value, mode, replays)
            if mode == ALIASED:
                aliased.extend(tensors_of(value))
        if func.namespace in COLLECTIVES:
            self.accesses.collectives.add(str(func))
        result = self.run(func, args, kwargs)
        self._record(result, CREATED, replays)
        if aliased:  # memory that the result does not view was read and copied
            self.accesses.reads |= self._of(aliased) - self._of(tensors_of(result))
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and note whether it draws; dropout with a rate of 0 does not."""
        if 0 not in self.draws and _recomputes(sys._getframe()):
            self.draws[0] = None
        if torch.Tag.nondeterministic_seeded not in func.tags:
            # zero_grad runs no operator if it sets gradients to None, but torch marks it as a range
            # for profilers.
            if func is _RANGE and str(args[0]).startswith("Optimizer.zero_grad"):
                self.clears = True
            return func(*args, **kwargs)
        if (generator := kwargs.get("generator")) is not None:
            self.draws[generator._cdata] = generator  # a generator may have several Python objects
            return func(*args, **kwargs)
        # The tag only says that an operator may draw; the generators' states show whether it did.
        before = self._states()
        result = func(*args, **kwargs)
        # Another thread may draw meanwhile. An operator with an empty result draws nothing itself.
        if self._states() != before and any(tensor.numel() for tensor in tensors_of(result)):
            self.draws[0] = None
        return result

    def _states(self) -> list[bytes]:
        return [bytes(state.numpy()) for state in self._device.generator_states().values()]

    def _of(self, tensors: Iterable[Tensor]) -> set[StorageId]:
        return {number for tensor in tensors for number in self.storages.of(tensor)}

    def _record(self, value: Any, mode: str, replays: bool = False) -> None:
        accesses = self.accesses
        reads = accesses.replays if replays else accesses.reads
        for tensor in tensors_of(value):
            accesses.on_device |= not on_cpu(tensor)
            for storage, new in self.storages.add(tensor):
                if new and mode == CREATED:
                    accesses.created.add(storage)
                if mode in ("r", "rw"):
                    reads.add(storage)
                if mode in ("w", "rw"):
                    accesses.writes.add(storage)

    def arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Any, str]]:
        """Yield each argument and its mode.

        The modes are "r", "w", "rw", ALIASED, CREATED, and "" for an argument of which only the
        shape is used.
        """
        modes = _modes(func)
        given = dict(zip(modes, args, strict=False)) | kwargs
        training = bool(given.get("training", given.get("train", False)))
        for name, value in given.items():
            mode = modes.get(name, "r")
            yield value, "rw" if mode == "r" and training and name in RUNNING else mode
        yield from ((value, "r") for value in args[len(modes) :])


def _called_by_the_engine(caller: FrameType | None) -> bool:
    """Return whether autograd's engine runs the operator, with no other Python frame in between.

    ``caller`` is the frame that called the mode; in the engine's own threads it may be None.
    """
    while caller is not None and caller.f_globals.get("__name__") in _AROUND_MODES:
        caller = caller.f_back
    return caller is None or caller.f_code is _ENGINE


_ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""The code of the function that enters the engine from Python; private in torch 2.13."""

_AROUND_MODES = ("torch._compile", "torch._dynamo.eval_frame")
"""The modules whose wrappers disable torch's compiler around dispatch modes."""


@cache
def _modes(func: Any) -> Mapping[str, str]:
    """Return the mode of each argument, in order; an operator without a schema has none."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return {}
    name = schema.name.partition("::")[2]
    if func.namespace in COLLECTIVES:  # their schemas declare no writes
        return {argument.name: "rw" for argument in schema.arguments}
    # torch.tensor calls lift_fresh on a tensor that it has just made outside the dispatcher.
    if name == "lift_fresh":
        return {"self": CREATED}
    only_shape = name.startswith("new_") or name.endswith("_like")
    return {a.name: "" if only_shape else _mode(name, a) for a in schema.arguments}


def _mode(operator: str, argument: Any) -> str:
    """Return the mode of one argument of an operator's schema."""
    alias = argument.alias_info
    if alias is None:
        return "r"
    if not alias.is_write:
        return ALIASED
    return "w" if operator in OVERWRITES or argument.is_out else "rw"


def tensors_of(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in an operator's argument or result that have memory, or may have."""
    if isinstance(value, Tensor):
        return () if is_lazy(value) else (value,)
    if isinstance(value, torch.Size | str) or not isinstance(value, list | tuple):
        return ()
    return (tensor for item in value for tensor in tensors_of(item))


def _recomputes(frame: FrameType | None) -> bool:
    """Return whether activation checkpointing runs a forward again, in a backward.

    Checkpointing sets the default generators and sets them back: another task would draw other
    numbers meanwhile, whether or not the forward draws.
    """
    # -1: no backward runs on this thread. The function is private in torch 2.13.
    if torch._C._current_graph_task_id() == -1:
        return False
    while frame is not None and frame.f_globals.get("__name__") != _CHECKPOINT:
        frame = frame.f_back
    return frame is not None


_CHECKPOINT = "torch.utils.checkpoint"


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions eagerly within the block.

    The kernels of compiled functions do not go through the dispatcher.
    """
    stance: AbstractContextManager[None] = nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    with stance, warnings.catch_warnings():
        # Compiled modules warn here, because their global hooks fire twice when they run eagerly.
        warnings.filterwarnings("ignore", r".*torch\.compile\(module\).*global hooks")
        yield


def copied(batch: Any) -> Any:
    """Return the batch with clones of the tensors in it."""

    def clone(tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return tensor.clone().requires_grad_(tensor.requires_grad)

    return map_tensors(batch, clone)
