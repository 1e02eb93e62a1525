"""Pipelines with the interface of TorchRec's train pipelines: ``progress(dataloader_iter)``.

As in TorchRec, ``progress`` returns the model's output (the second of ``(losses, output)``) for the
oldest batch, raises StopIteration at the end, and treats None as the end of the data. The
differences from TorchRec:

- A batch keeps the mode in which it was pulled. ``model.eval()`` or ``torch.no_grad()`` is refused
  while batches are in flight: call ``drain()`` first, or continue to the end of the data.
- If ``progress`` gets another iterator while batches are in flight, each call finishes one of these
  batches. The new iterator begins after them. The old iterator keeps its remaining batches.
- After StopIteration the same iterator may be passed again: a DataLoader with persistent workers
  restarts its iterator for the next epoch.
- An error of the iterator is raised after the batches before it are finished. The next call of
  ``progress`` continues.
- The ranks agree on the end of the data. If the data of one rank ends first, the batches that all
  ranks have are finished, and all ranks raise ``UnevenDataError`` instead of StopIteration.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeAlias, Unpack

import torch
from torch import nn

from swpipe.core.plan import PipelinePlan
from swpipe.device import Device
from swpipe.distributed import EvenIterator, UnevenDataError, batches_left
from swpipe.inference.early_changes import runs_early
from swpipe.pipeline import PipelineOptions, SWPipeline, check_idle
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec.pipelines.mid_flight import check_saving, refusal_to_others
from swpipe.tasks.torchrec.pipelines.pipeline_factory import PipelineFactory
from swpipe.tasks.torchrec.rewriting.rewrite import RewriteReport
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
from swpipe.tasks.torchrec.step.train_step import TrainStep

_REPLACED = (
    "progress() was given an iterator, and another one before it had begun: while batches are in "
    "flight, a call finishes one of these and pulls nothing from a new iterator, so no batch of "
    "the one in between was used. Give each call the same iterator until it ends, or call drain() "
    "before you give another"
)


class Pass(Iterator[Any]):
    """One pass over one of the user's iterators, from which a pipeline pulls; None ends the pass.

    ``keep_back`` batches are read ahead and dropped at the end of the data, which implements
    ``execute_all_batches=False``. At most ``limit`` batches are handed out; the rest stay in the
    iterator. A pass that is ``stopped`` reads no further and hands out the batches that it has
    read. An error of the iterator is raised at its position among the batches. ``pull`` is called
    with the iterator for each batch.
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        keep_back: int = 0,
        limit: int | None = None,
        pull: Callable[[Iterator[Any]], Any] = next,
    ) -> None:
        self.source = source
        self.stopped = False
        self.ended = False
        self._keep_back = keep_back
        self._left = limit
        self._pull = pull
        self._next: Iterator[Any] | None = None
        self._kept: deque[Any] = deque()
        # An error of the iterator that comes after the kept batches. Nothing is read behind it.
        self._errors: list[Exception] = []

    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        over = self.stopped or self.ended or self._errors
        while not over and len(self._kept) <= self._keep_back:
            try:
                batch = self._pull(self.source)
            except StopIteration:
                batch = None
            except Exception as error:  # noqa: BLE001 - raised after the batches before it
                self._errors.append(error)
                break
            if batch is None:
                # The data has ended, and the batches kept back are dropped.
                self._kept.clear()
                self.ended = True
                break
            self._kept.append(batch)
        if not self._kept:
            if self._errors:
                raise self._errors.pop()
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        return self._kept.popleft()

    @property
    def agreed(self) -> bool:
        """Whether the ranks already agree on the end of the user's iterator."""
        return isinstance(self.source, EvenIterator)

    def batches_left(self) -> int | None:
        """Return how many batches this pass will hand out, or None if that is unknown."""
        left = batches_left(self.source) if self._pull is next else None
        if left is None or self.stopped or self.ended:
            return None
        left = max(0, left + len(self._kept) - self._keep_back)
        return left if self._left is None else min(left, self._left)

    def ends_before(self, source: Iterator[Any], in_flight: int) -> bool:
        """Return whether this pass is over, so that a pass over ``source`` may begin.

        If ``source`` is not the iterator of this pass, this pass reads no further.

        Warns:
            RuntimeWarning: A different iterator was given before ``source``, and none of its
                batches was used.
        """
        if source is not self.source:
            self.stopped = True
            if self._next is not None and self._next is not source:
                warnings.warn(_REPLACED, RuntimeWarning, stacklevel=2)
            self._next = source
        return self.stopped and not (in_flight or self._kept or self._errors)

    @property
    def waiting(self) -> int:
        """The number of batches that were read or pulled early, and not handed out."""
        early = self.source.waiting if isinstance(self.source, EvenIterator) else 0
        return len(self._kept) + early


