"""The pipelines of recsys-examples: their arguments and results, each under a ready-made plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from swpipe.pipeline import SWPipeline
from swpipe.tasks.torchrec.pipelines.drop_in import PLANS
from swpipe.tasks.torchrec.pipelines.named import Form, In, NamedPipeline, Out
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
"""What all pipelines take by keyword, with the defaults."""


class _WholeShuffle(IdentityShuffler):
    """A batch shuffler of recsys-examples, as one of ours; it does all in ``finish``."""

    def __init__(self, shuffler: Any, group: dist.ProcessGroup | None) -> None:
        self._shuffler = shuffler
        self._group = dist.group.WORLD if group is None else group

    def finish(self, batch: Any, ticket: None = None) -> Any:
        return self._shuffler.shuffle(batch, self._group)


def _shuffler(given: Any, group: dist.ProcessGroup | None) -> Shuffler | None:
    if given is None:
        return None
    if callable(getattr(given, "start", None)) and callable(getattr(given, "finish", None)):
        ours: Shuffler = given
        return ours
    if callable(getattr(given, "shuffle", None)):
        return _WholeShuffle(given, group)
    raise TypeError(
        f"batch_shuffler is a {type(given).__name__}: give one of recsys-examples, with "
        "shuffle(batch, group), or one of swpipe.tasks.torchrec, with start() and finish()"
    )


class JaggedPipeline(NamedPipeline[In, Out]):
    """What the pipelines have in common.

    Args:
        model: A model that returns (losses, output), with one loss per token.
        optimizer: Of the dense parameters.
        device: Where the batches go.
        execute_all_batches: Whether the last batches are trained on.
        apply_jit: Refused unless False.
        pipeline_postproc: No effect, as there.
        custom_model_fwd: Called with the batch instead of the model.
        batch_shuffler: One of recsys-examples, or of ``swpipe.tasks.torchrec``; None for none.
        returns: What ``progress`` returns: "tokens" for (sum of this rank's losses, tokens of all
            ranks, output), with None for the tokens in evaluation, or "reporting_loss" for ([sum of
            all losses, their number], output), as older versions do; None for that of the class.
        finalize: As ``TrainStep.finalize``; with tensor parallelism, ``finalize_model_grads``.
        watchdog: As ``TrainStep.watchdog``.
        assert_nan_loss: A loss that is NaN is an error, as with ``ASSERT_LOSS_HAS_NAN=1``.
        find, inputs, strict, random: As for ``TaskOptions``, but that inputs are found "direct".
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.

    Raises:
        NotImplementedError: ``apply_jit``.
        TypeError: A shuffler of neither kind, or another argument.
        ValueError: Tensor parallelism without ``finalize``, and others as ``SparseDistTasks``.
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

    def _take(self, given: Mapping[str, Any]) -> None:
        state = sys.modules.get("megatron.core.parallel_state")
        if state is not None and not state.model_parallel_is_initialized():
            state = None
        self._group = None if state is None else state.get_data_parallel_group()
        self._shuffler = _shuffler(given["batch_shuffler"], self._group)
        splits = state is not None and state.get_tensor_model_parallel_world_size() > 1
        if splits and given["finalize"] is None and any(map(is_megatrons, self._model.modules())):
            raise ValueError(
                "Megatron splits layers over ranks here, and some of their gradients are reduced "
                "by finalize_model_grads alone: give the pipeline "
                "finalize=lambda model: finalize_model_grads([model.module], None)"
            )

    def _step(self) -> TrainStep:
        given = self._given
        returns = given["returns"] or self._reports
        per_token = PerToken(returns, self._group, given["assert_nan_loss"])
        return replace(
            super()._step(), per_token=per_token, finalize=given["finalize"],
            watchdog=given["watchdog"],
        )  # fmt: skip

    def _options(self, kind: Kind) -> TaskOptions:
        given = {name: self._given[name] for name in ("find", "strict", "random")}
        inputs = self._given["inputs"] or {}
        return TaskOptions(forward=kind, shuffler=self._shuffler, inputs=inputs, **given)

    def _copy_batch_to_gpu_and_shuffle(self, dataloader_iter: Iterator[In]) -> Any:
        """The next batch, for trainers that evaluate by themselves; None at the end; collective."""
        batch: Any = next(dataloader_iter, None)
        if batch is None:
            return None
        ticket = None if self._shuffler is None else self._shuffler.start(batch)
        batch = batch.to(device=self._given["device"], non_blocking=True)
        return batch if self._shuffler is None else self._shuffler.finish(batch, ticket)


