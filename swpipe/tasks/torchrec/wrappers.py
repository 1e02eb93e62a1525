"""The modules around a model: TorchRec's, torch's and Megatron's; Megatron's keep gradients.

    DistributedModelParallel ─> Megatron's DistributedDataParallel ─> Float16Module ─> the model

Megatron's wrapper adds each gradient to ``parameter.main_grad``, a part of a buffer of its own, and
sets ``parameter.grad`` to None; its optimizers read the buffer. So its ``zero_grad_buffer`` must
come before the first backward of a step, and ``finish_grad_sync``, which reduces over the ranks,
after the last. It is known by these methods: Megatron is not imported.

Source: Megatron-LM, megatron.core.distributed.DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swpipe.tasks.torchrec._torchrec import get_unwrapped_module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within DistributedModelParallel, DDP, FSDP, Megatron's DDP and Float16Module."""
    inner: nn.Module = get_unwrapped_module(model)
    while _is_megatrons(inner) or type(inner).__name__ == "Float16Module":
        inner = get_unwrapped_module(inner.module)
    return inner


def ddp_modules(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Every DDP wrapper of torch, including TorchRec's around data-parallel tables."""
    return (m for m in model.modules() if isinstance(m, DistributedDataParallel))


def reduced_by_outer_ddp(model: nn.Module, module: nn.Module) -> bool:
    """Whether a DDP wrapper around ``module`` reduces some of its parameters.

    Such are those of feature processors: they take part in the look-up, and DDP expects their
    gradients in the backward of the dense part.
    """
    own = {id(p) for p in module.parameters() if p.requires_grad}
    return any(
        id(parameter) in own
        for wrapper in ddp_modules(model)
        if wrapper not in set(module.modules())
        for name, parameter in wrapper.module.named_parameters()
        if name not in wrapper.parameters_to_ignore
    )


class GradientBuffers:
    """The gradients that Megatron's wrappers keep; nothing where a model has none."""

    def __init__(self, model: nn.Module) -> None:
        self._wrappers: list[Any] = [m for m in model.modules() if _is_megatrons(m)]
        self.parameters = [p for p in model.parameters() if hasattr(p, "main_grad")]

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def zero(self) -> None:
        """Begin a step without gradients."""
        for wrapper in self._wrappers:
            wrapper.zero_grad_buffer()

    def unreduced(self) -> ExitStack:
        """Within the block no backward begins to reduce: it is not the last of its step."""
        stack = ExitStack()
        for wrapper in self._wrappers:
            stack.enter_context(wrapper.no_sync())
        return stack

    def reduce(self) -> None:
        """Reduce over the ranks, after the last backward of a step."""
        for wrapper in self._wrappers:
            wrapper.finish_grad_sync()

    def copies(self) -> list[Tensor]:
        """Of all parameters' gradients, as they are."""
        return [parameter.main_grad.clone() for parameter in self.parameters]

    def put_back(self, copies: list[Tensor]) -> None:
        """In place: a parameter's gradient is a part of a buffer."""
        for parameter, copy in zip(self.parameters, copies, strict=True):
            parameter.main_grad.copy_(copy)


def _is_megatrons(module: nn.Module) -> bool:
    return callable(getattr(module, "zero_grad_buffer", None))
