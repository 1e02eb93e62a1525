"""TorchRec's pipelines whose numbers are those of a plain loop, each under a ready-made plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec.drop_in import split
from swpipe.tasks.torchrec.task_set import SparseDistTasks
from swpipe.tasks.torchrec.translated import In, Out, Translated


class TrainPipelineBase(Translated[In, Out]):
    """As TorchRec's: the next batch is copied during this one's step. Any model, sharded or not.

    Unlike there, ``custom_model_fwd`` is used, and data after the end of an iterator needs no
    ``reset``.
    """

    _kind = "own"

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return plans.copy_ahead(lean=bool(tasks.memory))


class TrainPipelineSparseDist(Translated[In, Out]):
    """As TorchRec's, under the plan ``sparse_dist``."""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._copy_later(plans.sparse_dist(lean=bool(tasks.memory)))

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
        return plans.copy_ahead(lean=bool(tasks.memory))


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``prefetch``."""

    _kind = "prefetch"

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return plans.prefetch(lean=bool(tasks.memory))


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``split``.

    Unless ``embedding_lookup_after_data_dist=True``, a look-up takes the learning rates of the call
    before, as there. ``strict`` has no effect. The look-up is submitted on the caller's stream.
    """

    _kind, _kind_alone = "split", "ahead"

    def _take(self, given: Mapping[str, Any]) -> None:
        if not given.get("embedding_lookup_after_data_dist"):
            self._zero_grad = plans.DENSE_BACK  # after the look-up
        if (stream := given["emb_lookup_stream"]) not in ("new", "current", "data_dist"):
            raise ValueError(
                f"emb_lookup_stream is {stream!r}: give 'new', 'current' or 'data_dist'"
            )

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        late = self._given.get("embedding_lookup_after_data_dist")
        return self._copy_later(_late(tasks) if late else split(tasks))


def _late(tasks: SparseDistTasks) -> PipelinePlan:
    return plans.split(lean=bool(tasks.memory))


class TrainPipelineSparseDistT(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: batches are copied on a thread of their own."""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        plan = plans.sparse_dist(lean=bool(tasks.memory))
        copied = replace(plan.schedule[plans.COPY], thread_group="copy")
        return replace(plan, schedule={**plan.schedule, plans.COPY: copied})


class _Evaluates(Translated[In, Out]):
    """Forwards only, whatever mode the model is in, and without gradients."""

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Evaluate one more batch, and return the oldest batch's output."""
        with torch.no_grad():
            return super().progress(dataloader_iter)

    def drain(self) -> list[Out]:
        """Finish the batches in flight and return their outputs, oldest first."""
        with torch.no_grad():
            return super().drain()


class EvalPipelineSparseDist(_Evaluates[In, Out], TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: forwards only, whatever mode the model is in, and without gradients."""


class EvalPipelineFusedSparseDist(_Evaluates[In, Out], TrainPipelineFusedSparseDist[In, Out]):
    """As TorchRec's: forwards only, whatever mode the model is in, and without gradients.

    With ``enable_embedding_lookup_prefetch=True`` the next batch is looked up a call ahead, where
    no optimizer of the pipeline has the tables.
    """

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        ahead = self._given.get("enable_embedding_lookup_prefetch")
        return self._copy_later(split(tasks) if ahead else _late(tasks))


class TrainEvalHybridPipelineBase(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: under ``model.eval()`` a batch is evaluated, without gradients.

    Unlike there, batches in flight keep their mode: to change it, train or evaluate to the end of
    the iterator, or call ``drain``.
    """

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one more batch, or evaluate it, and return the oldest batch's output."""
        with nullcontext() if self._model.training else torch.no_grad():
            return super().progress(dataloader_iter)
