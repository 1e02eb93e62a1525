"""The pipelines of recsys-examples: their arguments and results, each under a ready-made plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from swpipe.pipeline import SWPipeline, check_idle
from swpipe.tasks.torchrec.pipelines.drop_in import PLANS
from swpipe.tasks.torchrec.pipelines.named import In, NamedPipeline, Out
from swpipe.tasks.torchrec.pipelines.pipeline_factory import PipelineFactory
from swpipe.tasks.torchrec.pipelines.refused_arguments import arguments
from swpipe.tasks.torchrec.rewriting.forwards import Kind
from swpipe.tasks.torchrec.shuffling.shuffle import IdentityShuffler, Shuffler
from swpipe.tasks.torchrec.step.grad_reduction import is_megatrons
from swpipe.tasks.torchrec.step.per_token import PerToken, Returns
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.train_step import TrainStep

KEYWORDS = {
    "returns": None,
    "finalize": None,
    "watchdog": None,
    "assert_nan_loss": False,
    "find": "direct",
    "inputs": None,
    "strict": True,
    "random": False,
}
"""The keyword arguments of all pipelines, with their defaults."""


class _WholeShuffle(IdentityShuffler):
    """A ``Shuffler`` around one of recsys-examples, which has one method, ``shuffle``.

    ``finish`` calls that method, and ``start`` does nothing.
    """

    def __init__(self, shuffler: Any, group: dist.ProcessGroup | None) -> None:
        self._shuffler = shuffler
        # Shufflers of recsys-examples take a group, and not None.
        self._group = dist.group.WORLD if group is None else group

    def finish(self, batch: Any, ticket: None = None) -> Any:
        return self._shuffler.shuffle(batch, self._group)


def _shuffler(given: Any, group: dist.ProcessGroup | None) -> Shuffler | None:
    if given is None:
        return None
    # Recognised by its methods, since recsys-examples is not imported.
    if hasattr(given, "start") and hasattr(given, "finish"):
        ours: Shuffler = given
        return ours
    if hasattr(given, "shuffle"):
        return _WholeShuffle(given, group)
    raise TypeError(
        f"batch_shuffler is a {type(given).__name__}: give one of recsys-examples, with "
        "shuffle(batch, group), or one of swpipe.tasks.torchrec, with start() and finish()"
    )


class JaggedPipeline(NamedPipeline[In, Out]):
    """Base class of the pipelines of recsys-examples.

    Args:
        model: A model that returns (losses, output), with one loss per token.
        optimizer: The optimizer of the dense parameters.
        device: The device of the batches.
        execute_all_batches: Whether the last batches are trained on.
        apply_jit: Refused unless False.
        pipeline_postproc: Accepted for compatibility; it has no effect.
        custom_model_fwd: Called with the batch instead of the model.
        batch_shuffler: A shuffler of recsys-examples or of ``swpipe.tasks.torchrec``; None for
            none.
        returns: The values that ``progress`` returns. "tokens": (sum of this rank's losses, tokens
            of all ranks, output), with None for the tokens in evaluation. "reporting_loss": ([sum
            of all losses, their number], output), as in older versions. None: the default of the
            class.
        finalize: As ``TrainStep.finalize``; with tensor parallelism, ``finalize_model_grads``.
        watchdog: As ``TrainStep.watchdog``.
        assert_nan_loss: Whether a loss that is NaN is an error, as with ``ASSERT_LOSS_HAS_NAN=1``.
        find, inputs, strict, random: As for ``TaskOptions``, except that ``find`` defaults to
        "direct".
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.

    Raises:
        NotImplementedError: ``apply_jit`` is given.
        TypeError: The shuffler is of neither kind, or another argument is unknown.
        ValueError: Tensor parallelism without ``finalize``, and the errors of ``SparseDistTasks``.
    """

    _reports: ClassVar[Returns] = "tokens"

    arguments = arguments(
        {
            "execute_all_batches": True,
            "apply_jit": False,
            "pipeline_postproc": True,
            "custom_model_fwd": None,
            "batch_shuffler": None,
        },
        KEYWORDS,
    )

    def _take(self) -> None:
        # Megatron is not imported by swpipe. If the user's script has not imported it either, there
        # are no parallel groups.
        state = sys.modules.get("megatron.core.parallel_state")
        if state is not None and not state.model_parallel_is_initialized():
            state = None
        self._group = None if state is None else state.get_data_parallel_group()
        self._shuffler = _shuffler(self._given["batch_shuffler"], self._group)
        # With tensor parallelism, finish_grad_sync() of Megatron's wrapper does not reduce all
        # gradients: finalize_model_grads reduces the others.
        splits = state is not None and state.get_tensor_model_parallel_world_size() > 1
        finalizes = self._given["finalize"] is not None
        if splits and not finalizes and any(map(is_megatrons, self._model.modules())):
            raise ValueError(
                "Megatron splits layers over ranks here, and some of their gradients are reduced "
                "by finalize_model_grads alone: give the pipeline "
                "finalize=lambda model: finalize_model_grads([model.module], None)"
            )

    # Losses per token, and what `progress` reports of them, distinguish these pipelines from
    # TorchRec's.
    def _step(self) -> TrainStep:
        given = self._given
        returns = given["returns"] or self._reports
        per_token = PerToken(returns, self._group, given["assert_nan_loss"])
        return replace(
            super()._step(), per_token=per_token, finalize=given["finalize"],
            watchdog=given["watchdog"],
        )  # fmt: skip

    def _options(self, kind: Kind) -> TaskOptions:
        # Unlike in NamedPipeline, the user chooses how inputs are found and whether a module that
        # cannot be pipelined is an error; KEYWORDS has the defaults.
        given = {name: self._given[name] for name in ("find", "strict", "random")}
        inputs = self._given["inputs"] or {}
        return TaskOptions(forward=kind, shuffler=self._shuffler, inputs=inputs, **given)

    def _copy_batch_to_gpu_and_shuffle(self, dataloader_iter: Iterator[In]) -> Any:
        """Return the next batch for trainers that evaluate by themselves; a collective.

        Returns None at the end of the data.
        """
        batch: Any = next(dataloader_iter, None)
        if batch is None:
            return None
        shuffler = self._shuffler or IdentityShuffler()
        ticket = shuffler.start(batch)
        batch = batch.to(device=self._device, non_blocking=True)
        return shuffler.finish(batch, ticket)


class TrainPipelineFactory(PipelineFactory):
    """The factory of recsys-examples, with the names of the classes here."""


def register_train_pipeline(name: str) -> Any:
    """Return a decorator that registers a class under a name with ``TrainPipelineFactory``."""
    return TrainPipelineFactory.register(name)


@register_train_pipeline("jagged_none")
class JaggedMegatronTrainNonePipeline(JaggedPipeline[In, Out]):
    """``jagged_none``: no overlap; the model is not rewritten, and may be called at any time."""

    _plan_for = staticmethod(PLANS["jagged_sw_serial"])
    _kind: ClassVar[Kind] = "own"
    _left = 1

    arguments = arguments(
        {"batch_shuffler": None},
        {"execute_all_batches": True, "custom_model_fwd": None, **KEYWORDS},
    )


@register_train_pipeline("jagged_sw_serial")
class SWSerialTrainPipeline(JaggedMegatronTrainNonePipeline[In, Out]):
    """``jagged_sw_serial``: the eleven tasks one after another.

    As in recsys-examples, it returns ([sum of all losses, their number], output) by default.
    """

    _kind = "split"
    _left = 0
    _reports = "reporting_loss"

    # The members below are read or called by scripts of recsys-examples, by these private names.
    @property
    def _sw_pipeline(self) -> SWPipeline[Any]:
        return self.pipe

    @property
    def _pipeline_ctx(self) -> Any:
        """The context of the batch that ran last, of TorchRec's type; None before any batch."""
        forwards = self.tasks.rewrite.forwards
        return forwards[0]._context if forwards else None

    def _build_pipeline(self) -> SWPipeline[Any]:
        """Rebuild the pipeline of the eleven tasks, with no batch in flight, and return it."""
        check_idle(self.pipe, "making the pipeline anew")
        self._restart(self._start)
        return self.pipe

    def _ensure_initialized(self, batch: In) -> None:
        """Replace the forwards of the sharded modules once, with a batch on the device."""
        if self.tasks.rewrite.report is None:
            self.tasks.rewrite.prepare(batch)


@register_train_pipeline("jagged_sparse_dist")
class JaggedMegatronTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_sparse_dist``: the copy and the exchange of ids overlap."""

    _left = 1


@register_train_pipeline("jagged_prefetch_sparse_dist")
class JaggedMegatronPrefetchTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_prefetch_sparse_dist``: the prefetch of caches overlaps too."""

    _plan_for = staticmethod(PLANS["jagged_prefetch_sparse_dist"])
    _kind = "prefetch"


@register_train_pipeline("jagged_split_sparse_dist")
class JaggedMegatronSplitTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_split_sparse_dist``, which recsys-examples does not have: the plan ``split``."""

    _plan_for = staticmethod(PLANS["jagged_split_sparse_dist"])
    _kind = "split"


@register_train_pipeline("jagged_semi_sync_sparse_dist")
class JaggedMegatronSemiSyncTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_semi_sync_sparse_dist``, which recsys-examples does not have: one batch stale."""

    _plan_for = staticmethod(PLANS["jagged_semi_sync_sparse_dist"])
    _kind = "split"
