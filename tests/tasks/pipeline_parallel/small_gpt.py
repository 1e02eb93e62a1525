"""A small GPT in stages, its batches, and random valid schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from docs.examples.moe_gpt import GPTModel, TransformerConfig
from swpipe.plans.pipeline_parallel import Action, PipelineSchedule

CONFIG = TransformerConfig(
    num_layers=8, hidden_size=16, num_attention_heads=2, vocab_size=11, max_sequence_length=6
)


def chunk(stage: int, n_stages: int) -> GPTModel:
    """Return the layers of one stage; ``n_stages`` divides 8."""
    layers = CONFIG.num_layers // n_stages
    return GPTModel(
        CONFIG,
        range(stage * layers, (stage + 1) * layers),
        pre_process=stage == 0,
        post_process=stage == n_stages - 1,
    )


def whole(n_stages: int) -> list[GPTModel]:
    """Return all stages."""
    return [chunk(stage, n_stages) for stage in range(n_stages)]


def on_rank(schedule: PipelineSchedule, rank: int) -> dict[int, GPTModel]:
    """Return the stages of one rank."""
    places = enumerate(schedule.placement)
    return {stage: chunk(stage, schedule.n_stages) for stage, place in places if place == rank}


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens after them, (rows, 6) each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CONFIG.vocab_size, (rows, 7), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def random_schedule(placement: Sequence[int], n_micro: int, seed: int) -> PipelineSchedule:
    """Return a random order in which each action comes after its inputs, and W in order.

    The forward passes of the last stage are in the order of the microbatches, too.
    """
    draw = random.Random(seed)
    last = len(placement) - 1
    whole_backward = {(s, m): draw.random() < 0.3 for s in range(last + 1) for m in range(n_micro)}
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]

    def ready(action: Action) -> bool:
        stage, op, micro = action
        ordered = op in "WB" or (op == "F" and stage == last)
        before = [Action(stage, o, micro - 1) for o in ("F" if op == "F" else "WB")]
        if ordered and micro and not done.intersection(before):
            return False
        if op == "F":
            return stage == 0 or Action(stage - 1, "F", micro) in done
        if op == "W":
            return Action(stage, "I", micro) in done
        given = stage == last or bool(done.intersection(Action(stage + 1, o, micro) for o in "IB"))
        return given and Action(stage, "F", micro) in done

    left = [
        Action(stage, op, micro)
        for (stage, micro), both in whole_backward.items()
        for op in ("FB" if both else "FIW")
    ]
    while left:
        action = draw.choice([one for one in left if ready(one)])
        left.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    return PipelineSchedule(tuple(map(tuple, rows)), n_micro)
