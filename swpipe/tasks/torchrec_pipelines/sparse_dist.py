"""TorchRec's pipelines whose numbers are those of a plain loop, each under a ready-made plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.plans import sparse_dist as plans
from swpipe.tasks.sparse_dist.drop_in import split
from swpipe.tasks.sparse_dist.task_set import SparseDistTasks
from swpipe.tasks.torchrec_pipelines.translated import In, Out, Translated


class TrainPipelineBase(Translated[In, Out]):
    """As TorchRec's: the next batch is copied during this one's step. Any model, sharded or not.

    Unlike there, ``custom_model_fwd`` is used, and data after the end of an iterator needs no
    ``reset``.
    """

    _kind = "own"

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return plans.copy_ahead()


class TrainPipelineSparseDist(Translated[In, Out]):
    """As TorchRec's, under the plan ``sparse_dist``."""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._copy_later(plans.sparse_dist())

    def _copy_later(self, plan: PipelinePlan) -> PipelinePlan:
        """The plan with the copy of a later batch after the forward, if wanted."""
        if not self._given.get("enqueue_batch_after_forward"):
            return plan
        order = [name for name in plan.order if name != plans.COPY]
        order.insert(order.index(plans.DENSE) + 1, plans.COPY)
        return replace(plan, order=order)


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: only the copy of the next batch overlaps."""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return plans.copy_ahead()


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``prefetch``."""

    _kind = "prefetch"

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return plans.prefetch()


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``split``, which looks the next batch up as early.

    Under that plan the look-up of the next batch follows the start of its exchange of ids in any
    case, so ``embedding_lookup_after_data_dist`` has no effect; nor has ``strict``. The look-up is
    submitted on the caller's stream.
    """

    _kind = "split"

    def _take(self, given: Mapping[str, Any]) -> None:
        if (stream := given["emb_lookup_stream"]) not in ("new", "current", "data_dist"):
            raise ValueError(
                f"emb_lookup_stream is {stream!r}: give 'new', 'current' or 'data_dist'"
            )

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._copy_later(split(tasks))


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: forwards only, whatever mode the model is in, and without gradients."""

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
