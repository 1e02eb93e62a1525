"""What TorchRec's arguments that save memory do here: no more bytes than there, the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from swpipe._values.walk import tensors_in
from swpipe.plans.torchrec.sparse_dist import TASKS
from swpipe.profiler import TaskProfiler
from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec.inputs import RewriteError
from tests.support.ranks import Ranks
from tests.tasks.torchrec.alive import run
from tests.tasks.torchrec.loops import (
    PIPELINES,
    arguments,
    made,
    streams_on_a_cpu,
    theirs,
    train_pipelines,
    trained,
)
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    Model,
    batches,
    dense_optimizer,
    everything,
    plain_model,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, to_the_end

ARGUMENTS = ("free_features_storage_early", "clear_data_dist_inputs", "enable_inplace_copy_batch")
SPARSE = "TrainPipelineSparseDist"
WITH_STATE: dict[str, Any] = {"optimizer": torch.optim.Adagrad, "options": {"lr": 0.01}}
ANSWERS = 8
"""Bytes of the ranks' answers whether their data has ended, which stay on the host."""

WATCH = 4096
"""Bytes, at most, that the watch of pure tasks holds while one of the first iterations runs."""

FAILS_THERE = {
    "EvalPipelineSparseDist": ["free_features_storage_early"],  # it exchanges batch 0 twice
}


class _Inline:
    """An executor without a thread, so that a copy comes when it is asked for."""

    def submit(self, fn: Any, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args))
        return done


class _Loader:
    """TorchRec's thread that copies for evaluations, where it is quick: one batch is ahead."""

    def __init__(self, *, dataloader_iter: Any, **_: Any) -> None:
        self._data = dataloader_iter

    def start(self) -> None:
        self._next = self._copied()

    def stop(self) -> None:
        self._next = None

    def get_next_batch(self) -> Any:
        taken, self._next = self._next, None
        self._next = self._copied()
        return taken

    def _copied(self) -> Any:
        batch = next(self._data, None)
        return None if batch is None else batch.to(CPU)


def _given(name: str) -> dict[str, Any]:
    """The arguments of one class that it takes to save memory."""
    return {key: True for key in ARGUMENTS if key in arguments(theirs(name))}


def _options(name: str) -> dict[str, Any]:
    return {"start_batch": 0} if name == "TrainPipelineSemiSync" else {}


def _by_torchrec(name: str, job: Job, given: dict[str, Any]) -> tuple[int, Outcome]:
    given = {key: value for key, value in given.items() if key not in FAILS_THERE.get(name, ())}
    on_a_cpu = nullcontext() if name.endswith("T") else streams_on_a_cpu()
    with on_a_cpu, mock.patch.object(train_pipelines, "DataLoadingThread", _Loader):
        pipeline = made(theirs(name), job, **given, **_options(name))
        if name.startswith("Prefetch"):  # it prefetches nothing where streams are None
            pipeline._data_dist_stream = mock.Mock()
            pipeline._stream_context = lambda _stream: nullcontext()
        if name.endswith("T"):
            pipeline._copy_executor = _Inline()
        return _ran(pipeline)


def _ran(pipeline: Any) -> tuple[int, Outcome]:
    peak, outputs = run(pipeline)
    state = {f"state {k}": t for k, t in enumerate(tensors_in(pipeline._optimizer.state_dict()))}
    fused = getattr(pipeline._model, "fused_optimizer", None)
    if fused is not None:
        held = [value for one in fused.state_dict()["state"].values() for value in one.values()]
        shards = [s.tensor for v in held if hasattr(v, "local_shards") for s in v.local_shards()]
        state |= {f"fused {k}": tensor for k, tensor in enumerate(shards)}
    return peak, Outcome(outputs, everything(pipeline._model) | state)


def _compared(job: Job, names: tuple[str, ...]) -> dict[str, tuple[int, list[str]]]:
    """Class to how many bytes ours has more than TorchRec's, and what differs."""
    found = {}
    for name in names:
        given = _given(name)
        there, wanted = _by_torchrec(name, job, given)
        peak, got = _ran(made(getattr(ours, name), job, **given, **_options(name)))
        found[name] = peak - there, got.differences(wanted)
    return found


def _judge(found: dict[str, tuple[int, list[str]]], ranks: int) -> None:
    assert {name: where for name, (_, where) in found.items() if where} == {}
    most = WATCH + (ANSWERS * ranks if ranks > 1 else 0)
    assert {name: more for name, (more, _) in found.items() if more > most} == {}


