"""The inputs that are pipelined, those that are not, and the messages about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swpipe.device import CpuDevice
from swpipe.tasks.torchrec import (
    RewriteError,
    TrainPipelineSparseDist,
)
from swpipe.tasks.torchrec.rewriting.inputs import TracedArguments, named_input
from swpipe.tasks.torchrec.rewriting.rewrite import Rewrite
from swpipe.tasks.torchrec.step.task_options import Find
from tests.support.ranks import Ranks
from tests.tasks.torchrec import computing as kinds
from tests.tasks.torchrec.computing import TWO, Kind, computing
from tests.tasks.torchrec.models import (
    CPU,
    Batch,
    Job,
    KeyedJaggedTensor,
    batches,
    dense_optimizer,
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


@dataclass
class _TwoIds(Batch):
    """A batch with ids of two kinds."""

    more: KeyedJaggedTensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> _TwoIds:
        plain = Batch.to(self, device, non_blocking)
        return _TwoIds(plain.dense, plain.ids, plain.labels, plain.ids)


class _NoTo:
    """A batch that cannot be moved."""


def _refused(
    kind: Kind = kinds.by_flag, batch: Any = None, find: Find = "trace", **options: Any
) -> str:
    """Return the error of a model at its first batch; "" if it runs."""
    with create("jagged_sparse_dist", computing(kind), TWO, find=find, **options) as pipeline:
        return refusal(lambda: pipeline.progress(iter([batch or next(batches(1))])))


class _Picks(nn.Module):
    """A model that calls a module with parts of the batch, alone and in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Identity()

    def forward(self, batch: Any) -> Any:
        named = {"rest": batch.parts["b"][:1], "none": batch.parts.get("c", None)}
        return self.leaf(batch.parts.get("a"), [batch.parts["b"][1], 3], more=named)


def test_an_input_is_picked_by_attributes_items_and_get() -> None:
    """The forward uses lists and dicts, too; a message shows the path to it."""
    graph = torch.fx.Tracer().trace(_Picks())
    (call,) = (node for node in graph.nodes if node.op == "call_module")
    traced = TracedArguments(call.args, call.kwargs)
    args, kwargs = traced.values({"": SimpleNamespace(parts={"a": 1, "b": [2, 4]})})
    assert args == [1, [4, 3]]
    assert kwargs == {"more": {"rest": [2], "none": None}}
    assert str(traced).startswith("batch.parts['a'], ")
    assert str(named_input("user.ids")) == "batch.user.ids"
    user = SimpleNamespace(ids=5)
    assert named_input("user.ids").values({"": SimpleNamespace(user=user)}) == ([5], {})


def _refused_two_ids(**options: Any) -> str:
    (batch,) = batches(1)
    two = _TwoIds(batch.dense, batch.ids, batch.labels, batch.ids)
    return _refused(batch=two, find="direct", **options)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (kinds.calls_twice, "tables.0: it is called 2 times in one forward"),
        (kinds.permutes, "tables.0: its input (permute) is computed in the forward"),
        (kinds.leaves_out, "tables.1: the forward never calls it"),
        (kinds.branches, "torch.fx cannot trace the forward of Computes (symbolically"),
    ],
)
def test_a_module_that_cannot_be_pipelined_is_named(
    two_ranks: Ranks, kind: Kind, says: str
) -> None:
    """The error names the module, the reason and the fix, on every rank."""
    for said in two_ranks.run(_refused, kind):
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
    """The result of `torch.compile(model)` cannot be traced; the error says how to compile."""
    ((said,),) = one_rank.run(_compiled, False)
    assert said.startswith("the model was made by torch.compile(), which torch.fx cannot trace")
    assert "call .compile() of the module instead" in said
    assert "control flow" not in said
    assert one_rank.run(_compiled, True) == [[]]


def test_an_untraced_second_call_is_reported_when_it_happens(two_ranks: Ranks) -> None:
    """The direct path cannot see the forward; the forward itself raises, instead of hanging."""
    for said in two_ranks.run(partial(_refused, kinds.calls_twice, find="direct")):
        assert said.startswith("RuntimeError: module 'tables.0' is called a second time")
        assert "call it once" in said


def test_the_direct_path_needs_no_trace_and_does_not_guess(two_ranks: Ranks) -> None:
    """A forward that branches works with it; two matching attributes are an error.

    Naming one of them fixes it.
    """
    found = two_ranks.run(partial(_refused, kinds.branches, find="direct"))
    assert found == ["nothing raised"] * 2
    for said in two_ranks.run(_refused_two_ids):
        assert "2 (ids, more) is a KeyedJaggedTensor" in said
    named = partial(_refused_two_ids, inputs={"tables.0": "ids", "tables.1": "ids"})
    assert two_ranks.run(named) == ["nothing raised"] * 2


def test_an_unknown_module_name_is_reported(one_rank: Ranks) -> None:
    """The error lists the existing modules."""
    with pytest.raises(RewriteError, match=r"'tabels.0'.* those are tables.0, tables.1"):
        one_rank.run(partial(_refused, inputs={"tabels.0": "ids"}))


def test_a_batch_that_cannot_be_moved_is_reported(one_rank: Ranks) -> None:
    """The error has its type and the missing methods."""
    (said,) = one_rank.run(partial(_refused, batch=_NoTo()))
    assert said.startswith("TypeError: a batch is a _NoTo without to and record_stream")


def _outside(postproc: bool) -> str:
    model = computing(kinds.one if postproc else kinds.by_flag)
    with create("jagged_sparse_dist", model, TWO, pipeline_postproc=postproc) as pipeline:
        pipeline.progress(batches(3))
        return refusal(lambda: model(next(batches(1))))


@pytest.mark.parametrize(("postproc", "module"), [(False, "tables.0"), (True, "augment")])
def test_calling_an_attached_model_is_an_error(
    two_ranks: Ranks, postproc: bool, module: str
) -> None:
    """It must use neither the ids of a batch in flight, nor what was computed for it."""
    for said in two_ranks.run(_outside, postproc):
        assert f"module {module!r} is called outside of its pipeline" in said
        assert "detach() the model first" in said


def test_a_model_without_sharded_modules_is_told() -> None:
    """There is nothing to pipeline."""
    with pytest.raises(RewriteError, match="Linear has no sharded module"):
        Rewrite(nn.Linear(1, 1), CpuDevice())
