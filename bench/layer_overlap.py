"""Layers of experts on two ranks, all or every other one: forward over backward, beside serially.

The link is emulated: an exchange takes 5 ms and no core. The microbatches are made so large that a
serial run spends half of its time in exchanges. Both run the same tasks, and train the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.emulated_link import EmulatedLink
from bench.measure import Row, Spread, compared, interleaved, sharpen_timers

MICROBATCHES, LATENCY_MS = 8, 5.0
BARS = {("moe",) * 4: 0.75, ("dense", "moe") * 2: 0.85}
"""By the types of layers."""

EXCHANGES = 5
"""Of a layer: counts, dispatch and combine of tokens; combine and dispatch of gradients."""


@dataclass
class Measured:
    """What was measured on one rank, in milliseconds per step of all microbatches.

    Attributes:
        rows: Sequences in a microbatch.
        serial_ms: One task after the other, a figure per round.
        overlapped_ms: By the plan.
        same: Both trained the same bits.
    """

    rows: int
    serial_ms: list[float]
    overlapped_ms: list[float]
    same: bool


def exchanges_ms(types: tuple[str, ...]) -> float:
    """Of all microbatches, in sequence."""
    return MICROBATCHES * types.count("moe") * EXCHANGES * LATENCY_MS


def on_rank(types: tuple[str, ...], rounds: int, size: int, rows: int | None) -> Measured:
    """Train on microbatches in both ways, in turn."""
    from docs.examples.moe_gpt import GPTModel, TransformerConfig
    from swpipe.tasks.transformer import training_pipeline

    sharpen_timers()
    config = TransformerConfig(
        num_layers=len(types),
        hidden_size=size,
        num_attention_heads=4,
        vocab_size=64,
        max_sequence_length=32,
        layer_types=types,
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=2 * size,
        moe_shared_expert_size=2 * size,
        delay_wgrad_compute=True,
    )
    models = [GPTModel(config, expert_group=dist.group.WORLD) for _ in range(2)]
    pipes = [training_pipeline(model, check_effects=False) for model in models]

    def batches(rows: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        drawn = [torch.randint(64, (rows, 33), generator=generator) for _ in range(MICROBATCHES)]
        return [{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in drawn]

    def ms(pipe: Any, serially: bool) -> float:
        dist.barrier()
        begin_s = time.perf_counter()
        (pipe.run_serial if serially else pipe.run)(data)
        return (time.perf_counter() - begin_s) * 1e3

    with EmulatedLink() as link:
        link.latency_ms = LATENCY_MS
        trial, exchanged = 8, exchanges_ms(types)
        for _ in range(4 if rows is None else 0):
            data = batches(trial)
            rest_ms = torch.tensor(ms(pipes[0], True) - exchanged)
            dist.all_reduce(rest_ms)
            trial = max(1, round(trial * exchanged * dist.get_world_size() / rest_ms.item()))
        data = batches(rows or trial)
        for pipe in pipes:
            pipe.run(data)  # the first time is longer
        for model in models:
            model.zero_grad()
        found = interleaved(rounds, lambda: ms(pipes[0], True), lambda: ms(pipes[1], False))
    for pipe in pipes:
        pipe.close()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    same = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    return Measured(len(data[0]["labels"]), *found, same)


def rows(rounds: int = 7, size: int = 128, rows_of_a_microbatch: int | None = None) -> list[Row]:
    """The ratio with its bar."""
    return [
        row
        for types, bar in BARS.items()
        for row in _rows(types, bar, rounds, size, rows_of_a_microbatch)
    ]


def _rows(types: tuple[str, ...], bar: float, *given: int | None) -> list[Row]:
    from bench.contest import on_ranks

    found: Measured = on_ranks(on_rank, types, *given)[0]
    if not found.same:
        raise ValueError("the overlapped run trained other numbers than the serial one")
    serial = Spread.of(found.serial_ms).median
    both = found.overlapped_ms, found.serial_ms
    kinds = " ".join(dict.fromkeys(types))
    what = f"layer overlap, {len(types)} layers ({kinds}), L = {LATENCY_MS:g} ms"
    return [
        Row(
            f"{what}: of the serial time, exchanges",
            f"{exchanges_ms(types) / serial:.0%}",
            f"{found.rows} sequences a microbatch",
        ),
        compared(f"{what}: over serial", *both, "ms", "serial", bar, digits=1),
    ]
