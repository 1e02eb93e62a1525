"""TorchRec's ``TrainPipelineSemiSync``: exact up to ``start_batch``, then one batch stale.

batch        0 ... start_batch - 1      start_batch       start_batch + 1 ...
looked up    after the step before      the same          before that batch updates the tables
plan         prefetch                   semi_sync         semi_sync
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec._torchrec import DMPCollection
from swpipe.tasks.torchrec.pipelines.drop_in import semi_sync
from swpipe.tasks.torchrec.pipelines.named import In, Out, TrainPipelineSparseDist
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
from swpipe.tasks.torchrec.step.train_step import TrainStep


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class; from ``start_batch`` on, it uses the plan ``semi_sync``.

    ``strict`` has no effect: tables that the optimizer steps are always refused.
    """

    _kind = "split"
    _kind_alone = "ahead"
    _zero_grad = plans.STEP
    # TorchRec's class trains on all batches, whatever execute_all_batches is.
    _left = 0

    # Two arguments, by ``__getattr__``.
    _start_batch: int
    _stash_gradients: bool

    def reset(self) -> None:
        """Drop the batches in flight and count batches from 0 again."""
        self._changes_at = self._start_batch
        self.close()
        self._build()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, unless gradients are stashed or stale batches are in flight."""
        if self._stale and self._stash_gradients:
            raise RuntimeError(
                "the gradients of the last batch are stashed for the next batch's step, and no "
                "state_dict has them: save before start_batch, or train with stash_gradients=False"
            )
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; reads are stale from ``start_batch`` on, as before."""
        super().load_state_dict(state)
        # The next progress() changes to the stale plan again if the loaded number asks for it.
        if self._stale:
            self._changes_at = self._start_batch
            self._restart(self._build)

    def is_semi_sync(self) -> bool:
        """Return whether the next output is that of a batch from ``start_batch`` on."""
        return self._pass is not None and self._done >= self._start_batch

    def _at_stop(self) -> None:
        super()._at_stop()
        # Gradients that a failed batch has left must not be added to the next batch's.
        self.tasks.gradients.zero(self._done, trains=True)

    def _take(self) -> None:
        start_batch = self._start_batch
        interval = self._given["dmp_collection_sync_interval_batches"]
        if isinstance(self._model, DMPCollection) and interval and start_batch % interval:
            raise NotImplementedError(
                f"start_batch={start_batch} is no multiple of dmp_collection_sync_interval_batches="
                f"{interval}, which counts from there: give a multiple"
            )
        if self._stash_gradients and "_optimizer_step" in self._overrides:
            raise NotImplementedError(
                f"{type(self).__name__} overrides _optimizer_step, and stash_gradients=True steps "
                "with the gradients of the batch before, which a step of the optimizer in the "
                "override would not: leave one of the two out"
            )
        self._changes_at = start_batch

    @property
    def _stale(self) -> bool:
        """Whether the stale plan is in use, which does not change any more."""
        return self._changes_at is None

    def _change_plan(self) -> None:
        self._changes_at = None
        # With stashed gradients the stale plan has another optimizer, so the tasks are made again.
        self._restart(self._build)

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        # Made before start_batch too: it refuses tables that cannot be read stale.
        stale = semi_sync(tasks)
        return stale if self._stale else plans.prefetch(lean=bool(tasks.options.memory))

    def _step(self) -> TrainStep:
        step = super()._step()
        if not (self._stash_gradients and self._stale):
            return step
        stashing: Any = _Stashing(self._optimizer_given, self._model)
        return replace(step, optimizers=[stashing])


class _Stashing:
    """An optimizer that steps a model's parameters with the gradients of the batch before."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        self._gradients: dict[str, Tensor] = {}
        self._first = True

    def step(self) -> None:
        # Each parameter gets the gradient of the batch before, so that any optimizer can be used
        # unchanged. The first step only stores its gradients.
        for name, parameter in self._model.named_parameters():
            before = self._gradients.get(name)
            if parameter.grad is not None:
                self._gradients[name] = parameter.grad.clone()
            parameter.grad = before
        if not self._first:
            self._optimizer.step()
        self._first = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
