"""A batch keeps its mode, its iterator and its tables: what would mix them is refused.

TorchRec's pipelines train and evaluate whatever is in flight in the mode of the moment, and so did
ours: of 20 batches before an evaluation, 18 were trained on.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from swpipe.tasks.torchrec import EvenData, PipelineFactory, UnevenDataError
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import EXACT, by_torchrec, to_the_end

STALE = "jagged_semi_sync_sparse_dist"
NAMES = (*EXACT, STALE)
EARLY = ("jagged_prefetch_sparse_dist", "jagged_split_sparse_dist", STALE)


def _pipeline(name: str, model: nn.Module, **options: Any) -> Any:
    optimizer = dense_optimizer(Job(), model)
    return PipelineFactory.create(name, model=model, optimizer=optimizer, device=CPU, **options)


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "not refused"


def _progress_without_gradients(pipeline: Any, data: Iterator[Batch]) -> None:
    with torch.no_grad():
        pipeline.progress(data)


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# ------------------------------------------------------------------------------------------ modes


def _evaluates_in_mid_epoch(name: str) -> list[str]:
    """Train 4 of 10 batches, evaluate 3, train the rest: against a plain training of all 10."""
    wanted = by_torchrec(Job(), batches(10))
    model = sharded(Job())
    found = []
    with _pipeline(name, model) as pipeline:
        data, other = batches(10), batches(3, seed=3)
        outputs = [pipeline.progress(data) for _ in range(4)]
        flying = pipeline.pipe.in_flight
        calls = {
            "another iterator": lambda: pipeline.progress(other),
            "evaluation": lambda: pipeline.progress(data),
            "without gradients": lambda: _progress_without_gradients(pipeline, data),
        }
        for what, call in calls.items():
            model.train(what != "evaluation")
            said = _refusal(call) if flying else "drain()"
            model.train()
            if "drain()" not in said:
                found.append(f"{what}: {said}")
        outputs += pipeline.drain()
        before = everything(model)
        model.eval()
        with torch.no_grad():
            evaluated = to_the_end(pipeline, other)
        model.train()
        if len(evaluated) != 3:
            found.append(f"{len(evaluated)} of 3 batches were evaluated")
        found += [k for k, v in everything(model).items() if not torch.equal(v, before[k])]
        outputs += to_the_end(pipeline, data)
    if name != STALE:
        found += [] if _same(outputs, wanted.outputs) else ["the outputs differ"]
        found += [k for k, v in everything(model).items() if not torch.equal(v, wanted.state[k])]
    elif len(outputs) != 10:
        found.append(f"{len(outputs)} outputs of 10 batches")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_in_mid_epoch_needs_a_drain_and_changes_nothing(
    two_ranks: Ranks, name: str
) -> None:
    """Without it, every switch is refused; with it, the training is TorchRec's, bit for bit."""
    assert two_ranks.run(_evaluates_in_mid_epoch, name) == [[], []]


def _one_module_changes() -> str:
    model = sharded(Job())
    with _pipeline("jagged_sparse_dist", model) as pipeline:
        data = batches(5)
        pipeline.progress(data)
        model.module.top.eval()
        return _refusal(pipeline.drain)


def test_the_mode_of_a_single_module_counts(two_ranks: Ranks) -> None:
    """A part that is frozen in mid-flight would be frozen for batches before."""
    said = two_ranks.run(_one_module_changes)[0]
    assert "admitted with gradients on, the model in training mode" in said
    assert "modules in training mode (" in said


# -------------------------------------------------------------------------------------- iterators


