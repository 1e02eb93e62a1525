"""The pipelines of recsys-examples have the results, numbers and arguments of their originals."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.profiler import pipeline_breakdown
from swpipe.tasks.torchrec import recsys_examples as ours
from swpipe.tasks.torchrec.recsys_examples import (
    TrainPipelineFactory,
    register_train_pipeline,
)
from tests.support.pairs import pairwise_cases
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU
from tests.tasks.torchrec.recsys_examples.trainer import (
    EXACT,
    SequenceModel,
    Sequences,
    by_hand,
    created,
    flat,
    made,
    ran,
    sequences,
    trained,
)
from tests.tasks.torchrec.trial import refusal, to_the_end

PIPELINES = [getattr(ours, name) for name in ours.__all__ if name.endswith(("Dist", "Pipeline"))]


def _broken_down() -> list[Any]:
    pipeline = created("jagged_sw_serial")
    assert pipeline._sw_pipeline is pipeline.pipe
    data = list(sequences(2))
    pipeline.progress(iter(data[:1]))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = pipeline_breakdown(pipeline, data[1:], num_rounds=2, tasks=["EmbForward"])
    return [len(found), "EmbForward" in printed.getvalue()]


def test_a_breakdown_is_printed_on_rank_0(two_ranks: Ranks) -> None:
    """``pipeline_breakdown`` of its trainer has one result for each batch."""
    assert two_ranks.run(_broken_down) == [[1, True], [1, False]]


def _seen_inside() -> list[Any]:
    pipeline = created("jagged_sw_serial")
    before = pipeline._pipeline_ctx
    first, *rest = sequences(4)
    pipeline._ensure_initialized(first)
    modules = [*pipeline._pipelined_modules]
    pipeline.progress(iter([first]))
    index = pipeline._pipeline_ctx.index
    old = pipeline.pipe
    same = pipeline._build_pipeline() is pipeline.pipe
    outputs = to_the_end(pipeline, iter(rest))
    pipeline._ensure_initialized(first)
    same_modules = modules == pipeline._pipelined_modules
    return [before, len(modules), index, same, old is pipeline.pipe, len(outputs), same_modules]


def test_the_serial_pipeline_has_the_parts_that_its_document_names(one_rank: Ranks) -> None:
    """These are the context of the last batch, a new pipeline, and one rewrite of the model."""
    assert one_rank.run(_seen_inside) == [[None, 1, 0, True, False, 3, True]]


CASES = pairwise_cases(EXACT, ("tokens", "reporting_loss"), (False, True))
"""Names, results, and whether Megatron's wrappers are around the model."""


def _differences() -> dict[str, list[str]]:
    found = {}
    for name, returns, megatron in CASES:
        outcome = trained(name, 4, megatron, returns=returns)
        if where := outcome.differences(by_hand(4, megatron, returns)):
            found[f"{name}, {returns}, {megatron}"] = where
    return found


def test_every_pipeline_trains_and_reports_as_recsys_examples_does(two_ranks: Ranks) -> None:
    """(loss, tokens, output) or (reporting_loss, output), and parameters, are equal bit for bit."""
    assert two_ranks.run(_differences) == [{}, {}]


def _slices(source: Iterator[Any], count: int) -> Iterator[Iterator[Any]]:
    """Yield parts of a loader's iterator, between which a trainer evaluates."""
    for first in source:
        yield chain((first,), islice(source, count - 1))


def _trained_and_evaluated(name: str, returns: str) -> list[Tensor]:
    """Train on a part of the data, evaluate, and train on the next part."""
    found: list[Tensor] = []
    with closing(created(name, returns=returns)) as pipeline:
        for part in _slices(sequences(5), 3):
            pipeline._model.train()
            found += flat(to_the_end(pipeline, part))
            pipeline._model.eval()
            with torch.no_grad():
                evaluated = to_the_end(pipeline, islice(sequences(9, seed=1), 2))
            if returns == "tokens":
                assert all(tokens is None for _, tokens, _ in evaluated)
                evaluated = [(loss, output) for loss, _, output in evaluated]
            found += flat(evaluated)
    return found


