"""A learning rate takes effect as in TorchRec's class of the same name.

Rates change in the loop, between two calls of ``progress``. In the classes that look the next batch
up ahead, or before ``zero_grad``, the tables' rates are those of an earlier call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from swpipe._values.stateful import modules_in
from swpipe._values.walk import tensors_in
from swpipe.tasks import torchrec as ours
from swpipe.tasks.torchrec.embedding_tables.table_state import rates_of, set_rates
from tests.support.ranks import Ranks
from tests.tasks.torchrec.loops import streams_on_a_cpu, theirs
from tests.tasks.torchrec.models import CPU, Job, batches, everything, sharded
from tests.tasks.torchrec.trial import Outcome

from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # isort: skip
from torchrec.optim.optimizers import in_backward_optimizer_filter  # isort: skip
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage  # isort: skip

JOB = Job(optimizer=torch.optim.Adagrad)
STAGED = "StagedTrainPipeline"

SCHEDULES = ("lambda", "warm-up", "by hand")
WHERE = ("both", "fused", "dense", "dense alone")
"""The optimizers whose rates change; in the last case the pipeline has the dense one only."""

LESS_MEMORY = {"free_features_storage_early": True, "clear_data_dist_inputs": True}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("TrainPipelineBase", {}),
    "sparse-dist": ("TrainPipelineSparseDist", {}),
    "lite": ("TrainPipelineSparseDistLite", {}),
    "prefetch": ("PrefetchTrainPipelineSparseDist", {}),
    "fused": ("TrainPipelineFusedSparseDist", {}),
    "fused, late": ("TrainPipelineFusedSparseDist", {"embedding_lookup_after_data_dist": True}),
    "semi-sync from 4": ("TrainPipelineSemiSync", {"start_batch": 4}),
    "semi-sync from 900": ("TrainPipelineSemiSync", {"start_batch": 900}),
    "semi-sync, stashed": ("TrainPipelineSemiSync", {"start_batch": 4, "stash_gradients": True}),
    "fused, less memory": ("TrainPipelineFusedSparseDist", LESS_MEMORY),
    "semi-sync, less memory": ("TrainPipelineSemiSync", {"start_batch": 4, **LESS_MEMORY}),
    "hybrid": ("TrainEvalHybridPipelineBase", {}),
    "staged": (STAGED, {}),
}
"""The classes, with their arguments."""

_TWIN = {STAGED: "TrainPipelineBase"}
"""Ours in place of those of TorchRec's classes that a CPU cannot run."""


def train(kind: str, schedule: str, where: str, steps: int, *, on_ours: bool) -> Outcome:
    """Train, with rates that change after each call of ``progress``.

    The outcome has losses and outputs; parameters, optimizer states, and the tables' rates.
    """
    model = sharded(JOB)
    optimizer, change = optimizer_of(model, schedule, where)
    outputs: list[Tensor] = []
    losses: list[Tensor] = []
    model.register_forward_hook(lambda _module, _args, result: losses.append(result[0].detach()))
    with nullcontext() if on_ours else streams_on_a_cpu():
        for step, output in enumerate(_outputs(kind, model, optimizer, steps, on_ours)):
            outputs += [losses[-1], output]
            change(step)
    state = _named(optimizer.state_dict()["state"], "state")
    rates = torch.tensor([m.get_learning_rate() for m in _tables(model)])
    return Outcome(outputs, {**everything(model), **state, "rates": rates})


def _outputs(
    kind: str, model: nn.Module, optimizer: Any, steps: int, on_ours: bool
) -> Iterator[Tensor]:
    name, options = KINDS[kind]
    if name == STAGED and on_ours:
        yield from _staged(model, optimizer, steps)
        return
    made = getattr(ours, name) if on_ours else theirs(_TWIN.get(name, name))
    pipeline, data = made(model, optimizer, CPU, **options), batches(steps)
    if name.startswith("Prefetch") and not on_ours:  # it prefetches nothing where streams are None
        pipeline._data_dist_stream = mock.Mock()
        pipeline._stream_context = lambda _stream: nullcontext()
    for _ in range(steps):
        yield pipeline.progress(data)


