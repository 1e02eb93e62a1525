"""A training that was stopped and resumed gives the numbers of one that was not, bit for bit."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, refusal, to_the_end

from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # isort: skip

JOB = Job(optimizer=torch.optim.Adagrad, modules=2)
STEPS = 9
EVAL, SEMI_SYNC = "EvalPipelineSparseDist", "TrainPipelineSemiSync"


RESUMED = (
    *("TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"),
    *("TrainPipelineFusedSparseDist", "TrainPipelineSparseDistT", EVAL),
)


class Case(NamedTuple):
    """A pipeline, where it is stopped, and whether it is drained there."""

    name: str
    places: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    drains: bool = False


class Training:
    """Everything of one process that trains."""

    def __init__(self, case: Case) -> None:
        self.model: Any = sharded(JOB)
        named = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(named, lambda own: torch.optim.Adagrad(own, lr=0.1))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        kind = getattr(ours, case.name)
        self.pipeline = kind(self.model, self.optimizer, CPU, **case.options)

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder: Path) -> dict[str, int]:
        """A checkpoint of all but the data."""
        state: dict[str, int] = self.pipeline.state_dict()
        dcp.save(self._parts(), checkpoint_id=folder)
        return state

    def load(self, folder: Path, state: dict[str, int]) -> None:
        """Go on from it."""
        parts = self._parts()
        dcp.load(parts, checkpoint_id=folder)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.pipeline.load_state_dict(state)

    def outcome(self, outputs: list[Tensor]) -> Outcome:
        """What is left at the end."""
        self.pipeline.close()
        return Outcome(outputs, everything(self.model))


class Counted(Iterator[Batch]):
    """An iterator that knows how many batches were pulled from it."""

    def __init__(self, data: Iterator[Batch]) -> None:
        self.pulled = 0
        self._data = data

    def __next__(self) -> Batch:
        batch = next(self._data)
        self.pulled += 1
        return batch


def _stopped(case: Case, folder: str) -> list[str]:
    """Where a run that is resumed at each place differs from the one that goes on."""
    warnings.simplefilter("ignore")  # what torch says of its own checkpoints
    first, data = Training(case), Counted(batches(STEPS))
    outputs: list[Tensor] = []
    saved = {}
    for place in case.places:
        while len(outputs) < place:
            outputs.append(first.pipeline.progress(data))
        if case.drains:
            outputs += first.pipeline.drain()
        saved[place] = first.save(Path(folder, f"{place}")), data.pulled
        assert saved[place][0]["next_iteration"] == len(outputs)
        assert saved[place][0]["in_flight"] == data.pulled - len(outputs)
    outputs += to_the_end(first.pipeline, data)
    whole = first.outcome(outputs)
    found = []
    for place, (state, _) in saved.items():
        other, done = Training(case), state["next_iteration"]
        other.load(Path(folder, f"{place}"), state)
        rest = to_the_end(other.pipeline, islice(batches(STEPS), done, None))
        assert other.pipeline.state_dict()["next_iteration"] == len(outputs)
        where = other.outcome(outputs[:done] + rest).differences(whole)
        found += [f"{place}: {one}" for one in where]
    return found


EXACT = [Case(name, (1, 4, 7, 9)) for name in RESUMED]
EXACT += [Case("TrainPipelineFusedSparseDist", (3,), {"execute_all_batches": False})]
STALE = [
    Case(SEMI_SYNC, (1, 3, 4), {"start_batch": 4}),
    Case(SEMI_SYNC, (5,), {"start_batch": 4}, drains=True),
    Case(SEMI_SYNC, (2,), {"start_batch": 4}, drains=True),
]


@pytest.mark.parametrize("case", [*EXACT, *STALE], ids=lambda case: f"{case[0]}-{case[1]}")
def test_any_place_is_good_for_a_checkpoint(two_ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """With batches in flight, and with as many as were not returned pulled again."""
    assert two_ranks.run(_stopped, case, str(tmp_path)) == [[], []]


def _kept() -> list[int]:
    case = Case("TrainPipelineSparseDist", (), {"execute_all_batches": False})
    pipeline = Training(case).pipeline
    early = pipeline.state_dict()
    pipeline.progress(batches(STEPS))
    pipeline.drain()
    drained = pipeline.state_dict()
    pipeline.load_state_dict(early)
    return [drained["in_flight"], pipeline.state_dict()["in_flight"]]


def test_a_loaded_state_lets_go_of_what_was_kept_back(one_rank: Ranks) -> None:
    """Two batches are, also after a drain; they come again."""
    assert one_rank.run(_kept) == [[2, 0]]


# --------------------------------------------------------------------------- semi-sync, staged


def _stale() -> list[str]:
    found = []
    for stash in (False, True):
        options = {"start_batch": 3, "stash_gradients": stash}
        pipeline = Training(Case(SEMI_SYNC, (), options)).pipeline
        data = batches(STEPS)
        for _ in range(4):
            pipeline.progress(data)
        found.append(refusal(pipeline.state_dict))
        pipeline.drain()
        found.append(refusal(pipeline.state_dict))
        pipeline.close()
    return found


def test_stale_reads_and_stashed_gradients_are_not_saved(one_rank: Ranks) -> None:
    """Reads after a drain are fresh; a stash stays, which no state has."""
    ((flying, drained, stashed, still),) = one_rank.run(_stale)
    assert flying.startswith("RuntimeError: batches are in flight (3), and a run resumed from here")
    assert "the plan reads optimizer, tables from before the update" in flying
    assert flying.endswith("Call drain() before you save")
    assert drained == "nothing raised"
    assert "RuntimeError: the gradients of the last batch are stashed" in stashed
    assert still == stashed


def _numbers() -> list[Any]:
    pipeline = Training(Case(SEMI_SYNC, (), {"start_batch": 3})).pipeline
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
    """When the reads become stale, and with another model; a state may lead back to exact ones."""
    ((flying, wrong, stale, exact, plan, number, kept, reset, bad),) = one_rank.run(_numbers)
    assert "before loading a state" in flying
    assert (wrong, stale, exact, plan) == (0, True, True, "exact")
    assert (number, kept, reset) == (3, 3, 0)
    assert bad.startswith("ValueError: the state's next_iteration is '2'")


def _plain(**more: Any) -> ours.StagedTrainPipeline[Any, Any]:
    stages = [ours.PipelineStage(name, lambda rows: rows + 1, None) for name in ("a", "b")]
    return ours.StagedTrainPipeline(stages, **more)


def test_a_staged_pipeline_is_saved_after_a_flush() -> None:
    """In mid-flight its stages have run, of which nothing is known."""
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


def _wrapped(folder: str) -> list[Any]:
    """Three batches a step, by TorchRec's GradientAccumulationWrapper; saved after the first."""
    warnings.simplefilter("ignore")
    case = Case("TrainPipelineSparseDist", ())
    wrapper = importlib.import_module("torchrec.distributed.train_pipeline")
    config = wrapper.GradientAccumulationConfig(is_enabled=True, num_steps=3)

    def training() -> tuple[Training, Any]:
        one = Training(case)
        parts = one.pipeline, one.optimizer, one.model
        return one, wrapper.GradientAccumulationWrapper(*parts, config)

    first, wrapped = training()
    data = batches(STEPS)
    outputs, said = [], []
    for _ in range(3):
        said.append(refusal(first.pipeline.state_dict))
        outputs.append(wrapped.progress(data))
    state = first.save(Path(folder))
    whole = first.outcome(outputs + to_the_end(wrapped, data))
    other, wrapped = training()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        other.load(Path(folder), state)
    rest = to_the_end(wrapped, islice(batches(STEPS), 3, None))
    rounded = [str(one.message) for one in warned if one.category is RuntimeWarning]
    return [said, other.outcome(outputs + rest).differences(whole), rounded]


def test_an_unfinished_step_of_torchrecs_wrapper_is_not_saved(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Its gradients are in no state; after a step a run is resumed bit for bit, on one rank."""
    ((said, where, warned),) = one_rank.run(_wrapped, str(tmp_path))
    assert said[0] == "nothing raised"
    assert said[1].startswith("RuntimeError: gradients of 1 of 3 batches wait")
    assert said[2].startswith("RuntimeError: gradients of 2 of 3 batches wait")
    assert (where, warned) == ([], [])


def test_on_several_ranks_the_first_step_is_rounded_otherwise(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """DDP reduces the first batch of a process by itself; loading a state says so."""
    for _, where, warned in two_ranks.run(_wrapped, str(tmp_path)):
        assert where
        assert len(warned) == 1
        assert warned[0].startswith("DDP reduces the first batch of a process by itself")
