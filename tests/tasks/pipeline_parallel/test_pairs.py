"""A rank overlaps one chunk's forward with another microbatch's backward, with equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from docs.examples.moe_gpt import GPTModel, TransformerConfig, mean_loss
from swpipe.plans.pipeline_parallel import (
    Pair,
    PipelineCosts,
    PipelineSchedule,
    plan_v_schedule,
    torch_schedule,
)
from swpipe.tasks.pipeline_parallel import PipelineRuntime
from swpipe.tasks.transformer import TransformerModelChunkSchedulePlan
from tests.support.ranks import Ranks
from tests.tasks.pipeline_parallel.by_hand import PlainLoop
from tests.tasks.pipeline_parallel.small_gpt import batch, on_rank

DEADLINE_S = 240.0
CONFIG = TransformerConfig(
    num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=11, max_sequence_length=6,
    layer_types=("moe", "dense", "moe", "moe"), num_experts=4, moe_router_topk=2,
)  # fmt: skip
PAIRED = PipelineCosts(20, 20, 10, hop=0.5, pair=35, max_mem=100)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the sides of each run of chunk plans."""
    sides: list[str] = []
    real = TransformerModelChunkSchedulePlan.run

    def run(f: Any, b: Any, *rest: Any, **more: Any) -> Any:
        sides.append(("f" if f is not None else "") + ("b" if b is not None else ""))
        return real(f, b, *rest, **more)

    TransformerModelChunkSchedulePlan.run = staticmethod(run)  # type: ignore[assignment, method-assign]
    try:
        yield sides
    finally:
        TransformerModelChunkSchedulePlan.run = staticmethod(real)  # type: ignore[method-assign]


def different(schedule: PipelineSchedule, experts_of: int) -> tuple[list[str], int]:
    """Return the differences from a model without a pipeline, and the number of pairs that ran.

    Ranks r and r + 1 of ``experts_of`` = 2 share the experts of a stage, and are in two pipelines.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    pipelines = [list(range(k, size, experts_of)) for k in range(experts_of)]
    pipeline = [dist.new_group(ranks) for ranks in pipelines][rank % experts_of]
    sharing = [list(range(k, k + experts_of)) for k in range(0, size, experts_of)]
    experts = [dist.new_group(ranks) for ranks in sharing][rank // experts_of]
    own = {
        stage: GPTModel(
            CONFIG, [stage], pre_process=stage == 0, post_process=stage == 3, expert_group=experts
        )
        for stage, place in enumerate(schedule.placement)
        if place == rank // experts_of
    }
    runtime = PipelineRuntime(schedule, dict(own), mean_loss, group=pipeline)
    model = GPTModel(CONFIG, expert_group=experts)
    loop = PlainLoop([model], schedule.n_micro, mean_loss)
    found, pairs = [], 0
    for step in range(2):
        inputs, target = batch(2 * schedule.n_micro, 10 * step + rank % experts_of)
        with counted() as sides:
            result = runtime.train(inputs, target=target, with_output=True)
        pairs = sides.count("fb")
        wanted = loop.train(inputs, target=target)
        if result.losses is not None:
            output = torch.cat(wanted.outputs)
            found += [] if torch.equal(result.losses, wanted.losses) else [f"{step}: losses"]
            found += [] if torch.equal(result.output, output) else [f"{step}: output"]
        of_all = dict(model.named_parameters())
        for chunk in own.values():
            for name, one in chunk.named_parameters():
                other = of_all[name].grad
                assert other is not None
                assert one.grad is not None
                found += [] if torch.equal(one.grad, other) else [f"{step}: {name}"]
        again = runtime.evaluate(inputs, target=target, with_output=True)
        if again.losses is not None:
            alone = loop.evaluate(inputs, target=target)
            found += [] if torch.equal(again.losses, alone.losses) else [f"{step}: evaluation"]
    return found, pairs


def pairs_on(schedule: PipelineSchedule, rank: int) -> int:
    """Return the number of pairs on a rank."""
    return sum(isinstance(entry, Pair) for entry in schedule.rows[rank])


def test_pairs_have_the_bits_of_one_process(two_ranks: Ranks) -> None:
    """Losses, output and gradients are equal; each pair was one run of two plans.

    Some microbatches' backward passes are I and W.
    """
    schedule = plan_v_schedule(2, 6, PAIRED, effort=0.02).schedule
    assert all(pairs_on(schedule, rank) for rank in range(2))
    found = two_ranks.run(different, schedule, 1, deadline_s=DEADLINE_S)
    assert found == [([], pairs_on(schedule, rank)) for rank in range(2)]


def test_pipelines_that_share_experts_run_pairs(four_ranks: Ranks) -> None:
    """Their exchanges match within pairs, too, and in torch's order."""
    schedule = torch_schedule("dualpipev", 2, 6)
    assert all(pairs_on(schedule, rank) for rank in range(2))
    found = four_ranks.run(different, schedule, 2, deadline_s=DEADLINE_S)
    assert found == [([], pairs_on(schedule, rank // 2)) for rank in range(4)]


def with_hooks() -> tuple[int, int]:
    """Return how often a hook of a layer was called, and how many pairs ran, on this rank."""
    schedule, rank = torch_schedule("dualpipev", 2, 6), dist.get_rank()
    own = dict(on_rank(schedule, rank))
    calls: list[int] = []
    for chunk in own.values():
        for layer in chunk.layers.values():
            layer.register_forward_hook(lambda *given: calls.append(1))
    inputs, target = batch(12)
    with counted() as sides:
        PipelineRuntime(schedule, dict(own), mean_loss).train(inputs, target=target)
    return len(calls), sides.count("fb")


def test_hooks_of_modules_are_called(two_ranks: Ranks) -> None:
    """Plans of layers do not call them: such chunks run their pairs serially."""
    found = two_ranks.run(with_hooks, deadline_s=DEADLINE_S)
    assert found == [(2 * 2 * 6, 0)] * 2  # of two stages, two layers each
