"""Exchanges rows that a batch shares with the one before late, and all other rows early (PEC).

    batch i + 1      EmbOverlap ~~ masks ~~> EmbEarly           EmbForward     rows, to the ranks
    batch i                                    DenseBackward ~~> EmbBackward   gradients, of rows
    batch i + 1                                                 EmbForward ~~> EmbLate     that
                                                                             batch i + 1 has not

The rank that holds a row knows whether two successive batches use it, and tells the other ranks
(``EmbOverlap``). Rows that batch i does not use are looked up before batch i updates its own rows.
Rows that batch i + 1 does not use may be updated after the look-up of batch i + 1. All other rows
keep their order. So each look-up reads, and each update adds, the same values as in a serial run.

The backward of batch i knows which rows batch i + 1 uses only if the plan runs ahead
(``PipelinePlan.newer``). Otherwise, as under a serial plan or for the last batch, no gradient is
deferred.

The collections are TorchRec's ``ShardedPECEmbeddingCollection``. Their parts that find and split
the rows are used. Their exchange of gradients is not used, since it lacks the order of several
features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.core.context import IterContext
from swpipe.core.messages import in_bytes
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.plans.torchrec import sparse_dist as names
from swpipe.plans.torchrec.pec_plan import EARLY, LATE, OVERLAP
from swpipe.tasks.torchrec._torchrec import LazyAwaitable
from swpipe.tasks.torchrec.embedding_tables.table_state import rates_of, set_rates
from swpipe.tasks.torchrec.pipelines.mid_flight import counts
from swpipe.tasks.torchrec.rewriting.seam import run_embedding_backward
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks, in_turn


@dataclass
class Sizes:
    """The bytes of embeddings and gradients that a rank has received, counted while it trains.

    Attributes:
        bytes: Those of rows that two successive batches share, exchanged between two steps, and
            those of all other rows.
        steps: The number of steps.
    """

    bytes: list[int] = field(default_factory=lambda: [0, 0])
    steps: int = 0

    @property
    def late(self) -> float:
        """The average bytes per step of rows that two successive batches share."""
        return self.bytes[0] / max(1, self.steps)

    @property
    def early(self) -> float:
        """The average bytes per step of rows that the neighbouring batch does not use."""
        return self.bytes[1] / max(1, self.steps)

    def __str__(self) -> str:
        shares = f"{in_bytes(round(self.late))} late, {in_bytes(round(self.early))} early"
        return f"a rank gets {shares} per step, over {self.steps} steps"


class Part(NamedTuple):
    """The rows of one sharding group that two batches share, or all its other rows.

    Attributes:
        features: The ids of this rank's rows.
        sent: The number of this rank's ids whose embeddings each rank sends.
        got: The number of ids that each rank has asked for.
        order: The places of these ids among this rank's own ids of the batch.
    """

    features: Any
    sent: list[int]
    got: list[int]
    order: Tensor


Parts: TypeAlias = tuple[Part, Part]
"""The shared rows, then the others."""


@dataclass
class Batch:
    """One batch at one module.

    Attributes:
        index: The iteration.
        context: The module's context, which has the exchange of ids.
        features: The ids of this rank's rows, from all ranks, per sharding group.
        masks: The pending exchanges of masks, or None after the wait.
        before: The batch before, if it is known.
        forward: The parts by whether the batch before uses the rows, per sharding group.
        merge: The places of this rank's own ids in both parts, one after the other, per group.
        backward: The parts by whether the next batch uses the rows; None if that is unknown.
        early: The pending exchanges of embeddings, per group.
        merged: The embeddings of the batch, leaves of the dense part's graph.
        rates: The learning rates of the batch's look-up.
        sent: The pending exchanges of gradients that are not deferred.
    """

    index: int
    context: Any
    features: Any
    masks: Any
    before: Batch | None
    forward: list[Parts] = field(default_factory=list)
    merge: list[Tensor] = field(default_factory=list)
    backward: list[Parts] | None = None
    early: list[Any] = field(default_factory=list)
    merged: list[Tensor] = field(default_factory=list)
    rates: Sequence[float] = ()
    sent: list[Sent] = field(default_factory=list)


class Sent(NamedTuple):
    """The gradients of one part of one group; ``work`` is None until they are sent."""

    batch: Batch
    group: int
    part: Part
    gradient: Tensor
    work: Any = None


class PecModule:
    """One collection, with its state for the batches in flight; ``sizes`` counts its exchanges."""

    def __init__(self, name: str, module: Any, sizes: Sizes) -> None:
        self.name = name
        self.module = module
        self.inner = module._embedding_collection
        self._group = module._env.process_group
        # The dimension of the embeddings of each sharding group.
        kinds = self.inner._sharding_type_to_sharding
        self._dims = [self.inner._embedding_dim_for_sharding_type(kind) for kind in kinds]
        self._sizes = sizes
        # The batch of the latest start_masks: the one before the next batch.
        self._last: Batch | None = None
        self._deferred: list[Sent] = []

    def forget(self) -> None:
        """Forget the batches that were dropped."""
        self._last = None
        self._deferred.clear()

    def start_masks(self, ctx: IterContext) -> Batch:
        """Find the rows that the batch before uses, and start to tell the other ranks."""
        context = ctx.pipeline.module_contexts_post_prefetch[self.name]
        features = ctx.pipeline.module_input_post_prefetch[self.name]
        before = self._last
        # After dropped batches the last one known is not the predecessor, and shares nothing.
        if before is not None and before.index != ctx.iter_idx - 1:
            before = None
        masks = self.module.overlap_dist(
            ctx=context,
            dist_input=features,
            prev_ctx=None if before is None else before.context,
            prev_dist_input=None if before is None else before.features,
        )
        batch = Batch(ctx.iter_idx, context, features, masks, before)
        self._last = batch
        # For look_up_late, which gets the module's context and not the batch.
        context.pec_batch = batch
        return batch

    def look_up_early(self, ctx: IterContext) -> None:
        """Wait for the masks, then look up and send the rows that the batch before does not use."""
        batch: Batch = ctx.pec[self.name]
        results = [mask.wait() for mask in batch.masks]
        batch.merge = [split.permute for split, _ in results]
        batch.forward = [_parts(split, _orders(split)) for split, _ in results]
        # The masks also split the batch before, whose backward needs it: its gradients for rows of
        # this batch are sent first.
        if batch.before is not None:
            batch.before.backward = [
                _parts(split, (split.ol_permute, split.nol_permute)) for _, split in results
            ]
            # Each batch refers to its predecessor only until then; otherwise all batches would stay
            # alive.
            batch.before = None
        batch.masks = None
        batch.early = [*self._look_up(batch, 1)]

    def look_up_late(self, context: Any, features: Any) -> Any:
        """Look up and send the rows that the batch before uses, in place of the whole look-up."""
        batch: Batch = context.pec_batch
        late = [*self._look_up(batch, 0)]
        batch.rates = rates_of([self.module])
        return _Merged(self, batch, late)

    def _look_up(self, batch: Batch, which: int) -> Iterator[Any]:
        inner = self.inner
        groups = zip(
            inner._lookups,
            inner._output_dists,
            batch.context.sharding_contexts,
            batch.forward,
            strict=True,
        )
        # Without a graph: `update` looks the rows up again to run their backward.
        with torch.no_grad():
            for number, (lookup, output_dist, context, parts) in enumerate(groups):
                part = parts[which]
                # A copy of the sharding context for one part: the exchange of embeddings reads the
                # sizes from it. The rows are put into the order of ids in _Merged, so nothing is
                # unbucketized here.
                own = copy.copy(context)
                lengths = part.features.lengths()
                own.lengths_after_input_dist = lengths.view(-1, part.features.stride())
                own.input_splits = part.sent
                own.output_splits = part.got
                own.unbucketize_permute_tensor = None
                rows = lookup(part.features).view(-1, self._dims[number])
                self._count(part.sent, number, which)
                yield output_dist(rows, own)

    def start_deferred(self, ctx: IterContext) -> None:
        """Send the gradients that the batch before has kept, after this batch's shared rows."""
        self._deferred = [self._started(share, 1) for share in self._deferred]

    def update_deferred(self, ctx: IterContext) -> None:
        """Update the rows of the batch before that this batch does not use."""
        self._update(self._deferred)

    def start_backward(self, ctx: IterContext) -> None:
        """Send the gradients of rows that the next batch uses, and keep the other gradients."""
        if not ctx.training:
            return
        # The module's seam is taken here, so EmbBackward does not run the backward of its tables.
        # The backward from its cuts ends at the leaves of _Merged.
        run_embedding_backward([ctx.pipeline.seams.pop(self.name)])
        batch: Batch = ctx.pec[self.name]
        # Without the next batch's masks no gradient is deferred: those of both parts of the look-up
        # are sent.
        groups = batch.backward or batch.forward
        for number, (parts, merged) in enumerate(zip(groups, batch.merged, strict=True)):
            gradient = merged.grad
            # The model has not used these embeddings, but other ranks may wait for the gradients.
            if gradient is None:
                gradient = torch.zeros_like(merged)
            # Gradients take the way of the ids: to the rank that holds the row.
            shares = [
                Sent(batch, number, part, gradient.index_select(0, part.order)) for part in parts
            ]
            if batch.backward is not None:
                self._deferred.append(shares.pop())
            batch.sent += [self._started(share, 0) for share in shares]
        batch.merged.clear()

    def update(self, ctx: IterContext) -> None:
        """Update the rows that the next batch uses."""
        self._update(ctx.pec[self.name].sent)

    def _started(self, share: Sent, which: int) -> Sent:
        dim = self._dims[share.group]
        got = share.gradient.new_empty(sum(share.part.got) * dim)
        work = dist.all_to_all_single(
            got,
            share.gradient.reshape(-1),
            output_split_sizes=[count * dim for count in share.part.got],
            input_split_sizes=[count * dim for count in share.part.sent],
            group=self._group,
            async_op=True,
        )
        self._count(share.part.got, share.group, which)
        return share._replace(gradient=got, work=work)

    def _update(self, sent: list[Sent]) -> None:
        """Wait for gradients, update their rows with the rate of their look-up, and forget them."""
        # Imported here, since TorchRec before 1.8 is supported without PEC.
        from torchrec.distributed.comm_ops import get_gradient_division

        for share in sent:
            share.work.wait()
            features = share.part.features
            if not features.values().numel():
                continue
            gradient = share.gradient.view(-1, self._dims[share.group])
            context = share.batch.context.sharding_contexts[share.group]
            # Gradients come by rank, then feature; rows are looked up by feature, then rank.
            recat = torch.ops.fbgemm.invert_permute(context.sparse_features_recat)
            places = torch.arange(len(gradient), device=gradient.device)
            lengths = features.lengths().view(recat.shape[0], -1)
            _, order, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                recat, lengths, places, None, len(gradient)
            )
            ordered = torch.empty_like(gradient).index_copy_(0, order, gradient)
            # TorchRec can divide gradients by the number of ranks, which its own exchange would do.
            if get_gradient_division():
                ordered.div_(dist.get_world_size(self._group))
            # The tables hold the rate of the newest look-up, and this update may belong to an older
            # batch. The rate is set back, since the next look-up reads it.
            before = rates_of([self.module])
            set_rates([self.module], share.batch.rates)
            # The fused optimizer runs in the backward of a look-up, so the rows are looked up
            # again.
            with torch.enable_grad():
                rows = self.inner._lookups[share.group](features)
                rows.view_as(ordered).backward(ordered)
            set_rates([self.module], before)
        sent.clear()

    def _count(self, rows: Sequence[int], group: int, which: int) -> None:
        """Count the bytes that come from other ranks, at 4 bytes per value."""
        mine = dist.get_rank(self._group)
        self._sizes.bytes[which] += 4 * self._dims[group] * (sum(rows) - rows[mine])


