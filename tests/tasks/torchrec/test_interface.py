"""Names, arguments and methods are TorchRec's; the rest is refused by name."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec.pipelines.refused_arguments import REASONS
from tests.support.ranks import Ranks
from tests.tasks.torchrec.computing import TWO, computing, permutes
from tests.tasks.torchrec.loops import (
    MODULES,
    PIPELINES,
    arguments,
    made,
    theirs,
    train_pipelines,
    trained,
)
from tests.tasks.torchrec.models import (
    CPU,
    Job,
    batches,
    dense_optimizer,
    everything,
    sharded,
)
from tests.tasks.torchrec.trial import Outcome, refusal, to_the_end

SPARSE = "TrainPipelineSparseDist"
UNUSED = nn.Linear(1, 1)


# -------------------------------------------------------------------------- names and arguments


@pytest.mark.parametrize("name", PIPELINES)
def test_classes_arguments_and_methods_are_torchrecs(name: str) -> None:
    """Arguments have the same order and defaults; a subclass is one if TorchRec's is."""
    mine, original = getattr(ours, name), theirs(name)
    assert arguments(mine) == arguments(original)
    for method in ("progress", "attach", "detach", "reset"):
        if hasattr(original, method):
            taken = inspect.signature(getattr(original, method)).parameters
            assert list(inspect.signature(getattr(mine, method)).parameters) == list(taken)
    assert issubclass(mine, train_pipelines.TrainPipeline)
    assert issubclass(mine, original)
    theirs_is = issubclass(original, train_pipelines.TrainPipelineSparseDist)
    assert issubclass(mine, ours.TrainPipelineSparseDist) == theirs_is


NAMES = [
    "EvalPipelineCPUSparse",
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "StagedTrainPipeline",
    "TrainEvalHybridPipelineBase",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePEC",
    "TrainPipelinePT2",
    "TrainPipelinePrefetchEMS",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistBwdOpt",
    "TrainPipelineSparseDistCompAutograd",
    "TrainPipelineSparseDistEmbStash",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistOptStash",
    "TrainPipelineSparseDistT",
]
"""The pipelines of TorchRec 1.5 to its main branch of August 2026."""


@pytest.mark.parametrize("name", sorted({*NAMES} - {*ours.__all__}))
def test_a_class_without_a_counterpart_says_what_to_use_instead(name: str) -> None:
    """Its construction raises, with any arguments."""
    kind = getattr(ours, name)
    said = refusal(lambda: kind(UNUSED, None, CPU, anything="at all"))
    assert said.startswith(f"NotImplementedError: {name} has no counterpart in swpipe: it ")
    assert re.search("use|PipelineSparseDist|PipelineFusedSparseDist", said.split(": it ")[1])


def test_every_class_of_torchrecs_can_be_imported() -> None:
    """The installed TorchRec's modules have no other class that extends TrainPipeline."""
    base = train_pipelines.TrainPipeline
    assert all(issubclass(getattr(ours, name), base) for name in NAMES)
    found = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    assert found <= set(NAMES)


def test_other_names_of_torchrecs_package_are_its_own() -> None:
    """Names that are imported with a pipeline need no second import."""
    package = importlib.import_module("torchrec.distributed.train_pipeline")
    for name in ("GradientAccumulationWrapper", "TorchCompileConfig", "TrainPipelineContext"):
        assert getattr(ours, name) is getattr(package, name)
    with pytest.raises(AttributeError, match="'Nothing', nor has TorchRec's"):
        getattr(ours, "Nothing")  # noqa: B009


def _by_doors() -> list[str]:
    """Return the differences of a pipeline filled by hand, and of one with its own copy."""

    class Doubled(ours.TrainPipelineSparseDist[Any, Any]):
        def copy_batch_to_gpu(self, dataloader_iter: Any) -> tuple[Any, None]:
            batch, context = super().copy_batch_to_gpu(dataloader_iter)
            batch.dense = 2 * batch.dense
            return batch, context

    def filled(pipeline: Any) -> list[Tensor]:
        data = batches(5)
        pipeline.fill_pipeline(data)
        assert pipeline.pipe.in_flight == 2
        return to_the_end(pipeline, data)

    def doubled(count: int) -> Any:
        for batch in batches(count):
            batch.dense = 2 * batch.dense
            yield batch

    wanted = trained(theirs(SPARSE), 5)
    found = trained(ours.TrainPipelineSparseDist, filled).differences(wanted)
    wanted = trained(theirs(SPARSE), lambda one: to_the_end(one, doubled(5)))
    found += trained(Doubled, 5).differences(wanted)
    door = made(ours.TrainPipelineSparseDist).copy_batch_to_gpu
    one = batches(1)
    return [*found, str(door(one)[0] is None), str(door(one))]