@pytest.mark.parametrize("returns", ["tokens", "reporting_loss"])
def test_training_with_evaluations_in_between(two_ranks: Ranks, returns: str) -> None:
    """Evaluations report their losses, and no tokens; the pipelines agree."""
    wanted = two_ranks.run(_trained_and_evaluated, "jagged_none", returns)
    ahead = two_ranks.run(_trained_and_evaluated, "jagged_prefetch_sparse_dist", returns)
    for found, right in zip(ahead, wanted, strict=True):
        assert len(found) == len(right) == (5 * 3 if returns == "tokens" else 5 * 2) + 4 * 2
        assert all(map(torch.equal, found, right))


def _own_evaluation(name: str) -> int:
    """Return how many batches a trainer evaluates itself, as that of semantic ids does."""
    data = sequences(3)
    count = 0
    with closing(created(name, batch_shuffler=_Rotate())) as pipeline:
        to_the_end(pipeline, sequences(2, seed=2))
        model = pipeline._model if name == "jagged_none" else pipeline.detach()
        model.eval()
        while (batch := pipeline._copy_batch_to_gpu_and_shuffle(data)) is not None:
            model(batch)
            count += 1
    return count


@pytest.mark.parametrize("name", ["jagged_none", "jagged_prefetch_sparse_dist"])
def test_a_trainer_may_take_batches_by_itself(two_ranks: Ranks, name: str) -> None:
    """They are copied and shuffled; None ends the data. ``jagged_none`` never changes the model."""
    assert two_ranks.run(_own_evaluation, name) == [3, 3]


def _left() -> list[int]:
    """Return how many of four batches are left, by name."""
    found = []
    for name in ("jagged_sparse_dist", "jagged_prefetch_sparse_dist", "jagged_sw_serial"):
        with closing(created(name, execute_all_batches=False)) as pipeline:
            found.append(4 - len(to_the_end(pipeline, sequences(4))))
    return found


def test_execute_all_batches_false_leaves_as_many_as_there(two_ranks: Ranks) -> None:
    """One is left, or two with a prefetch: its pipelines have pulled them when the data ends."""
    assert two_ranks.run(_left) == [[1, 2, 0]] * 2


class _Rotate:
    """A shuffler with recsys-examples' method, which gives each rank the next one's rows."""

    def shuffle(self, batch: Any, pg_group: Any = None) -> Any:
        assert pg_group is dist.group.WORLD
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, batch)
        return everyone[(dist.get_rank() + 1) % len(everyone)]


def _rotated() -> dict[str, list[str]]:
    """Return the differences between pipelines with the shuffler, and one with shuffled batches."""
    found = {}
    shuffled = [_Rotate().shuffle(batch, dist.group.WORLD) for batch in sequences(5)]
    plain = ran("jagged_none", iter(shuffled))
    for name in (EXACT[1], EXACT[4]):
        mine = ran(name, sequences(5), batch_shuffler=_Rotate(), returns="tokens")
        if not all(map(torch.equal, mine, plain)):
            found[name] = ["outputs"]
    return found


def test_a_shuffler_of_recsys_examples_deals_the_rows(two_ranks: Ranks) -> None:
    """It is called with the data-parallel group, once per batch."""
    assert two_ranks.run(_rotated) == [{}, {}]


def _not_a_number(returns: str, asked: bool = False, there: str = "0") -> str:
    """Return the error for a loss that is NaN on rank 1."""
    data = list(sequences(3))
    if dist.get_rank() == 1:
        data[1].dense[:, 1:].fill_(float("nan"))
    with mock.patch.dict("os.environ", ASSERT_LOSS_HAS_NAN=there):
        pipeline = created("jagged_sparse_dist", returns=returns, assert_nan_loss=asked)
    with closing(pipeline):
        return refusal(lambda: to_the_end(pipeline, iter(data)))


def test_a_loss_that_is_nan_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    """recsys-examples checks it, or the caller asks for it."""
    raised = ["AssertionError: losses of batch 1 are NaN (on ranks 1)"] * 2
    assert two_ranks.run(_not_a_number, "tokens", False, "1") == raised
    assert two_ranks.run(_not_a_number, "tokens", True) == raised
    assert two_ranks.run(_not_a_number, "reporting_loss") == raised
    assert two_ranks.run(_not_a_number, "tokens") == ["nothing raised"] * 2


