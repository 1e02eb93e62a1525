"""A training that was stopped and resumed has the numbers of one that was not, bit for bit."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from swpipe.tasks import torchrec as ours
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    everything,
    in_backward_optimizer_filter,
    put_back,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, refusal, to_the_end

from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # isort: skip

JOB = Job(optimizer=torch.optim.Adagrad, modules=2)
STEPS = 9
SPARSE, FUSED = "TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"
SEMI_SYNC = "TrainPipelineSemiSync"
WRAPPERS = "torchrec.distributed.train_pipeline"


class Case(NamedTuple):
    """A pipeline, the places where it is stopped, and whether it is drained there."""

    name: str
    places: tuple[int, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    drains: bool = False


class Counted(Iterator[Batch]):
    """An iterator that counts the batches pulled from it."""

    def __init__(self, data: Iterator[Batch]) -> None:
        self.pulled = 0
        self._data = data

    def __next__(self) -> Batch:
        batch = next(self._data)
        self.pulled += 1
        return batch


class Training:
    """All objects of one training process, with rates that change in each call."""

    def __init__(self, case: Case, done: int = 0) -> None:
        self.model: Any = sharded(JOB)
        named = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(named, lambda own: torch.optim.Adagrad(own, lr=0.1))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        kind = getattr(ours, case.name)
        self.pipeline = kind(self.model, self.optimizer, CPU, **case.options)
        self.data = Counted(islice(batches(2 * STEPS), done, None))

    def take_over(self, other: Training, state: Any) -> None:
        """Load a checkpoint of another training."""
        put_back(self.model, everything(other.model))
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        self.pipeline.load_state_dict(state)

    def run(self, first: int, last: int = STEPS) -> list[Tensor]:
        """Return the outputs of some calls."""
        found = []
        for call in range(first, last):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.3 / (1 + call)
            found.append(self.pipeline.progress(self.data))
        return found


def _stopped(case: Case) -> list[str]:
    """Return the differences between resumed runs and the one that continues."""
    first, outputs, others = Training(case), list[Tensor](), {}
    for place in case.places:
        outputs += first.run(len(outputs), place)
        if case.drains:
            outputs += first.pipeline.drain()
        state, done = first.pipeline.state_dict(), len(outputs)
        assert state["next_iteration"] == done
        assert state["in_flight"] == first.data.pulled - done
        others[done] = Training(case, done)
        others[done].take_over(first, state)
    outputs += first.run(len(outputs))
    whole, found = Outcome(outputs, everything(first.model)), []
    for done, other in others.items():
        got = Outcome(outputs[:done] + other.run(done), everything(other.model))
        found += [f"{done}: {one}" for one in got.differences(whole)]
    return found


CASES = (
    Case("TrainPipelineBase", (1, 9)),
    Case("PrefetchTrainPipelineSparseDist", (4, 7)),
    Case("TrainPipelineSparseDistT", (4,)),
    Case(FUSED, (1, 7)),
    Case(FUSED, (3,), {"execute_all_batches": False}),
    Case(SEMI_SYNC, (1, 4), {"start_batch": 4}),
    Case(SEMI_SYNC, (5,), {"start_batch": 4}, drains=True),
    Case(SEMI_SYNC, (2,), {"start_batch": 4}, drains=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_any_place_is_good_for_a_checkpoint(two_ranks: Ranks, case: Case) -> None:
    """Batches are in flight; as many as were not returned are pulled again.

    Some look-ups take the rates of an earlier step, which no optimizer's state has.
    """
    assert two_ranks.run(_stopped, case) == [[], []]


def _kept() -> list[int]:
    case = Case(SPARSE, options={"execute_all_batches": False})
    pipeline = Training(case).pipeline
    early = pipeline.state_dict()
    pipeline.progress(batches(STEPS))
    pipeline.drain()
    drained = pipeline.state_dict()
    pipeline.load_state_dict(early)
    return [drained["in_flight"], pipeline.state_dict()["in_flight"]]


def test_a_loaded_state_lets_go_of_what_was_kept_back(one_rank: Ranks) -> None:
    """Two batches are kept back, also after a drain; they come again."""
    assert one_rank.run(_kept) == [[2, 0]]


# --------------------------------------------------------------------------- semi-sync, staged


def _stale() -> list[str]:
    found = []
    for stash in (False, True):
        options = {"start_batch": 3, "stash_gradients": stash}
        pipeline = Training(Case(SEMI_SYNC, options=options)).pipeline
        data = batches(STEPS)
        for _ in range(4):
            pipeline.progress(data)
        found.append(refusal(pipeline.state_dict))
        pipeline.drain()
        found.append(refusal(pipeline.state_dict))
        pipeline.close()
    return found


def test_stale_reads_and_stashed_gradients_are_not_saved(one_rank: Ranks) -> None:
    """Reads after a drain are fresh; a stash stays, which no state contains."""
    ((flying, drained, stashed, still),) = one_rank.run(_stale)
    assert flying.startswith("RuntimeError: batches are in flight (3), and a run resumed from here")
    assert "the plan reads optimizer, tables from before the update" in flying
    assert flying.endswith("Call drain() before you save")
    assert drained == "nothing raised"
    assert "RuntimeError: the gradients of the last batch are stashed" in stashed
    assert still == stashed


def _numbers() -> list[Any]:
    pipeline = Training(Case(SEMI_SYNC, options={"start_batch": 3})).pipeline
    data = batches(STEPS)
    early = pipeline.state_dict()
    for _ in range(5):
        pipeline.progress(data)
    found = [refusal(lambda: pipeline.load_state_dict(early))]
    done = 5 + len(pipeline.drain())
    found += [pipeline.state_dict()["next_iteration"] - done, pipeline.is_semi_sync()]
    pipeline.load_state_dict({**early, "next_iteration": 2})
    pipeline.progress(batches(STEPS))
    found += [pipeline.is_semi_sync(), "semi_sync" if pipeline.pipe.plan.stale else "exact"]
    pipeline.drain()
    number = pipeline.state_dict()["next_iteration"]
    pipeline.attach(sharded(JOB))
    found += [number, pipeline.state_dict()["next_iteration"]]
    pipeline.reset()
    found += [pipeline.state_dict()["next_iteration"]]
    found.append(refusal(lambda: pipeline.load_state_dict({"next_iteration": "2"})))
    return found


def test_the_number_of_the_next_batch_is_kept_until_a_reset(one_rank: Ranks) -> None:
    """It counts when the reads become stale, and with another model; a state may restore it."""
    ((flying, wrong, stale, exact, plan, number, kept, reset, bad),) = one_rank.run(_numbers)
    assert "before loading a state" in flying
    assert (wrong, stale, exact, plan) == (0, True, True, "exact")
    assert (number, kept, reset) == (3, 3, 0)
    assert bad.startswith("ValueError: the state's next_iteration is '2'")


def _filled() -> list[Any]:
    pipeline = Training(Case(SEMI_SYNC, options={"start_batch": 3})).pipeline
    pipeline.load_state_dict({**pipeline.state_dict(), "next_iteration": 5})
    data = batches(4)
    pipeline.fill_pipeline(data)
    outputs = to_the_end(pipeline, data)
    plan = "semi_sync" if pipeline.pipe.plan.stale else "exact"
    return [len(outputs), plan, pipeline.state_dict()["next_iteration"]]


def test_a_resumed_pass_that_is_filled_by_hand_keeps_its_batches(one_rank: Ranks) -> None:
    """The state is after ``start_batch``: the plan changes before a batch is pulled."""
    assert one_rank.run(_filled) == [[4, "semi_sync", 9]]


def _plain(**more: Any) -> ours.StagedTrainPipeline[Any, Any]:
    stages = [ours.PipelineStage(name, lambda rows: rows + 1, None) for name in ("a", "b")]
    return ours.StagedTrainPipeline(stages, **more)


def test_a_staged_pipeline_is_saved_after_a_flush() -> None:
    """In flight its stages have run, of which nothing is known."""
    states: list[Any] = []
    pipeline = _plain(on_flush_end=lambda: states.append(pipeline.state_dict()))
    data = iter(torch.arange(8.0).view(-1, 1))
    pipeline.progress(data)
    said = refusal(pipeline.state_dict)
    assert said.startswith("RuntimeError: iterations are in flight (2): ")
    assert said.endswith("and save in on_flush_end")
    assert "before loading a state" in refusal(lambda: pipeline.load_state_dict({}))
    pipeline.set_flush(True)
    outputs = [float(pipeline.progress(data)) for _ in range(4)]
    assert outputs == [3.0, 4.0, 5.0, 6.0]
    pipeline.pipe.close()
    (state,) = states
    assert (state["next_iteration"], state["in_flight"]) == (3, 0)
    other = _plain()
    other.load_state_dict(state)
    rest = iter(torch.arange(3.0, 8.0).view(-1, 1))
    assert float(other.progress(rest)) == 5.0
    assert other.pipe.state_dict(check=False)["next_iteration"] == 4
    other.pipe.close()


# ---------------------------------------------------------------------------------- accumulation


def _wrapped() -> tuple[Training, Any]:
    """Return a training by TorchRec's ``GradientAccumulationWrapper``, three batches a step."""
    wrapper = importlib.import_module(WRAPPERS)
    config = wrapper.GradientAccumulationConfig(is_enabled=True, num_steps=3)
    one = Training(Case(SPARSE))
    parts = one.pipeline, one.optimizer, one.model
    return one, wrapper.GradientAccumulationWrapper(*parts, config)