class PassPipeline:
    """A pipeline whose ``progress`` takes the user's iterator; it pulls from one pass at a time.

    Use it as a context manager, or call ``close``. Its tasks set ``ctx.output``.

    Attributes:
        pipe: The underlying pipeline: for traces, shortcuts and the profiler.
    """

    pipe: SWPipeline[Any]
    _pass: Pass | None = None
    # Whether each call of progress calls fill_pipeline, since a subclass overrides it.
    _fills = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Run the pipeline for one more batch and return the output of the oldest batch in flight.

        Raises:
            StopIteration: All batches are finished.
            UnevenDataError: All batches are finished, and the ranks did not have the same number of
                batches.
            RuntimeError: The batches in flight have another mode: call ``drain`` first. Or batches
                in flight in another pipeline of the model prevent this one from running.
            Exception: An error of the iterator, raised when the batches before it are finished; the
                next call continues.
            BaseException: As ``SWPipeline.progress``.

        Warns:
            RuntimeWarning: An iterator was replaced by another one before any of its batches was
                used.
        """
        with nullcontext() if self._has_grad() else torch.no_grad():
            return self._step_of(dataloader_iter)

    def _step_of(self, source: Iterator[Any]) -> Any:
        current = self._pass
        # The common case, the same iterator as in the last call, costs one comparison.
        if current is None or current.source is not source or current.stopped:
            self._change_pass(source)
        try:
            self._make_ready()
            if self._fills:
                self.fill_pipeline(source)
            return self.pipe.progress(self._pass).output
        # The end of the data and failures leave by the same path: hooks of subclasses run before
        # the exception reaches the user, and find the pipeline as the failure left it.
        except BaseException as error:
            if isinstance(error, StopIteration | UnevenDataError):
                self._pass = None  # the next call begins a new pass, also with the same iterator
                self._at_end()
            if not self.pipe.in_flight:
                self._at_stop()
            raise

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Pull the first batches and start them, as the first ``progress`` would otherwise do.

        Does nothing while batches are in flight, or when the data has ended.
        """
        self._change_pass(dataloader_iter)
        self.attach()
        current: Any = self._pass
        if not (self.pipe.in_flight or current.ended):
            self.pipe.fill_pipeline(current)

    def _change_pass(self, source: Iterator[Any]) -> None:
        """Begin a pass over ``source`` once the current pass has finished."""
        current = self._pass
        # Batches of the old iterator are still in flight or kept: they are finished first.
        if current is not None and not current.ends_before(source, self.pipe.in_flight):
            return
        self._pass = self._new_pass(source)

    def _at_end(self) -> None:
        """Run at the end of the data, before StopIteration is raised; a hook for subclasses."""

    def _at_stop(self) -> None:
        """Run after the end of the data or a failure, with nothing in flight; for subclasses."""

    def _has_grad(self) -> bool:
        """Return whether batches run with gradients enabled."""
        return True

    def _new_pass(self, source: Iterator[Any]) -> Pass:
        return Pass(source)

    def _make_ready(self) -> None:
        """Prepare to run the batches in flight; a hook for subclasses."""

    def drain(self) -> list[Any]:
        """Finish the batches in flight and return their outputs, oldest first.

        The iterator keeps its remaining batches. On several ranks, call it on all ranks after the
        same step. One batch more than the plan's depth may then have been pulled; it is finished
        too.

        Raises:
            RuntimeError: The batches in flight have another mode.
            BaseException: As ``SWPipeline.progress``.
        """
        if self.pipe.in_flight:
            self._make_ready()
        with nullcontext() if self._has_grad() else torch.no_grad():
            return [ctx.output for ctx in self.pipe.drain()]

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs, besides models and optimizers, to resume from here.

        Call it between two calls of ``progress``, together with the states of model and optimizers.

        Returns:
            As ``SWPipeline.state_dict``. ``in_flight`` also counts a batch that was pulled early.
            ``rates`` is present if tables use the learning rates of an earlier step, and holds the
            rates of the next look-up.

        Raises:
            RuntimeError: A run that is resumed from here would give different numbers; the message
                says why. For example, batches in flight have read stale rows: call ``drain`` first.
        """
        # check=False: subclasses have checked before whether this state may be saved.
        state = self.pipe.state_dict(check=False)
        early = 0 if self._pass is None else self._pass.waiting
        return {**state, "in_flight": state["in_flight"] + early}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; restoring model, optimizers and data is up to the caller.

        Raises:
            RuntimeError: Batches are in flight.
            ValueError: ``state`` is not what ``state_dict`` returns.

        Warns:
            RuntimeWarning: DDP on several ranks reduces the first batch of an accumulation by
                itself, so the sums may be rounded differently.
        """
        self.pipe.load_state_dict(state)
        self._pass = None

    def attach(self) -> None:
        """Undo ``detach``."""

    def close(self) -> None:
        """Drop the batches in flight and restore the model; the pipeline cannot be used again."""
        self.pipe.close()
        self._pass = None  # drops the batches that were pulled early

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class SparseDistPipeline(PassPipeline):
    """A pipeline that trains a model under one plan, with the ``progress`` of TorchRec.

    Between two calls of ``progress`` the model may be detached, evaluated and saved if the plan
    uses no worker threads (the ready-made plans use none). With several ranks, the constructor is a
    collective.

    Args:
        tasks: The tasks of the step.
        plan: The plan. ``InputPostproc`` is added if the tasks include it and the plan does not.
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.
        options: Options of ``SWPipeline``, such as ``seed`` and ``stall_timeout_s``. Unless
            ``check_data=False`` is given, the ranks agree on the end of their data: once per pass
            if all ranks know how many batches they have, otherwise at each pull. Each batch is then
            pulled one step before it enters the pipeline, except under a serial plan. Without the
            check, a rank whose data ends first leaves the other ranks waiting in a collective.
    """

    def __init__(
        self,
        tasks: SparseDistTasks,
        plan: PipelinePlan,
        *,
        run_ahead: int | None = None,
        **options: Unpack[PipelineOptions],
    ) -> None:
        self.tasks = tasks
        if tasks.options.pipeline_postproc and plans.POSTPROC not in plan.schedule:
            plan = plans.with_postproc(plan)
        if run_ahead is not None:
            plan = replace(plan, run_ahead=run_ahead)
        options.setdefault("check_data", True)
        options.setdefault("mode", tasks.mode)
        self.pipe = SWPipeline(plan, plan.tasks or tasks.tasks(), device=tasks.device, **options)
        self._pass = None
        # If the plan reads tables before the period that returns the batch, loading other tables in
        # between would mix old and new rows in one batch.
        reads = map(tasks.task_of, ("prefetch", "embedding_forward"))
        early = any(runs_early(plan, task) for task in reads)
        self._hooks = _refuse_loading(self.pipe, tasks) if early else []
        tasks.rewrite.refusal = refusal_to_others(self.pipe, tasks)

    @property
    def report(self) -> RewriteReport | None:
        """Which modules are pipelined; None before the first batch."""
        return self.tasks.rewrite.report

    def _make_ready(self) -> None:
        rewrite = self.tasks.rewrite
        # The user may have detached the model since the last call, or run another pipeline of it,
        # and each of these must be noticed before a task uses the replaced forwards.
        if not rewrite.attached:
            rewrite.attach()
        if rewrite.others:
            rewrite.check_others(self.tasks.trains())
        if rewrite.postprocs and (in_flight := self.pipe.in_flight):
            # Postprocs have already run for the batches in flight.
            for postproc in rewrite.postprocs:
                postproc.check_unchanged(in_flight)

    def _at_end(self) -> None:
        # An unfinished accumulation would otherwise be lost when the loop ends.
        if self.tasks.trains():
            self.flush()

    def flush(self) -> None:
        """Update the parameters with the gradients that an unfinished accumulation has left.

        At the end of the data, ``progress`` calls it before it raises StopIteration. ``drain`` does
        not, since training may continue. On several ranks, call it on all ranks.

        Raises:
            RuntimeError: Batches are in flight.
        """
        check_idle(self.pipe, "flushing an accumulation")
        self.tasks.flush(self.pipe.next_iteration)

    def state_dict(self) -> dict[str, Any]:
        check_saving(self.pipe, self.tasks)
        return {**super().state_dict(), **self.tasks.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.tasks.load_state_dict(state)

    # GradientAccumulationWrapper assigns this attribute, which cannot change the tasks that have
    # been made. So the setter raises an error.
    @property
    def _optimizer(self) -> Any:
        """The first optimizer of the step, under the name that TorchRec's wrappers read."""
        return self.tasks.step.optimizers[0]

    @_optimizer.setter
    def _optimizer(self, optimizer: Any) -> None:
        raise RuntimeError(
            f"a {type(optimizer).__name__} was to replace the optimizer of this pipeline, whose "
            "step is fixed: for TorchRec's GradientAccumulationWrapper(num_steps=n), give "
            "TrainStep(accumulate=n) instead, without the wrapper"
        )

    def detach(self) -> nn.Module:
        """Restore and return the model, for evaluation, a checkpoint or other code.

        Batches in flight are kept for ``attach`` or the next ``progress``. If the plan has already
        looked up their rows, ``load_state_dict`` is refused: call ``drain`` first.

        Raises:
            RuntimeError: Threads work on batches in flight, or their updates of rows are pending:
                call ``drain`` first.
        """
        if why := self.tasks.rewrite.refusal(False):
            raise RuntimeError(f"batches are in flight, and {why}: call drain() first")
        self.tasks.rewrite.detach()
        return self.tasks.model

    def attach(self) -> None:
        self.tasks.rewrite.attach()

    def close(self) -> None:
        super().close()
        self.tasks.rewrite.detach()
        for hook in self._hooks:
            hook.remove()


def _refuse_loading(pipe: SWPipeline[Any], tasks: SparseDistTasks) -> list[Any]:
    """Make ``load_state_dict`` of the tables raise while batches in flight have read them."""
    # The hooks outlive the pipeline if close() is never called: a strong reference would keep it,
    # and its batches, alive as long as the model.
    weak = weakref.ref(pipe)

    def refuse(module: nn.Module, *_: Any) -> None:
        owner = weak()
        if owner is not None and owner.in_flight:
            raise RuntimeError(
                f"batches in flight ({owner.in_flight}) have read rows of {type(module).__name__} "
                "already, and would train on values from before load_state_dict(): call drain() "
                "of their pipeline first"
            )

    modules: Iterable[Any] = tasks.rewrite.sharded.values()
    return [module.register_load_state_dict_pre_hook(refuse) for module in modules]


PlanFor: TypeAlias = Callable[[SparseDistTasks], PipelinePlan]


def build(
    plan: PlanFor,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    device: Device | torch.device | str | None = None,
    step: TrainStep | None = None,
    **options: Any,
) -> SparseDistPipeline:
    """Return a ``SparseDistPipeline`` under the plan that ``plan`` makes for the tasks.

    Pass either ``optimizer``, one or several, which is short for ``TrainStep([optimizer])``, or
    ``step``. The remaining arguments are those of ``TaskOptions`` and ``SparseDistPipeline``.

    Raises:
        ValueError: Both an optimizer and a step are given, or neither.
    """
    if (optimizer is None) == (step is None):
        raise ValueError("give either optimizer= or step=TrainStep(...), which has its own")
    if step is None:
        given: Any = optimizer
        step = TrainStep(given)
    own = {name: options.pop(name) for name in _OPTIONS & options.keys()}
    tasks = SparseDistTasks(model, step, TaskOptions(**options), device=device)
    return SparseDistPipeline(tasks, plan(tasks), **own)


_OPTIONS = {"run_ahead", *PipelineOptions.__annotations__}


def lean(make: Callable[..., PipelinePlan]) -> PlanFor:
    """Return a function that makes a ready-made plan, in its lean form if the tasks save memory."""
    return lambda tasks: make(lean=bool(tasks.options.memory))


def split(tasks: SparseDistTasks, *, late: bool = False) -> PipelinePlan:
    """Return the plan ``split`` for these tasks; if ``late``, look-ups come after the last step."""
    # The next look-up may precede this batch's step only if the step changes neither the tables'
    # rows nor the learning rate that their fused optimizer reads.
    changes = tasks.tables_in_step or tasks.fused or not tasks.rewrite.looks_up_ahead
    return plans.split(
        after_step=bool(late or changes),
        one_backward=tasks.options.forward != "split" or bool(tasks.rewrite.late),
        lean=bool(tasks.options.memory),
    )


def semi_sync(tasks: SparseDistTasks) -> PipelinePlan:
    """Return the plan ``semi_sync`` for these tasks.

    Raises:
        ValueError: Some tables cannot be read stale.
    """
    if tasks.tables_in_step:
        raise ValueError(
            "semi_sync looks up the next batch before this one's backward, which data-parallel "
            "tables and those that the optimizers step do not allow: shard them otherwise, with a "
            "fused optimizer, or take jagged_split_sparse_dist"
        )
    one_backward = tasks.options.forward == "ahead"
    return plans.semi_sync(one_backward=one_backward, lean=bool(tasks.options.memory))


PLANS: dict[str, PlanFor] = {
    "jagged_sw_serial": lambda _: plans.serial(),
    "jagged_sparse_dist": lean(plans.sparse_dist),
    "jagged_prefetch_sparse_dist": lean(plans.prefetch),
    "jagged_split_sparse_dist": split,
    "jagged_semi_sync_sparse_dist": semi_sync,
}
for _name, _plan in PLANS.items():
    PipelineFactory.register(_name, partial(build, _plan))