def _refused() -> list[tuple[str, ...]]:
    """Return error messages, and the words that they must have."""

    def said(**options: Any) -> str:
        return refusal(lambda: created("jagged_sparse_dist", **options))

    labelled = (super(Sequences, batch).to(CPU) for batch in sequences(2))
    uncounted = refusal(lambda: ran("jagged_none", labelled))
    kind = "JaggedMegatronTrainPipelineSparseDist"
    return [
        (uncounted, "TypeError: a Batch has no num_loss_tokens()", "returns='reporting_loss'"),
        (said(returns="loss"), "ValueError: returns is 'loss'; give 'tokens'"),
        (said(batch_shuffler=3), "TypeError: batch_shuffler is a int: give one of"),
        (said(apply_jit=True), f"NotImplementedError: {kind}(apply"),
        (said(pipeline_depth=2), f"TypeError: {kind}() got an unexp"),
        (_averaged("tokens"), "TypeError: the model returned tensor(", "one loss per token"),
        (_averaged("reporting_loss"), "TypeError: the model returned tensor("),
    ]


def test_what_is_wrong_is_refused_by_name(one_rank: Ranks) -> None:
    """The error says what to give; an averaged loss would be divided by the tokens once more."""
    for said, *parts in one_rank.run(_refused)[0]:
        assert all(part in said for part in parts), said


class _Mean(SequenceModel):
    """A model that averages its losses, as those of other libraries do."""

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        losses, output = super().forward(batch)
        return losses.mean(), output


def _averaged(returns: str) -> str:
    model, optimizer = made()
    model._dmp_wrapped_module.module.__class__ = _Mean
    pipeline = ours.JaggedMegatronTrainNonePipeline(model, optimizer, CPU, returns=returns)
    with closing(pipeline):
        return refusal(lambda: pipeline.progress(sequences(1)))


class _Counted(Sequences):
    """A batch whose tokens were counted before."""

    tokens: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        return self

    def num_loss_tokens(self) -> Tensor:
        return self.tokens


def _counts() -> list[bool]:
    """Return whether a batch keeps the number that it has counted."""
    (batch,) = sequences(1)
    counted = _Counted(**vars(batch))
    counted.tokens = batch.num_loss_tokens()
    with closing(created("jagged_none")) as pipeline:
        tokens = [pipeline.progress(iter([counted]))[1] for _ in range(2)]
    return [torch.equal(*tokens), torch.equal(counted.tokens, batch.num_loss_tokens())]


def test_a_batch_may_be_trained_on_twice(two_ranks: Ranks) -> None:
    """The sum over the ranks does not replace the batch's own number."""
    assert two_ranks.run(_counts) == [[True, True]] * 2


def _state(tensor_parallel: int) -> Any:
    """Return Megatron's module of groups, with one rank per data-parallel group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda: groups[dist.get_rank()],
        get_tensor_model_parallel_world_size=lambda: tensor_parallel,
    )


def _own_report() -> list[bool]:
    """Return for each step whether the report is that of the rank alone."""
    with mock.patch.dict(sys.modules, {"megatron.core.parallel_state": _state(1)}):
        pipeline = created("jagged_sparse_dist", returns="reporting_loss")
    with closing(pipeline):
        reported = [report for report, _ in to_the_end(pipeline, sequences(3))]
    return [
        report[1].item() == batch.num_loss_tokens().item()
        for report, batch in zip(reported, sequences(3), strict=True)
    ]


def test_reports_are_those_of_megatrons_data_parallel_ranks(two_ranks: Ranks) -> None:
    """The script has initialised its groups."""
    assert two_ranks.run(_own_report) == [[True] * 3] * 2


def _tensor_parallel(megatron: bool, finalized: bool) -> str:
    options = {"finalize": lambda model: None} if finalized else {}
    with mock.patch.dict(sys.modules, {"megatron.core.parallel_state": _state(2)}):
        return refusal(lambda: created("jagged_none", megatron, **options))


def test_tensor_parallelism_needs_megatrons_own_finalize(two_ranks: Ranks) -> None:
    """finish_grad_sync alone would silently leave some gradients unreduced."""
    said, _ = two_ranks.run(_tensor_parallel, True, False)
    assert said.startswith("ValueError: Megatron splits layers over ranks here")
    assert "finalize=lambda model: finalize_model_grads([model.module], None)" in said
    assert two_ranks.run(_tensor_parallel, True, True) == ["nothing raised"] * 2
    assert two_ranks.run(_tensor_parallel, False, False) == ["nothing raised"] * 2


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_arguments_by_position_are_those_of_recsys_examples(pipeline: Any) -> None:
    """They have the same defaults; swpipe's own arguments are by keyword."""
    given = inspect.signature(pipeline).parameters.values()
    positional = {p.name: p.default for p in given if p.kind is p.POSITIONAL_OR_KEYWORD}
    several = {"execute_all_batches": True, "apply_jit": False, "pipeline_postproc": True}
    none = pipeline in (ours.JaggedMegatronTrainNonePipeline, ours.SWSerialTrainPipeline)
    extra = {} if none else {**several, "custom_model_fwd": None}
    empty = inspect.Parameter.empty
    first = dict.fromkeys(("model", "optimizer", "device"), empty)
    wanted = {**first, **extra, "batch_shuffler": None}
    assert list(positional.items()) == list(wanted.items())