class _Data(torch.utils.data.Dataset[Batch]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Batch:
        return next(batches(1, seed=index, rank=0))


def _epochs(name: str) -> list[int]:
    # A rank is a daemonic process, which may not have a loader's workers as children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    loader = DataLoader(
        _Data(), batch_size=None, num_workers=1, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    with _pipeline(name, sharded(Job())) as pipeline:
        return [len(to_the_end(pipeline, iter(loader))) for _ in range(3)]


@pytest.mark.parametrize("name", [EXACT[0], EXACT[-1]])
def test_persistent_workers_give_every_epoch(two_ranks: Ranks, name: str) -> None:
    """They return the same iterator object each epoch; from the second on, no batch came."""
    assert two_ranks.run(_epochs, name) == [[6, 6, 6]] * 2


def _uneven(name: str, counts: tuple[int, int]) -> tuple[int, str]:
    model = sharded(Job())
    outputs = []
    with _pipeline(name, model, stall_timeout_s=60.0) as pipeline:
        data = batches(counts[dist.get_rank()])
        try:
            while True:
                outputs.append(pipeline.progress(data))
        except UnevenDataError as error:
            said = str(error)
        again = to_the_end(pipeline, batches(2))
    return len(outputs), said if len(again) == 2 else f"then {len(again)} of 2"


@pytest.mark.parametrize("counts", [(3, 6), (1, 0), (6, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_uneven_data_is_an_error_on_all_ranks(
    two_ranks: Ranks, name: str, counts: tuple[int, int]
) -> None:
    """It was an abort in C++ on one rank, and "connection reset" on the other."""
    for finished, said in two_ranks.run(_uneven, name, counts, deadline_s=100):
        assert finished == min(counts)
        shorter = counts.index(min(counts))
        assert f"the data of ranks [{shorter}] ended after {min(counts)} batches" in said
        assert "EvenData('stop')" in said


# ------------------------------------------------------------------------------------ checkpoints


def _loads(name: str, drain: bool) -> list[str]:
    """Train 3 batches, go back to the first state, train 4: against TorchRec's base doing that."""
    job = Job(modules=2)
    other, model = sharded(job), sharded(job)
    with _pipeline(name, model) as pipeline:
        data = batches(7)
        for _ in range(3):
            pipeline.progress(data)
        flying = len(pipeline.drain()) if drain else pipeline.pipe.in_flight
        said = _refusal(lambda: model.load_state_dict(other.state_dict()))
        if said != "not refused":
            return [said]
        to_the_end(pipeline, data)
    seen = 3 + (flying if drain else 0)
    again = sharded(job)
    rest = list(batches(7))[seen:]
    wanted = by_torchrec(job, iter(rest), again)
    return [k for k, v in everything(model).items() if not torch.equal(v, wanted.state[k])]


@pytest.mark.parametrize("name", NAMES)
def test_loading_in_flight_is_exact_or_refused(two_ranks: Ranks, name: str) -> None:
    """Rows that were looked up before would be trained as if they were the loaded ones."""
    for found in two_ranks.run(_loads, name, False):
        if name in EARLY:
            assert "have read rows" in found[0]
            assert "drain()" in found[0]
        else:
            assert found == []


@pytest.mark.parametrize("name", EXACT)
def test_loading_after_a_drain_is_exact(two_ranks: Ranks, name: str) -> None:
    """Nothing is in flight; the next batches use what was loaded."""
    assert two_ranks.run(_loads, name, True) == [[], []]


# ------------------------------------------------------------------------- batches pulled early


def _waits_for_ranks(name: str) -> tuple[list[int], list[int]]:
    """In each step: how many agreements of the ranks were waited for as soon as they had begun."""
    begun, at_once = [0], [0]
    real = EvenData.exchange_status

    def exchange(even: EvenData, status: int) -> Any:
        statuses, work = real(even, status)
        begun[0] += 1
        mine = begun[0]
        watched = Mock(wraps=work)

        def is_completed() -> bool:
            at_once[0] += begun[0] == mine
            return work is None or bool(work.is_completed())

        watched.is_completed.side_effect = is_completed
        return statuses, watched

    seen = []
    with patch.object(EvenData, "exchange_status", exchange), _pipeline(name, sharded(Job())) as p:
        data = batches(12)
        for _ in range(6):
            at_once[0] = 0
            p.progress(data)
            seen.append(at_once[0])
        flying = p.pipe.in_flight
        outputs = len(p.drain())
        left = len(list(data))
    return seen, [flying, outputs, left]


@pytest.mark.parametrize("name", NAMES[1:])
def test_no_step_waits_for_the_round_trip_that_it_began(two_ranks: Ranks, name: str) -> None:
    """Whether data has ended is asked a step ahead; the batch pulled early counts as in flight."""
    for seen, (flying, outputs, left) in two_ranks.run(_waits_for_ranks, name):
        assert seen == [0] * 6
        assert outputs == flying + 1
        assert left == 12 - 6 - outputs
