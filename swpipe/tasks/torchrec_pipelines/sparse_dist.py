"""TorchRec's pipelines whose numbers are those of a plain loop, each under a ready-made plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.plans import sparse_dist as plans
from swpipe.tasks.sparse_dist._torchrec import TrainPipelineContext
from swpipe.tasks.sparse_dist.drop_in import split
from swpipe.tasks.torchrec_pipelines.refused import refuse
from swpipe.tasks.torchrec_pipelines.translated import In, Out, Translated


class TrainPipelineBase(Translated[In, Out]):
    """As TorchRec's: the next batch is copied during this one's step. Any model, sharded or not.

    Unlike there, ``custom_model_fwd`` is used, and data after the end of an iterator needs no
    ``reset``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        refuse(self, enable_inplace_copy_batch=enable_inplace_copy_batch)
        super().__init__(
            model,
            optimizer,
            device,
            kind="own",
            plan=lambda _: plans.copy_ahead(),
            custom_model_fwd=custom_model_fwd,
        )


class TrainPipelineSparseDist(Translated[In, Out]):
    """As TorchRec's, under the plan ``sparse_dist``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        refuse(
            self,
            apply_jit=apply_jit,
            context_type=context_type,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        super().__init__(
            model,
            optimizer,
            device,
            kind="pipelined",
            plan=lambda _: _copy_later(plans.sparse_dist(), enqueue_batch_after_forward),
            custom_model_fwd=custom_model_fwd,
            pipeline_postproc=pipeline_postproc,
            execute_all_batches=execute_all_batches,
            sync_every=dmp_collection_sync_interval_batches,
        )


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: only the copy of the next batch overlaps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        context_type: type = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        refuse(
            self,
            apply_jit=apply_jit,
            context_type=context_type,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        Translated.__init__(
            self,
            model,
            optimizer,
            device,
            kind="pipelined",
            plan=lambda _: plans.copy_ahead(),
            custom_model_fwd=custom_model_fwd,
            pipeline_postproc=pipeline_postproc,
        )


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``prefetch``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        refuse(
            self,
            apply_jit=apply_jit,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        Translated.__init__(
            self,
            model,
            optimizer,
            device,
            kind="prefetch",
            plan=lambda _: plans.prefetch(),
            custom_model_fwd=custom_model_fwd,
            pipeline_postproc=pipeline_postproc,
            execute_all_batches=execute_all_batches,
        )


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``split``, which looks the next batch up as early.

    Under that plan the look-up of the next batch follows the start of its exchange of ids in any
    case, so ``embedding_lookup_after_data_dist`` has no effect; nor has ``strict``. The look-up is
    submitted on the caller's stream.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enable_inplace_copy_batch: bool = False,
        enqueue_batch_after_forward: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        refuse(
            self,
            apply_jit=apply_jit,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        if emb_lookup_stream not in ("new", "current", "data_dist"):
            raise ValueError(
                f"emb_lookup_stream is {emb_lookup_stream!r}: give 'new', 'current' or 'data_dist'"
            )
        Translated.__init__(
            self,
            model,
            optimizer,
            device,
            kind="split",
            plan=lambda tasks: _copy_later(split(tasks), enqueue_batch_after_forward),
            custom_model_fwd=custom_model_fwd,
            pipeline_postproc=pipeline_postproc,
            execute_all_batches=execute_all_batches,
        )


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: forwards only, whatever mode the model is in, and without gradients."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            apply_jit=apply_jit,
            pipeline_postproc=pipeline_postproc,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Evaluate one more batch, and return the oldest batch's output."""
        with torch.no_grad():
            return super().progress(dataloader_iter)

    def drain(self) -> list[Out]:
        """Finish the batches in flight and return their outputs, oldest first."""
        with torch.no_grad():
            return super().drain()


class TrainEvalHybridPipelineBase(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: under ``model.eval()`` a batch is evaluated, without gradients.

    Unlike there, batches in flight keep their mode: to change it, train or evaluate to the end of
    the iterator, or call ``drain``.
    """

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one more batch, or evaluate it, and return the oldest batch's output."""
        with nullcontext() if self._model.training else torch.no_grad():
            return super().progress(dataloader_iter)


def _copy_later(plan: PipelinePlan, later: bool) -> PipelinePlan:
    """The plan with the copy of a later batch after the forward, if wanted."""
    if not later:
        return plan
    order = [name for name in plan.order if name != plans.COPY]
    order.insert(order.index(plans.DENSE) + 1, plans.COPY)
    return replace(plan, order=order)