def _as_the_serial_one() -> bool:
    """Return whether ``SWSerialTrainPipeline`` with a shuffler gives both of its results."""
    model, optimizer = made()
    pipeline = ours.SWSerialTrainPipeline(model, optimizer, CPU, _Rotate())
    with closing(pipeline):
        reported = flat(to_the_end(pipeline, sequences(3)))
    wanted = ran("jagged_none", sequences(3), batch_shuffler=_Rotate(), returns="reporting_loss")
    return len(reported) == 6 and all(map(torch.equal, reported, wanted))


def test_the_serial_pipeline_takes_a_shuffler_and_reports_two(two_ranks: Ranks) -> None:
    """The shuffler was once silently taken for another argument."""
    assert two_ranks.run(_as_the_serial_one) == [True, True]


# ------------------------------------------------------------------------------ the factory

NAMES = (*EXACT, "jagged_semi_sync_sparse_dist")
MODEL = nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class _Mine:
    """A pipeline of a user's own that keeps its arguments."""

    def __init__(self, **given: Any) -> None:
        self.given = given


@pytest.fixture
def registry() -> Iterator[type[TrainPipelineFactory]]:
    """The factory, from which a test's registrations are removed afterwards."""
    before = TrainPipelineFactory.list_available()
    yield TrainPipelineFactory
    TrainPipelineFactory.clear_registry()
    for name, kind in before.items():
        TrainPipelineFactory.register(name, kind)


def test_the_names_are_those_of_recsys_examples(registry: type[TrainPipelineFactory]) -> None:
    """Its three, the serial one of its successor, and two of ours; the decorator adds to them."""
    assert tuple(registry.list_available()) == NAMES
    registry.list_available().clear()  # of a copy
    assert register_train_pipeline("mine")(_Mine) is _Mine
    assert registry.is_registered("mine")
    registry.unregister("mine")
    assert tuple(registry.list_available()) == NAMES
    registry.clear_registry()
    assert registry.list_available() == {}


def test_a_pipeline_is_created_by_name(registry: type[TrainPipelineFactory]) -> None:
    """Arguments are passed on by position, by keyword, or from an unchanged configuration."""
    registry.register("mine", _Mine)
    first, config = (MODEL, OPTIMIZER, CPU), {"type": "mine", "depth": 2}
    wanted = {"model": MODEL, "optimizer": OPTIMIZER, "device": CPU, "depth": 2}
    assert registry.create("mine", *first, depth=2).given == wanted
    assert registry.create("mine", **wanted).given == wanted
    assert registry.create_from_config(config, *first).given == wanted
    assert config == {"type": "mine", "depth": 2}


def test_wrong_names_are_refused_with_those_that_exist(
    registry: type[TrainPipelineFactory],
) -> None:
    """The error is a KeyError as in recsys-examples, or a ValueError for a name that is taken."""
    for call in (
        lambda: registry.create("none", MODEL, OPTIMIZER, CPU),
        lambda: registry.unregister("none"),
        lambda: registry.create_from_config({"type": "none"}, MODEL, OPTIMIZER, CPU),
    ):
        with pytest.raises(KeyError, match=r"no pipeline is named 'none'; there are 'jagged_none'"):
            call()
    with pytest.raises(KeyError, match=r'needs the entry "type", one of .*; it has .*depth'):
        registry.create_from_config({"depth": 2}, MODEL, OPTIMIZER, CPU)
    with pytest.raises(ValueError, match=r"'jagged_none' is registered already"):
        registry.register("jagged_none", _Mine)