class _Merged(LazyAwaitable):  # type: ignore[misc]
    """The embeddings of both parts, in the order of the batch's ids."""

    def __init__(self, module: PecModule, batch: Batch, late: list[Any]) -> None:
        super().__init__()
        self._module = module
        self._batch = batch
        self._late = late

    def _wait_impl(self) -> dict[str, Any]:
        # Imported here, since TorchRec before 1.8 is supported without PEC.
        from torchrec.modules.utils import construct_jagged_tensors

        batch = self._batch
        inner = self._module.inner
        jagged: dict[str, Any] = {}
        for number, (late, early) in enumerate(zip(self._late, batch.early, strict=True)):
            with torch.no_grad():
                both = torch.cat([late.wait(), early.wait()])
                merged = both.index_select(0, batch.merge[number])
            # Leaves: the graph is cut here, and the gradients go into `merged.grad` for
            # start_backward.
            batch.merged.append(merged.requires_grad_(torch.is_grad_enabled()))
            jagged |= construct_jagged_tensors(
                embeddings=merged,
                features=batch.context.sharding_contexts[number].features_before_input_dist,
                embedding_names=inner._embedding_names_per_sharding[number],
                need_indices=inner._need_indices,
                features_to_permute_indices=inner._features_to_permute_indices,
            )
        batch.early = []
        return jagged


