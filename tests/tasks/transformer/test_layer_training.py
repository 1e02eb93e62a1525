"""Training on microbatches: the plan, what it records, other plans, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from swpipe.analysis import verify
from swpipe.errors import PlanError
from swpipe.planning import Limits, auto_plan, simulate
from swpipe.plans.transformer import chunk_order
from swpipe.tasks.transformer import (
    GPTModel,
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
    training_pipeline,
    training_plan,
    training_tasks,
)
from swpipe.tasks.transformer.experts import MixtureOfExperts
from swpipe.tasks.transformer.layer_training import layer_kinds
from tests.plans.layer_costs import costs
from tests.support.ranks import Ranks
from tests.tasks.transformer.models import (
    GRAD,
    config,
    differing,
    microbatch,
    model,
    plan_of,
    run_plain,
)

run = TransformerModelChunkSchedulePlan.run
DELAYED: dict[str, Any] = {"delay_wgrad_compute": True, "moe_shared_expert_size": 24}
SHARING: dict[str, Any] = {"mtp_num_layers": 1, "tie_embeddings": True, **DELAYED}


@pytest.mark.parametrize("more", [{}, DELAYED, SHARING], ids=["plain", "delayed", "sharing"])
def test_the_plan_keeps_what_the_tasks_declare(more: dict[str, Any]) -> None:
    """On devices with streams and without."""
    of = model("moe", "dense", **more)
    verify(training_plan(of), training_tasks(of), pull_ahead=True)


def test_a_plan_without_its_dependences_is_refused() -> None:
    """The declared states show what is missing where nothing else keeps the order."""
    of = model("moe", **SHARING)
    plan = training_plan(of)
    with pytest.raises(PlanError, match="shared gradients"):
        verify(replace(plan, deps=(), order=plan.order[::-1]), training_tasks(of), pull_ahead=True)


def test_a_recorded_run_has_the_order_of_the_seed_on_both_streams() -> None:
    """In a period in the middle: which tasks ran, by the stream that the plan gives them."""
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
        "f0.attn", "f0.post_attn", "b1.mlp", "b1.mlp.dw", "f0.mlp",
        "b1.post_attn", "b1.attn", "b1.attn.dw",
        "f1.attn", "f1.post_attn", "b0.mlp", "b0.mlp.dw", "f1.mlp",
        "b0.post_attn", "b0.attn", "b0.attn.dw",
    ]  # fmt: skip


@pytest.mark.parametrize("more", [DELAYED, SHARING], ids=["delayed", "sharing"])
def test_a_planned_order_trains_the_same_numbers(more: dict[str, Any]) -> None:
    """``auto_plan``'s, which is at most as slow by the simulator."""
    ours, theirs = model("moe", "moe", **more), model("moe", "moe", **more)
    plan = training_plan(ours)
    kinds = layer_kinds(ours)
    model_costs = costs(chunk_order(kinds, kinds, hooks=False), 1000.0)
    choice = auto_plan(plan, model_costs, limits=Limits(in_flight=2, threads=1), effort=0.1)
    assert choice.ii_us <= simulate(plan, model_costs).ii_us
    verify(choice.plan, training_tasks(ours), pull_ahead=True)
    for of, how in ((ours, choice.plan), (theirs, plan)):
        with training_pipeline(of, plan=how) as pipeline:
            pipeline.run([microbatch(n) for n in range(4)])
    assert differing(ours, theirs) == []


def test_an_optimizer_steps_between_runs_of_the_pipeline() -> None:
    """Three steps of two microbatches: parameters equal those of a plain loop."""
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


def test_serial_and_pipelined_runs_are_the_same_tasks() -> None:
    """``run_serial`` trains the same numbers."""
    ours, theirs = model("moe", **DELAYED), model("moe", **DELAYED)
    batches = [microbatch(n) for n in range(3)]
    with training_pipeline(ours) as one, training_pipeline(theirs) as other:
        one.run(batches)
        other.run_serial(batches)
    assert differing(ours, theirs) == []


def test_after_an_error_the_pipeline_trains_on() -> None:
    """A microbatch that is wrong is refused; those after it train as if it had not been."""
    ours, plain = model("moe"), model("moe")
    with training_pipeline(ours) as pipeline:
        batch = microbatch(0)
        del batch["labels"]
        with pytest.raises(RuntimeError, match="mat1 and mat2|shape|grad|scalar"):
            pipeline.run([{**batch, "input_ids": batch["input_ids"].float()}])
        for parameter in ours.parameters():
            parameter.grad = None
        pipeline.run([microbatch(1)])
    run_plain(plain, [1])
    assert differing(ours, plain) == []


# ----------------------------------------------------------------------------------- bad input


def _run_twice() -> None:
    of = model("dense")
    plan = plan_of(of, 0)
    run(plan, None)
    run(None, plan, GRAD)
    run(None, plan, GRAD)


def _run_released() -> None:
    plan = plan_of(model("dense"), 0)
    run(plan, None)
    plan.release_state()
    run(None, plan, GRAD)


def _forward_twice() -> None:
    plan = plan_of(model("dense"), 0)
    run(plan, None)
    run(plan, None)


def _never_forward() -> None:
    run(None, plan_of(model("dense"), 0), GRAD)


