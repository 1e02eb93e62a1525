"""Layers of experts on two ranks: forward over backward, compared with a serial run.

The link is emulated: an exchange takes 5 ms and no core. The microbatches are so large that a
serial run spends half of its time in exchanges. Both run the same tasks and train the same bits.
The experts are in all layers, or in every other one.

The bound is that of the schedule. In each period one forward and one backward run, neither faster
than its own chain of work and exchanges, and both on one thread. Before them a forward runs alone,
after them a backward.
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
"""The bars by the types of layers."""

EXCHANGES = {"f": 3, "b": 2}
"""The exchanges of a layer: counts, dispatch, combine of tokens; combine, dispatch of gradients."""


@dataclass
class Measured:
    """The measurements of one rank, in milliseconds per step of all microbatches.

    Attributes:
        rows: Sequences in a microbatch.
        layers: The number of layers with experts.
        serial_ms: The serial time, a figure per round.
        overlapped_ms: The time under the plan.
        work_ms: The work of one microbatch without latency: forward, backward, and the part of it
            that nothing but the optimizer waits for.
        same: Whether both trained the same bits.
    """

    rows: int
    layers: int
    serial_ms: list[float]
    overlapped_ms: list[float]
    work_ms: dict[str, float]
    same: bool

    @property
    def serial_bound_ms(self) -> float:
        """The sum of work and exchanges."""
        each = self.work_ms["f"] + self.work_ms["b"] + sum(map(self.exchange_ms, "fb"))
        return MICROBATCHES * each

    @property
    def bound_ms(self) -> float:
        """The lower bound on a step under the schedule."""
        ahead, back, late = (self.work_ms[part] for part in ("f", "b", "dw"))
        chains = ahead + self.exchange_ms("f"), back - late + self.exchange_ms("b")
        period = max(ahead + back, *chains)
        return chains[0] + (MICROBATCHES - 1) * period + max(back, chains[1])

    def exchange_ms(self, side: str) -> float:
        return self.layers * EXCHANGES[side] * LATENCY_MS


def on_rank(types: tuple[str, ...], rounds: int, size: int, rows: int | None) -> Measured:
    """Train on microbatches both ways, in alternation."""
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
        layers = types.count("moe")
        trial, exchanged = 8, MICROBATCHES * layers * sum(EXCHANGES.values()) * LATENCY_MS
        for _ in range(4 if rows is None else 0):
            data = batches(trial)
            rest_ms = torch.tensor(ms(pipes[0], True) - exchanged)
            dist.all_reduce(rest_ms)
            trial = max(1, round(trial * exchanged * dist.get_world_size() / rest_ms.item()))
        link.latency_ms = 0.0
        data = batches(rows or trial)
        work = [_work(pipe, data) for pipe in (*pipes, *pipes)]
        for model in models:
            model.zero_grad()
        link.latency_ms = LATENCY_MS
        serial_ms, overlapped_ms = interleaved(
            rounds, lambda: ms(pipes[0], True), lambda: ms(pipes[1], False)
        )
    for pipe in pipes:
        pipe.close()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    same = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    mean = {part: sum(each[part] for each in work) / len(work) for part in ("f", "b", "dw")}
    return Measured(len(data[0]["labels"]), layers, serial_ms, overlapped_ms, mean, same)


def _work(pipe: Any, data: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the ms of a microbatch's tasks by direction, and those of delayed weight gradients."""
    dist.barrier()
    with pipe.trace() as trace:
        pipe.run(data)
    sums = dict.fromkeys(("f", "b", "dw"), 0.0)
    for span in trace.spans:
        took_ms = (span.end_ns - span.start_ns) / 1e6 / len(data)
        if span.task[:1] in sums:
            sums[span.task[:1]] += took_ms
            sums["dw"] += took_ms if span.task.endswith(".dw") else 0.0
    return sums


def rows(rounds: int = 7, size: int = 128, rows_of_a_microbatch: int | None = None) -> list[Row]:
    """Return the ratio with its bar, and the bound."""
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
    exchanged = MICROBATCHES * sum(map(found.exchange_ms, "fb"))
    both = found.overlapped_ms, found.serial_ms
    kinds = " ".join(dict.fromkeys(types))
    what = f"layer overlap, {len(types)} layers ({kinds}), L = {LATENCY_MS:g} ms"
    return [
        Row(
            f"{what}: of the serial time, exchanges",
            f"{exchanged / serial:.0%}",
            f"{found.rows} sequences a microbatch",
        ),
        compared(f"{what}: over serial", *both, "ms", "serial", bar, digits=1),
        Row(
            f"{what}: the schedule's bound, over serial",
            f"{found.bound_ms / found.serial_bound_ms:.3f}",
            f"{found.bound_ms:.1f} of {found.serial_bound_ms:.1f} ms",
        ),
    ]