def _staged(model: nn.Module, optimizer: Any, steps: int) -> Iterator[Tensor]:
    """Train with a model that the user runs; TorchRec's own classes need a device's streams."""
    exchange = ours.SparseDataDistUtil[Any](model, None)
    pipeline = ours.StagedTrainPipeline([exchange.start_sparse_data_dist_stage()])
    data = batches(steps)
    for _ in range(steps):
        batch = pipeline.progress(data)
        optimizer.zero_grad()
        losses, output = model(batch)
        torch.sum(losses, dim=0).backward()
        optimizer.step()
        yield output


def optimizer_of(model: nn.Module, schedule: str, where: str) -> tuple[Any, Callable[[int], Any]]:
    """Return the pipeline's optimizer, and a function that changes its rates after a step."""
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense: Any = KeyedOptimizerWrapper(named, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    fused: Any = model.fused_optimizer
    warm = schedule == "warm-up"
    if warm and where in ("dense", "dense alone"):
        dense = _warmed(dense)
    if warm and where == "fused":
        fused = _warmed(fused)
    both: Any = CombinedOptimizer([("fused", fused), ("dense", dense)])
    if warm and where == "both":
        both = _warmed(both)
    changed = {"fused": fused, "both": both}.get(where, dense)
    used = dense if where == "dense alone" else both
    return used, _change(changed, schedule)


def _warmed(optimizer: Any) -> Any:
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=7, value=0.1),
        WarmupStage(WarmupPolicy.POLY, max_iters=100, value=2.0, decay_iters=50),
    ]
    return WarmupOptimizer(optimizer, stages, lr=0.3)


def _change(optimizer: Any, schedule: str) -> Callable[[int], Any]:
    if schedule == "by hand":
        return lambda step: set_rate(optimizer, 0.3 / (1 + step)) if step % 3 == 1 else None
    made = LambdaLR(optimizer, lambda step: 0.9**step) if schedule == "lambda" else None
    return lambda step: None if made is None else made.step()


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _named(state: Any, name: str) -> dict[str, Tensor]:
    if hasattr(state, "local_shards"):
        return {f"{name}[{k}]": s.tensor for k, s in enumerate(state.local_shards())}
    if isinstance(state, dict):
        parts = [_named(value, f"{name}.{key}") for key, value in state.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {f"{name}[{k}]": tensor for k, tensor in enumerate(tensors_in(state))}


def _tables(model: nn.Module) -> Iterator[Any]:
    return (m for m in modules_in(model) if hasattr(m, "get_learning_rate"))


def _different(cases: list[tuple[str, str, str]], steps: int) -> list[Any]:
    found = []
    for case in cases:
        mine, original = (train(*case, steps, on_ours=on_ours) for on_ours in (True, False))
        found += [(case, one) for one in mine.differences(original)]
    return found


def _early(kind: str) -> bool:
    return kind.startswith(("fused", "semi-sync"))


CASES = [
    *(
        (kind, SCHEDULES[k % 3], WHERE[k % (2 if _early(kind) else 4)])
        for k, kind in enumerate(KINDS)
    ),
    ("fused", "lambda", "dense alone"),
    ("semi-sync from 4", "warm-up", "dense alone"),
]
"""Cases: where a look-up is early, only the tables' rates change, or nothing else is known."""

ALONE = [
    ("fused", "by hand", "both"),
    ("fused", "lambda", "dense alone"),
    ("fused, late", "lambda", "fused"),
    ("semi-sync from 4", "by hand", "fused"),
]
"""Classes that have one backward on one rank."""


def test_trainings_equal_torchrecs_under_schedules(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Losses, outputs, parameters and states of every class are equal, with varied schedules."""
    assert two_ranks.run(_different, CASES, 6, deadline_s=300.0) == [[], []]
    assert one_rank.run(_different, ALONE, 6) == [[]]


class Group(nn.Module):
    """Tables with a rate, as fbgemm's."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def get_learning_rate(self) -> float:
        """Return the rate of the next look-up."""
        return self.rate

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate."""
        self.rate = rate


def test_rates_of_another_sharding_are_refused() -> None:
    """A rank with more groups of tables would train some with the rate they were made with."""
    saved, other = (nn.ModuleList(map(Group, rates)) for rates in ([0.5, 0.25], [0.1, 0.1]))
    set_rates([other], rates_of([saved]))
    assert rates_of([other]) == [0.5, 0.25]
    with pytest.raises(ValueError, match="has 2 learning rates of tables, and this rank has 4"):
        set_rates([other, saved], rates_of([saved]))
