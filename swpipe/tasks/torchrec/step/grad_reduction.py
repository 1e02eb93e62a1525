"""Gradients over several ranks and batches: DDP's reductions, Megatron's buffers, accumulation.

    trained batch      0     1     2     3     4     5   end of the data
    zero gradients     ^                 ^                 ^
    reduce (DDP)       ^           ^           !     ^
    optimizer step                 ^                 ^         with accumulate=3, and so on;
                                                               an unfinished one at the end: flush

As with TorchRec's ``GradientAccumulationWrapper``, gradients are added, not averaged: a table with
a fused optimizer is updated by each batch, inside its backward, and must move as far as without
accumulation. DDP reduces with the last batch of a step only, and in its very first batch, in which
it records its static graph.

If the tables have a backward of their own, waiting for DDP's all-reduces is deferred::

    DenseBackward   backward ─ bucket 1 ─ bucket 2 ─ end      DDP itself would wait here for all
    EmbBackward                  backward of the tables
    FinalizeGrads                                    wait ─ the gradients of all buckets

Megatron's wrapper adds each gradient to ``parameter.main_grad``, a part of a buffer of its own, and
sets ``parameter.grad`` to None; its optimizers read the buffer. Therefore ``zero_grad_buffer`` must
be called before the first backward of a step, and ``finish_grad_sync``, which reduces over the
ranks, after the last. A wrapper is recognised by these methods: Megatron is not imported.

Source: Megatron-LM, megatron.core.distributed.DistributedDataParallel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swpipe.tasks.torchrec.step.train_step import TrainStep


def ddp_modules(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield every DDP wrapper of torch, including TorchRec's around data-parallel tables."""
    return (m for m in model.modules() if isinstance(m, DistributedDataParallel))


def is_megatrons(module: nn.Module) -> bool:
    """Return whether a module is Megatron's wrapper, with a buffer of gradients."""
    return hasattr(module, "zero_grad_buffer")


class DeferredReduction:
    """The reductions of DDP wrappers, waited for after backward; without wrappers it does nothing.

    DDP gets a communication hook that starts the same reduction (scaled before the sum, as in DDP)
    and returns the bucket at once. ``finish`` waits, and writes the reduced gradients over the
    unreduced ones that DDP has stored. A hook cannot be removed: outside of ``deferring`` it
    reduces as DDP does without a hook. A wrapper with a hook of the user keeps that hook, and waits
    as before.
    """

    def __init__(self, modules: Iterable[DistributedDataParallel]) -> None:
        # On one rank there is nothing to wait for.
        self._modules = tuple(
            module for module in modules if dist.get_world_size(module.process_group) > 1
        )
        self._pending: list[_Bucket] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Let backwards within the block not wait for their reductions."""
        hooks = [hook for module in self._modules if (hook := _hook_of(module)) is not None]
        for hook in hooks:
            hook.pending = self._pending
        try:
            yield
        finally:
            for hook in hooks:
                hook.pending = None

    def finish(self) -> None:
        """Wait for the pending reductions, if any, and store the reduced gradients."""
        # Taken before waiting: if a wait raises, the next batch does not wait for these again.
        pending = self._pending
        self._pending = []
        for bucket in pending:
            bucket.work.wait()
            for parameter, reduced in zip(bucket.parameters, bucket.gradients, strict=True):
                # With gradient_as_bucket_view, parameter.grad is a view of the bucket and reduced
                # already.
                gradient = parameter.grad
                if gradient is not None and gradient.data_ptr() != reduced.data_ptr():
                    gradient.copy_(reduced)


class _Bucket(NamedTuple):
    """A bucket of gradients whose reduction has begun."""

    work: dist.Work
    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]


@dataclass
class _Hook:
    """The state of one DDP wrapper's communication hook."""

    group: dist.ProcessGroup
    pending: list[_Bucket] | None = None


_hooks: WeakKeyDictionary[nn.Module, _Hook | None] = WeakKeyDictionary()
"""Wrapper to its hook; None for a wrapper with a hook of the user."""


def _hook_of(module: Any) -> _Hook | None:
    if module not in _hooks:
        hook = _Hook(module.process_group)
        try:
            module.register_comm_hook(hook, _start_reduction)
        except RuntimeError:  # DDP takes one hook only, and the user has registered one
            _hooks[module] = None
        else:
            _hooks[module] = hook
    return _hooks[module]


