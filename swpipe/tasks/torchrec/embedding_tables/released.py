"""The memory of ids goes when they have been exchanged, as under TorchRec's memory arguments.

::

    EmbInputDistStart   batch.ids ── permuted copy ──> exchange     free_features_storage_early:
                        batch.ids has no memory now                 where the module has copied them
    EmbPrefetch         what this rank has sent has none            clear_data_dist_inputs:
                        batch.ids neither, where that was sent      after the wait for the exchange

TorchRec empties the storage of these tensors. Whatever still refers to it then reads memory that is
not there. Here references are dropped instead: a jagged tensor gets tensors without memory, which
have the shape, type and device of the ones before, and raise where they are read. So memory stays
where anything else holds it, such as the module's own context or another module's exchange.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor

from swpipe._values.walk import tensors_in
from swpipe.device import Device, Stream
from swpipe.tasks.torchrec._torchrec import KeyedJaggedTensor, KJTAllToAllTensorsAwaitable
from swpipe.tasks.torchrec.rewriting.forwards import SparseDistContext
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """What TorchRec's pipelines have to save device memory, by the names of TorchRec 1.8.

    With any of them ``ctx.batch`` is None after the model's forward.

    Attributes:
        enable_inplace_copy_batch: The copy to the device gets memory of the caller's stream, which
            later batches can use again. The batch's ``to`` takes ``data_copy_stream``.
        free_features_storage_early: The ids of a batch have no memory after ``EmbInputDistStart``,
            where the sharded module has made a permuted copy.
        clear_data_dist_inputs: What a rank has sent of them has none after ``EmbPrefetch``.
    """

    enable_inplace_copy_batch: bool = False
    free_features_storage_early: bool = False
    clear_data_dist_inputs: bool = False

    def __bool__(self) -> bool:
        return self != MemoryOptions()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Those among the arguments of a pipeline of TorchRec's; those that it lacks are off."""
        old = given.get("inplace_copy_batch_to_gpu", False)  # its name in TorchRec 1.5
        return cls(
            enable_inplace_copy_batch=bool(given.get("enable_inplace_copy_batch", old)),
            free_features_storage_early=bool(given.get("free_features_storage_early")),
            clear_data_dist_inputs=bool(given.get("clear_data_dist_inputs")),
        )


def copied_in_place(batch: Any, target: torch.device, device: Device, home: Stream) -> Any:
    """The batch in memory of the stream ``home``, copied on the current one."""
    parameters = inspect.signature(batch.to).parameters.values()
    if not any(p.name == "data_copy_stream" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"enable_inplace_copy_batch: {type(batch).__name__}.to takes no data_copy_stream: let "
            "it take this argument, allocate its tensors, make that stream current, let it wait "
            "for the stream that was current before, and copy there (as ModelInput.to in "
            "torchrec.distributed.test_utils.model_input); or leave enable_inplace_copy_batch out"
        )
    copying = device.current_stream()
    with device.on(home):
        return batch.to(device=target, non_blocking=True, data_copy_stream=copying)


_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Released(Tensor):
    """Stands for a tensor whose memory went; has its shape, type and device."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Self:
        with torch.inference_mode(False):
            made: Self = Tensor._make_wrapper_subclass(
                cls, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device,
                storage_size=0,
            )  # fmt: skip
        return made

    def __init__(self, tensor: Tensor) -> None:
        """Without a reference to the tensor."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Released({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operator that reads."""
        if func is torch.ops.aten.record_stream.default:
            return None
        if func in _HARMLESS:
            return cls(args[0])
        raise RewriteError(
            f"{func} reads ids of the batch whose memory went when they had been exchanged: pass "
            "them to their sharded module and to nothing else, keep what else you need of them in "
            "another attribute of the batch, or leave out free_features_storage_early and "
            "clear_data_dist_inputs"
        )


MARK = "_free_features_storage_early"
"""By this attribute a sharded module of TorchRec 1.8 lists in its context what it has copied."""

_PARTS = ("_values", "_weights", "_lengths", "_offsets")


class Releases:
    """Lets go of the ids of batches, as the options say."""

    def __init__(self, options: MemoryOptions, device: Device) -> None:
        self._options = options
        self._device = device

    def marks(self, module: Any) -> bool:
        """Whether a sharded module is to list what it has copied."""
        return self._options.free_features_storage_early and hasattr(module, MARK)

    def lent(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """The arguments with which a module starts its exchange; what it keeps of them stays."""
        if not self._options.free_features_storage_early:
            return inputs
        args, kwargs = inputs
        return [*map(_lent, args)], {name: _lent(value) for name, value in kwargs.items()}

    def started(self, context: SparseDistContext) -> None:
        """All exchanges of a batch have started: let go of what the modules have copied."""
        for module_context in context.module_contexts.values():
            copied = getattr(module_context, "early_releasable_inputs", [])
            gone = _storages(tensor for features in copied for tensor in _tensors(features))
            for lent, features in product(copied, _inputs(context)):
                if features.values() is lent.values():
                    vars(features).update(vars(lent))  # lists, which it computes when asked
            if copied:
                self._release(context, gone)
                copied.clear()

    def sent(self, context: SparseDistContext) -> None:
        """Wait for the exchange of a batch's ids, and let go of what this rank has sent."""

        def let_go(awaitable: Any, module_context: Any) -> None:
            kept = _storages(tensors_in(module_context))
            self._release(context, _sent(awaitable) - kept)

        if self._options.clear_data_dist_inputs:
            for request in context.input_dist_tensors_requests.values():
                request.before_wait(let_go)

    def _release(self, context: SparseDistContext, gone: set[int]) -> None:
        """Let go of what of the modules' inputs lies in these storages."""
        for features in _inputs(context):
            if _storages(_tensors(features)) & gone:
                self._device.hold([features], [self._device.current_stream()])
                _empty(features, gone)
        computed = () if context.computed is None else context.computed.calls.values()
        for call in (*context.inputs.values(), *computed):
            call.forget(gone)


def _inputs(context: SparseDistContext) -> list[Any]:
    """The jagged tensors among the modules' inputs."""
    values = (value for call in context.inputs.values() for value in call.values)
    return [value for value in values if isinstance(value, KeyedJaggedTensor)]


def _lent(value: Any) -> Any:
    """The same jagged tensor in another object."""
    return copy.copy(value) if isinstance(value, KeyedJaggedTensor) else value


def _empty(features: Any, gone: set[int]) -> None:
    for name in _PARTS:
        if (tensor := getattr(features, name)) is not None and _storages([tensor]) & gone:
            setattr(features, name, Released(tensor))
    features._jt_dict = None


def _sent(awaitable: Any) -> set[int]:
    """Wait for the exchanges of one module, and let them forget what was sent: its storages."""
    found: set[int] = set()
    for exchange in getattr(awaitable, "awaitables", ()):
        if isinstance(exchange, KJTAllToAllTensorsAwaitable) and exchange._workers > 1:
            for work in exchange._awaitables:
                work.wait()
            sent = _storages(_tensors(exchange._input))
            # which hold them too
            exchange._input_tensors = []
            exchange._awaitables = []
            exchange._input = _lent(exchange._input)  # the module's context may have this object
            _empty(exchange._input, sent)
            found |= sent
    return found


def _tensors(features: Any) -> list[Tensor]:
    return [tensor for name in _PARTS if (tensor := getattr(features, name)) is not None]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}
