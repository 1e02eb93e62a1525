"""HSTU in small: a model, batches, the synchronous loop, and pipelines with late tasks."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from swpipe.tasks.torchrec import IdentityShuffler, KarmarkarKarpShuffler
from swpipe.tasks.torchrec.hstu import HSTUPipeline
from tests.tasks.torchrec.hstu.ranking import SMALL, hstu_model
from tests.tasks.torchrec.megatron import within_megatrons
from tests.tasks.torchrec.models import CPU, everything
from tests.tasks.torchrec.trial import Late, Outcome, late_tasks, to_the_end

BATCH = 4

CASCADE = {
    "h2d": 5, "start_shuffle": 4, "finish_shuffle": 3, "start_input_dist": 3, "wait_input_dist": 2,
    "prefetch_embeddings": 1,
}  # fmt: skip
"""A lookahead for each task, as in recsys-examples: six batches are in flight."""

GATED = {
    "version": 1,
    "thread_map": "all_noncritical_on_io",
    "lookahead": CASCADE,
    "same_progress_sync": {
        "h2d": [{"task": "global_tokens_allreduce", "sides": "gpu"}],
        "start_shuffle": [{"task": "ranking_embedding_forward", "sides": "none"}],
        "wait_input_dist": {"task": "compute_output_dist", "sides": "cpu"},
    },
}
"""The cascade on one thread, with waits within a period that order the host, a stream, nothing."""


class Case(NamedTuple):
    """A way to train.

    Attributes:
        preset: The thread map's name.
        prefetch: Whether there is a task of that name.
        depth: The prefetch depth.
        balanced: The shuffler balances; otherwise there is none.
        wrapper: "ddp" or "megatron"; "plain" is not sharded, within DDP where there are ranks.
        config: A schedule configuration.
    """

    preset: str | None = "default"
    prefetch: bool = True
    depth: int = 1
    balanced: bool = False
    wrapper: str = "ddp"
    config: str | None = None


def batches(count: int, seed: int = 0) -> Iterator[Any]:
    """Yield this rank's batches; some histories are empty, and on one rank a whole batch."""
    draws = random.Random(1000 * seed + _rank())
    for step in range(count):
        histories = [_history(draws) for _ in range(BATCH)]
        empty = step % 5 == 2 and _rank() == 1
        yield hstu_model.SequenceBatch.of([()] * BATCH if empty else histories)


def _history(draws: random.Random) -> list[Any]:
    count = draws.choice([0, 1, 2, 6])
    times = sorted(draws.randrange(10**6) for _ in range(count))
    return [
        hstu_model.Event(draws.randrange(SMALL.items), draws.randint(1, 10), time) for time in times
    ]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def made(wrapper: str = "ddp") -> tuple[nn.Module, Any]:
    """Return a model with the same weights on all ranks, and its dense optimizer."""
    plain = hstu_model.HSTURanking(SMALL, seed=3)
    if wrapper == "plain":
        alone = not dist.is_initialized()
        model = plain if alone else nn.parallel.DistributedDataParallel(plain)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = shard_tables(plain, "tables", EmbeddingCollectionSharder(), CPU, 0.1)
    dense = [value for _, value in in_backward_optimizer_filter(model.named_parameters())]
    if wrapper == "ddp":
        return model, torch.optim.SGD(dense, lr=0.1)
    return within_megatrons(model, model._dmp_wrapped_module.module, dense)


def shard_tables(
    whole: nn.Module, path: str, sharder: Any, device: torch.device, learning_rate: float
) -> nn.Module:
    """Return a model over all ranks, within DDP; table t is on rank t % R.

    Args:
        whole: The model, whose parameters are the same on all ranks.
        path: The path of its tables, which a fused Adagrad updates in backward.
        sharder: The sharder of these tables.
        device: The device of the ranks.
        learning_rate: The learning rate of the tables.
    """
    tables = whole.get_submodule(path)
    initial = {name: value.detach().clone() for name, value in tables.named_parameters()}
    options = {"lr": learning_rate}
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), options)
    size = dist.get_world_size()
    # Parameters are named "embeddings.NAME.weight", or "embedding_bags.NAME.weight".
    plan = construct_module_sharding_plan(
        tables,
        {name.split(".")[1]: table_wise(rank=t % size) for t, name in enumerate(initial)},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        world_size=size,
        device_type=device.type,
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with warnings.catch_warnings():  # TorchRec gives DDP an argument that has been renamed
        warnings.filterwarnings("ignore", category=FutureWarning)
        sharded: nn.Module = DistributedModelParallel(
            whole, env, device, ShardingPlan({path: plan}), sharders=[sharder]
        )
    # TorchRec draws a sharded table's rows anew; as they were, they depend on the seed alone.
    with torch.no_grad():
        for name, value in sharded.named_parameters():
            if name.startswith(path) and value.numel():
                value.copy_(initial[name.removeprefix(f"{path}.")])
    return sharded


def by_hand(steps: int, balanced: bool = False, wrapper: str = "ddp") -> Outcome:
    """Train in the synchronous loop: nothing overlaps, and the model's own forward runs."""
    model, optimizer = made(wrapper)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shuffler = (
        KarmarkarKarpShuffler(hstu_model.SequenceBatch.work) if balanced else IdentityShuffler()
    )
    outputs: list[Tensor] = []
    for given in batches(steps):
        batch = shuffler.finish(given, shuffler.start(given))
        optimizer.zero_grad()
        if wrapper == "megatron":
            model._dmp_wrapped_module.zero_grad_buffer()  # type: ignore[operator, union-attr]
        tokens = batch.num_loss_tokens()
        if dist.is_initialized():
            dist.all_reduce(tokens)
        losses, output = model(batch)
        total = torch.sum(losses)
        (total * ranks / tokens).backward()
        if wrapper == "megatron":
            model._dmp_wrapped_module.finish_grad_sync()  # type: ignore[operator, union-attr]
        optimizer.step()
        outputs += [total.detach(), tokens, *output]
    shuffler.close()
    return Outcome(outputs, everything(model))


def by_pipeline(case: Case, steps: int, late: Late | None = None) -> Outcome:
    """Train by the pipeline, with tasks that are up to 1 ms late, differently on each rank.

    ``late`` gives other delays.
    """
    draws = random.Random(_rank())
    model, optimizer = made(case.wrapper)
    shuffler = KarmarkarKarpShuffler(hstu_model.SequenceBatch.work) if case.balanced else None
    with (
        late_tasks(late or (lambda name: draws.random() * 1e-3)),
        HSTUPipeline(
            model, optimizer, CPU,
            prefetch=case.prefetch, prefetch_depth=case.depth, batch_shuffler=shuffler,
            thread_map=case.preset, schedule_config=case.config,
        ) as pipe,
    ):  # fmt: skip
        outputs = flat(to_the_end(pipe, batches(steps)))
    if shuffler is not None:
        shuffler.close()
    return Outcome(outputs, everything(model))


def flat(found: list[Any]) -> list[Tensor]:
    """Return the loss, tokens, logits and labels of each step."""
    return [part for loss, tokens, output in found for part in (loss, tokens, *output)]
