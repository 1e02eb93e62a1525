"""Release of the memory of ids once they are exchanged, as under TorchRec's memory arguments.

::

    EmbInputDistStart   batch.ids ── permuted copy ──> exchange     free_features_storage_early:
                        batch.ids has no memory now                 where the module has copied them
    EmbPrefetch         ids sent by this rank have none             clear_data_dist_inputs:
                        nor batch.ids, if it was sent itself        after the wait for the exchange

TorchRec empties the storage of these tensors. Whatever still refers to it then reads memory that is
not there. Here references are dropped instead: a jagged tensor gets tensors without memory, which
have the shape, type and device of the ones before, and raise when they are read. Memory that is
held by anything else stays, for example by the module's context or another module's exchange.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor

from swpipe.device import Device, Stream
from swpipe.tasks.torchrec._torchrec import KeyedJaggedTensor, KJTAllToAllTensorsAwaitable
from swpipe.tasks.torchrec.rewriting.forwards import SparseDistContext
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError
from swpipe.values import tensors_in


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """TorchRec's options to save device memory, by the names of TorchRec 1.8.

    With any of these options, ``ctx.batch`` is None after the model's forward.

    Attributes:
        enable_inplace_copy_batch: The copy to the device gets memory of the caller's stream, which
            later batches can use again. The batch's ``to`` takes ``data_copy_stream``.
        free_features_storage_early: The ids of a batch have no memory after ``EmbInputDistStart``,
            where the sharded module has made a permuted copy.
        clear_data_dist_inputs: The ids that a rank has sent have no memory after ``EmbPrefetch``.
    """

    enable_inplace_copy_batch: bool = False
    free_features_storage_early: bool = False
    clear_data_dist_inputs: bool = False

    def __bool__(self) -> bool:
        return self != MemoryOptions()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options among a TorchRec pipeline's arguments; missing ones are off."""
        # The name of enable_inplace_copy_batch in TorchRec 1.5.
        old = given.get("inplace_copy_batch_to_gpu")
        named = {"enable_inplace_copy_batch": old, **given}
        return cls(**{each.name: bool(named.get(each.name)) for each in fields(cls)})


def copied_in_place(batch: Any, target: torch.device, device: Device, home: Stream) -> Any:
    """Return the batch in memory of the stream ``home``, copied on the current stream."""
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
        # Allocated on home: the caching allocator gives the memory back to the stream that
        # allocated it, so that later batches reuse it without waiting for the copying stream.
        return batch.to(device=target, non_blocking=True, data_copy_stream=copying)


# The operators that torch or TorchRec call on tensors without reading values.
_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Released(Tensor):
    """A tensor without memory in place of a released one, with its shape, type and device."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Self:
        # A wrapper made in inference mode could not be used outside of it.
        with torch.inference_mode(False):
            wrapper: Self = Tensor._make_wrapper_subclass(
                cls, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device,
                storage_size=0,
            )  # fmt: skip
        return wrapper

    def __init__(self, tensor: Tensor) -> None:
        """Keep no reference to the tensor."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Released({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse every operator that reads values."""
        # It marks memory as used by a stream, and there is no memory.
        if func is torch.ops.aten.record_stream.default:
            return None
        if func in _HARMLESS:
            return cls(args[0])
        raise RewriteError(
            f"{func} reads ids of the batch whose memory was freed after the exchange: pass "
            "them to their sharded module and to nothing else, keep what else you need of them in "
            "another attribute of the batch, or leave out free_features_storage_early and "
            "clear_data_dist_inputs"
        )


MARK = "_free_features_storage_early"
"""The attribute by which a sharded module of TorchRec 1.8 is told to list its copied inputs."""

_PARTS = ("_values", "_weights", "_lengths", "_offsets")


class Releases:
    """Releases the ids of batches as the options say."""

    def __init__(self, options: MemoryOptions, device: Device) -> None:
        self._options = options
        self._device = device

    def marks(self, module: Any) -> bool:
        """Return whether a sharded module should list the inputs that it has copied."""
        return self._options.free_features_storage_early and hasattr(module, MARK)

    def lent(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the arguments with which a module starts its exchange, in objects of their own."""
        # The module's lists then hold these objects. The batch's own jagged tensors can be emptied
        # without emptying what the module keeps.
        if not self._options.free_features_storage_early:
            return inputs
        args, kwargs = inputs
        return [*map(_lent, args)], {name: _lent(value) for name, value in kwargs.items()}

    def started(self, context: SparseDistContext) -> None:
        """Release the ids that the modules have copied; all exchanges of the batch have started."""
        for module_context in context.module_contexts.values():
            copied = getattr(module_context, "early_releasable_inputs", ())
            if not copied:
                continue
            gone = _storages(tensor for features in copied for tensor in _tensors(features))
            for lent, features in product(copied, _inputs(context)):
                if features.values() is lent.values():
                    # A jagged tensor computes lists of lengths when asked. The lists that the
                    # module has computed on its copy are taken over to the batch's object, whose
                    # tensors are released next.
                    vars(features).update(vars(lent))
            self._release(context, gone)
            copied.clear()

    def sent(self, context: SparseDistContext) -> None:
        """Wait for the exchange of a batch's ids and release the ids that this rank has sent."""

        def let_go(awaitable: Any, module_context: Any) -> None:
            # The module still needs the tensors that its context holds.
            needed = _storages(tensors_in(module_context))
            self._release(context, _sent(awaitable) - needed)

        if self._options.clear_data_dist_inputs:
            for request in context.input_dist_tensors_requests.values():
                request.before_wait(let_go)

    def _release(self, context: SparseDistContext, gone: set[int]) -> None:
        """Release the parts of the modules' inputs that lie in these storages."""
        for features in _inputs(context):
            if _storages(_tensors(features)) & gone:
                # The current stream may still read the memory, which is held until that work is
                # done.
                self._device.hold([features], [self._device.current_stream()])
                _empty(features, gone)
        computed = () if context.computed is None else context.computed.calls.values()
        for call in (*context.inputs.values(), *computed):
            call.forget(gone)


def _inputs(context: SparseDistContext) -> list[Any]:
    """Return the jagged tensors among the modules' inputs."""
    values = (value for call in context.inputs.values() for value in call.values)
    return [value for value in values if isinstance(value, KeyedJaggedTensor)]


def _lent(value: Any) -> Any:
    """Return the same jagged tensor in another object."""
    return copy.copy(value) if isinstance(value, KeyedJaggedTensor) else value


def _empty(features: Any, gone: set[int]) -> None:
    for name in _PARTS:
        if (tensor := getattr(features, name)) is not None and _storages([tensor]) & gone:
            setattr(features, name, Released(tensor))
    # TorchRec's private cache of the split tensor: its parts are views of the memory.
    features._jt_dict = None


def _sent(awaitable: Any) -> set[int]:
    """Wait for one module's exchanges, and release and return the storages of what they sent."""
    storages: set[int] = set()
    for exchange in getattr(awaitable, "awaitables", ()):
        if isinstance(exchange, KJTAllToAllTensorsAwaitable) and exchange._workers > 1:
            for work in exchange._awaitables:
                work.wait()
            sent = _storages(_tensors(exchange._input))
            # These private lists of TorchRec's awaitable (1.8) hold the tensors too.
            exchange._input_tensors = []
            exchange._awaitables = []
            # A copy is emptied, since the module's context may hold this object.
            exchange._input = _lent(exchange._input)
            _empty(exchange._input, sent)
            storages |= sent
    return storages


def _tensors(features: Any) -> list[Tensor]:
    return [tensor for name in _PARTS if (tensor := getattr(features, name)) is not None]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}
