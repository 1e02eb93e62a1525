"""``progress`` as TorchRec's users know it, and the model given back in between."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.analysis import verify
from swpipe.errors import PlanError
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec import (
    PipelineFactory,
    SparseDistPipeline,
    SparseDistTasks,
    TrainStep,
)
from swpipe.tasks.torchrec.drop_in import build
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import CPU, Job, batches, dense_optimizer, everything, sharded
from tests.tasks.torchrec.trial import EXACT, by_name, to_the_end

PREFETCH = "jagged_prefetch_sparse_dist"


def _pipeline(name: str, model: nn.Module, job: Job | None = None, **options: Any) -> Any:
    optimizer = dense_optimizer(job or Job(), model)
    return PipelineFactory.create(name, model=model, optimizer=optimizer, device=CPU, **options)


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# ------------------------------------------------------------------------------------ progress


def _ends() -> list[str]:
    found = []
    for name in EXACT:
        model = sharded(Job())
        with _pipeline(name, model) as pipeline:
            for count in (1, 2, 5, 0, 3):
                data = batches(count)
                outputs = to_the_end(pipeline, data)
                if len(outputs) != count:
                    found.append(f"{name}: {len(outputs)} outputs of {count} batches")
                if to_the_end(pipeline, data):
                    found.append(f"{name}: outputs after the end")
    return found


def test_iterators_of_any_length_end_for_good(two_ranks: Ranks) -> None:
    """One output per batch, then StopIteration on every further call."""
    assert two_ranks.run(_ends) == [[], []]


def _none_ends() -> int:
    with _pipeline(PREFETCH, sharded(Job())) as pipeline:
        data: Iterator[Any] = chain(batches(2), [None], batches(2))
        return len(to_the_end(pipeline, data))


def test_none_is_the_end_of_the_data(two_ranks: Ranks) -> None:
    """As in TorchRec."""
    assert two_ranks.run(_none_ends) == [2, 2]


# --------------------------------------------------------------------------- detach and attach


def _interrupted(name: str) -> list[str]:
    """A training with an evaluation and a checkpoint after every step, and one without."""
    job = Job(modules=2)
    plain = by_name(name, job, batches(6))
    model = sharded(job)
    before = _marks(model)
    found = []
    outputs = []
    (probe,) = batches(1, seed=5)
    with _pipeline(name, model) as pipeline:
        data = batches(6)
        for _ in range(6):
            outputs.append(pipeline.progress(data))
            if _marks(model) == before:
                found.append("the attached model shows no mark")
            whole = pipeline.detach()
            if _marks(whole) != before:
                found.append(f"the detached model is not as it was: {_marks(whole) ^ before}")
            whole.eval()
            with torch.no_grad():
                whole(probe)
            everything(whole)
            whole.train()
            if len(outputs) % 2:  # progress attaches by itself
                pipeline.attach()
    if not _equal(outputs, plain.outputs):
        found.append("outputs differ")
    found += [k for k, v in everything(model).items() if not torch.equal(v, plain.state[k])]
    return found


def _marks(model: nn.Module) -> set[str]:
    """What a rewrite sets on modules."""
    marks = {name for name, m in model.named_modules() if getattr(m, "is_pipelined", False)}
    for name, module in model.named_modules():
        marks |= {f"{name}.forward" for _ in range("forward" in vars(module))}
        for k, input_dist in enumerate(getattr(module, "_input_dists", ())):
            if "forward" in vars(getattr(input_dist, "_dist", module)):
                marks.add(f"{name}._input_dists[{k}]._dist.forward")
    return marks


@pytest.mark.parametrize("name", EXACT)
def test_detaching_during_training_changes_nothing(two_ranks: Ranks, name: str) -> None:
    """Evaluations with batches in flight: the model is as before, and the training goes on."""
    assert two_ranks.run(_interrupted, name) == [[], []]


def _evaluated() -> bool:
    """Outputs of a pipelined evaluation are those of the model itself, and nothing is trained."""
    model = sharded(Job())
    with _pipeline(PREFETCH, model) as pipeline:
        to_the_end(pipeline, batches(3))
        before = everything(model)
        model.eval()
        with torch.no_grad():
            outputs = to_the_end(pipeline, batches(4, seed=3))
            pipeline.detach()
            wanted = [model(batch)[1] for batch in batches(4, seed=3)]
        model.train()
        unchanged = all(torch.equal(v, before[k]) for k, v in everything(model).items())
        to_the_end(pipeline, batches(2, seed=4))
        changed = any(not torch.equal(v, before[k]) for k, v in everything(model).items())
    return _equal(outputs, wanted) and unchanged and changed


def test_evaluation_goes_through_the_pipeline_too(two_ranks: Ranks) -> None:
    """In eval mode batches go through forward only; training goes on after it."""
    assert two_ranks.run(_evaluated) == [True, True]


# ----------------------------------------------------------------------------- names and plans


def _functions(name: str) -> list[str]:
    with _pipeline(name, sharded(Job())) as pipeline:
        parts = pipeline.tasks.parts()
        assert list(parts) == [task.name for task in pipeline.pipe.tasks]
        return [f"{n}: {[f.__qualname__ for f in fns]}" for n, fns in parts.items()]


def test_only_the_plans_differ(two_ranks: Ranks) -> None:
    """All exact pipelines run the same eleven functions."""
    functions = [two_ranks.run(_functions, name)[0] for name in EXACT]
    assert len(functions[0]) == 11
    assert all(other == functions[0] for other in functions)


def _misfit(job: Job, plan: str, forward: str) -> str:
    model = sharded(job)
    made = plans.split(after_step=False) if plan == "split" else plans.semi_sync()
    try:
        build(made, model=model, optimizer=dense_optimizer(job, model), device=CPU, forward=forward)
    except PlanError as error:
        return str(error)
    return "it runs"


def test_a_plan_that_the_forward_does_not_suit_is_refused(two_ranks: Ranks) -> None:
    """Without the split forward, the early look-up would be the whole model's forward."""
    assert "'dense'" in two_ranks.run(_misfit, Job(), "split", "prefetch")[0]


