"""Each of the eleven tasks can be shortcut; training continues unchanged afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swpipe import TaskProfiler
from swpipe.plans.torchrec.sparse_dist import TASKS
from swpipe.profiler import ProfileResult
from swpipe.tasks.torchrec import MemoryOptions
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import Job, batches, everything, sharded
from tests.tasks.torchrec.trial import ALL_MEMORY, EXACT, Outcome, create, to_the_end

SPLIT, PREFETCH = EXACT[3], EXACT[2]
ADAGRAD = Job(optimizer=torch.optim.Adagrad)
MEASURED = {False: TASKS, True: (TASKS[1], TASKS[5])}
"""Ways to measure: serially and pipelined."""


def _left_out(name: str, job: Job, memory: MemoryOptions) -> list[Tensor]:
    """Return outputs of one batch, while each task is shortcut in turn."""
    (batch,) = batches(1)
    with create(name, job=job, memory=memory) as pipeline:
        outputs = to_the_end(pipeline, iter([batch]))
        for task in TASKS:
            pipeline.pipe.enable_shortcut(task)
            outputs += to_the_end(pipeline, iter([batch] * 3))
            pipeline.pipe.disable_shortcut()
            outputs += to_the_end(pipeline, iter([batch]))
        return outputs


@pytest.mark.parametrize(
    ("job", "name", "memory"),
    [(Job(), PREFETCH, ALL_MEMORY), (Job("row_wise", pooled=False), SPLIT, MemoryOptions())],
    ids=["bags", "collections"],
)
def test_each_task_can_be_left_out_alone(
    two_ranks: Ranks, job: Job, name: str, memory: MemoryOptions
) -> None:
    """There are as many outputs as batches; what a collection stores about ids is restored.

    A replayed batch has its ids, also if later tasks free them.
    """
    for outputs in two_ranks.run(_left_out, name, job, memory):
        assert len(outputs) == 1 + 4 * len(TASKS)
        assert all(torch.isfinite(output).all() for output in outputs)


def _without(task: str) -> bool:
    """Return whether tables stay as they are while a task is shortcut."""
    model = sharded(Job())
    (batch,) = batches(1)
    with create(SPLIT, model) as pipeline:
        pipeline.pipe.enable_shortcut(task)
        to_the_end(pipeline, iter([batch] * 2))
        before = everything(model)
        to_the_end(pipeline, iter([batch] * 4))
        after = everything(model)
    return all(torch.equal(before[name], after[name]) for name in before if "tables" in name)


def test_leaving_out_the_embedding_backward_leaves_the_tables_alone(two_ranks: Ranks) -> None:
    """It is real work under the split forward: without it the fused update does not happen."""
    assert two_ranks.run(_without, "EmbBackward") == [True, True]
    assert two_ranks.run(_without, "OptimStep") == [False, False]


def _profiled() -> tuple[list[ProfileResult], list[str]]:
    """Return profiles, serial and pipelined, and the differences of a later training."""
    outcomes, results, changed = [], list[ProfileResult](), list[str]()
    for profiled in (False, True):
        model = sharded(ADAGRAD)
        with create(PREFETCH, model, ADAGRAD, forward="prefetch") as pipeline:
            before, profiler = Outcome([], everything(model)), TaskProfiler(pipeline.pipe)
            for pipelined, tasks in MEASURED.items() if profiled else ():
                results += profiler.profile_many([*batches(1, seed=1)], 1, 1, 2, pipelined, tasks)
                changed += Outcome([], everything(model)).differences(before)
            outputs = to_the_end(pipeline, batches(4))
        outcomes.append(Outcome(outputs, everything(model)))
    return results, changed + outcomes[1].differences(outcomes[0])


def test_the_profiler_measures_all_eleven(two_ranks: Ranks) -> None:
    """It measures on two ranks, and some under the plan; training continues unchanged.

    Each rank's report has the times of both.
    """
    ranks = two_ranks.run(_profiled)
    for number, (results, changed) in enumerate(ranks):
        assert changed == []
        for place, (result, tasks) in enumerate(zip(results, MEASURED.values(), strict=True)):
            assert set(result.exposed_s) == set(tasks)
            assert result.baseline_s > 0
            assert [of.rank for of in result.ranks] == [0, 1]
            assert result.ranks == ranks[0][0][place].ranks
            assert result.ranks[number].exposed_s.keys() == result.exposed_s.keys()
            assert {"EmbInputDistStart", "EmbForward", "DenseBackward"} <= set(result.collectives)
            assert "2 ranks, ms" in result.format_report()
