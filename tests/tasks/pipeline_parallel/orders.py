"""Schedules, and a small model cut into their stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from swpipe.plans import Action, PipelineSchedule
from swpipe.tasks.transformer import GPTModel, TransformerConfig

CONFIG = TransformerConfig(
    num_layers=8, hidden_size=16, num_attention_heads=2, vocab_size=11, max_sequence_length=6
)


def torch_order(name: str, n: int, m: int) -> PipelineSchedule:
    per = 1 if name == "1f1b" else 2
    cls: Any = {"1f1b": torch_schedules.ScheduleInterleaved1F1B, "zbv": torch_schedules.ScheduleZBVZeroBubble, "dualpipev": torch_schedules.ScheduleDualPipeV}[name]
    stages = [SimpleNamespace(stage_index=i, num_stages=per * n, group_size=n, group_rank=0, submod=nn.Identity()) for i in range(per)]
    rows = []
    for row in cls(stages, m).pipeline_order.values():
        flat = [b for a in row if a for b in (a.sub_actions or [a])]
        rows.append(tuple(Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in flat))
    return PipelineSchedule(tuple(rows), m)


def chunk(stage: int, n_stages: int) -> GPTModel:
    k = CONFIG.num_layers // n_stages
    return GPTModel(CONFIG, range(stage * k, stage * k + k), pre_process=stage == 0, post_process=stage == n_stages - 1)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (rows, 7), generator=generator)
    return ids[:, :-1], ids[:, 1:]
