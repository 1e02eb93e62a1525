"""TorchRec's pipelines by their names, each a row of data on one class."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec._torchrec import torchrec_class, torchrec_pipelines
from swpipe.tasks.torchrec.embedding_tables.released import MemoryOptions
from swpipe.tasks.torchrec.pipelines.drop_in import (
    PLANS,
    Pass,
    PlanFor,
    SparseDistPipeline,
    lean,
    split,
)
from swpipe.tasks.torchrec.pipelines.hooks import HOOKS, overridden, refuse_overrides
from swpipe.tasks.torchrec.pipelines.refused_arguments import bound, no_internal, signature_of
from swpipe.tasks.torchrec.rewriting.forwards import Kind, SparseDistContext
from swpipe.tasks.torchrec.rewriting.inputs import sharded_modules, unwrapped
from swpipe.tasks.torchrec.step.grad_reduction import ddp_modules, warn_of_rounding
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
from swpipe.tasks.torchrec.step.train_step import TrainStep

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What one of TorchRec's classes is here.

    Attributes:
        plan: Makes the plan for the tasks; a class with arguments for it makes its own.
        kind: How the sharded modules are called.
        alone: The same on one rank, where it is another.
        left: How many batches ``execute_all_batches=False`` leaves at the end of the data.
        zero_grad: The task in which TorchRec's class calls the optimizer's ``zero_grad``.
        without_grad: When batches are run without gradients: "always", under "eval" mode, "never".
        copies_later: Whether there is ``enqueue_batch_after_forward``.
        copies_apart: Whether batches are copied on a thread of their own.
    """

    plan: PlanFor = PLANS["jagged_sparse_dist"]
    kind: Kind = "pipelined"
    alone: Kind | None = None
    left: int = 2
    zero_grad: str | None = plans.EMBED
    without_grad: Literal["always", "eval", "never"] = "never"
    copies_later: bool = False
    copies_apart: bool = False


