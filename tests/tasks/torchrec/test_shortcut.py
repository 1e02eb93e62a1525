"""Each of the eleven tasks can be left out; training goes on unchanged after that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest
import torch
from torch import Tensor

from swpipe import TaskProfiler
from swpipe.plans.torchrec.sparse_dist import TASKS
from swpipe.profiler import ProfileResult
from swpipe.profiler.trial import trial_state
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import Job, batches, everything, sharded
from tests.tasks.torchrec.trial import EXACT, create, to_the_end

SPLIT, PREFETCH = EXACT[3], EXACT[2]


def _left_out(name: str, job: Job) -> list[Tensor]:
    """Outputs of one batch again and again, while each task is left out in turn."""
    (batch,) = batches(1)
    with create(name, job=job) as pipeline:
        outputs = to_the_end(pipeline, iter([batch]))
        for task in TASKS:
            pipeline.pipe.enable_shortcut(task)
            outputs += to_the_end(pipeline, iter([batch] * 5))
            pipeline.pipe.disable_shortcut()
            outputs += to_the_end(pipeline, iter([batch]))
        return outputs


@pytest.mark.parametrize(
    ("job", "name"), [(Job(), PREFETCH), (Job("row_wise", pooled=False), SPLIT)]
)
def test_each_task_can_be_left_out_alone(two_ranks: Ranks, job: Job, name: str) -> None:
    """As many outputs as batches; what a collection remembers of ids is put back, too."""
    for outputs in two_ranks.run(_left_out, name, job):
        assert len(outputs) == 1 + 6 * len(TASKS)
        assert all(torch.isfinite(output).all() for output in outputs)


def _without(task: str) -> bool:
    """Whether tables stay as they are while a task is left out."""
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


ALONE = tuple((name,) for name in TASKS)
PAIRS = tuple(zip(TASKS[::4], TASKS[2::4], strict=True))
"""Some with another one."""


def _trained(shortcuts: list[tuple[str, ...] | None]) -> Iterator[dict[str, Tensor]]:
    """The parameters after one batch more; each time, tasks were shortcut before it."""
    model, replayed = sharded(Job()), next(batches(1, seed=1))
    with create(PREFETCH, model) as pipeline:
        pipe = pipeline.pipe
        for names, batch in zip(shortcuts, batches(len(shortcuts)), strict=True):
            if names is not None:
                with trial_state(pipe, replayed, None).trial(), pipe.shortcut(*names):
                    to_the_end(pipeline, repeat(replayed, 3))
            to_the_end(pipeline, iter([batch]))
            yield everything(model)


def _differing(shortcuts: tuple[tuple[str, ...], ...]) -> list[str]:
    """The first shortcut after which training differs in any bit."""
    apart = zip(_trained([None] * len(shortcuts)), _trained([*shortcuts]), strict=True)
    for names, (expected, trained) in zip(shortcuts, apart, strict=True):
        if not all(torch.equal(expected[name], trained[name]) for name in expected):
            return ["+".join(names)]
    return []


def test_training_goes_on_unchanged(two_ranks: Ranks) -> None:
    """Nothing outside of the snapshot is trained meanwhile."""
    assert two_ranks.run(_differing, (*ALONE, *PAIRS), deadline_s=300) == [[], []]


def _profiled(pipelined: bool) -> tuple[ProfileResult, bool]:
    model = sharded(Job())
    before = everything(model)
    with create(PREFETCH, model, forward="prefetch") as pipeline:
        results = TaskProfiler(pipeline.pipe).profile_many(
            list(batches(1)), 1, 1, 2, pipelined, tasks=TASKS[::4] if pipelined else TASKS
        )
    after = everything(model)
    return results[0], all(torch.equal(before[name], after[name]) for name in before)


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
        assert "2 ranks, ms" in result.format_report()
