"""Small models and microbatches for the tests of schedules, and how to run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docs.examples.moe_gpt import GPTModel, TransformerConfig
from swpipe.tasks.transformer import TransformerModelChunkSchedulePlan

VOCABULARY, LENGTH, ROWS = 32, 8, 2
TOKENS = ROWS * LENGTH

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "max_sequence_length": LENGTH,
    "num_experts": 4,
    "moe_router_topk": 2,
}


def config(*types: str, **more: Any) -> TransformerConfig:
    """Return a small config with layers of these types."""
    return TransformerConfig(num_layers=len(types), layer_types=types, **{**SIZES, **more})


def model(*types: str, group: dist.ProcessGroup | None = None, **more: Any) -> GPTModel:
    """Return a whole model of these layers."""
    return GPTModel(config(*types, **more), expert_group=group)


def microbatch(number: int) -> dict[str, Tensor]:
    """Return ids, labels and a loss mask, which differ between ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * rank + number)
    drawn = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.8).float()
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:], "loss_mask": mask}


def plan_of(of: GPTModel, number: int, **more: Any) -> TransformerModelChunkSchedulePlan:
    """Return the schedule plan of a microbatch."""
    return of.build_schedule_plan(**{**microbatch(number), **more})


GRAD = torch.full((ROWS, LENGTH), 1 / TOKENS)
"""The gradient of the mean loss of a microbatch."""


def run_pairs(of: GPTModel, numbers: Sequence[int]) -> list[Tensor]:
    """Run each forward over the previous microbatch's backward; return the outputs."""
    outputs, before = [], None
    for plan in [*(plan_of(of, number) for number in numbers), None]:
        output = TransformerModelChunkSchedulePlan.run(plan, before, before and GRAD)
        outputs.append(output)
        before = plan
    return outputs[:-1]


def run_alone(of: GPTModel, numbers: Sequence[int]) -> list[Tensor]:
    """Run each microbatch's forward, and then its backward."""
    outputs = []
    for number in numbers:
        plan = plan_of(of, number)
        outputs.append(TransformerModelChunkSchedulePlan.run(plan, None))
        TransformerModelChunkSchedulePlan.run(None, plan, GRAD)
    return outputs


def run_plain(of: GPTModel, numbers: Sequence[int]) -> list[Tensor]:
    """Run each microbatch by plain autograd."""
    outputs = []
    for number in numbers:
        batch = microbatch(number)
        outputs.append(of(batch.pop("input_ids"), **batch))
        outputs[-1].backward(GRAD)
    return [output.detach() for output in outputs]


def gradients(of: GPTModel) -> dict[str, Tensor | None]:
    """Return the gradients by the name of the parameter."""
    return {name: parameter.grad for name, parameter in of.named_parameters()}


def differing(ours: GPTModel, theirs: GPTModel) -> list[str]:
    """Return the names of parameters whose gradients are not equal bit for bit."""
    pairs = gradients(theirs)
    return [
        name
        for name, grad in gradients(ours).items()
        if not (grad is pairs[name] is None or same(grad, pairs[name]))
    ]


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether both are tensors with the same bits."""
    return one is not None and other is not None and torch.equal(one, other)