def test_tables_that_the_optimizer_steps_are_not_read_too_early(two_ranks: Ranks) -> None:
    """The look-up ahead of OptimStep is for tables that update themselves."""
    assert "'tables'" in two_ranks.run(_misfit, Job("data_parallel"), "split", "split")[0]
    assert two_ranks.run(_misfit, Job(), "split", "split") == ["it runs"] * 2


def _on_streams(job: Job, forward: str) -> list[str]:
    """The ready-made plans that would be refused on a device with streams."""
    model = sharded(job)
    step = TrainStep([dense_optimizer(job, model)])
    tasks = SparseDistTasks(model, step, device="cpu", forward=forward)
    made = {name: plan() for name, plan in plans.PLANS.items() if name != "semi_sync"}
    if forward != "split":
        del made["split"]
    elif not tasks.tables_in_step:
        made["early"] = plans.split(after_step=False)
        made["semi_sync"] = plans.semi_sync()
    refused = []
    for name, plan in made.items():
        try:
            verify(plan, tasks.tasks(), streams=True, pull_ahead=True)
        except PlanError as error:
            refused.append(f"{name}: {error}")
    return refused


@pytest.mark.parametrize("forward", ["pipelined", "prefetch", "split"])
@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_the_plans_hold_on_a_device_with_streams(
    two_ranks: Ranks, sharding: str, forward: str
) -> None:
    """Their dependences order every state, also across streams."""
    assert two_ranks.run(_on_streams, Job(sharding), forward) == [[], []]


def test_the_factory_knows_its_names() -> None:
    """Listed, sorted; another can be registered once; an unknown one is told with those known."""
    assert set(EXACT) <= set(PipelineFactory.list())
    assert PipelineFactory.list() == sorted(PipelineFactory.list())
    with pytest.raises(ValueError, match="jagged_sw_serial"):
        PipelineFactory.create("jagged_sw_seriell")
    with pytest.raises(ValueError, match="registered already"):
        PipelineFactory.register("jagged_sw_serial", SparseDistPipeline)
    PipelineFactory.register("mine", lambda **arguments: arguments["model"])
    try:
        assert PipelineFactory.create("mine", model=3) == 3
    finally:
        del PipelineFactory._builders["mine"]


def test_a_step_or_an_optimizer_but_not_both() -> None:
    """The step has optimizers of its own."""
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for both in ({}, {"optimizer": optimizer, "step": TrainStep([optimizer])}):
        with pytest.raises(ValueError, match="either optimizer= or step="):
            PipelineFactory.create("jagged_sw_serial", model=layer, **both)