SHARDINGS: dict[str, Job] = {
    "table_wise": Job(**WITH_STATE),
    "row_wise": Job("row_wise", **WITH_STATE),
    "in_order": Job("in_order", **WITH_STATE),
    "two modules": Job(modules=2, **WITH_STATE),
}


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [
        *[("table_wise", 1), ("table_wise", 2)],
        pytest.param("row_wise", 2, marks=pytest.mark.slow),
        pytest.param("in_order", 2, marks=pytest.mark.slow),
        pytest.param("two modules", 1, marks=pytest.mark.slow),
    ],
)
def test_no_more_bytes_are_alive_than_in_torchrecs_classes(
    request: pytest.FixtureRequest, sharding: str, ranks: int
) -> None:
    """In every class, with all its arguments that save memory; numbers are those of TorchRec's.

    Each class is tried with two shardings or more. On one rank nothing is sent, and ids that the
    module permutes go.
    """
    group: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
    names = PIPELINES[([*SHARDINGS].index(sharding) + ranks) % 2 :: 2]
    for found in group.run(_compared, SHARDINGS[sharding], names, deadline_s=300):
        _judge(found, ranks)


# ------------------------------------------------------------------------ what reads them, after


class Reading(Model):
    """Reads the ids in its forward."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        losses, output = super().forward(batch)
        return losses + batch.ids.values().float().mean(), output


def _pipeline(model: type[Model], job: Job, **given: Any) -> Any:
    plain = model(job)
    plain.load_state_dict(plain_model(job).state_dict())
    whole = sharded(job, plain)
    return ours.TrainPipelineSparseDist(whole, dense_optimizer(job, whole), CPU, **given)


def _read(argument: str, job: Job) -> str:
    pipeline = _pipeline(Reading, job, **{argument: True})
    try:
        to_the_end(pipeline, batches(4))
    except RewriteError as error:
        return str(error)
    return "it trains"


def test_a_model_that_reads_what_went_is_told(two_ranks: Ranks) -> None:
    """Instead of reading memory that is not there. What is not sent itself stays."""
    early = two_ranks.run(_read, "free_features_storage_early", Job())
    assert all("reads ids of the batch whose memory went" in said for said in early)
    sent = two_ranks.run(_read, "clear_data_dist_inputs", Job())
    assert sent == ["it trains"] * 2  # a permuted copy was sent
    as_they_are = two_ranks.run(_read, "clear_data_dist_inputs", Job("in_order"))
    assert all("reads ids of the batch whose memory went" in said for said in as_they_are)
    stays = two_ranks.run(_read, "clear_data_dist_inputs", Job("in_order", pooled=False))
    assert stays == ["it trains"] * 2  # the module's context has them


# ---------------------------------------------------------------------------- copied on a thread


class _Noting(Batch):
    """Notes on which thread it is copied."""

    threads: ClassVar[set[int]] = set()

    def to(self, device: torch.device, non_blocking: bool = False, **_: Any) -> Batch:
        self.threads.add(threading.get_ident())
        return super().to(device, non_blocking)


def _noting() -> Iterator[Batch]:
    return (_Noting(batch.dense, batch.ids, batch.labels) for batch in batches(6))


def _copied_on_a_thread(name: str) -> tuple[bool, list[str]]:
    """Whether it is another than the caller's, and what differs from TorchRec's class."""
    given = {"async_inplace_copy": True, "enable_inplace_copy_batch": True}
    wanted = trained(theirs(SPARSE), 6, async_inplace_copy=True)
    _Noting.threads.clear()
    pipeline = made(getattr(ours, name), **given)
    outputs = to_the_end(pipeline, _noting())
    apart = bool(_Noting.threads) and threading.get_ident() not in _Noting.threads
    return apart, Outcome(outputs, everything(pipeline._model)).differences(wanted)


@pytest.mark.skipif(
    "async_inplace_copy" not in arguments(theirs(SPARSE)), reason="TorchRec has it since 1.9"
)
@pytest.mark.parametrize(
    "name", [SPARSE, "TrainPipelineSparseDistLite", "PrefetchTrainPipelineSparseDist"]
)
def test_batches_are_copied_on_a_thread(two_ranks: Ranks, name: str) -> None:
    """With `async_inplace_copy`, in each class that has it, to the bits of TorchRec's class."""
    assert two_ranks.run(_copied_on_a_thread, name) == [(True, []), (True, [])]


# ---------------------------------------------------------------------------- tools of ours


def _watched() -> list[str]:
    """Profiled, shortcut and measured in the middle of a training."""
    kind, given = ours.PrefetchTrainPipelineSparseDist, _given("PrefetchTrainPipelineSparseDist")
    wanted = trained(kind, 4, **given)

    def loop(pipeline: Any) -> list[Tensor]:
        pipe = pipeline.pipe
        for pipelined in (False, True):
            TaskProfiler(pipe).profile(next(batches(1, seed=5)), 1, 1, 2, pipelined, TASKS[1:5])
        return to_the_end(pipeline, batches(4))

    return trained(kind, loop, **given).differences(wanted)


def test_profiles_replay_what_went(two_ranks: Ranks) -> None:
    """A replayed batch has its ids, whatever later tasks let go of."""
    assert two_ranks.run(_watched, deadline_s=200) == [[], []]