class NamedPipeline(SparseDistPipeline, torchrec_pipelines.TrainPipeline, Generic[In, Out]):  # type: ignore[misc]
    """A pipeline of TorchRec's, with its methods and arguments.

    A class here has the name of the class of TorchRec's that it stands for, and takes the arguments
    of that class. A subclass may override ``progress`` and the steps in ``hooks``; an override of
    another method of TorchRec's is refused. Two more arguments are keywords: ``run_ahead``, as for
    ``PipelinePlan``, and ``pipeline_forward``: all sharded modules are looked up before the model
    runs, and their exchanges overlap each other and the dense part. On one rank, where there is
    no exchange, it has no effect.

    Replicas of a ``DMPCollection`` are averaged also by those of TorchRec's pipelines that have no
    argument for it, which never do so there. Modules that hold parameters are not run ahead by
    ``pipeline_postproc``.

    What scripts read of TorchRec's pipelines is there: ``_model``, ``_optimizer``, ``_model_fwd``,
    ``_pipelined_modules``, ``_pipelined_postprocs``, and each argument after an underscore, such as
    ``_device``.
    """

    __signature__: ClassVar[inspect.Signature | None]
    arguments: ClassVar[inspect.Signature | None] = None  # None for those of TorchRec's class

    _original: ClassVar[type]  # the class of TorchRec's
    form: ClassVar[Form]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("swpipe."):
            theirs = torchrec_class(cls.__name__)
            cls._original = theirs or torchrec_pipelines.TrainPipelineSparseDist
            if theirs is not None:
                theirs.register(cls)  # for isinstance()
        else:
            refuse_overrides(cls, cls._original)
        own = cls.__init__ is not NamedPipeline.__init__
        cls.__signature__ = None if own else cls.arguments or signature_of(cls._original)

    # For overrides of _next_batch, which keep and read these as in TorchRec's classes.
    _dataloader_iter: Iterator[In] | None = None
    _dataloader_exhausted = False
    _data_iter_stopped = False

    _copies: list[Any] | None = None  # what enqueue_batch has copied, while H2DAndShuffle calls it

    def __init__(
        self,
        *args: Any,
        run_ahead: int | None = None,
        pipeline_forward: bool = False,
        **kwargs: Any,
    ) -> None:
        torchrec_pipelines.TrainPipeline.__init__(self)
        self._run_ahead = run_ahead
        self._splits_forward = pipeline_forward
        self._overrides = overridden(type(self), NamedPipeline)
        self._fills = "fill_pipeline" in self._overrides
        if "_next_batch" in self._overrides:
            self.batches: deque[In] = deque()
            self._pull = self._pulled
        ours = self.arguments
        signature = ours or signature_of(self._original)
        self._given = given = bound(self, signature, args, kwargs, ours=ours is not None)
        self._model: nn.Module = given["model"]
        self._optimizer_given: torch.optim.Optimizer = given["optimizer"]
        self._keep_back = 0 if given.get("execute_all_batches", True) else self.form.left
        self._take(given)
        self._build()

    def _take(self, given: Mapping[str, Any]) -> None:
        """Take the arguments that only this class has, before the model is rewritten."""

    # ----------------------------------------------------------------------- TorchRec's methods

    if TYPE_CHECKING:

        def progress(self, dataloader_iter: Iterator[In]) -> Out: ...

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """Return the next batch; None at the end of the data.

        An override may leave batches out, add some, or let the ranks agree on the end. It finds the
        batches in flight in ``batches``, the oldest first, as they were pulled.
        """
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter = dataloader_iter
            self._dataloader_exhausted = False
        batch = None if self._dataloader_exhausted else next(dataloader_iter, None)
        self._dataloader_exhausted = batch is None
        return batch

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Copy one batch to the device; return whether there was one.

        The pipeline calls it for each batch, on the stream for copies, with an iterator that has
        this batch alone.

        Raises:
            RuntimeError: It is called by anything else: the pipeline pulls the batches itself.
        """
        if self._copies is None:
            raise RuntimeError(
                "enqueue_batch() was called outside of the task that copies a batch. The plan says "
                "how many batches are in flight: give a plan with another pipeline_depth"
            )
        batch, _ = self.copy_batch_to_gpu(dataloader_iter)
        if batch is not None:
            self._copies.append(batch)
        return batch is not None

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, None]:
        """Return the next batch on the device, without a context; None at the end of the data.

        ``enqueue_batch`` calls an override for each batch, with an iterator that has this batch
        alone.
        """
        batch: Any = next(dataloader_iter, None)
        return None if batch is None else self.tasks.to_device(batch), None

    def start_sparse_data_dist(self, batch: In | None, context: SparseDistContext) -> None:
        """Start the exchange of the sizes of a batch's ids."""
        if batch is not None:
            self.tasks.rewrite.start(batch, context)

    def wait_sparse_data_dist(self, context: SparseDistContext) -> None:
        """Wait for the sizes; start the exchange of ids."""
        context.wait_for_sizes()

    def _backward(self, losses: Any) -> None:
        """Run the backward of the losses that the model returned.

        With a split forward it ends at the embeddings; ``EmbBackward`` goes on.
        """
        step = self.tasks.step
        step.backward(step.total(losses))

    def _optimizer_step(self) -> None:
        """Update the parameters."""
        self.tasks.step.update()

    def dequeue_batch(self) -> None:
        """Forget the oldest batch, on which all tasks have run."""
        batches = vars(self).get("batches")
        if batches:
            batches.popleft()

    def reset(self) -> None:
        """Drop the batches in flight. On several ranks, call it on all after the same step."""
        self.close()
        self._start()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Undo ``detach``, as ``progress`` does; or take another model, with no batch in flight."""
        if model is not None and model is not self._model:
            self.pipe.check_idle("taking another model")
            self._model = model
            self._restart(self._build)
        super().attach()

    def register_backward_hook(self, site: Any, work: Any) -> None:
        """Refused: work inside backward would escape the plan."""
        raise NotImplementedError(
            f"register_backward_hook({site!r}): work inside backward is unknown to the plan, which "
            "could then overlap what must not be: use TrainStep.finalize or a task of your own"
        )

    def state_dict(self) -> dict[str, Any]:
        """As ``SparseDistPipeline.state_dict``.

        ``next_iteration`` counts from 0 again after ``reset``, and ``in_flight`` has the batches
        that ``execute_all_batches=False`` keeps back.
        """
        optimizer: Any = self._optimizer_given
        every = _batches_per_step(optimizer)
        if every > 1 and (rest := optimizer._current_step % every):
            raise RuntimeError(
                f"gradients of {rest} of {every} batches wait for their step, and no state_dict "
                "has them: save after a step of TorchRec's GradientAccumulationWrapper"
            )
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        every = _batches_per_step(self._optimizer_given)
        if every > 1 and state["next_iteration"]:
            warn_of_rounding(ddp_modules(self._model), every)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer_given

    @_optimizer.setter
    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        # TorchRec's GradientAccumulationWrapper puts its own around it.
        self.pipe.check_idle("taking another optimizer")
        self._optimizer_given = optimizer
        self._restart(self._build)

    @property
    def _model_fwd(self) -> Callable[[In], Any]:
        forward: Callable[[In], Any] = self._given.get("custom_model_fwd") or self._model
        return forward

    @property
    def _pipelined_modules(self) -> list[nn.Module]:
        return [forward._module for forward in self.tasks.rewrite.forwards]

    @property
    def _pipelined_postprocs(self) -> list[nn.Module]:
        return [postproc._module for postproc in self.tasks.rewrite.postprocs]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in HOOKS:
            raise TypeError(
                f"{type(self).__name__}.{name} was to be replaced in one pipeline, whose tasks "
                "have been made: override it in a subclass"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Scripts read arguments so, and TorchRec's classes have most of them by these names.
        given = vars(self).get("_given", {})
        if name.startswith("_") and name[1:] in given:
            return given[name[1:]]
        raise no_internal(self, name)

    def _has_grad(self) -> bool:
        when = self.form.without_grad
        return when == "never" or (when == "eval" and self._model.training)

    def _optimizers(self) -> Sequence[Any]:
        return [self._optimizer_given]

    def _build(self) -> None:
        kind: Kind = "own"
        if sharded_modules(unwrapped(self._model)):
            alone = dist.is_initialized() and dist.get_world_size() == 1
            kind = (self.form.alone if alone else None) or self.form.kind
            if self._splits_forward and not alone:
                kind = "split"
        options = replace(self._options(kind), functions=self._functions())
        if "copy_batch_to_gpu" in self._overrides and options.memory.enable_inplace_copy_batch:
            raise NotImplementedError(
                f"{type(self).__name__} overrides copy_batch_to_gpu, and copies in place "
                "(enable_inplace_copy_batch), which does not call it: leave the argument out, "
                "and allocate and copy so in the override"
            )
        self.tasks = SparseDistTasks(
            self._model, self._step(), options, device=self._given["device"]
        )
        self._start()

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Return the overrides of a subclass, by the parts of the tasks that call them."""
        functions: dict[str, Callable[..., Any]] = {
            part: getattr(self, hook)
            for hook, part in HOOKS.items()
            if part and hook in self._overrides
        }
        if "copy" in functions:
            functions["copy"] = self._copied
        if "dense_backward" in functions:
            functions["postprocess_loss"] = _unchanged  # an override gets what the model returned
        if self._overrides & {"dequeue_batch", "_next_batch"}:
            functions["watch"] = self._dequeue
        return functions

    def _step(self) -> TrainStep:
        return TrainStep(
            self._optimizers(),
            forward=self._given.get("custom_model_fwd"),
            sync_interval=self._given.get("dmp_collection_sync_interval_batches", 1),
        )

    def _options(self, kind: Kind) -> TaskOptions:
        return TaskOptions(
            forward=kind,
            strict=False,
            zero_grad=self._zero_grad(),
            pipeline_postproc=self._given.get("pipeline_postproc", False) and kind != "own",
            memory=MemoryOptions.of(self._given),
        )

    def _zero_grad(self) -> str | None:
        return self.form.zero_grad

    def _start(self) -> None:
        plan = self._plan(self.tasks)
        if self.form.copies_later and self._given.get("enqueue_batch_after_forward"):
            order = [name for name in plan.order if name != plans.COPY]
            order.insert(order.index(plans.DENSE) + 1, plans.COPY)
            plan = replace(plan, order=order)
        if self.form.copies_apart or self._given.get("async_inplace_copy"):
            copied = replace(plan.schedule[plans.COPY], thread_group="copy")
            plan = replace(plan, schedule={**plan.schedule, plans.COPY: copied})
        SparseDistPipeline.__init__(self, self.tasks, plan, run_ahead=self._run_ahead)

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self.form.plan(tasks)

    def _pulled(self, source: Iterator[In]) -> In | None:
        """Pull a batch by an override of ``_next_batch``."""
        batch = type(self)._next_batch(self, source)
        if batch is not None:
            self.batches.append(batch)
        return batch

    def _copied(self, batch: In) -> In:
        """Copy a batch by overrides of ``enqueue_batch`` or ``copy_batch_to_gpu``."""
        copies: list[In] = []
        self._copies = copies
        # TorchRec's copy_batch_to_gpu pulls by it; the batch was pulled before, once.
        self.__dict__["_next_batch"] = _next_or_none
        try:
            self.enqueue_batch(iter([batch]))
        finally:
            self._copies = None
            del self.__dict__["_next_batch"]
        if not copies:
            raise RuntimeError(
                f"{type(self).__name__}.copy_batch_to_gpu returned no batch for one that the "
                "iterator has given: leave batches out in the iterator, or in _next_batch"
            )
        return copies.pop()

    def _dequeue(self) -> None:
        """End a batch, as ``dequeue_batch`` and ``TrainStep.watchdog`` do."""
        self.dequeue_batch()
        if (watchdog := self.tasks.step.watchdog) is not None:
            watchdog()

    def _new_pass(self, source: Iterator[In], limit: int | None = None) -> Pass:
        self._dataloader_iter = None  # the same iterator may begin anew
        NamedPipeline._at_stop(self)
        return super()._new_pass(source, limit)

    def _at_stop(self) -> None:
        vars(self).get("batches", []).clear()

    def _restart(self, begin: Callable[[], None]) -> None:
        """Begin anew, with the number of the next batch; none is in flight."""
        state = self.pipe.state_dict(check=False)
        self.close()
        begin()
        SparseDistPipeline.load_state_dict(self, state)


