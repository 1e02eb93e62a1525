"""DDP's reductions, waited for later: the same gradients as DDP's own, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swpipe.tasks.torchrec.grad_reduction import DeferredReduction
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks

STEPS = 4


class _Net(nn.Module):
    """With sparse gradients and a part that some batches do not use, if asked for."""

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
    """The gradients of each step: by DDP alone, or deferred, or within and outside of it."""
    net = DistributedDataParallel(
        _Net(sparse=sparse, unused=unused),
        gradient_as_bucket_view=view,
        find_unused_parameters=unused,
        bucket_cap_mb=0.001,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reduction = DeferredReduction(net)
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
    """Also outside of the pipeline, where the hook stays; with views, sparse or unused parts."""
    assert two_ranks.run(_differs) == [[], []]


def _waits() -> tuple[bool, bool]:
    """Whether a backward that is deferred ends before the other rank has begun its own."""
    net = DistributedDataParallel(_Net(sparse=False, unused=False))
    reduction = DeferredReduction(net)
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
    """That wait was between the dense backward and that of the tables."""
    assert two_ranks.run(_waits) == [(True, True)] * 2


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
    reduction = DeferredReduction(net)
    with reduction.deferring():
        net(torch.tensor([1]), 0).backward()
    return len(calls), bool(reduction._pending)


def test_a_hook_of_the_user_stays(one_rank: Ranks) -> None:
    """Compression, for example: nothing is deferred then."""
    assert one_rank.run(_own_hook) == [(1, False)]
