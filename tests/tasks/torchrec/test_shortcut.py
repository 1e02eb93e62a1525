"""Each of the eleven tasks can be left out, alone and with all others, and the step still runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swpipe import TaskProfiler
from swpipe.plans.torchrec.sparse_dist import TASKS
from swpipe.profiler import ProfileResult
from swpipe.tasks.torchrec import PipelineFactory
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, everything, sharded
from tests.tasks.torchrec.trial import EXACT, to_the_end


def _left_out(name: str, job: Job, tasks: tuple[str, ...]) -> list[Tensor]:
    """Outputs of one batch again and again, the first without shortcuts."""
    model = sharded(job)
    (batch,) = batches(1)
    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(job, model), device=CPU
    ) as pipeline:
        outputs = to_the_end(pipeline, iter([batch]))
        pipeline.pipe.enable_shortcut(*tasks)
        outputs += to_the_end(pipeline, iter([batch] * 6))
        pipeline.pipe.disable_shortcut()
        return outputs + to_the_end(pipeline, iter([batch]))


@pytest.mark.parametrize("task", TASKS)
def test_each_task_can_be_left_out_alone(two_ranks: Ranks, task: str) -> None:
    """Under every exact plan: no error, no hang, and as many outputs as batches."""
    for name in EXACT:
        for outputs in two_ranks.run(_left_out, name, Job(), (task,)):
            assert len(outputs) == 8
            assert all(torch.isfinite(output).all() for output in outputs)


def _without_backward(task: str) -> bool:
    """Whether tables stay as they are while a task is left out."""
    job = Job()
    model = sharded(job)
    (batch,) = batches(1)
    with PipelineFactory.create(
        "jagged_split_sparse_dist", model=model, optimizer=dense_optimizer(job, model), device=CPU
    ) as pipeline:
        pipeline.pipe.enable_shortcut(task)
        to_the_end(pipeline, iter([batch] * 2))
        before = everything(model)
        to_the_end(pipeline, iter([batch] * 4))
        after = everything(model)
    return all(torch.equal(before[name], after[name]) for name in before if "tables" in name)


def test_leaving_out_the_embedding_backward_leaves_the_tables_alone(two_ranks: Ranks) -> None:
    """It is real work under the split forward: without it the fused update does not happen."""
    assert two_ranks.run(_without_backward, "EmbBackward") == [True, True]
    assert two_ranks.run(_without_backward, "OptimStep") == [False, False]


def _profiled(pipelined: bool) -> tuple[ProfileResult, bool]:
    job = Job()
    model = sharded(job)
    before = everything(model)
    with PipelineFactory.create(
        "jagged_prefetch_sparse_dist",
        model=model,
        optimizer=dense_optimizer(job, model),
        device=CPU,
        forward="prefetch",
    ) as pipeline:
        results = TaskProfiler(pipeline.pipe).profile_many(
            list(batches(1)), 1, 1, 2, pipelined, tasks=TASKS[::4] if pipelined else TASKS
        )
    after = everything(model)
    put_back = all(torch.equal(before[name], after[name]) for name in before)
    return results[0], put_back


@pytest.mark.parametrize("pipelined", [False, True], ids=["serial", "pipelined"])
def test_the_profiler_measures_all_eleven(two_ranks: Ranks, pipelined: bool) -> None:
    """On two ranks, and some under the plan; sharded tables are put back, too.

    Each rank's report has the times of both.
    """
    ranks = two_ranks.run(_profiled, pipelined)
    for number, (result, put_back) in enumerate(ranks):
        assert set(result.exposed_s) == set(TASKS[::4] if pipelined else TASKS)
        assert result.baseline_s > 0
        assert put_back
        assert [of.rank for of in result.ranks] == [0, 1]
        assert result.ranks == ranks[0][0].ranks
        assert result.ranks[number].exposed_s.keys() == result.exposed_s.keys()
        assert {"EmbInputDistStart", "EmbForward", "DenseBackward"} <= set(result.collectives)
        assert "over 2 ranks" in result.format_report()