def test_fill_pipeline_and_copy_batch_to_gpu_are_doors(two_ranks: Ranks) -> None:
    """The first may be called; the second may be called, and overridden, as in TorchRec's."""
    assert two_ranks.run(_by_doors) == [["False", "(None, None)"]] * 2


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", PIPELINES)
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    """TorchRec's class has the argument; its default raises in no class."""
    kind = getattr(ours, name)
    for argument in REASONS.keys() & arguments(kind).keys():
        given: dict[str, Any] = {argument: arguments(kind)[argument] is False or dict}
        given |= {"site_fqn": "top"} if "site_fqn" in arguments(kind) else {}
        said = refusal(partial(kind, UNUSED, None, CPU, **given))
        assert said.startswith(f"NotImplementedError: {name}({argument}=")
        assert ": " in said.split("=", 1)[1]


def test_an_argument_that_only_a_newer_torchrec_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its default is accepted; an argument that no TorchRec has is a TypeError."""

    class Newer:
        def __init__(self, model: Any, optimizer: Any, device: Any, fancy: int = 3) -> None:
            """Take an additional argument."""

    base = ours.TrainPipelineBase
    monkeypatch.setattr(base, "_original", Newer)
    said = refusal(lambda: base(UNUSED, None, CPU, fancy=4))
    assert said.startswith("NotImplementedError: TrainPipelineBase(fancy=4): ")
    base(UNUSED, torch.optim.SGD(UNUSED.parameters()), CPU, fancy=3).close()
    said = refusal(lambda: base(UNUSED, None, CPU, plain=4))
    assert said.startswith("TypeError: TrainPipelineBase() got an unexpected keyword argument 'pl")


def test_a_subclass_has_its_own_arguments() -> None:
    """They are those of its constructor if it has one, or else those of its base class."""

    class Mine(ours.TrainPipelineBase[Any, Any]):
        def __init__(self, rate: float) -> None:
            super().__init__(UNUSED, None, CPU)

    class Plain(ours.TrainPipelineBase[Any, Any]):
        """A subclass without additions."""

    assert list(arguments(Mine)) == ["rate"]
    assert arguments(Plain) == arguments(theirs("TrainPipelineBase"))
    assert "rate" in pydoc.render_doc(Mine)
    assert "custom_model_fwd" in pydoc.render_doc(ours.TrainPipelineBase)


def test_a_subclass_that_would_be_ignored_is_refused() -> None:
    """It overrides a private method of TorchRec's; progress may be overridden."""
    said = refusal(lambda: type("Mine", (ours.TrainPipelineSparseDist,), {"_wait_for_batch": max}))
    assert "Mine overrides _wait_for_batch of TorchRec's TrainPipelineSparseDist" in said
    progress = {"progress": lambda *_: None}
    assert refusal(lambda: type("Mine", (ours.TrainPipelineBase,), progress)) == "nothing raised"
    said = refusal(lambda: type("Mine", (ours.TrainPipelineBase,), {"sync_embeddings": print}))
    assert "Mine overrides sync_embeddings" in said


def _private() -> list[tuple[str, str]]:
    """Return error messages, and their beginnings."""
    pipeline = made(ours.TrainPipelineSparseDist)
    stream = {"emb_lookup_stream": "fast"}
    return [
        (
            refusal(lambda: pipeline.batches),
            "AttributeError: TrainPipelineSparseDist has no 'batches'",
        ),
        (
            refusal(lambda: pipeline.register_backward_hook("site", print)),
            "NotImplementedError: register_backward_hook('site')",
        ),
        (
            refusal(lambda: made(ours.TrainPipelineFusedSparseDist, **stream)),
            "ValueError: emb_lookup_stream is 'fast': give 'new', 'current' or 'data_dist'",
        ),
    ]


def test_torchrecs_internals_are_named_when_they_are_asked_for(one_rank: Ranks) -> None:
    """The error names the pipeline underneath as the alternative."""
    (told,) = one_rank.run(_private)
    assert all(said.startswith(wanted) for said, wanted in told), told
    assert ".pipe" in told[0][0]


READ = (
    *("_device", "_model", "_optimizer"),
    *("_execute_all_batches", "_custom_model_fwd", "_model_fwd"),
)
"""What scripts read: ``dlrm_main.py`` and MLPerf's, the trainers of recsys-examples, and forks."""


def _read(name: str) -> list[Any]:
    pipeline = made(getattr(ours, name), execute_all_batches=True)
    pipeline._connected = False  # as MLPerf's script sets it
    for arguments_ in ({}, {"custom_model_fwd": print}):
        other = made(theirs(name), **arguments_)
        mine = made(getattr(ours, name), **arguments_)
        for one in READ:
            here, there = getattr(mine, one), getattr(other, one, None)
            if type(here) is not type(there) and one != "_custom_model_fwd":
                return [f"{one} is {here}, TorchRec's {there}"]
    return [pipeline._device, pipeline._execute_all_batches, mine._custom_model_fwd is print]


def test_what_scripts_read_is_there(one_rank: Ranks) -> None:
    """Each has the name and the value of TorchRec's pipeline."""
    assert one_rank.run(_read, SPARSE) == [[CPU, True, True]]


# ------------------------------------------------------------------------------- what is warned of