def _resumed() -> list[Any]:
    """Resume from a state after the first step."""
    first, wrapped = _wrapped()
    said = []
    for _ in range(3):
        said.append(refusal(first.pipeline.state_dict))
        wrapped.progress(first.data)
    other, again = _wrapped()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        other.take_over(first, first.pipeline.state_dict())
    other.data = Counted(islice(batches(2 * STEPS), 3, None))
    left = [
        Outcome([run.progress(one.data) for _ in range(6)], everything(one.model))
        for one, run in ((first, wrapped), (other, again))
    ]
    return [said, left[0].differences(left[1]), [str(one.message) for one in warned]]


@pytest.mark.skipif(
    not hasattr(importlib.import_module(WRAPPERS), "GradientAccumulationConfig"),
    reason="this TorchRec has no GradientAccumulationWrapper",
)
def test_an_unfinished_step_of_torchrecs_wrapper_is_not_saved(
    one_rank: Ranks, two_ranks: Ranks
) -> None:
    """Its gradients are in no state; after a step a resumed run is equal on one rank.

    On several, DDP reduces the first batch of a process differently; loading a state warns.
    """
    ((said, where, warned),) = one_rank.run(_resumed)
    assert said[0] == "nothing raised"
    assert said[1].startswith("RuntimeError: gradients of 1 of 3 batches wait")
    assert said[2].startswith("RuntimeError: gradients of 2 of 3 batches wait")
    assert (where, warned) == ([], [])
    for _, where, (warning,) in two_ranks.run(_resumed):
        assert where
        assert warning.startswith("DDP reduces the first batch of a process by itself")
