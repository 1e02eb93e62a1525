"""TorchRec's memory-saving arguments: no more bytes than in TorchRec's classes, and equal bits.

The bytes are those that a pipeline has made and that still exist, by storage, as operators run.
Batches are large, of one size, and copied: on a CPU, their copies are what a device would hold. A
period is a call of ``progress``; its figure is the largest at any operator. A thread of gloo may
hold a buffer a little longer than its exchange takes, so the smallest figure of several equal
periods counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec.rewriting.inputs import RewriteError
from tests.support.ranks import Ranks
from tests.tasks.torchrec.loops import (
    arguments,
    made,
    streams_on_a_cpu,
    theirs,
    trained,
)
from tests.tasks.torchrec.models import (
    CPU,
    DENSE,
    ROWS,
    TABLES,
    Batch,
    Job,
    KeyedJaggedTensor,
    Model,
    batches,
    dense_optimizer,
    everything,
    plain_model,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, to_the_end

ROW_IDS, BATCH_ROWS = 40, 64


@dataclass
class CopiedBatch(Batch):
    """A batch whose move to the CPU is a copy."""

    def to(self, device: torch.device, non_blocking: bool = False) -> CopiedBatch:
        ids = KeyedJaggedTensor(
            self.ids.keys(),
            self.ids.values().clone(),
            lengths=self.ids.lengths().clone(),
            stride=self.ids.stride(),
        )
        copied = CopiedBatch(self.dense.clone(), ids, self.labels.clone())
        Alive.add_all([copied.dense, ids.values(), ids.lengths(), copied.labels])
        return copied


def large_batches(count: int) -> list[CopiedBatch]:
    """Return this rank's batches."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.full((TABLES * BATCH_ROWS,), ROW_IDS)
    return [
        CopiedBatch(
            torch.rand(BATCH_ROWS, DENSE, generator=draws),
            KeyedJaggedTensor.from_lengths_sync(
                [f"f{t}" for t in range(TABLES)],
                torch.randint(0, ROWS, (int(lengths.sum()),), generator=draws),
                lengths,
            ),
            torch.randint(0, 2, (BATCH_ROWS,), generator=draws).float(),
        )
        for _ in range(count)
    ]


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A count of live bytes; ``peak`` is the largest while ``measures``, since it was set to 0."""

    only_watches = True
    _entered: Alive | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.measures = False
        self.peak = 0
        self._made: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> Alive:
        Alive._entered = self
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        Alive._entered = None
        super().__exit__(*failure)

    @classmethod
    def add_all(cls, tensors: list[Tensor]) -> None:
        """Count tensors that another thread may have made."""
        if cls._entered is not None:
            for tensor in tensors:
                cls._entered._add(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._add(tensor)
        if made and self.measures:
            self.peak = max(self.peak, self._bytes())
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made:
            self._made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _bytes(self) -> int:
        found = 0
        for number, reference in list(self._made.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._made[number]
            else:
                found += storage.nbytes()  # 0 where TorchRec has emptied it
        return found


CALLS = 6
STEADY = (1, 2)
"""The calls of ``progress`` in which all stages of every class work on a batch."""


def peak(pipeline: Any) -> int:
    """Return the smallest of the peaks of the steady periods of one pass."""
    data, peaks = iter(large_batches(CALLS)), []
    with Alive() as alive:
        for call in range(CALLS):
            alive.peak, alive.measures = 0, call in STEADY
            pipeline.progress(data)
            peaks.append(alive.peak)
    return min(peaks[call] for call in STEADY)


ARGUMENTS = ("free_features_storage_early", "clear_data_dist_inputs", "enable_inplace_copy_batch")
SPARSE = "TrainPipelineSparseDist"
WITH_STATE: dict[str, Any] = {"optimizer": torch.optim.Adagrad, "options": {"lr": 0.01}}
ANSWERS = 8
"""Bytes of the ranks' answers whether their data has ended, which stay on the host."""

WATCH = 4096
"""Bytes, at most, that the watch of pure tasks holds while one of the first iterations runs."""

COMPARED = (
    SPARSE, "TrainPipelineSemiSync",
    "PrefetchTrainPipelineSparseDist", "TrainPipelineFusedSparseDist",
)  # fmt: skip
"""One class for each plan in which batches are exchanged ahead."""


