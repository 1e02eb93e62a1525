"""DDP's reductions with a deferred wait: the gradients are those of DDP, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swpipe.tasks.torchrec import TrainPipelineFusedSparseDist, TrainPipelineSemiSync
from swpipe.tasks.torchrec.step import grad_reduction, task_set
from swpipe.tasks.torchrec.step.grad_reduction import DeferredReduction, ddp_modules
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Job,
    batches,
    dense_optimizer,
    everything,
    put_back,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, create, refusal, to_the_end

STEPS = 4


class _Net(nn.Module):
    """A network that may have sparse gradients, and a part that some batches do not use."""

    def __init__(self, *, sparse: bool, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(5, 16, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.aside = nn.Linear(16, 16) if unused else None

    def forward(self, ids: Tensor, step: int) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.aside is not None and (step + dist.get_rank()) % 3 == 0:
            x = self.aside(x)
        return x.square().sum()


def _trained(how: str, view: bool, sparse: bool, unused: bool) -> list[Tensor]:
    """Return the gradients of each step: by DDP alone, deferred, or both."""
    net = DistributedDataParallel(
        _Net(sparse=sparse, unused=unused),
        gradient_as_bucket_view=view,
        find_unused_parameters=unused,
        bucket_cap_mb=0.001,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reduction = DeferredReduction(ddp_modules(net))
    draws = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(STEPS):
        ids = torch.randint(0, 5, (7,), generator=draws)
        optimizer.zero_grad()
        loss = net(ids, step)
        if how == "deferred" or (how == "in turn" and step % 2):
            with reduction.deferring():
                loss.backward()
            reduction.finish()
        else:
            loss.backward()
        for parameter in net.parameters():
            gradient = parameter.grad
            seen.append(torch.zeros(0) if gradient is None else gradient.to_dense().clone())
        optimizer.step()
    return seen


def _differs() -> list[Any]:
    found = []
    for options in pairwise_cases((False, True), (False, True), (False, True)):
        wanted = _trained("ddp", *options)
        for how in ("deferred", "in turn"):
            pairs = zip(_trained(how, *options), wanted, strict=True)
            found += [(how, options) for ours, ddps in pairs if not torch.equal(ours, ddps)]
    return found


def test_deferred_reductions_are_ddps(two_ranks: Ranks) -> None:
    """The hook stays outside the pipeline, too; with views, sparse or unused parts."""
    assert two_ranks.run(_differs) == [[], []]


def _waits() -> tuple[bool, bool]:
    """Return whether a deferred backward ends before the other rank has begun its own."""
    net = DistributedDataParallel(_Net(sparse=False, unused=False))
    reduction = DeferredReduction(ddp_modules(net))
    loss = net(torch.tensor([1]), 0)
    if dist.get_rank() == 0:
        with reduction.deferring():
            loss.backward()  # rank 1 begins after the barrier
        begun = bool(reduction._pending)
        store = dist.distributed_c10d._get_default_store()
        store.set("the backward of rank 0 has ended", "1")
    else:
        dist.distributed_c10d._get_default_store().wait(["the backward of rank 0 has ended"])
        with reduction.deferring():
            loss.backward()
        begun = bool(reduction._pending)
    reduction.finish()
    return begun, not reduction._pending


def test_a_deferred_backward_waits_for_no_other_rank(two_ranks: Ranks) -> None:
    """The wait was between the dense backward and that of the tables."""
    assert two_ranks.run(_waits) == [(True, True)] * 2


class _InPlace(torch.optim.SGD):
    """An optimizer that sets gradients to zero, not to None, as Apex's can."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


class _Late:
    """A reduction that runs only when it is waited for, as if another rank delayed it."""

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._reduce = partial(dist.all_reduce, buffer, group=group)

    def wait(self) -> None:
        self._reduce()


