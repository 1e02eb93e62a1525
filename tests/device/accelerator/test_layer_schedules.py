"""Layer schedules on streams: the same bits as on one stream, however late the streams are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from docs.examples.moe_gpt import GPTModel, TransformerConfig
from swpipe.tasks.transformer import (
    TransformerModelChunkSchedulePlan,
    get_comm_stream,
    set_streams,
    training_pipeline,
)
from tests import backend
from tests.device.accelerator.work import DEVICE, SIMULATED, spin

run = TransformerModelChunkSchedulePlan.run
NUMBERS = range(3)


def model() -> GPTModel:
    """Return a model of two layers of experts, and one for multi-token prediction."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        max_sequence_length=8,
        layer_types=("moe", "moe"),
        num_experts=4,
        moe_router_topk=2,
        moe_shared_expert_size=24,
        mtp_num_layers=1,
        delay_wgrad_compute=True,
    )
    return GPTModel(config, device=DEVICE)


def microbatch(number: int) -> dict[str, Tensor]:
    """Return two sequences of eight tokens, which the caller's stream makes."""
    drawn = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(number)).to(DEVICE)
    spin(1.0)
    drawn = drawn + 0
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:]}


def trained_by_pairs(of: GPTModel) -> list[Tensor]:
    """Train by ``run``; return outputs and gradients on the host."""
    grad = torch.full((2, 8), 1 / 16, device=DEVICE)
    outputs, before = [], None
    for plan in [*(of.build_schedule_plan(**microbatch(n)) for n in NUMBERS), None]:
        outputs.append(run(plan, before, None if before is None else grad))
        before = plan
    return on_host(of, outputs[:-1])


def trained_by_plan(of: GPTModel, serially: bool = False) -> list[Tensor]:
    """Train by a pipeline; return losses and gradients on the host."""
    with training_pipeline(of) as pipe:
        batches = map(microbatch, NUMBERS)
        if serially:
            losses = [pipe.run_one_serial_iter(batch).loss for batch in batches]
        else:
            losses = [ctx.loss for ctx in pipe.iterate(batches)]
        return on_host(of, losses)


def trained_by_nodes(of: GPTModel) -> list[Tensor]:
    """Train by calling each node, which runs on its own stream."""
    outputs = []
    for number in NUMBERS:
        plan = of.build_schedule_plan(**microbatch(number))
        grad = torch.full((2, 8), 1 / 16, device=DEVICE)
        plan.record_current_stream()  # nodes wait for what the caller's stream has made by now
        value: Any = plan.pre_process.forward()
        for layer in plan.layers:
            for node in layer.nodes:
                value = node.forward(value)
        outputs.append(plan.post_process.forward(value).detach())
        value = plan.post_process.backward(grad)
        for layer in reversed(plan.layers):
            for node in reversed(layer.nodes):
                value = node.backward(value)
                node.backward_dw()
        plan.pre_process.backward(value)
        plan.wait_current_stream()
    return on_host(of, outputs)


def on_host(of: GPTModel, outputs: list[Any]) -> list[Tensor]:
    """Return outputs and gradients on the host."""
    gradients = [p.grad for p in of.parameters() if p.grad is not None]
    assert len(gradients) == len(list(of.parameters()))
    found = [tensor.detach().cpu() for tensor in (*outputs, *gradients)]
    torch.accelerator.synchronize()
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether all bits are equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def misbehaving() -> AbstractContextManager[object]:
    """Make streams late, and overwrite freed memory at once, where possible."""
    return backend.misbehaving(late_streams=200.0, poison=True) if SIMULATED else nullcontext()


def test_streams_change_nothing(deterministic: None) -> None:
    """Pairs and nodes run on a separate stream; the training plan runs on the caller's."""
    expected = trained_by_plan(model(), serially=True)
    outputs, gradients = expected[: len(NUMBERS)], expected[len(NUMBERS) :]
    set_streams(torch.Stream(device=DEVICE))
    try:
        assert get_comm_stream() is not None
        with misbehaving():
            by_pairs = trained_by_pairs(model())
            by_nodes = trained_by_nodes(model())
    finally:
        set_streams()
    with misbehaving():
        by_plan = trained_by_plan(model())
    assert equal(by_plan, expected)
    for found in (by_pairs, by_nodes):
        losses = [one.to(DEVICE).mean().cpu() for one in found[: len(NUMBERS)]]
        assert equal(losses, outputs)
        assert equal(found[len(NUMBERS) :], gradients)
