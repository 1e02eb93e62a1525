"""Training on microbatches: the plan, what it records, other plans, and what follows an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe.analysis import verify
from swpipe.core.costs import CostModel, TaskCost
from swpipe.errors import PlanError
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.plans.transformer import chunk_order
from swpipe.tasks.transformer import training_pipeline, training_plan, training_tasks
from swpipe.tasks.transformer.layer_training import layer_kinds
from tests.tasks.transformer.models import GRAD, differing, microbatch, model, run_plain

DELAYED: dict[str, Any] = {"delay_wgrad_compute": True, "moe_shared_expert_size": 24}
SHARING: dict[str, Any] = {"mtp_num_layers": 1, "tie_embeddings": True, **DELAYED}


def test_the_plan_keeps_what_the_tasks_declare() -> None:
    """This holds for any sharing between layers; without its dependences it is refused."""
    for more in ({}, DELAYED, SHARING):
        of = model("moe", "dense", **more)
        verify(training_plan(of), training_tasks(of), pull_ahead=True)
    plan = training_plan(of)
    with pytest.raises(PlanError, match="shared gradients"):
        verify(replace(plan, deps=(), order=plan.order[::-1]), training_tasks(of), pull_ahead=True)


def test_a_recorded_run_has_the_order_of_the_seed_on_both_streams() -> None:
    """In a middle period, tasks ran on the plan's streams in this order."""
    of = model("moe", "moe", **DELAYED)
    plan = training_plan(of)
    with training_pipeline(of) as pipeline, pipeline.trace() as trace:
        for _ in pipeline.iterate(map(microbatch, range(3))):
            pass
    ran = sorted(trace.spans, key=lambda span: span.start_ns)
    mine = [s for s in ran if s.iteration == {"f": 2, "b": 1}.get(s.task[:1])]
    order: dict[Any, list[str]] = {"comm": [], None: []}
    for span in mine:
        if "." in span.task and span.task[1].isdigit() and not span.task.endswith("wait"):
            order[plan.schedule[span.task].stream].append(span.task.removesuffix(".start"))
    assert order["comm"] == [
        "b1.moe_combine", "f0.moe_dispatch", "b1.moe_dispatch", "f0.moe_combine",
        "b0.moe_combine", "f1.moe_dispatch", "b0.moe_dispatch", "f1.moe_combine",
    ]  # fmt: skip
    assert order[None] == [
        "f0.attn.route", "b1.mlp", "b1.mlp.dw", "f0.mlp", "b1.attn", "b1.attn.dw",
        "f1.attn.route", "b0.mlp", "b0.mlp.dw", "f1.mlp", "b0.attn", "b0.attn.dw",
    ]  # fmt: skip


@pytest.mark.parametrize("more", [DELAYED, SHARING], ids=["delayed", "sharing"])
def test_a_planned_order_trains_the_same_numbers(more: dict[str, Any]) -> None:
    """``auto_plan``'s is at most as slow; both are faster than one task after another."""
    ours, theirs = model("moe", "moe", **more), model("moe", "moe", **more)
    plan, kinds = training_plan(ours), layer_kinds(ours)
    costs = {}
    for step in chunk_order(kinds, kinds, hooks=False):
        device_us = 100.0 if step.layer is None or step.part == "wait" else 1000.0
        costs[step.name] = TaskCost(host_us=20.0, device_us=device_us)
    model_costs = CostModel(costs)
    choice = auto_plan(plan, model_costs, limits=Limits(in_flight=2, groups=1), effort=0.1)
    assert simulate(choice.plan, model_costs).ii_us == pytest.approx(choice.ii_us)
    by_hand = simulate(plan, model_costs).ii_us
    assert choice.ii_us <= by_hand < sum(cost.total_us for cost in costs.values())
    verify(choice.plan, training_tasks(ours), pull_ahead=True)
    for of, how in ((ours, choice.plan), (theirs, plan)):
        with training_pipeline(of, plan=how) as pipeline:
            pipeline.run([microbatch(n) for n in range(4)])
    assert differing(ours, theirs) == []


def test_an_optimizer_steps_between_runs_of_the_pipeline() -> None:
    """After three steps of two microbatches, parameters equal those of a plain loop."""
    ours, plain = model("moe", **DELAYED), model("moe", **DELAYED)
    optimizers = [torch.optim.Adam(of.parameters()) for of in (ours, plain)]

    def scaled(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output * GRAD).sum()

    with training_pipeline(ours, scaled) as pipeline:
        for step in range(3):
            numbers = [2 * step, 2 * step + 1]
            pipeline.run([microbatch(n) for n in numbers])
            run_plain(plain, numbers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_after_an_error_the_pipeline_trains_on() -> None:
    """A microbatch that is wrong is refused; those after it train as a serial run does."""
    ours, theirs = model("moe", **DELAYED), model("moe", **DELAYED)
    batches = [microbatch(n) for n in (1, 2)]
    with training_pipeline(ours) as pipeline, training_pipeline(theirs) as other:
        batch = microbatch(0)
        del batch["labels"]
        with pytest.raises(RuntimeError, match="mat1 and mat2|shape|grad|scalar"):
            pipeline.run([{**batch, "input_ids": batch["input_ids"].float()}])
        for parameter in ours.parameters():
            parameter.grad = None
        pipeline.run(batches)
        other.run_serial(batches)
    assert differing(ours, theirs) == []