def pec_tasks(
    tasks: SparseDistTasks, collections: Mapping[str, Any], sizes: Sizes
) -> tuple[PipelineTask, ...]:
    """Return the fourteen tasks of a step with PEC, made from the eleven of ``tasks``.

    Args:
        tasks: The tasks of the step, whose ``forward`` is "split".
        collections: The collections of TorchRec that are exchanged in two parts, by name.
        sizes: Counts the bytes of both exchanges.

    Raises:
        ValueError: A table's optimizer counts its look-ups, of which PEC makes more.
    """
    counting = [name for name, module in collections.items() if counts(module)]
    if counting:
        raise ValueError(
            f"the optimizer fused into {', '.join(counting)} counts look-ups, which PEC makes "
            "more of: take TrainPipelineFusedSparseDist, or SGD or Adagrad for the tables"
        )
    modules = [PecModule(name, module, sizes) for name, module in collections.items()]
    # The replaced forwards of these modules then look up the shared rows only.
    tasks.rewrite.look_ups = {module.name: module.look_up_late for module in modules}

    def forget() -> None:
        for module in modules:
            module.forget()

    def start_masks(ctx: IterContext) -> None:
        ctx.pec = {module.name: module.start_masks(ctx) for module in modules}
        sizes.steps += 1

    # The overlap and the deferred gradients are state between iterations. Declaring them makes the
    # plan's order of these tasks checked like any other.
    overlap = DeclaredIO(state="overlap", others="", reset=forget)
    deferred = DeclaredIO(state="late gradients", others="")
    reads, updates = (DeclaredIO(state="tables", mode=mode) for mode in ("r", "rw"))
    look_up_early = in_turn([module.look_up_early for module in modules])
    update_deferred = in_turn([module.update_deferred for module in modules])
    added = {
        names.PREFETCH: [
            PipelineTask(OVERLAP, start_masks, [overlap]),
            PipelineTask(EARLY, look_up_early, [overlap, reads]),
        ],
        names.DENSE: [PipelineTask(LATE, update_deferred, [deferred, updates])],
    }
    masks = DeclaredIO(state="overlap", mode="r")
    wrapped = {
        names.EMBED: ([module.start_deferred for module in modules], [deferred]),
        names.DENSE_BACK: ([module.start_backward for module in modules], [masks, deferred]),
        names.EMBED_BACK: ([module.update for module in modules], []),
    }
    fourteen: list[PipelineTask] = []
    for own in tasks.tasks():
        then, io = wrapped.get(own.name, ([], []))
        task = replace(own, fn=in_turn([own.fn, *then]), io=(*own.io, *io))
        fourteen += [task, *added.get(own.name, ())]
    return tuple(fourteen)


def _parts(split: Any, orders: Sequence[Tensor]) -> Parts:
    """Return TorchRec's two partitions, of the rows that are shared (ol) and not (nol)."""
    features = (split.ol_features, split.nol_features)
    sizes = (split.splits.input_splits, split.splits.output_splits)
    shared, others = map(Part, features, *sizes, orders)
    return shared, others


def _orders(split: Any) -> Sequence[Tensor]:
    """Return the order of gradients that go back the way of a look-up's embeddings."""
    # Embedding i of the batch is number permute[i] of both parts, so gradient n of both parts is
    # number invert_permute(permute)[n] of the batch.
    sizes = [sum(rows) for rows in split.splits.input_splits]
    return torch.split(torch.ops.fbgemm.invert_permute(split.permute), sizes)