def _unchanged(losses: Any) -> Any:
    return losses


def _next_or_none(iterator: Iterator[In]) -> In | None:
    return next(iterator, None)


def _batches_per_step(optimizer: Any) -> int:
    """1, unless TorchRec's ``GradientAccumulationWrapper`` has put its optimizer here."""
    every: int = getattr(getattr(optimizer, "_config", None), "num_steps", 1)
    return every


# --------------------------------------------------------------------------------------- the table


class TrainPipelineBase(NamedPipeline[In, Out]):
    """As TorchRec's: the next batch is copied during this one's step. Any model, sharded or not.

    Unlike there, ``custom_model_fwd`` is used, and data after the end of an iterator needs no
    ``reset``.
    """

    form = Form(plan=lean(plans.copy_ahead), kind="own")


class TrainPipelineSparseDist(NamedPipeline[In, Out]):
    """As TorchRec's, under the plan ``sparse_dist``."""

    form = Form(copies_later=True)


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: only the copy of the next batch overlaps."""

    form = Form(plan=lean(plans.copy_ahead))


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``prefetch``."""

    form = Form(plan=lean(plans.prefetch), kind="prefetch")


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's, under the plan ``split``.

    Unless ``embedding_lookup_after_data_dist=True``, a look-up takes the learning rates of the call
    before, as there. ``strict`` has no effect. The look-up is submitted on the caller's stream.
    """

    form = Form(plan=split, kind="split", alone="ahead", copies_later=True)

    def _take(self, given: Mapping[str, Any]) -> None:
        if (stream := given["emb_lookup_stream"]) not in ("new", "current", "data_dist"):
            raise ValueError(
                f"emb_lookup_stream is {stream!r}: give 'new', 'current' or 'data_dist'"
            )

    def _zero_grad(self) -> str:
        return plans.EMBED if self._late() else plans.DENSE_BACK  # after the look-up

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return plans.split(lean=bool(tasks.options.memory)) if self._late() else split(tasks)

    def _late(self) -> bool:
        """Whether a batch is looked up in the call that returns it, whatever tables allow."""
        return bool(self._given.get("embedding_lookup_after_data_dist"))


class TrainPipelineSparseDistT(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: batches are copied on a thread of their own."""

    form = Form(copies_apart=True)


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: forwards only, whatever mode the model is in, and without gradients."""

    form = replace(TrainPipelineSparseDist.form, without_grad="always")


class EvalPipelineFusedSparseDist(TrainPipelineFusedSparseDist[In, Out]):
    """As TorchRec's: forwards only, whatever mode the model is in, and without gradients.

    With ``enable_embedding_lookup_prefetch=True`` the next batch is looked up a call ahead, where
    no optimizer of the pipeline has the tables.
    """

    form = replace(TrainPipelineFusedSparseDist.form, without_grad="always")

    def _late(self) -> bool:
        return not self._given.get("enable_embedding_lookup_prefetch")


class TrainEvalHybridPipelineBase(TrainPipelineSparseDist[In, Out]):
    """As TorchRec's: under ``model.eval()`` a batch is evaluated, without gradients.

    Unlike there, batches in flight keep their mode: to change it, train or evaluate to the end of
    the iterator, or call ``drain``.
    """

    form = replace(TrainPipelineSparseDist.form, without_grad="eval")
