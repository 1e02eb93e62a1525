"""Several pipelines on one model: the called one owns the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks import torchrec as ours
from tests.support.ranks import Ranks
from tests.tasks.torchrec.loops import made, theirs
from tests.tasks.torchrec.models import CPU, Job, batches, combined, everything, sharded
from tests.tasks.torchrec.test_numbers import popped
from tests.tasks.torchrec.trial import Outcome, refusal

TRAIN = (
    "TrainPipelineSparseDist", "TrainPipelineBase", "PrefetchTrainPipelineSparseDist",
    "TrainPipelineFusedSparseDist",
)  # fmt: skip
EVALUATE = ("EvalPipelineFusedSparseDist",)


def _turns(count: int) -> Iterator[int]:
    """Yield the numbers of pipelines in an order in which each follows each other one."""
    for one in range(count):
        for other in range(one + 1, count):
            yield from (one, other)
    yield 0


def _in_turns(train: Sequence[Any], evaluate: Sequence[Any]) -> Outcome:
    """Train several pipelines on one model alternately; their passes continue."""
    model = sharded(Job())
    optimizer = combined(model)  # so that no plan looks up before the step
    pipelines = [kind(model, optimizer, CPU) for kind in (*train, *evaluate)]
    data = [batches(30, seed=seed) for seed in range(len(pipelines))]
    outputs = []
    for turn, which in enumerate(_turns(len(pipelines))):
        model.train(which < len(train))
        with torch.set_grad_enabled(model.training):
            steps = 1 + (turn % 5 == 0)
            outputs += [pipelines[which].progress(data[which]).detach() for _ in range(steps)]
    return Outcome(outputs, everything(model))


def _ours() -> list[str]:
    train, evaluate = ([getattr(ours, name) for name in names] for names in (TRAIN, EVALUATE))
    found = _in_turns([*train, train[0]], evaluate)  # two of one class
    base = theirs(TRAIN[1])  # which has nothing in flight but a copy
    return found.differences(_in_turns([base] * (len(train) + 1), [base] * len(evaluate)))


def test_pipelines_on_one_model_take_turns(two_ranks: Ranks) -> None:
    """Six train and evaluate, each after each other one: bit for bit as a plain loop."""
    assert two_ranks.run(_ours) == [[], []]


def _looked_up(name: str, options: dict[str, Any]) -> list[str]:
    """Return the error of a pipeline while another one has read rows of its next batch."""
    one = made(getattr(ours, name), **options)
    new, other = (ours.TrainPipelineSparseDist(one._model, one._optimizer, CPU) for _ in range(2))
    data, others = batches(9), list(batches(9, seed=1))
    outputs = [one.progress(data) for _ in range(4)]
    left = popped(others)
    found = [refusal(lambda: new.progress(left))]
    one._model.eval()
    with torch.no_grad():
        other.progress(left)
        other.drain()
    one._model.train()
    count = len(others)
    found += [refusal(lambda: other.progress(left)), f"{count - len(others)} lost"]
    outputs += one.drain()
    other.progress(left)
    other.drain()
    outputs += [one.progress(data) for _ in range(9 - len(outputs))]
    return [*found, refusal(lambda: other.progress(left))]


def _on_a_thread() -> list[str]:
    """Return a pipeline's error and the thread that detaches the model, around a drain."""
    model = sharded(Job())
    plan = plans.sparse_dist()
    apart = {name: replace(plan.schedule[name], thread_group="io") for name in plans.STREAMS}
    plan = replace(plan, schedule={**plan.schedule, **apart})
    tasks = ours.SparseDistTasks(model, ours.TrainStep([combined(model)]), device=CPU)
    other = ours.TrainPipelineSparseDist(model, combined(model), CPU)
    with ours.SparseDistPipeline(tasks, plan) as pipeline:
        pipeline.progress(batches(5))
        refused = [refusal(lambda: other.progress(batches(5))), refusal(pipeline.detach)]
        pipeline.drain()
        return [*refused, refusal(pipeline.detach)]


def test_the_model_is_not_taken_from_under_a_thread(one_rank: Ranks) -> None:
    """Threads of a hand-written plan may work on batches in flight between two calls."""
    ((other, detached, drained),) = one_rank.run(_on_a_thread)
    assert "has batches in flight, and threads (io) work on them" in other
    assert "threads (io) work on them: call drain() first" in detached
    assert drained == "nothing raised"


@pytest.mark.parametrize(
    ("name", "options"),
    [("TrainPipelineFusedSparseDist", {}), ("TrainPipelineSemiSync", {"start_batch": 2})],
)
def test_rows_that_were_read_are_not_changed_by_another(
    two_ranks: Ranks, name: str, options: dict[str, Any]
) -> None:
    """It may evaluate; before it trains, the batches that have read them must be drained."""
    for *refused, lost, at_the_end in two_ranks.run(_looked_up, name, options):
        for said in refused:
            assert "another pipeline of this model has batches in flight, and they have" in said
            assert "drain() of that pipeline" in said
        assert (lost, at_the_end) == ("0 lost", "nothing raised")
