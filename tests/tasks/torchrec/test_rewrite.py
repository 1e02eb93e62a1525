"""What is pipelined, what is not, and what is said of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.device import CpuDevice
from swpipe.tasks.torchrec import (
    RewriteError,
    SparseDistTasks,
    TrainPipelineSparseDist,
    TrainStep,
)
from swpipe.tasks.torchrec.rewrite import Rewrite
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    KeyedJaggedTensor,
    Model,
    batches,
    dense_optimizer,
    plain_model,
    sharded,
)
from tests.tasks.torchrec.trial import (
    Outcome,
    by_torchrec,
    create,
    everything,
    refusal,
    to_the_end,
)


class _Twice(Model):
    """Calls its tables twice."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        (table,) = self.tables
        both = table(batch.ids).values() + table(batch.ids).values()
        logits = self.top(torch.cat([self.bottom(batch.dense), both], dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class _Computed(Model):
    """Computes its tables' input."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        ids = batch.ids.permute([0, 1, 2, 3])
        logits = self.top(torch.cat([self.bottom(batch.dense), self.tables[0](ids).values()], 1))
        return self.criterion(logits.squeeze(1), batch.labels), logits.squeeze(1).detach()


class _Skipped(Model):
    """Never calls its second tables."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.top(
            torch.cat([self.bottom(batch.dense), *[self.tables[0](batch.ids).values()] * 2], 1)
        ).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


_BRANCH = inspect.currentframe().f_lineno + 7  # type: ignore[union-attr]


class _Branching(Model):
    """Does something else where the data says so."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.labels.sum() < 0:
            raise ValueError("labels")
        return super().forward(batch)


@dataclass
class _TwoIds(Batch):
    """A batch with ids of two kinds."""

    more: KeyedJaggedTensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> _TwoIds:
        plain = Batch.to(self, device, non_blocking)
        return _TwoIds(plain.dense, plain.ids, plain.labels, plain.ids)


class _NoTo:
    """A batch that cannot be moved."""


def _changed(cls: type[Model], job: Job | None = None) -> tuple[nn.Module, Job]:
    job = job or Job()
    model = plain_model(job)
    model.__class__ = cls
    return sharded(job, model), job


def _refused(cls: type[Model], job: Job | None = None, batch: Any = None, **options: Any) -> str:
    """What is said of a model at its first batch; "" if it runs."""
    model, job = _changed(cls, job)
    with create("jagged_sparse_dist", model, job, **options) as pipeline:
        return refusal(lambda: pipeline.progress(iter([batch or next(batches(1))])))


def _refused_two_ids(**options: Any) -> str:
    (batch,) = batches(1)
    two = _TwoIds(batch.dense, batch.ids, batch.labels, batch.ids)
    return _refused(Model, None, two, find="direct", **options)


@pytest.mark.parametrize(
    ("cls", "modules", "says"),
    [
        (_Twice, 1, "tables.0: it is called 2 times in one forward"),
        (_Computed, 1, "tables.0: its input (permute) is computed in the forward"),
        (_Skipped, 2, "tables.1: the forward never calls it"),
        (_Branching, 1, "torch.fx cannot trace the forward of _Branching at "),
        (_Branching, 1, f"{__file__}:{_BRANCH}, `if batch.labels.sum() < 0:` (symbolically traced"),
    ],
)
def test_a_module_that_cannot_be_pipelined_is_named(
    two_ranks: Ranks, cls: type[Model], modules: int, says: str
) -> None:
    """The error names the module, the reason and the fix, on every rank."""
    for said in two_ranks.run(_refused, cls, Job(modules=modules)):
        assert said.startswith("RewriteError: ")
        assert says in said


def _compiled(in_place: bool) -> list[str]:
    job = Job()
    model = sharded(job)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(job, model), CPU)
    try:
        outputs = to_the_end(pipeline, batches(1))
    except RewriteError as error:
        return [str(error)]
    return Outcome(outputs, everything(model)).differences(by_torchrec(job, batches(1)))


def test_a_compiled_model_is_compiled_in_place(one_rank: Ranks) -> None:
    """What `torch.compile(model)` returns cannot be traced; the error says how to compile."""
    ((said,),) = one_rank.run(_compiled, False)
    assert said.startswith("the model was made by torch.compile(), which torch.fx cannot trace")
    assert "call .compile() of the module instead" in said
    assert "control flow" not in said
    assert one_rank.run(_compiled, True) == [[]]


def test_an_untraced_second_call_is_reported_when_it_happens(two_ranks: Ranks) -> None:
    """The direct path cannot see the forward; the forward itself says so, instead of hanging."""
    for said in two_ranks.run(partial(_refused, _Twice, find="direct")):
        assert said.startswith("RuntimeError: module 'tables.0' is called a second time")
        assert "call it once" in said


def test_the_direct_path_needs_no_trace(two_ranks: Ranks) -> None:
    """A forward that branches is pipelined by it."""
    found = two_ranks.run(partial(_refused, _Branching, find="direct"))
    assert found == ["nothing raised"] * 2


def test_the_direct_path_does_not_guess(two_ranks: Ranks) -> None:
    """Two matching attributes are an error; naming one of them fixes it."""
    for said in two_ranks.run(_refused_two_ids):
        assert "2 (ids, more) is a KeyedJaggedTensor" in said
    named = partial(_refused_two_ids, inputs={"tables.0": "ids"})
    assert two_ranks.run(named) == ["nothing raised"] * 2


def test_an_unknown_module_name_is_reported(two_ranks: Ranks) -> None:
    """The error lists the modules there are."""
    with pytest.raises(RewriteError, match=r"'tabels.0'.* those are tables.0"):
        two_ranks.run(partial(_refused, Model, inputs={"tabels.0": "ids"}))


def test_a_batch_that_cannot_be_moved_is_reported(two_ranks: Ranks) -> None:
    """The error has its type and the missing methods."""
    for said in two_ranks.run(partial(_refused, Model, batch=_NoTo())):
        assert said.startswith("TypeError: a batch is a _NoTo without to and record_stream")


def _lenient() -> tuple[str, list[str]]:
    """Unpipelined modules keep their forwards, and the numbers are the same."""
    model, job = _changed(_Computed)
    with create("jagged_split_sparse_dist", model, job, strict=False) as pipeline:
        outputs = to_the_end(pipeline, batches(5))
        report = str(pipeline.report)
    ours = Outcome(outputs, everything(model))
    return report, ours.differences(by_torchrec(job, batches(5), model=_changed(_Computed)[0]))


def test_without_strict_a_module_runs_unpipelined_and_is_reported(two_ranks: Ranks) -> None:
    """The report has the reason; the numbers are TorchRec's."""
    for report, where in two_ranks.run(_lenient):
        assert "tables.0 (ShardedEmbeddingBagCollection) NOT pipelined: its input" in report
        assert where == []


def _outside() -> str:
    model = sharded(Job())
    with create("jagged_sparse_dist", model) as pipeline:
        pipeline.progress(batches(3))
        return refusal(lambda: model(next(batches(1))))


def test_calling_an_attached_model_is_an_error(two_ranks: Ranks) -> None:
    """It must not use the ids of a batch in flight."""
    for said in two_ranks.run(_outside):
        assert "module 'tables.0' is called outside of its pipeline" in said
        assert "detach() the model first" in said


def test_a_model_without_sharded_modules_is_told() -> None:
    """There is nothing to pipeline."""
    with pytest.raises(RewriteError, match="Linear has no sharded module"):
        Rewrite(nn.Linear(1, 1), CpuDevice())


def test_a_missing_process_group_is_told() -> None:
    """Before anything is done to the model."""
    layer = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="init_process_group"):
        SparseDistTasks(layer, TrainStep([torch.optim.SGD(layer.parameters())]))