def _not_pipelined(kind: Any) -> list[str]:
    model = computing(permutes)
    pipeline = kind(model, dense_optimizer(TWO, model), CPU)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        to_the_end(pipeline, batches(3))
    return [str(one.message) for one in said if one.category is RuntimeWarning]


def test_a_module_that_is_not_pipelined_is_warned_of(one_rank: Ranks) -> None:
    """One warning has its name and the reason: it is the most frequent cause of lost overlap."""
    ((said,),) = one_rank.run(_not_pipelined, ours.TrainPipelineSparseDist)
    assert said.startswith("sharded modules that are not pipelined")
    assert "tables.0: its input" in said
    assert "tables.1" not in said
    assert one_rank.run(_not_pipelined, ours.TrainPipelineBase) == [[]]  # pipelines none


def _iterators_given(name: str, in_each_call: bool) -> list[str]:
    pipeline = made(getattr(ours, name))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if in_each_call:
            for k in range(3):
                pipeline.progress(batches(4, seed=k))
        else:
            first, second = batches(3, seed=4), batches(3, seed=5)
            for one in (first, first, second, second, second, second):
                pipeline.progress(one)
            for k in range(3):
                to_the_end(pipeline, batches(1, seed=k))
    return [str(one.message) for one in said if one.category is RuntimeWarning]


@pytest.mark.parametrize("name", [SPARSE, "TrainPipelineSemiSync"])
def test_a_new_iterator_in_each_call_is_warned_of(one_rank: Ranks, name: str) -> None:
    """Batches of iterators that never begin are not trained on; those of one iterator are."""
    ((said,),) = one_rank.run(_iterators_given, name, True)
    assert "no batch of the one in between was used" in said
    assert one_rank.run(_iterators_given, name, False) == [[]]


# --------------------------------------------------------------------------------------- modes


def _evaluated(name: str, training: bool) -> list[str]:
    """Return what an evaluation with gradients switched on has left."""
    pipeline = made(getattr(ours, name))
    model = pipeline._model.train(training)
    before = everything(model)
    kept: list[str] = []
    model.module.top.register_forward_hook(
        lambda *_: kept.append("a graph is kept") if torch.is_grad_enabled() else None
    )
    outputs = to_the_end(pipeline, batches(4))
    changed = Outcome([], everything(model)).differences(Outcome([], before))
    return [*changed, *kept, *(f"output {k}" for k, o in enumerate(outputs) if o.requires_grad)]


def test_an_evaluation_never_trains(two_ranks: Ranks) -> None:
    """EvalPipelineSparseDist evaluates in any mode of the model, the hybrid one under eval()."""
    assert two_ranks.run(_evaluated, "EvalPipelineSparseDist", True) == [[], []]
    assert two_ranks.run(_evaluated, "EvalPipelineFusedSparseDist", True) == [[], []]
    assert two_ranks.run(_evaluated, "TrainEvalHybridPipelineBase", False) == [[], []]


# ------------------------------------------------------------------- attach, detach, reset, _model


def _attached() -> list[str]:
    pipeline = made(ours.TrainPipelineSparseDist)
    first, other = pipeline._model, sharded(Job())
    data = batches(6)
    outputs = [pipeline.progress(data)]
    found = [refusal(lambda: pipeline.attach(other))]
    if pipeline.detach() is not first:
        found.append("detach() returns another model")
    pipeline.attach(first, sparse_dist=False)
    outputs += pipeline.drain()
    pipeline.attach(other)
    if pipeline._model is not other:
        found.append("_model is the old one")
    outputs += to_the_end(pipeline, data)
    return [*found, f"{len(outputs)} outputs, {len(pipeline._pipelined_modules)} pipelined"]


def test_another_model_is_attached_when_none_is_in_flight(two_ranks: Ranks) -> None:
    """With batches in flight it is refused, and they stay."""
    for said in two_ranks.run(_attached):
        assert said[0].startswith("RuntimeError: iterations are in flight (2)")
        assert said[1:] == ["6 outputs, 1 pipelined"]


# -------------------------------------------------------------------------- the user's own parts


def _accumulated(module: Any) -> Outcome:
    """Train under TorchRec's own ``GradientAccumulationWrapper``."""
    wrapper = importlib.import_module("torchrec.distributed.train_pipeline")
    model = sharded(Job())
    optimizer = dense_optimizer(Job(), model)
    pipeline = module.TrainPipelineSparseDist(model, optimizer, CPU)
    config = wrapper.GradientAccumulationConfig(is_enabled=True, num_steps=3)
    wrapped = wrapper.GradientAccumulationWrapper(pipeline, optimizer, model, config)
    return Outcome(to_the_end(wrapped, batches(7)), everything(model))


def _wrapped() -> list[str]:
    return _accumulated(ours).differences(_accumulated(train_pipelines))


def test_torchrecs_gradient_accumulation_wraps_ours(two_ranks: Ranks) -> None:
    """Three batches for each step, and one step with the batch that is left."""
    assert two_ranks.run(_wrapped) == [[], []]
