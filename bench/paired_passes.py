"""A V schedule whose pairs overlap, and the same one in sequence: PP 2 x EP 2 on four ranks.

Ranks 0, 1 and 2, 3 share the experts of a stage; the pipelines are ranks 0, 2 and 1, 3. The link is
emulated: an exchange of the experts takes 5 ms and no core. The checker predicts both from costs
that are measured before, those of pairs included.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from bench.emulated_link import EmulatedLink
from bench.measure import Row, Spread, compared, interleaved, off_by, sharpen_timers
from swpipe.plans.pipeline_parallel import check_schedule, torch_schedule

MICROBATCHES, LATENCY_MS, BAR = 16, 5.0, 0.85
LAYERS_OF_A_STAGE, ROWS, TOKENS = 4, 2, 8


@dataclass
class Measured:
    """The measurements of one rank, in milliseconds per step.

    Attributes:
        paired_ms: Pairs overlap, a figure per round.
        sequence_ms: F and B of each pair one after the other.
        predicted_ms: The predicted times of both.
        same: Whether gradients were equal, bit for bit.
    """

    paired_ms: list[float]
    sequence_ms: list[float]
    predicted_ms: list[float]
    same: bool


def on_rank(rounds: int) -> Measured:
    """Run both schedules alternately."""
    from docs.examples.moe_gpt import GPTModel, TransformerConfig, mean_loss
    from swpipe.tasks.pipeline_parallel import PipelineRuntime, measure_costs

    sharpen_timers()
    rank = dist.get_rank()
    pipeline = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    experts = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    layers = 4 * LAYERS_OF_A_STAGE
    config = TransformerConfig(
        num_layers=layers, hidden_size=16, num_attention_heads=2, vocab_size=32,
        max_sequence_length=TOKENS, layer_types=("moe",) * layers, num_experts=4,
        moe_router_topk=2, moe_ffn_hidden_size=16,
    )  # fmt: skip
    schedule = torch_schedule("dualpipev", 2, MICROBATCHES)
    own = [stage for stage, place in enumerate(schedule.placement) if place == rank // 2]

    def chunks() -> dict[int, torch.nn.Module]:
        each = LAYERS_OF_A_STAGE
        return {
            s: GPTModel(
                config, range(s * each, (s + 1) * each), pre_process=s == 0, post_process=s == 3,
                expert_group=experts,
            )
            for s in own
        }  # fmt: skip

    generator = torch.Generator().manual_seed(rank % 2)
    text = torch.randint(32, (ROWS * MICROBATCHES, TOKENS + 1), generator=generator)
    inputs, target = text[:, :-1], text[:, 1:]

    def example(stage: int) -> Tensor:
        return torch.randn(ROWS, TOKENS, config.hidden_size) if stage else inputs[:ROWS]

    schedules = schedule, schedule.in_sequence
    modules = [chunks() for _ in schedules]
    runtimes = [
        PipelineRuntime(one, own_chunks, mean_loss, group=pipeline)
        for one, own_chunks in zip(schedules, modules, strict=True)
    ]

    def ms(which: int) -> float:
        dist.barrier()
        begin_s = time.perf_counter()
        runtimes[which].train(inputs, target=target)
        dist.barrier()
        return (time.perf_counter() - begin_s) * 1e3

    with EmulatedLink() as link:
        link.latency_ms = LATENCY_MS
        costs = measure_costs(
            modules[0], 4, example, mean_loss, target[:ROWS], group=pipeline, rounds=rounds
        )
        for which in (0, 1):
            ms(which)
        paired, sequence = interleaved(rounds, lambda: ms(0), lambda: ms(1))
    predicted = [
        check_schedule(one, replace(costs, max_mem=math.inf)).makespan for one in schedules
    ]
    grads = [[p.grad for stage in own for p in held[stage].parameters()] for held in modules]
    same = all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(*grads, strict=True)
    )
    return Measured(paired, sequence, predicted, same)


def rows(rounds: int = 7) -> list[Row]:
    """Return the ratio with its bar, and predicted over measured."""
    from tests.support.ranks import Ranks

    try:
        import swpipe.tasks.pipeline_parallel.torch_pipelining  # noqa: F401
    except ImportError as error:  # another torch
        return [Row("pairs of passes", f"skipped: {error}")]
    with Ranks(4, deadline_s=300.0) as ranks:
        found: list[Measured] = ranks.run(on_rank, rounds)
    if not all(one.same for one in found):
        raise ValueError("the schedule with pairs found other gradients than the one without")
    first = found[0]
    what = f"DualPipe-V of {MICROBATCHES} microbatches, PP 2 x EP 2, L = {LATENCY_MS:g} ms"
    ratio = compared(
        f"{what}: pairs", first.paired_ms, first.sequence_ms, "ms", "in sequence", BAR, digits=1
    )
    predictions = [
        Row(
            f"{what}: predicted, {name}",
            f"{predicted:.1f} ms",
            f"measured {Spread.of(times).text(1)} ms",
            off_by([predicted] * len(times), times),
        )
        for name, predicted, times in zip(
            ("pairs", "in sequence"),
            first.predicted_ms,
            (first.paired_ms, first.sequence_ms),
            strict=True,
        )
    ]
    return [ratio, *predictions]
