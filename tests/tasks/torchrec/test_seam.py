"""The cut of the graph: gradients of embeddings are sent before the backward has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.emulated_link import EmulatedLink
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.plans.torchrec.sparse_dist import DENSE_BACK, EMBED, PLANS, START, WAIT
from swpipe.tasks.torchrec import SparseDistTasks, TrainStep
from swpipe.tasks.torchrec.rewriting.seam import Seam, run_embedding_backward
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, sharded


def _issued(job: Job) -> dict[str, int]:
    """Return how many exchanges each task issues for the third batch of a serial run."""
    found: dict[str, int] = {}
    model = sharded(job)
    tasks = SparseDistTasks(model, TrainStep([dense_optimizer(job, model)]), device=CPU)
    with EmulatedLink() as link:

        def counted(task: PipelineTask) -> PipelineTask:
            def fn(ctx: IterContext) -> None:
                before = link.issued.total()
                task.fn(ctx)
                found[task.name] = link.issued.total() - before

            return PipelineTask(task.name, fn, task.io)

        with SWPipeline(PLANS["serial"](), [counted(t) for t in tasks.tasks()], device=CPU) as pipe:
            pipe.run(batches(3))
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("job", [Job(pooled=False), Job("row_wise", modules=2)], ids=str)
def test_gradients_are_sent_before_the_dense_backward_ends(two_ranks: Ranks, job: Job) -> None:
    """One exchange of each kind, sizes fused, and DDP's all-reduce; none is left for later."""
    found = two_ranks.run(_issued, job)[0]
    assert found.keys() == {START, WAIT, EMBED, DENSE_BACK}
    assert found[START] == 1
    assert found[WAIT] >= 2 * job.modules
    assert found[EMBED] == job.modules
    assert found[DENSE_BACK] == job.modules + 1


def test_gradients_go_on_from_their_leaves_once() -> None:
    """A leaf that the loss does not use is left out; what needs no gradient is not cut."""
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    seam = Seam()
    assert seam.cut(output := torch.ones(2)) is output
    used, _unused = seam.cut(first * 3), seam.cut(second * 3)
    used.sum().backward()
    assert first.grad is None
    for _ in range(2):
        run_embedding_backward([seam])
    assert torch.equal(first.grad, torch.full((2,), 3.0))
    assert second.grad is None


class All2All_Pooled_Req(torch.autograd.Function):  # noqa: N801 - TorchRec's name, which counts
    """The node of a graph at which an exchange was begun, by TorchRec's name."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_the_graph_is_cut_at_the_exchange() -> None:
    """The part behind it has no gradient yet, and then the right one."""
    table = torch.ones(2, requires_grad=True)
    seam = Seam()
    seam.cut(All2All_Pooled_Req.apply(table * 5) * 2).sum().backward()
    assert seam._started is not None
    assert table.grad is None
    run_embedding_backward([seam])
    assert torch.equal(table.grad, torch.full((2,), 10.0))


def test_tables_with_and_without_an_exchange_go_on_together() -> None:
    """Tables without an exchange lose nothing."""
    far, near = (torch.ones(2, requires_grad=True) for _ in range(2))
    seam = Seam()
    seam.cut(All2All_Pooled_Req.apply(far * 5) + near * 3).sum().backward()
    run_embedding_backward([seam])
    assert torch.equal(far.grad, torch.full((2,), 5.0))
    assert torch.equal(near.grad, torch.full((2,), 3.0))