def _start_reduction(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    size = dist.get_world_size(state.group)
    # The scaling of DDP without a hook, so that both give the same bits: it divides sparse
    # gradients, and multiplies dense ones by the reciprocal
    # (torch/csrc/distributed/c10d/reducer.cpp).
    if buffer.is_sparse:
        buffer.div_(size)
    else:
        buffer.mul_(1.0 / size)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    if state.pending is None or buffer.is_sparse:
        return work.get_future().then(lambda done: done.value()[0])
    # The returned future is complete, so DDP does not wait. It copies the unreduced bucket to
    # parameter.grad; DeferredReduction.finish writes the reduced values over it.
    state.pending.append(_Bucket(work, bucket.parameters(), bucket.gradients()))
    devices = [] if buffer.is_cpu else [buffer.device]
    returned: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    returned.set_result(buffer)
    return returned


class GradientFlow:
    """When the gradients of a model are cleared, reduced and used; batches are iterations.

    Attributes:
        batches: Batches per optimizer step.
        megatrons: Megatron's wrappers in the model.
        reduction: DDP's reductions, which are deferred if the tables have a backward of their own.

    Raises:
        ValueError: The step uses ``parameter.grad``, and Megatron's wrapper does not.
    """

    def __init__(self, model: nn.Module, step: TrainStep, *, defers: bool) -> None:
        self._model = model
        self._step = step
        self._defers = defers
        self.batches = step.accumulate
        wrappers = tuple(ddp_modules(model))
        self._ddp = wrappers if self.batches > 1 else ()
        self.reduction = DeferredReduction(wrappers if defers else ())
        self.megatrons: list[Any] = [m for m in model.modules() if is_megatrons(m)]
        self._origin = 0  # the iteration that would be the first of a step
        self._first: int | None = None
        if self.megatrons and (step.scaler is not None or isinstance(step.clip, int | float)):
            raise ValueError(
                "TrainStep.scaler, and a number as TrainStep.clip, use parameter.grad; Megatron's "
                "DistributedDataParallel keeps the gradients in parameter.main_grad: let its "
                "optimizer scale and clip (OptimizerConfig), or give a function as clip"
            )

    def zero(self, iteration: int, *, trains: bool) -> None:
        """Clear the gradients if the batch is the first of a step."""
        # Reductions of a batch that failed may be pending, and would write over later gradients.
        self.reduction.finish()
        if trains and self.rest(iteration) == 0:
            self._step.zero_grad()
            for wrapper in self.megatrons:
                wrapper.zero_grad_buffer()

    def backward(self, iteration: int) -> AbstractContextManager[object]:
        """Return a block for the backward of a batch, in which gradients are not waited for."""
        stack = ExitStack()
        # Megatron's wrapper reduces after every backward unless it is told not to.
        for wrapper in () if self.ends(iteration) else self.megatrons:
            stack.enter_context(wrapper.no_sync())
        if self._defers:
            stack.enter_context(self.reduction.deferring())
        return stack

    def finalize(self) -> None:
        """Call the user's ``finalize``, which may communicate, or else Megatron's."""
        if self._step.finalize is not None:
            self._step.finalize(self._model)
            return
        for wrapper in self.megatrons:
            wrapper.finish_grad_sync()

    def ends(self, iteration: int) -> bool:
        """Return whether the batch is the last of a step."""
        return (iteration + 1 - self._origin) % self.batches == 0

    def skip(self) -> None:
        """Exclude an evaluation batch from the count."""
        self._origin += 1

    def set_reduction(self, iteration: int, *, trains: bool) -> None:
        """Let DDP reduce the gradients in the next backward, or not; called before each forward."""
        # DDP with static_graph records its graph in the first backward, which must reduce.
        if trains and self._first is None:
            self._first = iteration
        # DDP's no_sync() sets the same flag, which DDP's forward reads.
        for module in self._ddp:
            module.require_backward_grad_sync = self.ends(iteration) or iteration == self._first

    def rest(self, next_iteration: int) -> int:
        """Return how many batches an unfinished step has accumulated."""
        return (next_iteration - self._origin) % self.batches

    def restart(self, next_iteration: int) -> None:
        """Begin a step with this batch, without gradients of earlier batches."""
        self._origin = next_iteration
        if next_iteration and self._first is None:
            warn_of_rounding(self._ddp, self.batches)

    def take_rest(self, next_iteration: int) -> bool:
        """Reduce the gradients of an unfinished step; return False if there is none.

        A collective of the model's ranks. The next batch begins a new step.
        """
        rest = self.rest(next_iteration)
        self._origin += rest
        if rest:
            for module in self._ddp:
                _reduce(module)
        return rest > 0


def warn_of_rounding(modules: Iterable[DistributedDataParallel], batches: int) -> None:
    """Warn that sums of the first accumulation after a resume may be rounded differently."""
    if any(dist.get_world_size(module.process_group) > 1 for module in modules):
        warnings.warn(
            "DDP reduces the first batch of a process by itself, so the first step that "
            f"accumulates the gradients of {batches} batches after a resume may differ in the last "
            "bits from that of a run that was not stopped",
            RuntimeWarning,
            stacklevel=2,
        )


def _reduce(module: DistributedDataParallel) -> None:
    """Average the gradients over the ranks, as DDP does within a backward."""
    group = module.process_group
    parameters = [
        parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    ]
    # A rank that did not use a parameter takes part with zeros, if any other rank did use it.
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    used = used.to(module.device)
    dist.all_reduce(used, group=group)
    for parameter, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.mul_(1.0 / dist.get_world_size(group))
            dist.all_reduce(parameter.grad, group=group)
