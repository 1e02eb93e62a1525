"""TorchRec's pipelines under their own names, each a few attributes of one class."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.pipeline import check_idle
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec._torchrec import torchrec_class, torchrec_pipelines
from swpipe.tasks.torchrec.embedding_tables.released import MemoryOptions
from swpipe.tasks.torchrec.pipelines.drop_in import (
    PLANS,
    Pass,
    SparseDistPipeline,
    lean,
    split,
)
from swpipe.tasks.torchrec.pipelines.hooks import HOOKS, refuse_overrides
from swpipe.tasks.torchrec.pipelines.refused_arguments import bound, no_internal, signature_of
from swpipe.tasks.torchrec.rewriting.forwards import Kind, SparseDistContext
from swpipe.tasks.torchrec.rewriting.inputs import sharded_modules, unwrapped
from swpipe.tasks.torchrec.step.grad_reduction import ddp_modules, warn_of_rounding
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
from swpipe.tasks.torchrec.step.train_step import TrainStep

In = TypeVar("In")
Out = TypeVar("Out")


class NamedPipeline(SparseDistPipeline, torchrec_pipelines.TrainPipeline, Generic[In, Out]):  # type: ignore[misc]
    """Base class of the pipelines with the methods and arguments of TorchRec's pipelines.

    A subclass here has the name of the TorchRec class that it replaces, and takes the arguments of
    that class. A user's subclass may override ``progress`` and the steps listed in ``hooks``;
    overriding another method of TorchRec's class is refused. There are two more keyword arguments.
    ``run_ahead`` is as for ``PipelinePlan``. ``pipeline_forward`` looks up all sharded modules
    before the model runs, so that their exchanges overlap each other and the dense part. It has no
    effect on one rank, where nothing is exchanged, or with one sharded module.

    Replicas of a ``DMPCollection`` are averaged by every pipeline here. TorchRec's classes without
    an argument for it never average them. ``pipeline_postproc`` does not run modules ahead that
    hold parameters.

    The attributes that scripts read from TorchRec's pipelines exist: ``_model``, ``_optimizer``,
    ``_model_fwd``, ``_pipelined_modules``, ``_pipelined_postprocs``, and each argument with a
    leading underscore, such as ``_device``.
    """

    __signature__: ClassVar[inspect.Signature | None]
    # The signature of the constructor; None if it is that of TorchRec's class.
    arguments: ClassVar[inspect.Signature | None] = None

    _original: ClassVar[type]  # TorchRec's class of the same name

    # The following attributes say how swpipe implements a class of TorchRec's.
    # Makes the plan for the tasks. A class whose arguments influence the plan overrides _plan().
    _plan_for = staticmethod(PLANS["jagged_sparse_dist"])
    # How the sharded modules are called; and on a single rank, if that differs.
    _kind: ClassVar[Kind] = "pipelined"
    _kind_alone: ClassVar[Kind | None] = None
    # How many batches execute_all_batches=False leaves at the end of the data.
    _left: ClassVar[int] = 2
    # The task in which TorchRec's class calls the optimizer's zero_grad.
    _zero_grad: ClassVar[str | None] = plans.EMBED
    # When batches run without gradients.
    _without_grad: ClassVar[Literal["always", "eval", "never"]] = "never"
    # Whether batches are copied on a thread of their own.
    _copies_apart: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Our own classes stand for TorchRec's class of the same name. If the installed TorchRec
        # lacks that class, the signature of the most common pipeline is the fallback.
        if cls.__module__.startswith("swpipe."):
            theirs = torchrec_class(cls.__name__)
            cls._original = theirs or torchrec_pipelines.TrainPipelineSparseDist
            if theirs is not None:
                theirs.register(cls)  # for isinstance()
        else:
            # A subclass outside of swpipe: refuse overrides that nothing would call, at its
            # definition rather than in the first step.
            refuse_overrides(cls, cls._original)
        own = cls.__init__ is not NamedPipeline.__init__
        cls.__signature__ = None if own else cls.arguments or signature_of(cls._original)

    # Attributes of TorchRec's classes that overrides of _next_batch read and set.
    _dataloader_iter: Iterator[In] | None = None
    _dataloader_exhausted = False
    _data_iter_stopped = False

    # The batches that enqueue_batch has copied; None unless H2DAndShuffle is calling it.
    _copies: list[Any] | None = None

    # Another function than next() if a subclass overrides the pull of a batch.
    _pull: Callable[[Iterator[In]], Any] = next

    # The number of the batch before which _change_plan is called; None for never.
    _changes_at: int | None = None

    def __init__(
        self,
        *args: Any,
        run_ahead: int | None = None,
        pipeline_forward: bool = False,
        **kwargs: Any,
    ) -> None:
        # It sets the private _state, which TorchRec keeps for the recovery of a training run.
        torchrec_pipelines.TrainPipeline.__init__(self)
        # Overrides are found on the class, once: tasks are made from them in _build.
        own = type(self)
        self._overrides = {
            name for name in HOOKS if getattr(own, name) is not getattr(NamedPipeline, name)
        }
        self._fills = "fill_pipeline" in self._overrides
        if "_next_batch" in self._overrides:
            self.batches: deque[In] = deque()
            self._pull = self._pulled
        signature = self.arguments or signature_of(self._original)
        given = bound(self, signature, args, kwargs)
        self._given = {**given, "run_ahead": run_ahead, "pipeline_forward": pipeline_forward}
        self._model: nn.Module = given["model"]
        self._optimizer_given: torch.optim.Optimizer = given["optimizer"]
        self._take()
        self._build()

    def _take(self) -> None:
        """Take the arguments that only this class has, before the model is rewritten."""

    # ----------------------------------------------------------------------- TorchRec's methods

    if TYPE_CHECKING:

        def progress(self, dataloader_iter: Iterator[In]) -> Out: ...

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """Return the next batch, or None at the end of the data.

        An override may skip or add batches, or let the ranks agree on the end of the data. It finds
        the batches in flight in ``batches``, oldest first, as they were pulled.
        """
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter = dataloader_iter
            self._dataloader_exhausted = False
        batch = None if self._dataloader_exhausted else next(dataloader_iter, None)
        self._dataloader_exhausted = batch is None
        return batch

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Copy one batch to the device and return whether there was one.

        The pipeline calls it for each batch, on the stream for copies, with an iterator that has
        only this batch.

        Raises:
            RuntimeError: The caller is not the pipeline, which pulls the batches itself.
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
        """Return the next batch on the device, without a context, or None at the end of the data.

        ``enqueue_batch`` calls an override for each batch, with an iterator that has only this
        batch.
        """
        batch: Any = next(dataloader_iter, None)
        return None if batch is None else self.tasks.to_device(batch), None

    def start_sparse_data_dist(self, batch: In | None, context: SparseDistContext) -> None:
        """Start the exchange of the sizes of a batch's ids."""
        if batch is not None:
            self.tasks.rewrite.start(batch, context)

    def wait_sparse_data_dist(self, context: SparseDistContext) -> None:
        """Wait for the sizes and start the exchange of ids."""
        context.wait_for_sizes()

    def _backward(self, losses: Any) -> None:
        """Run the backward pass of the losses that the model returned.

        With a split forward it ends at the embeddings, and ``EmbBackward`` continues from there.
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
        """Drop the batches in flight; on several ranks, call it on all after the same step."""
        self.close()
        self._start()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Undo ``detach``, as ``progress`` does, or replace the model if no batch is in flight."""
        if model is not None and model is not self._model:
            check_idle(self.pipe, "taking another model")
            self._model = model
            self._restart(self._build)
        super().attach()

    def register_backward_hook(self, site: Any, work: Any) -> None:
        """Raise NotImplementedError, since the plan could not see work inside backward."""
        raise NotImplementedError(
            f"register_backward_hook({site!r}): work inside backward is unknown to the plan, which "
            "could then overlap what must not be: use TrainStep.finalize or a task of your own"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``SparseDistPipeline.state_dict`` does.

        ``next_iteration`` counts from 0 again after ``reset``, and ``in_flight`` includes the
        batches that ``execute_all_batches=False`` keeps back.
        """
        # TorchRec's GradientAccumulationWrapper counts batches in the private _current_step, which
        # no state_dict has: between two of its steps nothing may be saved.
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
        # TorchRec's GradientAccumulationWrapper assigns its own optimizer here, around the given
        # one. The step holds its optimizers, so the tasks are made again.
        check_idle(self.pipe, "taking another optimizer")
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
        # An assignment to the instance would come too late: the tasks have bound the methods
        # already.
        if name in HOOKS:
            raise TypeError(
                f"{type(self).__name__}.{name} was to be replaced in one pipeline, whose tasks "
                "have been made: override it in a subclass"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Scripts read the arguments as _device, _execute_all_batches and so on, since most
        # attributes of TorchRec's classes have these names.
        given = vars(self).get("_given", {})
        if name.startswith("_") and name[1:] in given:
            return given[name[1:]]
        raise no_internal(self, name)

    def _has_grad(self) -> bool:
        when = self._without_grad
        return when == "never" or (when == "eval" and self._model.training)

    def _build(self) -> None:
        kind: Kind = "own"
        # A single rank exchanges nothing, so a class may take a simpler kind there. A model without
        # sharded modules runs as it is.
        sharded = sharded_modules(unwrapped(self._model))
        if sharded:
            alone = dist.is_initialized() and dist.get_world_size() == 1
            kind = (self._kind_alone if alone else None) or self._kind
            # The exchanges of several modules overlap each other. With one module, the second
            # backward of the split would cost more than the split hides.
            if self._given["pipeline_forward"] and not alone and len(sharded) > 1:
                kind = "split"
        options = replace(self._options(kind), functions=self._functions())
        if "copy_batch_to_gpu" in self._overrides and options.memory.enable_inplace_copy_batch:
            raise NotImplementedError(
                f"{type(self).__name__} overrides copy_batch_to_gpu, and copies in place "
                "(enable_inplace_copy_batch), which does not call it: leave the argument out, "
                "and allocate and copy so in the override"
            )
        self.tasks = SparseDistTasks(self._model, self._step(), options, device=self._device)
        self._start()

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Return the overrides of a subclass, keyed by the part of the tasks that calls each."""
        functions: dict[str, Callable[..., Any]] = {
            part: getattr(self, hook)
            for hook, part in HOOKS.items()
            if part and hook in self._overrides
        }
        # enqueue_batch and copy_batch_to_gpu take an iterator and append to _copies, so a wrapper
        # turns them into a function from a batch to its copy.
        if "copy" in functions:
            functions["copy"] = self._copied
        if "dense_backward" in functions:
            # An override of _backward gets the losses as the model returned them.
            functions["postprocess_loss"] = lambda losses: losses
        # Overrides of either read or write `batches`, whose oldest entry must go when its batch
        # ends.
        if self._overrides & {"dequeue_batch", "_next_batch"}:
            functions["watch"] = self._dequeue
        return functions

    def _step(self) -> TrainStep:
        return TrainStep(
            [self._optimizer_given],
            forward=self._given.get("custom_model_fwd"),
            sync_interval=self._given.get("dmp_collection_sync_interval_batches", 1),
        )

    def _options(self, kind: Kind) -> TaskOptions:
        return TaskOptions(
            forward=kind,
            strict=False,
            zero_grad=self._zero_grad,
            pipeline_postproc=self._given.get("pipeline_postproc", False) and kind != "own",
            memory=MemoryOptions.of(self._given),
        )

    def _start(self) -> None:
        plan = self._plan(self.tasks)
        # TorchRec's classes with this argument copy the next batch after the dense forward was
        # launched; the order of the plan says the same.
        if self._given.get("enqueue_batch_after_forward"):
            order = [name for name in plan.order if name != plans.COPY]
            order.insert(order.index(plans.DENSE) + 1, plans.COPY)
            plan = replace(plan, order=order)
        if self._copies_apart or self._given.get("async_inplace_copy"):
            copied = replace(plan.schedule[plans.COPY], thread_group="copy")
            plan = replace(plan, schedule={**plan.schedule, plans.COPY: copied})
        SparseDistPipeline.__init__(self, self.tasks, plan, run_ahead=self._given["run_ahead"])

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return self._plan_for(tasks)

    def _pulled(self, source: Iterator[In]) -> In | None:
        """Pull a batch with an override of ``_next_batch``."""
        batch = type(self)._next_batch(self, source)
        if batch is not None:
            self.batches.append(batch)
        return batch

    def _copied(self, batch: In) -> In:
        """Copy a batch with overrides of ``enqueue_batch`` or ``copy_batch_to_gpu``."""
        copies: list[In] = []
        self._copies = copies
        # TorchRec's copy_batch_to_gpu pulls with self._next_batch. The batch was pulled before, so
        # an attribute of the instance hides the override meanwhile: it must not run twice for one
        # batch.
        self.__dict__["_next_batch"] = lambda iterator: next(iterator, None)
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
        """End a batch by calling ``dequeue_batch`` and ``TrainStep.watchdog``."""
        self.dequeue_batch()
        if (watchdog := self.tasks.step.watchdog) is not None:
            watchdog()

    def _step_of(self, source: Iterator[In]) -> Out:
        # A pass ends where the plan changes (_new_pass), so no batch is in flight.
        if self._changes_at is not None and self._done >= self._changes_at:
            self._change_plan()
        output: Out = super()._step_of(source)
        return output

    def _change_plan(self) -> None:
        """Go on with another plan; a hook for classes that set ``_changes_at``."""

    def _new_pass(self, source: Iterator[In]) -> Pass:
        self._dataloader_iter = None  # the same iterator may have been restarted
        NamedPipeline._at_stop(self)
        ends_at = self._changes_at
        # Below 0 after a state was loaded: progress() changes the plan before it pulls a batch.
        limit = None if ends_at is None else max(0, ends_at - self._done)
        keep_back = 0 if self._given.get("execute_all_batches", True) else self._left
        return Pass(source, keep_back=keep_back, limit=limit, pull=self._pull)

    def _at_stop(self) -> None:
        vars(self).get("batches", []).clear()

    @property
    def _done(self) -> int:
        """The number of batches that were returned, or dropped by a failure."""
        return self.pipe.state_dict(check=False)["next_iteration"]

    def _restart(self, begin: Callable[[], None]) -> None:
        """Rebuild the tasks with ``begin``, keeping the next batch's number; none is in flight."""
        # check=False: the number is needed also where a failure has dropped batches.
        state = self.pipe.state_dict(check=False)
        self.close()
        begin()
        SparseDistPipeline.load_state_dict(self, state)


def _batches_per_step(optimizer: Any) -> int:
    """Return a ``GradientAccumulationWrapper``'s batches per step, or 1 for other optimizers."""
    every: int = getattr(getattr(optimizer, "_config", None), "num_steps", 1)
    return every


# --------------------------------------------------------------------------------------- the table


class TrainPipelineBase(NamedPipeline[In, Out]):
    """Counterpart of TorchRec's class: the next batch is copied during this one's step. Any model.

    Unlike TorchRec's class, it uses ``custom_model_fwd``, and needs no ``reset`` to continue with
    new data after the end of an iterator. The model need not be sharded.
    """

    _plan_for = staticmethod(lean(plans.copy_ahead))
    _kind = "own"


class TrainPipelineSparseDist(NamedPipeline[In, Out]):
    """Counterpart of TorchRec's class, under the plan ``sparse_dist``."""


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class; only the copy of the next batch overlaps."""

    _plan_for = staticmethod(lean(plans.copy_ahead))


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class, under the plan ``prefetch``."""

    _plan_for = staticmethod(lean(plans.prefetch))
    _kind = "prefetch"


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class, under the plan ``split``.

    As in TorchRec, a look-up uses the learning rates of the previous call, unless
    ``embedding_lookup_after_data_dist=True``. ``strict`` has no effect. The look-up is submitted on
    the caller's stream, whatever ``emb_lookup_stream`` is.
    """

    _kind = "split"
    _kind_alone = "ahead"

    def _take(self) -> None:
        stream = self._given["emb_lookup_stream"]
        if stream not in ("new", "current", "data_dist"):
            raise ValueError(
                f"emb_lookup_stream is {stream!r}: give 'new', 'current' or 'data_dist'"
            )

    def _options(self, kind: Kind) -> TaskOptions:
        # zero_grad hands the learning rates to fused tables, so its task decides which of them a
        # look-up takes.
        task = plans.EMBED if self._late() else plans.DENSE_BACK
        return replace(super()._options(kind), zero_grad=task)

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        return split(tasks, late=self._late())

    def _late(self) -> bool:
        """Return whether each batch is looked up only in the call that returns it."""
        return bool(self._given.get("embedding_lookup_after_data_dist"))


class TrainPipelineSparseDistT(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class; batches are copied on a thread of their own."""

    _copies_apart = True


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class: forward passes only, without gradients, in any mode."""

    _without_grad = "always"


class EvalPipelineFusedSparseDist(TrainPipelineFusedSparseDist[In, Out]):
    """Counterpart of TorchRec's class: forward passes only, without gradients, in any mode.

    With ``enable_embedding_lookup_prefetch=True`` the next batch is looked up one call ahead, if no
    optimizer of the pipeline updates the tables.
    """

    _without_grad = "always"

    def _late(self) -> bool:
        return not self._given.get("enable_embedding_lookup_prefetch")


class TrainEvalHybridPipelineBase(TrainPipelineSparseDist[In, Out]):
    """Counterpart of TorchRec's class; a batch under ``model.eval()`` runs without gradients.

    Unlike in TorchRec's class, batches in flight keep their mode. To change the mode, continue to
    the end of the iterator, or call ``drain``.
    """

    _without_grad = "eval"