def _without_grad() -> None:
    plan = plan_of(model("dense"), 0)
    run(plan, None)
    run(None, plan)


def _layer_without_input() -> None:
    layer = plan_of(model("dense"), 0).get_layer(0)
    TransformerLayerSchedulePlan.run(layer, None)


def _mtp_in_any_state() -> None:
    of = model("dense", mtp_num_layers=1)
    TransformerLayerSchedulePlan(of.predictors[0], None, SimpleNamespace(), None, None)


def _chunk() -> GPTModel:
    return GPTModel(config("dense"), pre_process=False)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (_without_grad, ValueError, "b_grad is not: give the gradient"),
        (_run_twice, RuntimeError, "was run backward already, or released"),
        (_run_released, RuntimeError, "was run backward already, or released"),
        (_forward_twice, RuntimeError, "was run forward already: build a plan for each microbatch"),
        (_never_forward, RuntimeError, "run backward, and it was not run forward yet"),
        (lambda: plan_of(model("dense"), 0).get_layer(1), IndexError, "layer 1 was asked for"),
        (lambda: plan_of(model("dense"), 0).get_layer(-1), IndexError, "layer -1 was asked for"),
        (_layer_without_input, ValueError, "f_layer is given and f_input is not"),
        (
            lambda: TransformerLayerSchedulePlan(nn.Linear(1, 1), None, None, None, None),  # type: ignore[arg-type]
            TypeError,
            "of an unknown type: give a TransformerLayer or a Multi",
        ),
        (_mtp_in_any_state, TypeError, "needs a ModelChunkState"),
        (lambda: config("sparse"), ValueError, "layer type 'sparse' is unknown: .* dense, moe"),
        (lambda: config("moe", mtp_layer_type="x"), ValueError, "layer type 'x' is unknown"),
        (lambda: config("moe", num_experts=1), ValueError, "moe_router_topk is 2: there are 1"),
        (
            lambda: GPTModel(config("dense", tie_embeddings=True), pre_process=False),
            ValueError,
            "use the embedding where the output layer is",
        ),
        (lambda: plan_of(model("dense"), 0, input_ids=None), ValueError, "input_ids is None"),
        (
            lambda: _chunk().build_schedule_plan(microbatch(0)["input_ids"]),
            ValueError,
            "decoder_input is None: this chunk has no embedding",
        ),
        (
            lambda: plan_of(model("dense"), 0, extra_block_kwargs={"rotary": 1}),
            ValueError,
            "extra_block_kwargs has rotary, which layers do not take",
        ),
        (
            lambda: plan_of(
                model("dense"), 0, packed_seq_params=SimpleNamespace(cu_seqlens_q=[1, 8])
            ),
            ValueError,
            "cu_seqlens_q is .1, 8.: give where sequences end",
        ),
        (
            lambda: training_pipeline(model("dense", mtp_num_layers=1)).run(
                [{"input_ids": microbatch(0)["input_ids"]}]
            ),
            ValueError,
            "give labels with each microbatch",
        ),
    ],
)
def test_wrong_input_is_refused_in_words(wrong: Any, kind: type[Exception], message: str) -> None:
    """With what is wrong, the rule, and what to do."""
    with pytest.raises(kind, match=message):
        wrong()


def _three_experts() -> None:
    MixtureOfExperts(config("moe", num_experts=3), dist.group.WORLD)


def test_ranks_that_do_not_divide_the_experts_are_refused(two_ranks: Ranks) -> None:
    """On all ranks."""
    with pytest.raises(ValueError, match="num_experts is 3 and the expert group has 2 ranks"):
        two_ranks.run(_three_experts)


def _other_layers() -> None:
    types = ("moe", "dense") if dist.get_rank() else ("moe", "moe")
    # What one rank has run before tells it nothing about the others.
    alone = model(*types)
    run(plan_of(alone, 0), None)
    of = model("moe", *types[1:], group=dist.group.WORLD)
    run(plan_of(of, 0), None)


def _other_plans() -> None:
    types = ("moe", "dense") if dist.get_rank() else ("moe", "moe")
    training_pipeline(model(*types, group=dist.group.WORLD))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(_other_layers, "run layers of different kinds"), (_other_plans, "task .f1.mo.*rank 1")],
)
def test_ranks_of_one_group_that_run_other_layers_are_refused(
    two_ranks: Ranks, wrong: Any, message: str
) -> None:
    """Before the first exchange, which would have no end, whatever was run before."""
    with pytest.raises(RuntimeError, match=message):
        two_ranks.run(wrong)


def _alone_in_its_group() -> list[str]:
    groups = [dist.new_group([rank]) for rank in range(2)]
    types = ("moe", "dense") if dist.get_rank() else ("moe",)
    ours, plain = (model(*types, group=groups[dist.get_rank()]) for _ in range(2))
    with training_pipeline(ours) as pipeline:
        pipeline.run([microbatch(0)])
    run_plain(plain, [0])
    return differing(ours, plain)


def test_ranks_of_other_groups_may_run_other_layers(two_ranks: Ranks) -> None:
    """As the ranks of a pipeline do: plans are compared within the expert group alone."""
    assert two_ranks.run(_alone_in_its_group) == [[], []]