class TrainPipelineFactory(PipelineFactory):
    """The factory of recsys-examples, with its names: those of the classes here."""


def register_train_pipeline(name: str) -> Any:
    """Decorator: ``TrainPipelineFactory.register`` with the decorated class."""
    return TrainPipelineFactory.register(name)


def _form(name: str, kind: Kind, left: int) -> Form:
    """The plan of one name of ``PipelineFactory``, and as many batches left as there."""
    return Form(plan=PLANS[name], kind=kind, left=left)


@register_train_pipeline("jagged_none")
class JaggedMegatronTrainNonePipeline(JaggedPipeline[In, Out]):
    """``jagged_none``: no overlap; the model is not rewritten and may be called at any time."""

    form = _form("jagged_sw_serial", "own", 1)

    arguments = arguments(
        {"batch_shuffler": None},
        {"execute_all_batches": True, "custom_model_fwd": None, **KEYWORDS},
    )


@register_train_pipeline("jagged_sw_serial")
class SWSerialTrainPipeline(JaggedMegatronTrainNonePipeline[In, Out]):
    """``jagged_sw_serial``: the eleven tasks one after another.

    As there, it reports ([sum of all losses, their number], output) unless ``returns`` says else.
    """

    form = _form("jagged_sw_serial", "split", 0)
    _reports = "reporting_loss"

    @property
    def _sw_pipeline(self) -> SWPipeline[Any]:
        return self.pipe

    @property
    def _pipeline_ctx(self) -> Any:
        """The context of the batch that ran last, of TorchRec's type; None before the first."""
        forwards = self.tasks.rewrite.forwards
        return forwards[0]._context if forwards else None

    def _build_pipeline(self) -> SWPipeline[Any]:
        """Make the pipeline of the eleven tasks anew, with no batch in flight, and return it."""
        self.pipe.check_idle("making the pipeline anew")
        self._restart(self._start)
        return self.pipe

    def _ensure_initialized(self, batch: In) -> None:
        """Replace the forwards of the sharded modules, with a batch on the device; once."""
        if self.tasks.rewrite.report is None:
            self.tasks.rewrite.prepare(batch)


@register_train_pipeline("jagged_sparse_dist")
class JaggedMegatronTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_sparse_dist``: copy and exchange of ids overlap."""

    form = _form("jagged_sparse_dist", "pipelined", 1)


@register_train_pipeline("jagged_prefetch_sparse_dist")
class JaggedMegatronPrefetchTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_prefetch_sparse_dist``: the prefetch of caches overlaps too."""

    form = _form("jagged_prefetch_sparse_dist", "prefetch", 2)


@register_train_pipeline("jagged_split_sparse_dist")
class JaggedMegatronSplitTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_split_sparse_dist``, which is not in recsys-examples: the plan ``split``."""

    form = _form("jagged_split_sparse_dist", "split", 2)


@register_train_pipeline("jagged_semi_sync_sparse_dist")
class JaggedMegatronSemiSyncTrainPipelineSparseDist(JaggedPipeline[In, Out]):
    """``jagged_semi_sync_sparse_dist``, which is not there either: reads are one batch stale."""

    form = _form("jagged_semi_sync_sparse_dist", "split", 2)
