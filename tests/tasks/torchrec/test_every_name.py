"""Properties of every pipeline by name, on two ranks: one table of properties and names.

Each property is a function that returns the faults of one name; all numbers are compared bit for
bit. It is checked for the names that differ in it: with the dense part and the tables in one
backward or two, with looked-up rows in flight or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from swpipe.loops import UnevenDataError
from swpipe.tasks.torchrec import TrainStep
from swpipe.tasks.torchrec._torchrec import DMPCollection
from swpipe.tasks.torchrec.step.grad_reduction import ddp_modules
from tests.support.ranks import Ranks
from tests.tasks.torchrec import computing as kinds
from tests.tasks.torchrec.computing import TWO, computing
from tests.tasks.torchrec.megatron import megatrons
from tests.tasks.torchrec.models import (
    BATCH,
    CPU,
    DENSE,
    DIM,
    TABLES,
    Batch,
    Job,
    KeyedJaggedTensor,
    bags,
    batches,
    dense_optimizer,
    everything,
    in_backward_optimizer_filter,
    sharded,
    warmed_up,
)
from tests.tasks.torchrec.trial import (
    EXACT,
    Outcome,
    Restarting,
    TrainPipelineBase,
    by_torchrec,
    create,
    outcome,
    refusal,
    to_the_end,
)

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist  # isort: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed import DistributedModelParallel, embedding_tower_sharding
    from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

SERIAL, SPARSE, PREFETCH, SPLIT = EXACT
PROPERTIES: dict[str, tuple[Callable[[str], list[str]], tuple[str, ...]]] = {}


def of(*names: str) -> Callable[[Callable[[str], list[str]]], Callable[[str], list[str]]]:
    """Register a property of these names."""

    def add(fn: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
        PROPERTIES[fn.__name__] = fn, names
        return fn

    return add


# ------------------------------------------------------------------------------------- the step


def _losses(model: nn.Module) -> Callable[[Batch], Any]:
    """Return a function that calls the model, and makes a dict of two losses."""

    def forward(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        loss, logits = model(batch)
        return {"clicks": loss, "twice": 2 * loss.unsqueeze(0)}, logits

    return forward


def _weigh(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Normalise by a count over all ranks: a collective of the step's own."""
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    return {name: loss / ranks for name, loss in losses.items()}


