"""DDP's all-reduces, begun within the backward and waited for in ``FinalizeGrads``.

    DenseBackward   backward ─ bucket 1 ─ bucket 2 ─ end      DDP itself would wait here for all
    EmbBackward                  backward of the tables
    FinalizeGrads                                    wait ─ the gradients of all buckets

A backward of its own for the dense part ends with a wait for its reductions, before the backward
of the tables can begin. So DDP gets a communication hook that starts the same reduction (scaled
before the sum, as DDP does it) and returns the bucket at once. ``finish`` waits, and puts the
results where DDP has stored what was there before.

A hook cannot be removed: outside of ``deferring`` it reduces as DDP does without one. A wrapper
that has a hook of its user keeps that, and waits as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from swpipe.tasks.torchrec.wrappers import ddp_modules


class DeferredReduction:
    """The reductions of all DDP wrappers in a model; nothing where it has none."""

    def __init__(self, model: nn.Module) -> None:
        # On one rank there is nothing to wait for.
        self._modules = tuple(
            module for module in ddp_modules(model) if dist.get_world_size(module.process_group) > 1
        )
        self._pending: list[_Bucket] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within the block backwards do not wait for their reductions."""
        hooks = [hook for module in self._modules if (hook := _hook_of(module)) is not None]
        for hook in hooks:
            hook.pending = self._pending
        try:
            yield
        finally:
            for hook in hooks:
                hook.pending = None

    def finish(self) -> None:
        """Wait for the reductions, if any; then the gradients are reduced."""
        pending, self._pending = self._pending, []
        for bucket in pending:
            bucket.finish()


class _Bucket:
    """A bucket whose reduction has begun."""

    def __init__(self, bucket: Any, work: dist.Work) -> None:
        self._reduced = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        self._work = work

    def finish(self) -> None:
        self._work.wait()
        for parameter, reduced in self._reduced:
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() != reduced.data_ptr():
                gradient.copy_(reduced)


class _Hook:
    """What one DDP wrapper's communication hook knows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.pending: list[_Bucket] | None = None


_hooks: WeakKeyDictionary[nn.Module, _Hook | None] = WeakKeyDictionary()
"""None for a wrapper that has a hook of its user."""


def _hook_of(module: Any) -> _Hook | None:
    if module not in _hooks:
        hook = _Hook(module.process_group)
        try:
            module.register_comm_hook(hook, _reduce)
        except RuntimeError:  # it has one, and takes no second
            _hooks[module] = None
        else:
            _hooks[module] = hook
    return _hooks[module]


def _reduce(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    size = dist.get_world_size(state.group)
    if buffer.is_sparse:
        buffer.div_(size)
    else:
        buffer.mul_(1.0 / size)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    if state.pending is None or buffer.is_sparse:
        return work.get_future().then(lambda done: done.value()[0])
    state.pending.append(_Bucket(bucket, work))
    devices = [] if buffer.is_cpu else [buffer.device]
    returned: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    returned.set_result(buffer)
    return returned
