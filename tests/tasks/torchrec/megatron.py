"""Stand-ins for Megatron-LM's wrappers and optimizer, written from its documentation.

All gradients lie in one buffer, of which each ``parameter.main_grad`` is a part. A backward adds to
it, and sets ``parameter.grad`` to None. Only ``zero_grad_buffer`` clears the buffer, and only
``finish_grad_sync`` reduces it. Like Megatron's, the wrapper is strict: it counts a step's last
backward, and refuses to reduce twice or before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.tasks.torchrec.models import Job, dense_optimizer, sharded


class Float16Module(nn.Module):
    """A wrapper that passes everything on; the real one converts tensors of 32 bits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class DistributedDataParallel(nn.Module):
    """A wrapper with the gradients of ``parameters`` in one buffer, reduced on request."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.module = module
        self._last = True
        self._ready: set[int] = set()
        self._buffer = torch.zeros(sum(p.numel() for p in parameters))
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.main_grad = self._buffer[start:end].view_as(parameter)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(partial(self._add))
            start = end

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _add(self, parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        if self._last and id(parameter) in self._ready:
            raise RuntimeError("a step has one last backward: run the others under no_sync()")
        self._ready |= {id(parameter)} if self._last else set()

    def zero_grad_buffer(self) -> None:
        """Begin a step."""
        self._buffer.zero_()
        self._ready.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark backwards in the block as not the last of their step."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def finish_grad_sync(self) -> None:
        """Average the gradients over the ranks."""
        if not self._ready:
            raise RuntimeError("the gradients were reduced already, or no last backward has run")
        self._ready.clear()
        self._buffer.div_(dist.get_world_size())
        dist.all_reduce(self._buffer)


class Optimizer:
    """An SGD on ``main_grad``; like Megatron's, it is no ``torch.optim.Optimizer``."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        self.param_groups = [{"params": parameters, "lr": lr}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``parameter.grad`` only."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        """Update the parameters."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            parameter.sub_(parameter.main_grad, alpha=group["lr"])
        return True, 0.0, None


def within_megatrons(model: Any, inner: nn.Module, parameters: list[Any]) -> tuple[Any, Any]:
    """Return a model of TorchRec within both wrappers, and the optimizer of these parameters."""
    model._dmp_wrapped_module = DistributedDataParallel(Float16Module(inner), parameters)
    return model, Optimizer(parameters, 0.1)


def megatrons(plain: nn.Module | None = None) -> tuple[Any, Any]:
    """Return a sharded model within both wrappers, and the optimizer of its dense part."""
    model: Any = sharded(Job(), plain, ddp=False)
    parameters = dense_optimizer(Job(), model).param_groups[0]["params"]
    return within_megatrons(model, model._dmp_wrapped_module, parameters)