def _made(kind: str) -> tuple[Any, list[Any], list[Any]]:
    """Return a model, optimizers for its parts and their schedules; or Megatron's wrappers."""
    if kind == "megatron":
        model, optimizer = megatrons()
        return model, [optimizer], []
    model = sharded(Job(kind))
    (group,) = dense_optimizer(Job(kind), model).param_groups
    bottom, rest = group["params"][:2], group["params"][2:]
    optimizers = [torch.optim.SGD(bottom, lr=0.2), torch.optim.Adam(rest, lr=0.01)]
    return model, optimizers, [StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


KINDS = {"table_wise": (3, 4), "data_parallel": (1, 3), "megatron": (3, 6)}
"""Kind of model to batches per optimizer step, and batches of a training; some are left over."""


def _finalize(model: Any) -> None:
    """Reduce the gradients by Megatron's method, or halve them."""
    if hasattr(model._dmp_wrapped_module, "finish_grad_sync"):
        model._dmp_wrapped_module.finish_grad_sync()
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 2


@cache
def _by_hand(kind: str) -> Outcome:
    model, optimizers, schedules = _made(kind)
    accumulate, steps = KINDS[kind]
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    wrappers = [model._dmp_wrapped_module] if kind == "megatron" else []
    outputs = []
    for k, batch in enumerate(batches(steps)):
        last = (k + 1) % accumulate == 0 or k + 1 == steps
        if k % accumulate == 0:
            for part in optimizers:
                part.zero_grad()
            for wrapper in wrappers:
                wrapper.zero_grad_buffer()
        with ExitStack() as stack:
            if not last and (wrappers or k > 0):  # DDP reduces the first batch by itself
                for module in wrappers or [*ddp_modules(model)]:
                    stack.enter_context(module.no_sync())
            losses, logits = _losses(model)(batch)
            weighed = _weigh(losses)
            (weighed["clicks"] + weighed["twice"].sum(0)).backward()
        outputs.append(logits)
        if last:
            _finalize(model)
            if not wrappers:
                nn.utils.clip_grad_norm_(parameters, 0.02)
            for thing in (*optimizers, *schedules):
                thing.step()
    return Outcome(outputs, everything(model))


@of(PREFETCH, SPLIT)
def runs_the_users_step_as_a_loop_would(name: str) -> list[str]:
    """Run a step with a dict of losses, a collective, a gradient hook, clipping, and two schedules.

    Megatron's DDP with a Float16Module inside was once refused as untraceable; with
    ``find="direct"`` it trained on the sum of all gradients since the beginning.
    """
    found = []
    for kind, (accumulate, steps) in KINDS.items():
        model, optimizers, schedules = _made(kind)
        step = TrainStep(
            optimizers, forward=_losses(model), on_losses=_weigh, schedules=schedules,
            accumulate=accumulate, finalize=_finalize, clip=None if kind == "megatron" else 0.02,
        )  # fmt: skip
        got = outcome(create(name, model, step=step), batches(steps))
        found += got.differences(_by_hand(kind))
    return found


@of(SPARSE, SPLIT)
def takes_the_rates_of_the_moment(name: str) -> list[str]:
    """Change rates of dense and fused parameters in the step; ``test_rates`` does so by class.

    The fused kernel takes the rate at the look-up; once ours handed it over in the backward.
    """
    model, theirs = sharded(Job()), sharded(Job())
    step = TrainStep([warmed_up(model)])
    wanted = to_the_end(TrainPipelineBase(theirs, warmed_up(theirs), CPU), batches(5))
    got = outcome(create(name, model, step=step), batches(5))
    return got.differences(Outcome(wanted, everything(theirs)))


@of(PREFETCH)
def an_evaluation_within_an_accumulation_changes_nothing(name: str) -> list[str]:
    """Accumulate over an evaluation: only training batches count, and ``drain`` does not step."""
    outcomes = []
    for parts in ((8,), (3, 5)):
        model, data = sharded(Job()), batches(8)
        step = TrainStep([dense_optimizer(Job(), model)], accumulate=4)
        with create(name, model, step=step) as pipeline:
            for part in parts:
                some = islice(data, part)
                for _ in range(part):  # not to StopIteration, which would step with the rest
                    pipeline.progress(some)
                model.eval()
                with torch.no_grad():
                    to_the_end(pipeline, batches(3, seed=4))
                model.train()
        outcomes.append(Outcome([], everything(model)))
    return outcomes[1].differences(outcomes[0])


class Replicas(DMPCollection):  # type: ignore[misc]
    """A stand-in for a ``DMPCollection`` whose tables have replicas on other ranks.

    The real class needs a GPU. Each rank adds the other's table sums to its own, so that a missing,
    an extra or a displaced sync changes bits.
    """

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Move the tables slightly, by an amount that depends on both ranks' tables."""
        with torch.no_grad():
            for parameter in self.module.tables.parameters():
                local = parameter.detach()
                total = local.sum().reshape(1) if local.numel() else torch.zeros(1)
                dist.all_reduce(total)
                local.add_(1e-3 * total)


REPLICATED = (
    (Job(), 1),
    (Job(optimizer=torch.optim.Adam, options={"lr": 0.01}, fused=False), 3),
    (Job(), None),
)


def _replicated(job: Job) -> nn.Module:
    model = sharded(job)
    model.__class__ = Replicas
    return model


@cache
def _replicas_by_torchrec(place: int) -> Outcome:
    job, interval = REPLICATED[place]
    model = _replicated(job)
    theirs: Any = TrainPipelineSparseDist(
        model, dense_optimizer(job, model), CPU, execute_all_batches=True,
        dmp_collection_sync_interval_batches=interval,
    )  # fmt: skip
    return Outcome(to_the_end(theirs, batches(5)), everything(model))


@of(SPARSE, SPLIT)
def averages_replicas_as_torchrec(name: str) -> list[str]:
    """Average replicas after the update in the backward of every n-th batch."""
    found = []
    for place, (job, interval) in enumerate(REPLICATED):
        model = _replicated(job)
        step = TrainStep([dense_optimizer(job, model)], sync_interval=interval)
        got = outcome(create(name, model, step=step), batches(5))
        found += got.differences(_replicas_by_torchrec(place))
    return found


class _Head(nn.Module):
    """A dense part over tables, with embeddings of some width, keyed or as one tensor."""

    keyed = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bottom = nn.Linear(DENSE, DIM)
        self.top = nn.Linear(DIM + width, 1)
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        embedded = self.tables(batch.ids)
        found = embedded.values() if self.keyed else embedded
        logits = self.top(torch.cat([self.bottom(batch.dense), found], dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class _Processed(_Head):
    """A model of bags behind feature processors, which have parameters of their own."""

    def __init__(self) -> None:
        super().__init__(DIM * TABLES)
        lengths = {f"f{t}": 8 for t in range(TABLES)}
        processors = PositionWeightedModuleCollection(lengths, device=CPU)
        self.tables = FeatureProcessedEmbeddingBagCollection(
            bags(range(TABLES), weighted=True), processors
        )


class _Interaction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, DIM)

    def forward(self, embedded: Any) -> Tensor:
        return self.layer(embedded.values())


class _Towers(_Head):
    """A model of towers: tables, and an interaction that runs on the rank of the tables."""

    keyed = False

    def __init__(self) -> None:
        super().__init__(2 * DIM)
        towers = [
            EmbeddingTower(bags(part), _Interaction(DIM * len(part)))
            for part in (range(2), range(2, TABLES))
        ]
        self.tables = EmbeddingTowerCollection(towers)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "feature processors": _Processed,
    "towers": _Towers,
}


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return Adam for all parameters that no fused optimizer updates."""
    named = in_backward_optimizer_filter(model.named_parameters())
    return torch.optim.Adam([parameter for _, parameter in named], lr=0.01)


def _data_of(kind: str, count: int) -> Iterator[Batch]:
    """Yield batches that the model takes."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    for batch in batches(count):
        if kind == "feature processors":
            weights = torch.rand(len(batch.ids.values()), generator=draws)
            batch.ids = KeyedJaggedTensor(
                batch.ids.keys(), batch.ids.values(), weights, lengths=batch.ids.lengths()
            )
        yield batch


def _ddp_on_cpu(module: nn.Module, device_ids: Any = None, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, **options)


def _planned(kind: str) -> nn.Module:
    """Return the model over all ranks, with fused tables, as TorchRec's planner shards it."""
    torch.manual_seed(5)
    model = ZOO[kind]()
    optimized = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    apply_optimizer_in_backward(torch.optim.SGD, optimized, {"lr": 0.1})
    sharders: list[Any] = [
        EmbeddingTowerCollectionSharder(),
        FeatureProcessedEmbeddingBagCollectionSharder(),
    ]
    world = dist.get_world_size()
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    # TorchRec names the device of a tower's DDP, which is an error on a CPU.
    embedding_tower_sharding.DistributedDataParallel = _ddp_on_cpu
    return DistributedModelParallel(model, env, CPU, plan, sharders=sharders)


@of(SPLIT)
def trains_tables_with_parameters_of_ddp(name: str) -> list[str]:
    """Train tables with parameters that DDP reduces, within the module or around it.

    The gradients of feature processors once came after DDP's backward, and were lost.
    """
    found = []
    for kind in ZOO:
        theirs = _planned(kind)
        by = TrainPipelineBase(theirs, _adam(theirs), CPU)
        wanted = Outcome(to_the_end(by, _data_of(kind, 4)), everything(theirs))
        model = _planned(kind)
        pipeline = create(name, model, optimizer=_adam(model))
        found += [
            f"{kind}: {one}" for one in outcome(pipeline, _data_of(kind, 4)).differences(wanted)
        ]
        late = "DDP reduces parameters of it" in str(pipeline.report)
        found += [] if late == (kind == "feature processors") else [str(pipeline.report)]
    return found


# ------------------------------------------------------------- modes, iterators, models in between


def _marks(model: nn.Module) -> set[str]:
    """Return the attributes that a rewrite sets on modules."""
    marks = {name for name, m in model.named_modules() if getattr(m, "is_pipelined", False)}
    for name, module in model.named_modules():
        marks |= {f"{name}.forward" for _ in range("forward" in vars(module))}
        for k, input_dist in enumerate(getattr(module, "_input_dists", ())):
            if "forward" in vars(getattr(input_dist, "_dist", module)):
                marks.add(f"{name}._input_dists[{k}]._dist.forward")
    return marks


@of(SPLIT)
def detaching_changes_nothing(name: str) -> list[str]:
    """Evaluate with batches in flight: the model is restored, and the training continues.

    Modules that compute inputs ahead are restored, too.
    """
    found = []
    for computes in (False, True):
        plain, model = (computing(kinds.one) if computes else sharded(TWO) for _ in range(2))
        wanted = by_torchrec(TWO, batches(5), plain)
        before, (probe,), outputs = _marks(model), batches(1, seed=5), []
        with create(name, model, TWO, pipeline_postproc=computes) as pipeline:
            data = batches(5)
            for _ in range(5):
                outputs.append(pipeline.progress(data))
                found += ["no mark"] if _marks(model) == before else []
                whole = pipeline.detach()
                found += [str(_marks(whole) ^ before)] if _marks(whole) != before else []
                whole.eval()
                with torch.no_grad():
                    whole(probe)
                whole.train()
                if len(outputs) % 2:  # progress attaches by itself
                    pipeline.attach()
        found += Outcome(outputs, everything(model)).differences(wanted)
    return found


@of(SPARSE, PREFETCH)
def loading_is_exact_after_a_drain_and_in_flight_exact_or_refused(name: str) -> list[str]:
    """Load a model: rows that were looked up before would be trained as if they were loaded."""
    job, found = Job(modules=2), []
    for drains in (True, False):
        other, model = sharded(job), sharded(job)
        with create(name, model) as pipeline:
            data = batches(7)
            for _ in range(3):
                pipeline.progress(data)
            seen = 3 + (len(pipeline.drain()) if drains else 0)
            state = other.state_dict()
            said = refusal(partial(model.load_state_dict, state))
            to_the_end(pipeline, data)
        if not drains and name not in EXACT[:2]:
            found += [] if "have read rows" in said and "drain()" in said else [said]
        elif name in EXACT:
            wanted = by_torchrec(job, islice(batches(7), seen, None), sharded(job))
            found += Outcome([], everything(model)).differences(Outcome([], wanted.state))
    return found


@of(SPLIT)
def an_iterator_that_begins_anew_gives_every_epoch(name: str) -> list[str]:
    """Iterate over three epochs; from the second on, no batch came once."""
    data = Restarting()
    with create(name) as pipeline:
        counts = [len(to_the_end(pipeline, data)) for _ in range(3)]
    return [] if counts == [3, 3, 3] else [str(counts)]


@of(SERIAL, SPLIT)
def uneven_data_is_an_error_on_all_ranks(name: str) -> list[str]:
    """Train on uneven data, which was once an abort in C++ and "connection reset"."""
    found = []
    for counts in ((1, 0), (5, 6)):
        outputs, fewest = [], min(counts)
        with create(name, stall_timeout_s=60.0) as pipeline:
            data = batches(counts[dist.get_rank()])
            with pytest.raises(UnevenDataError) as caught:  # noqa: PT012 - after some steps
                while True:
                    outputs.append(pipeline.progress(data))
            again = to_the_end(pipeline, batches(2))
        told = f"the data of rank {counts.index(fewest)} ended after {fewest} batches"
        right = told in str(caught.value) and "EvenData('stop')" in str(caught.value)
        if not right or (len(outputs), len(again)) != (fewest, 2):
            found.append(f"{counts}: {len(outputs)}, {len(again)}, {caught.value}")
    return found


# ------------------------------------------------------------------------------------ the table


def _wrong(prop: str) -> dict[str, list[str]]:
    holds, names = PROPERTIES[prop]
    return {name: wrong for name in names if (wrong := holds(name))}


@pytest.mark.parametrize("prop", PROPERTIES)
def test_every_name_has_every_property(two_ranks: Ranks, prop: str) -> None:
    """The docstring of each property says what it is."""
    assert two_ranks.run(_wrong, prop, deadline_s=200) == [{}, {}]
