"""TorchRec's ``TrainPipelineSemiSync``: exact up to ``start_batch``, then one batch stale.

batch        0 ... start_batch - 1      start_batch       start_batch + 1 ...
looked up    after the step before      the same          before that batch updates the tables
plan         prefetch                   semi_sync         semi_sync
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swpipe.core.plan import PipelinePlan
from swpipe.plans import sparse_dist as plans
from swpipe.tasks.sparse_dist._torchrec import DMPCollection
from swpipe.tasks.sparse_dist.drop_in import semi_sync
from swpipe.tasks.sparse_dist.task_set import SparseDistTasks
from swpipe.tasks.torchrec_pipelines.passes import Pass
from swpipe.tasks.torchrec_pipelines.refused import refuse
from swpipe.tasks.torchrec_pipelines.sparse_dist import TrainPipelineSparseDist
from swpipe.tasks.torchrec_pipelines.translated import In, Out, Translated


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's; from ``start_batch`` on, under the plan ``semi_sync``.

    ``strict`` has no effect: tables that the optimizer steps are always refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
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
        self._check_interval(model, start_batch, dmp_collection_sync_interval_batches)
        self._start_batch = start_batch
        self._stash = _Stash() if stash_gradients else None
        self._stale = False
        # TorchRec's trains on all batches here, whatever execute_all_batches says.
        Translated.__init__(
            self,
            model,
            optimizer,
            device,
            kind="split",
            plan=self._plan_now,
            custom_model_fwd=custom_model_fwd,
            pipeline_postproc=pipeline_postproc,
            sync_every=dmp_collection_sync_interval_batches,
        )

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """As for the other pipelines."""
        if not self._stale and self._done >= self._start_batch:
            self._go_stale()
        try:
            return super().progress(dataloader_iter)
        except BaseException:
            if not self.drop_in.pipe.in_flight:
                self._pass = None  # a failure dropped batches that its limit has counted
            raise

    def reset(self) -> None:
        """Drop the batches in flight, and count from 0 again."""
        self._go_exact()
        super().reset()

    def state_dict(self) -> dict[str, int]:
        """As for the other pipelines; from ``start_batch`` on, only after ``drain``.

        Raises:
            RuntimeError: With batches in flight from ``start_batch`` on, or gradients stashed.
        """
        if self._stash is not None and self._stash.begun:
            raise RuntimeError(
                "the gradients of the last batch are stashed for the next batch's step, and no "
                "state_dict has them: save before start_batch, or train with stash_gradients=False"
            )
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """As for the other pipelines; stale from ``start_batch`` on, as the run that saved."""
        super().load_state_dict(state)
        if self._stale:
            self._go_exact()
            self._restart(partial(self._start, self._plan_now))

    def is_semi_sync(self) -> bool:
        """Whether the next output is that of a batch from ``start_batch`` on."""
        return self._pass is not None and self._done >= self._start_batch

    @staticmethod
    def _check_interval(model: nn.Module, start_batch: int, interval: int | None) -> None:
        if isinstance(model, DMPCollection) and interval and start_batch % interval:
            raise NotImplementedError(
                f"start_batch={start_batch} is no multiple of dmp_collection_sync_interval_batches="
                f"{interval}, which counts from there: give a multiple"
            )

    def _go_stale(self) -> None:
        """Change the plan: the last exact batch is done, and none is in flight."""
        self._stale = True
        if self._stash is not None:
            self._stash.begin(self._model)
        self._restart(partial(self._start, self._plan_now))

    def _go_exact(self) -> None:
        self._stale = False
        if self._stash is not None:
            self._stash.clear()

    @property
    def _done(self) -> int:
        """How many batches were returned, or dropped by a failure."""
        return self.drop_in.pipe.state_dict(check=False)["next_iteration"]

    def _plan_now(self, tasks: SparseDistTasks) -> PipelinePlan:
        stale = semi_sync(tasks)  # refuses tables that cannot be read stale, also before the start
        return stale if self._stale else plans.prefetch()

    def _new_pass(self, source: Iterator[Any]) -> Pass:
        return Pass(source, limit=None if self._stale else self._start_batch - self._done)

    def _optimizers(self) -> Sequence[Any]:
        if self._stash is None:
            return super()._optimizers()
        return [_Stashing(self._optimizer_given, self._stash)]


class _Stash:
    """Dense gradients that wait for the next batch's step."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._gradients: dict[str, Tensor] = {}
        self._first = True

    @property
    def begun(self) -> bool:
        """Whether gradients are exchanged by now."""
        return self._model is not None

    def begin(self, model: nn.Module) -> None:
        self._model = model

    def clear(self) -> None:
        self._model, self._gradients, self._first = None, {}, True

    def swap(self) -> bool:
        """Exchange the gradients for the batch's before; whether there is any to step with."""
        if self._model is None:
            return True
        for name, parameter in self._model.named_parameters():
            before = self._gradients.get(name)
            if parameter.grad is not None:
                self._gradients[name] = parameter.grad.clone()
            parameter.grad = before
        first, self._first = self._first, False
        return not first


class _Stashing:
    """An optimizer that steps with the gradients of the batch before."""

    def __init__(self, optimizer: torch.optim.Optimizer, stash: _Stash) -> None:
        self._optimizer = optimizer
        self._stash = stash

    def step(self) -> None:
        if self._stash.swap():
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
