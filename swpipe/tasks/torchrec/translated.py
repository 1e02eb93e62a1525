"""What TorchRec's pipeline classes have in common, on ``SparseDistPipeline``.

::

TorchRec                                  here
class                                     a plan and a kind of forward
model, optimizer, custom_model_fwd        TrainStep
execute_all_batches                       Pass(keep_back=...)
progress with another iterator            the current Pass is stopped; a new one begins when
                                          none of its batches is in flight
the mode of the model                     as for SparseDistPipeline
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.plans.torchrec.sparse_dist import EMBED
from swpipe.tasks.torchrec._torchrec import torchrec_class, torchrec_pipelines
from swpipe.tasks.torchrec.accumulation import warn_of_rounding
from swpipe.tasks.torchrec.drop_in import SparseDistPipeline
from swpipe.tasks.torchrec.forwards import Kind
from swpipe.tasks.torchrec.inputs import sharded_modules
from swpipe.tasks.torchrec.passes import Pass
from swpipe.tasks.torchrec.refused import (
    bound,
    no_internal,
    refuse_overrides,
    signature_of,
)
from swpipe.tasks.torchrec.released import MemoryOptions
from swpipe.tasks.torchrec.step import TrainStep
from swpipe.tasks.torchrec.task_set import SparseDistTasks
from swpipe.tasks.torchrec.wrappers import ddp_modules, unwrapped

In = TypeVar("In")
Out = TypeVar("Out")


class Translated(torchrec_pipelines.TrainPipeline, Generic[In, Out]):  # type: ignore[misc]
    """A pipeline of TorchRec's, with its methods and arguments.

    A class here has the name of the class of TorchRec's that it stands for, and takes the arguments
    of that class. It says how the sharded modules are called (``_kind``), under which plan, and how
    many batches ``execute_all_batches=False`` leaves at the end (``_left``). Subclasses of the
    user's may override ``progress`` and ``copy_batch_to_gpu``; other methods of TorchRec's are
    refused. One argument more is for keywords: ``run_ahead``, as for ``PipelinePlan``.

    Replicas of a ``DMPCollection`` are averaged also by those of TorchRec's pipelines that have no
    argument for it, which never do so there. Modules that hold parameters are not run ahead by
    ``pipeline_postproc``.
    """

    __signature__: ClassVar[inspect.Signature | None]
    _original: ClassVar[type]  # the class of TorchRec's
    _kind: ClassVar[Kind] = "pipelined"
    _kind_alone: ClassVar[Kind | None] = None  # on one rank, where that is another
    _left: ClassVar[int] = 2
    _zero_grad: str = EMBED  # the task in which TorchRec's class calls the optimizer's zero_grad

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("swpipe."):
            theirs = torchrec_class(cls.__name__)
            cls._original = theirs or torchrec_pipelines.TrainPipelineSparseDist
            if theirs is not None:
                theirs.register(cls)  # for isinstance()
        else:
            refuse_overrides(cls, cls._original)
        own = cls.__init__ is not Translated.__init__
        cls.__signature__ = None if own else signature_of(cls._original)

    def __init__(self, *args: Any, run_ahead: int | None = None, **kwargs: Any) -> None:
        super().__init__()
        self._run_ahead = run_ahead
        given = bound(self, self._original, args, kwargs)
        self._given = given
        self._model: nn.Module = given["model"]
        self._model_fwd = given.get("custom_model_fwd")
        self._optimizer_given: torch.optim.Optimizer = given["optimizer"]
        self._keep_back = 0 if given.get("execute_all_batches", True) else self._left
        self._pass: Pass | None = None
        self._take(given)
        self._build()

    def _take(self, given: Mapping[str, Any]) -> None:
        """Take the arguments that only this class has, before the model is rewritten."""

    def _plan(self, tasks: SparseDistTasks) -> PipelinePlan:
        """The plan for the tasks."""
        raise NotImplementedError

    # ----------------------------------------------------------------------- TorchRec's methods

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on one more batch, and return the oldest batch's output.

        With another iterator while batches are in flight, each call finishes one of these; the
        new iterator begins after them, the old one keeps its other batches.

        Raises:
            StopIteration: All batches are done.
            RuntimeError: Batches in flight were admitted in another mode: call ``drain`` first.
            BaseException: As ``SparseDistPipeline.progress``.
        """
        current = self._current(dataloader_iter)
        try:
            output: Out = self.drop_in.progress(current)
        except StopIteration:
            self._pass = None
            raise
        return output

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Pull the first batches and start on them; otherwise the first ``progress`` does."""
        self.drop_in.fill_pipeline(self._current(dataloader_iter))

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, None]:
        """The next batch on the device, without a context; None at the end of the data.

        A subclass may override it: it is then called for each batch, on the stream for copies, with
        an iterator that has this batch alone.
        """
        batch: Any = next(dataloader_iter, None)
        return None if batch is None else self._tasks.to_device(batch), None

    def reset(self) -> None:
        """Drop the batches in flight. On several ranks, call it on all after the same step."""
        self.drop_in.close()
        self._pass = None
        self._start()

    def detach(self) -> nn.Module:
        """Restore and return the model; batches in flight are kept."""
        return self.drop_in.detach()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Undo ``detach``; ``progress`` also does. ``sparse_dist`` has no effect.

        Raises:
            RuntimeError: Another model, and batches of the old one are in flight.
        """
        if model is not None and model is not self._model:
            self._check_idle("another model")
            self._model = model
            self._rebuild()
        self.drop_in.attach()

    def register_backward_hook(self, site: Any, work: Any) -> None:
        """Refused: work inside backward would escape the plan.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"register_backward_hook({site!r}): work inside backward is unknown to the plan, which "
            "could then overlap what must not be: use TrainStep.finalize or a task of your own"
        )

    # ------------------------------------------------------------------------------------- more

    def drain(self) -> list[Out]:
        """Finish the batches in flight and return their outputs, oldest first."""
        return self.drop_in.drain()

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
        state = self.drop_in.state_dict()
        kept = 0 if self._pass is None else self._pass.waiting
        return {**state, "in_flight": state["in_flight"] + kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As ``SparseDistPipeline.load_state_dict``."""
        self.drop_in.load_state_dict(state)
        self._pass = None
        every = _batches_per_step(self._optimizer_given)
        if every > 1 and state["next_iteration"]:
            warn_of_rounding(ddp_modules(self._model), every)

    def close(self) -> None:
        """Drop the batches in flight and restore the model."""
        self.drop_in.close()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer_given

    @_optimizer.setter
    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        # TorchRec's GradientAccumulationWrapper puts its own around it.
        self._check_idle("another optimizer")
        self._optimizer_given = optimizer
        self._rebuild()

    @property
    def _pipelined_modules(self) -> list[nn.Module]:
        return [forward._module for forward in self.drop_in.tasks.rewrite.forwards]

    @property
    def _pipelined_postprocs(self) -> list[nn.Module]:
        return [postproc._module for postproc in self.drop_in.tasks.rewrite.postprocs]

    def __getattr__(self, name: str) -> Any:
        raise no_internal(self, name, ".drop_in, its plan .drop_in.pipe.plan")

    def _current(self, source: Iterator[Any]) -> Pass:
        """The pass to go on with; that over ``source`` once the one before has finished."""
        current = self._pass
        if current is not None:
            if current.source is not source:
                current.stop()
            if not current.stopped or self.drop_in.pipe.in_flight or current.kept:
                return current
        self._pass = self._new_pass(source)
        return self._pass

    def _new_pass(self, source: Iterator[Any]) -> Pass:
        return Pass(source, keep_back=self._keep_back)

    def _optimizers(self) -> Sequence[Any]:
        return [self._optimizer_given]

    def _build(self) -> None:
        step = TrainStep(
            self._optimizers(),
            forward=self._model_fwd,
            sync_interval=self._given.get("dmp_collection_sync_interval_batches", 1),
        )
        kind: Kind = "own"
        if sharded_modules(unwrapped(self._model)):
            alone = dist.is_initialized() and dist.get_world_size() == 1
            kind = (self._kind_alone if alone else None) or self._kind
        self._tasks = self._tasks_for(step, kind)
        if type(self).copy_batch_to_gpu is not Translated.copy_batch_to_gpu:
            if self._tasks.memory.enable_inplace_copy_batch:
                raise NotImplementedError(
                    f"{type(self).__name__} overrides copy_batch_to_gpu, and copies in place "
                    "(enable_inplace_copy_batch), which does not call it: leave the argument out, "
                    "and allocate and copy so in the override"
                )
            self._tasks.copy_batch = self._copied
        self._start()

    def _tasks_for(self, step: TrainStep, kind: Kind) -> SparseDistTasks:
        return SparseDistTasks(
            self._model,
            step,
            device=self._given["device"],
            forward=kind,
            strict=False,
            zero_grad=self._zero_grad,
            pipeline_postproc=self._given.get("pipeline_postproc", False) and kind != "own",
            memory=MemoryOptions.of(self._given),
        )

    def _start(self) -> None:
        plan = self._plan(self._tasks)
        self.drop_in = SparseDistPipeline(self._tasks, plan, run_ahead=self._run_ahead)

    def _copied(self, batch: In) -> In:
        copied, _ = self.copy_batch_to_gpu(iter([batch]))
        if copied is None:
            raise RuntimeError(
                f"{type(self).__name__}.copy_batch_to_gpu returned no batch for one that the "
                "iterator has given: leave batches out in the iterator"
            )
        return copied

    def _rebuild(self) -> None:
        self._restart(self._build)

    def _restart(self, begin: Callable[[], None]) -> None:
        """Begin anew, with the number of the next batch; none is in flight."""
        state = self.drop_in.pipe.state_dict(check=False)
        self.drop_in.close()
        self._pass = None
        begin()
        self.drop_in.load_state_dict(state)

    def _check_idle(self, what: str) -> None:
        if in_flight := self.drop_in.pipe.in_flight:
            raise RuntimeError(
                f"batches are in flight ({in_flight}), and cannot go on with {what}: call drain() "
                "or reset() first"
            )


def _batches_per_step(optimizer: Any) -> int:
    """1, unless TorchRec's ``GradientAccumulationWrapper`` has put its optimizer here."""
    every: int = getattr(getattr(optimizer, "_config", None), "num_steps", 1)
    return every