def _more(job: Job, names: tuple[str, ...]) -> dict[str, int]:
    """Return, for each class, how many bytes ours has more than TorchRec's."""
    found = {}
    for name in names:
        given: dict[str, Any] = {k: True for k in ARGUMENTS if k in arguments(theirs(name))}
        given |= {"start_batch": 0} if name == "TrainPipelineSemiSync" else {}
        with streams_on_a_cpu():
            pipeline = made(theirs(name), job, **given)
            if name.startswith("Prefetch"):  # it prefetches nothing where streams are None
                pipeline._data_dist_stream = mock.Mock()
                pipeline._stream_context = lambda _stream: nullcontext()
            there = peak(pipeline)
        found[name] = peak(made(getattr(ours, name), job, **given)) - there
    return found


TABLE_WISE = Job(**WITH_STATE)


@pytest.mark.parametrize(
    ("ranks", "job", "names"),
    [
        (1, TABLE_WISE, COMPARED[::3]),
        (2, TABLE_WISE, COMPARED),
        pytest.param(2, Job("in_order", **WITH_STATE), COMPARED[1:3], marks=pytest.mark.slow),
    ],
    ids=["alone", "table_wise", "in_order"],
)
def test_no_more_bytes_are_alive_than_in_torchrecs_classes(
    request: pytest.FixtureRequest, ranks: int, job: Job, names: tuple[str, ...]
) -> None:
    """All arguments that save memory are given. test_rates and test_parity compare numbers.

    On one rank nothing is sent, and ids that the module permutes are freed.
    """
    group: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[ranks])
    most = WATCH + (ANSWERS * ranks if ranks > 1 else 0)
    for found in group.run(_more, job, names, deadline_s=300):
        assert {name: more for name, more in found.items() if more > most} == {}


# ------------------------------------------------------------------------ what reads them, after


class Reading(Model):
    """A model that reads the ids in its forward."""

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
    """Otherwise it would read freed memory. What is not sent itself stays."""
    early = two_ranks.run(_read, "free_features_storage_early", Job())
    assert all("reads ids of the batch whose memory was freed" in said for said in early)
    sent = two_ranks.run(_read, "clear_data_dist_inputs", Job())
    assert sent == ["it trains"] * 2  # a permuted copy was sent
    as_they_are = two_ranks.run(_read, "clear_data_dist_inputs", Job("in_order"))
    assert all("reads ids of the batch whose memory was freed" in said for said in as_they_are)
    stays = two_ranks.run(_read, "clear_data_dist_inputs", Job("in_order", pooled=False))
    assert stays == ["it trains"] * 2  # the module's context has them


# ---------------------------------------------------------------------------- copied on a thread


class _Noting(Batch):
    """A batch that notes the thread that copies it."""

    threads: ClassVar[set[int]] = set()

    def to(self, device: torch.device, non_blocking: bool = False, **_: Any) -> Batch:
        self.threads.add(threading.get_ident())
        return super().to(device, non_blocking)


def _noting() -> Iterator[Batch]:
    return (_Noting(batch.dense, batch.ids, batch.labels) for batch in batches(6))


def _copied_on_a_thread() -> list[Any]:
    """Return whether another thread copies, and the differences from TorchRec's class."""
    given = {"async_inplace_copy": True, "enable_inplace_copy_batch": True}
    kinds: list[tuple[Any, dict[str, Any]]] = [(ours.TrainPipelineSparseDistT, {})]
    if "async_inplace_copy" in arguments(theirs(SPARSE)):  # since 1.9
        kinds.append((ours.TrainPipelineSparseDist, given))
    wanted, found = trained(theirs(SPARSE), 6), []
    for kind, options in kinds:
        _Noting.threads.clear()
        pipeline = made(kind, **options)
        outputs = to_the_end(pipeline, _noting())
        if not _Noting.threads or threading.get_ident() in _Noting.threads:
            found.append(kind)
        found += Outcome(outputs, everything(pipeline._model)).differences(wanted)
    return found


def test_batches_are_copied_on_a_thread(two_ranks: Ranks) -> None:
    """This includes `async_inplace_copy`."""
    assert two_ranks.run(_copied_on_a_thread) == [[], []]