@contextmanager
def late_reductions() -> Iterator[None]:
    """Delay each reduction in the block until it is waited for."""
    reduce: Any = dist.all_reduce

    def reduce_late(buffer: Tensor, *, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        return _Late(buffer, group) if async_op else reduce(buffer, group=group)

    with mock.patch.object(grad_reduction.dist, "all_reduce", reduce_late):
        yield


def _model() -> Any:
    """Return sharded tables within parts that DDP reduces, in its buckets and outside."""
    model: Any = sharded(Job(), ddp=False)
    for part, view in (("bottom", True), ("top", False)):
        module = getattr(model.module, part)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
        setattr(model.module, part, ddp)
    return model


def _after_a_failure(pipeline_of: Any) -> list[str]:
    """Return the differences after a first batch that failed before its tables' backward."""
    outcomes = []
    for fails in (False, True):
        model = _model()
        optimizer = dense_optimizer(Job(optimizer=_InPlace), model)
        pipeline = pipeline_of(model, optimizer, CPU)
        if fails:
            with (
                mock.patch.object(task_set, "run_embedding_backward", side_effect=KeyError),
                late_reductions(),
            ):
                assert "KeyError" in refusal(partial(pipeline.progress, batches(3)))
        outcomes.append(Outcome(to_the_end(pipeline, batches(3, seed=1)), everything(model)))
    return outcomes[1].differences(outcomes[0])


@pytest.mark.parametrize("pipeline_of", [TrainPipelineFusedSparseDist, TrainPipelineSemiSync])
def test_a_batch_that_failed_leaves_no_gradients(two_ranks: Ranks, pipeline_of: Any) -> None:
    """Their reductions end after it; they are not added to the next batch's gradients."""
    assert two_ranks.run(_after_a_failure, pipeline_of) == [[], []]


def _late() -> list[str]:
    """What differs in a training of which each reduction ends when it is waited for."""
    outcomes = []
    for reductions in (nullcontext, late_reductions):
        model = _model()
        pipeline = TrainPipelineFusedSparseDist(model, dense_optimizer(Job(), model), CPU)
        with reductions():
            outcomes.append(Outcome(to_the_end(pipeline, batches(3)), everything(model)))
    return outcomes[1].differences(outcomes[0])


def test_a_step_waits_for_its_reductions(two_ranks: Ranks) -> None:
    """However late these are, it has the gradients of all ranks."""
    assert two_ranks.run(_late) == [[], []]


def _replayed() -> bool:
    """Return whether a replay of the dense backward gives the reduced gradients of all ranks."""
    (batch,) = batches(1)
    grads = []
    for task in (None, "DenseBackward"):
        model = _model()
        optimizer = torch.optim.SGD([*model.module.bottom.parameters()], lr=0.0)
        optimizer.add_param_group({"params": [*model.module.top.parameters()]})
        with (
            late_reductions(),
            create("jagged_split_sparse_dist", model, optimizer=optimizer) as pipeline,
        ):
            if task is not None:
                pipeline.pipe.enable_shortcut(task)
            for _ in range(2):
                put_back(model, started := everything(model))
                to_the_end(pipeline, iter([batch]))
                put_back(model, started)  # the tables' fused optimizer steps
            grads.append([parameter.grad for parameter in pipeline.tasks.step.parameters()])
    return all(map(torch.equal, *grads))


def test_a_replayed_backward_has_reduced_gradients(two_ranks: Ranks) -> None:
    """They are not those of this rank, which it has when it returns."""
    assert two_ranks.run(_replayed) == [True, True]


def _own_hook() -> tuple[int, bool]:
    calls = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(state)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ = {}
    net = DistributedDataParallel(_Net(sparse=False, unused=False))
    net.register_comm_hook(None, hook)
    reduction = DeferredReduction(ddp_modules(net))
    with reduction.deferring():
        net(torch.tensor([1]), 0).backward()
    return len(calls), bool(reduction._pending)


def test_a_hook_of_the_user_stays(one_rank: Ranks) -> None:
    """Compression is an example: nothing is deferred then."""
    assert one_rank.run(_own_hook) == [(1, False)]
