"""The pipelines of recsys-examples: their arguments and results, each under a ready-made plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from swpipe.core.messages import listed
from swpipe.pipeline import SWPipeline
from swpipe.tasks.torchrec.drop_in import PLANS
from swpipe.tasks.torchrec.forwards import Kind
from swpipe.tasks.torchrec.grad_reduction import is_megatrons
from swpipe.tasks.torchrec.named import Form, In, NamedPipeline, Out
from swpipe.tasks.torchrec.pipeline_factory import Maker, PipelineFactory
from swpipe.tasks.torchrec.recsys_examples.reported_losses import (
    JaggedTasks,
    Returns,
    data_parallel_group,
    has_tensor_parallel,
)
from swpipe.tasks.torchrec.shuffle import Shuffler
from swpipe.tasks.torchrec.step import TrainStep
from swpipe.tasks.torchrec.task_set import SparseDistTasks

Finalize: TypeAlias = Callable[[nn.Module], object]

_OPTIONS = {"finalize", "returns", "run_ahead"}


class _WholeShuffle:
    """A batch shuffler of recsys-examples, as one of ours; it does all in ``finish``."""

    def __init__(self, shuffler: Any, group: dist.ProcessGroup | None) -> None:
        self._shuffler = shuffler
        self._group = dist.group.WORLD if group is None else group

    def start(self, batch: Any) -> None:
        """Do nothing: it needs the batch on the device."""

    def finish(self, batch: Any, ticket: None) -> Any:
        """The batch that this rank trains on."""
        return self._shuffler.shuffle(batch, self._group)

    def close(self) -> None:
        """Do nothing: the user has made it."""


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
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.
        options: Of ``SparseDistTasks``: ``find`` ("direct" by default), ``inputs``, ``strict`` and
            ``random``.

    Raises:
        NotImplementedError: ``apply_jit``.
        TypeError: A shuffler of neither kind, or another argument.
        ValueError: Tensor parallelism without ``finalize``, and others as ``SparseDistTasks``.
    """

    _tasks_class: ClassVar[type[JaggedTasks]] = JaggedTasks
    _reports: ClassVar[Returns] = "tokens"
    _takes: ClassVar[Set[str]] = {"find", "inputs", "random", "strict"}

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        batch_shuffler: Any = None,
        *,
        returns: Returns | None = None,
        finalize: Finalize | None = None,
        run_ahead: int | None = None,
        **options: Any,
    ) -> None:
        self._group = data_parallel_group()
        self._shuffler = _shuffler(batch_shuffler, self._group)
        self._returns = self._reports if returns is None else returns
        self._finalize = finalize
        if unknown := options.keys() - self._takes:
            raise TypeError(
                f"{type(self).__name__}() got an unexpected keyword argument "
                f"{listed(sorted(map(repr, unknown)))}: besides those of recsys-examples it takes "
                f"{listed(sorted(self._takes | _OPTIONS))}"
            )
        self._options: dict[str, Any] = {"find": "direct", **options}
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches=execute_all_batches,
            apply_jit=apply_jit,
            custom_model_fwd=custom_model_fwd,
            run_ahead=run_ahead,
        )

    def _tasks_for(self, step: TrainStep, kind: Kind) -> SparseDistTasks:
        if (
            self._finalize is None
            and has_tensor_parallel()
            and any(map(is_megatrons, self._model.modules()))
        ):
            raise ValueError(
                "Megatron splits layers over ranks here, and some of their gradients are reduced "
                "by finalize_model_grads alone: give the pipeline "
                "finalize=lambda model: finalize_model_grads([model.module], None)"
            )
        return self._tasks_class(
            self._model,
            replace(step, finalize=self._finalize),
            returns=self._returns,
            group=self._group,
            device=self._given["device"],
            forward=kind,
            shuffler=self._shuffler,
            **self._options,
        )

    def _copy_batch_to_gpu_and_shuffle(self, dataloader_iter: Iterator[In]) -> Any:
        """The next batch as the pipeline would train on it; None at the end of the data.

        The trainers of recsys-examples evaluate such batches themselves. A collective.
        """
        batch: Any = next(dataloader_iter, None)
        if batch is None:
            return None
        ticket = None if self._shuffler is None else self._shuffler.start(batch)
        batch = batch.to(device=self._given["device"], non_blocking=True)
        return batch if self._shuffler is None else self._shuffler.finish(batch, ticket)


class TrainPipelineFactory(PipelineFactory):
    """The factory of recsys-examples, with its names: those of the classes here."""


def register_train_pipeline(name: str) -> Callable[[Maker], Maker]:
    """Decorator: ``TrainPipelineFactory.register`` with the decorated class."""

    def register(pipeline_class: Maker) -> Maker:
        TrainPipelineFactory.register(name, pipeline_class)
        return pipeline_class

    return register


def _form(name: str, kind: Kind, left: int) -> Form:
    """The plan of one name of ``PipelineFactory``, and as many batches left as there."""
    return Form(plan=PLANS[name], kind=kind, left=left)


@register_train_pipeline("jagged_none")
class JaggedMegatronTrainNonePipeline(JaggedPipeline[In, Out]):
    """``jagged_none``: no overlap; the model is not rewritten and may be called at any time."""

    form = _form("jagged_sw_serial", "own", 1)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        batch_shuffler: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, device, batch_shuffler=batch_shuffler, **options)


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
