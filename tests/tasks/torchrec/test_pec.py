"""PEC exchanges shared rows late and all others early, with the serial plan's bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("torchrec.distributed.pec_embedding", exc_type=ImportError)

from swpipe import PipelinePlan
from swpipe.analysis import Effects, Location, verify
from swpipe.errors import PlanError
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.plans.torchrec.pec_plan import EARLY, LATE, OVERLAP, TASKS, pec
from swpipe.tasks.torchrec import (
    SparseDistPipeline,
    SparseDistTasks,
    TrainPipelinePEC,
    TrainStep,
)
from swpipe.tasks.torchrec.pipelines.pec_pipeline import DRAIN, FILL
from swpipe.tasks.torchrec.rewriting.pec import Sizes, pec_tasks
from tests.support.pec_models import CPU, batches, dense_optimizer, everything, sharded
from tests.support.ranks import Ranks
from tests.tasks.torchrec.models import warmed_up
from tests.tasks.torchrec.trial import Outcome, refusal, to_the_end

STEPS = 9
SGD, WARM_UP = torch.optim.SGD, "a rate that changes in every step"
TABLES, MASKS = Location("tables", persistent=True), Location("overlap", persistent=True)


def plan_of(kind: str, tasks: Any) -> PipelinePlan:
    """Return a plan for the fourteen tasks, or for the eleven."""
    return {
        "serial": lambda: PipelinePlan.serial(tasks),
        "pec": pec,
        "eleven": plans.serial,
        "split": plans.split,
    }[kind]()


def trained(kind: str, optimizer: Any = SGD, steps: int = STEPS) -> tuple[Outcome, Any]:
    """Train under a plan; return the outcome, and the sizes of its exchanges."""
    model = sharded(optimizer=SGD if optimizer == WARM_UP else optimizer)
    dense = warmed_up(model) if optimizer == WARM_UP else dense_optimizer(model)
    tasks = SparseDistTasks(model, TrainStep([dense]), device=CPU)
    with_pec = kind in ("serial", "pec")
    sizes = Sizes()
    modules = {"tables": tasks.rewrite.sharded["tables"]}
    made = pec_tasks(tasks, modules, sizes) if with_pec else tasks.tasks()
    plan = replace(plan_of(kind, made), tasks=made)
    with SparseDistPipeline(tasks, plan) as pipeline:
        outputs = to_the_end(pipeline, batches(steps))
    return Outcome(outputs, everything(model)), sizes


def _differences(optimizer: Any) -> dict[str, list[str]]:
    wanted, _ = trained("eleven", optimizer)
    found = {kind: trained(kind, optimizer)[0].differences(wanted) for kind in ("serial", "pec")}
    return {kind: where for kind, where in found.items() if where}


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.Adagrad, WARM_UP])
def test_the_plan_has_the_bits_of_the_serial_one(two_ranks: Ranks, optimizer: Any) -> None:
    """It equals a serial run of the eleven tasks, too, which exchange all rows at once.

    Each update has the rate of its look-up, though another batch's has come between.
    """
    assert two_ranks.run(_differences, optimizer) == [{}, {}]


def _sizes(shared: float) -> tuple[Any, Any]:
    sizes = trained("pec")[1]
    return sizes, trained("serial")[1]


def test_both_exchanges_are_counted(two_ranks: Ranks) -> None:
    """Under a serial plan the next batch is not known: all gradients come late."""
    for ahead, serially in two_ranks.run(_sizes, 0.3):
        assert ahead.steps == serially.steps == STEPS
        assert min(ahead.early, ahead.late) > 0
        assert ahead.late < serially.late
        assert ahead.early + ahead.late == pytest.approx(serially.early + serially.late)
        assert "late" in str(ahead)


class Tried(TrainPipelinePEC[Any, Any]):
    """A pipeline that tries each plan for the fewest batches with one step that counts."""

    trial_batches = FILL + DRAIN + 4


def _tried(ms: dict[str, float]) -> tuple[list[str], Any]:
    """Train through both trials, in which the plans take these times, and beyond."""
    steps = 2 * Tried.trial_batches + 5
    wanted, _ = trained("eleven", steps=steps)
    model = sharded()
    times = [ms["split"], ms["pec"]]
    with (
        mock.patch("swpipe.tasks.torchrec.pipelines.pec_pipeline._slowest", side_effect=times),
        Tried(model, dense_optimizer(model), CPU) as pipeline,
    ):
        outputs = to_the_end(pipeline, batches(steps))
        report = pipeline.exchange_report
    return Outcome(outputs, everything(model)).differences(wanted), report


@pytest.mark.parametrize(("pec_ms", "chosen"), [(90.0, "pec"), (99.0, "split"), (120.0, "split")])
def test_pec_is_used_where_its_steps_are_shorter(
    two_ranks: Ranks, pec_ms: float, chosen: str
) -> None:
    """Both are tried in training, which keeps its numbers; the report has times and sizes."""
    for differences, report in two_ranks.run(_tried, {"split": 100.0, "pec": pec_ms}):
        assert differences == []
        assert report.chosen == chosen
        assert report.ms == {"split": 100.0, "pec": pec_ms}
        assert report.sizes.steps >= Tried.trial_batches
        assert f"the plan is {chosen}; a step takes: split 100.000 ms" in str(report)


def _resumed(number: int) -> list[Any]:
    """Return the plans measured after a resume during a trial, and the final choice."""
    model = sharded()
    with (
        mock.patch("swpipe.tasks.torchrec.pipelines.pec_pipeline._slowest", side_effect=[100, 90]),
        Tried(model, dense_optimizer(model), CPU) as pipeline,
    ):
        state = {**pipeline.state_dict(), "next_iteration": number}
        pipeline.load_state_dict(state)
        to_the_end(pipeline, batches(Tried.trial_batches + 2))
        measured = [*pipeline.exchange_report.ms]
        to_the_end(pipeline, batches(2 * Tried.trial_batches + 5))
        return [measured, [*pipeline.exchange_report.ms], pipeline.exchange_report.chosen]


def test_a_pipeline_that_is_resumed_beyond_its_trials_tries_again(two_ranks: Ranks) -> None:
    """The links may differ; no plan is kept that was not measured."""
    found = two_ranks.run(_resumed, 1000)
    assert found == [[["split"], ["split", "pec"], "pec"]] * 2


class Always(TrainPipelinePEC[Any, Any]):
    """A pipeline that uses PEC without a trial."""

    trial_batches = 0


def _in_the_way() -> list[str]:
    model, data = sharded(), batches(6)
    with Always(model, dense_optimizer(model), CPU) as pipeline:
        pipeline.progress(data)
        said = [refusal(pipeline.detach), refusal(pipeline.state_dict)]
        with TrainPipelinePEC(model, dense_optimizer(model), CPU) as other:
            said.append(refusal(lambda: other.progress(batches(1))))
        pipeline.attach()
        pipeline.drain()
        pipeline.detach()
    with mock.patch("swpipe.tasks.torchrec.rewriting.pec.counts", return_value=True):
        said.append(refusal(lambda: Always(model, dense_optimizer(model), CPU)))
    return said


def test_updates_that_are_still_to_come_stand_in_the_way(two_ranks: Ranks) -> None:
    """They block the model, a checkpoint and another pipeline until all are drained."""
    for detached, saved, other, counted in two_ranks.run(_in_the_way):
        assert "still to come: call drain() first" in detached
        assert "the plan reads tables from before the update" in saved
        assert "still to come: call drain() of that pipeline first" in other
        assert "ValueError: the optimizer fused into tables counts look-ups" in counted


def test_a_plan_that_looks_up_early_is_verified_with_its_shifts() -> None:
    """Without them, the early look-up and the newer masks are named."""
    effects = {
        OVERLAP: Effects(frozenset({MASKS}), frozenset({MASKS})),
        EARLY: Effects(frozenset({MASKS, TABLES}), frozenset({MASKS})),
        plans.EMBED: Effects(frozenset({TABLES})),
        LATE: Effects(frozenset({TABLES}), frozenset({TABLES})),
        plans.DENSE_BACK: Effects(frozenset({MASKS})),
        plans.EMBED_BACK: Effects(frozenset({TABLES}), frozenset({TABLES})),
    }
    table = {name: effects.get(name, Effects()) for name in TASKS}
    asked = {"effects": table, "pull_ahead": True, "body": False}
    assert verify(pec(), **asked).orders > 0
    for what, place in (("stale", "tables"), ("newer", "overlap")):
        with pytest.raises(PlanError, match=f"state '{place}'.*set {what}={{'{place}': 1}}"):
            verify(replace(pec(), **{what: {}}), **asked)
