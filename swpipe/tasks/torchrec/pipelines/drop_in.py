"""A drop-in for TorchRec's train pipelines: ``progress(dataloader_iter)``.

As with TorchRec, it returns the model's output (the second of ``(losses, output)``) of the oldest
batch, raises StopIteration at the end, and treats None as the end of the data. Unlike TorchRec:

- A batch keeps its mode. ``model.eval()`` or ``torch.no_grad()`` is refused while batches are in
  flight: call ``drain()`` first, or go on to the end of the data.
- With another iterator while batches are in flight, each call finishes one of these; the new
  iterator begins after them, the old one keeps its other batches.
- After StopIteration the same iterator may be given again: persistent workers of a DataLoader start
  it anew for the next epoch.
- An error of the iterator is raised when the batches before it are done, and the next call goes on.
- The ranks agree on the end of the data. Where one rank's ends before that of others, the batches
  that all ranks have are finished, and all raise ``UnevenDataError`` instead of StopIteration.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import nn

from swpipe._distributed.batches_left import batches_left
from swpipe._distributed.even_data import EvenIterator, UnevenDataError
from swpipe.core.plan import PipelinePlan
from swpipe.device import Device
from swpipe.pipeline import SWPipeline
from swpipe.plans.torchrec import sparse_dist as plans
from swpipe.tasks.torchrec.pipelines.mid_flight import check_saving, refusal_to_others, runs_early
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
    """What a pipeline pulls from, for one pass over one of the user's iterators; None ends it.

    ``keep_back`` batches are read ahead, and dropped at the end of the data: what
    ``execute_all_batches=False`` means. At most ``limit`` batches are handed out; the others stay
    in the iterator. Once ``stopped`` it reads no further, and hands out what was read. An error of
    the iterator is raised in its place among the batches. ``pull`` is called with the iterator for
    each batch, in place of ``next``.
    """

    def __init__(
        self,
        source: Iterator[Any],
        *,
        keep_back: int = 0,
        limit: int | None = None,
        pull: Callable[[Iterator[Any]], Any] | None = None,
    ) -> None:
        self.source = source
        self.stopped = self.ended = False
        self._keep_back = keep_back
        self._left = limit
        self._pull = pull
        self._next: Iterator[Any] | None = None
        self._kept: deque[Any] = deque()
        self._errors: deque[tuple[int, Exception]] = deque()  # after so many of those kept

    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        while not (self.stopped or self.ended) and len(self._kept) <= self._keep_back:
            if self._errors and self._errors[0][0] == 0:
                break
            try:
                batch = next(self.source, None) if self._pull is None else self._pull(self.source)
            except StopIteration:  # of a function in place of next
                batch = None
            except Exception as error:
                if not self._kept:
                    raise
                self._errors.append((len(self._kept), error))
                continue
            if batch is None:
                self._kept.clear()
                self._errors = deque((0, error) for _, error in self._errors)
                self.ended = True
            else:
                self._kept.append(batch)
        if self._errors and self._errors[0][0] == 0:
            raise self._errors.popleft()[1]
        if not self._kept:
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        self._errors = deque((before - 1, error) for before, error in self._errors)
        return self._kept.popleft()

    @property
    def agreed(self) -> bool:
        """Whether the ranks agree on the user's iterator already."""
        return isinstance(self.source, EvenIterator)

    def batches_left(self) -> int | None:
        """Return how many batches it will hand out; None if that is not known."""
        left = batches_left(self.source) if self._pull is None else None
        if left is None or self.stopped or self.ended:
            return None
        left = max(0, left + len(self._kept) - self._keep_back)
        return left if self._left is None else min(left, self._left)

    def ends_before(self, source: Iterator[Any], in_flight: int) -> bool:
        """Whether this pass is over, so that one over this iterator of the user's may begin.

        With another iterator, this pass reads no further.

        Warns:
            RuntimeWarning: Yet another one was to come, and no batch of it was pulled.
        """
        if source is not self.source:
            self.stopped = True
            if self._next is not None and self._next is not source:
                warnings.warn(_REPLACED, RuntimeWarning, stacklevel=2)
            self._next = source
        return self.stopped and not (in_flight or self._kept or self._errors)

    @property
    def waiting(self) -> int:
        """Batches that were read and not handed out, or pulled for later steps of all ranks."""
        early = self.source.waiting if isinstance(self.source, EvenIterator) else 0
        return len(self._kept) + early


class PassPipeline:
    """A pipeline whose ``progress`` gets the user's iterator; it pulls one pass after another.

    Use it as a context manager, or call ``close``. Its tasks set ``ctx.output``.

    Attributes:
        pipe: The underlying pipeline: for traces, shortcuts and the profiler.
    """

    pipe: SWPipeline[Any]
    _keep_back = 0
    _pass: Pass | None = None
    _pull: Callable[[Iterator[Any]], Any] | None = None  # a batch, in place of next
    _fills = False  # whether each call of progress calls fill_pipeline, an override

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Run one more batch, and return the oldest one's output.

        Raises:
            StopIteration: All batches are done.
            UnevenDataError: The same, and other ranks have more batches, or this rank has.
            RuntimeError: Batches in flight are of another mode: call ``drain`` first. Or they are
                of another pipeline of the model, and stand in the way.
            Exception: What the iterator raised, when the batches before are done; go on by the
                next call.
            BaseException: As ``SWPipeline.progress``.

        Warns:
            RuntimeWarning: Another iterator was replaced by yet another before it began.
        """
        if self._has_grad():
            return self._step_of(dataloader_iter)
        with torch.no_grad():
            return self._step_of(dataloader_iter)

    def _step_of(self, source: Iterator[Any]) -> Any:
        current = self._pass
        if current is None or current.source is not source or current.stopped:
            self._change_pass(source)
        try:
            self._make_ready()
            if self._fills:
                self.fill_pipeline(source)
            return self.pipe.progress(self._pass).output
        except BaseException as error:
            if isinstance(error, StopIteration | UnevenDataError):
                self._pass = None  # the next call begins a new one, whatever its iterator
                self._at_end()
            if not self.pipe.in_flight:
                self._at_stop()
            raise

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Pull the first batches and start on them, as else the first ``progress`` does.

        Does nothing while batches are in flight, or when the data has ended.
        """
        self._change_pass(dataloader_iter)
        self.attach()
        current: Any = self._pass
        if not (self.pipe.in_flight or current.ended):
            self.pipe.fill_pipeline(current)

    def _change_pass(self, source: Iterator[Any]) -> None:
        """Begin a pass over ``source``, once the present one has finished."""
        current = self._pass
        if current is not None and not current.ends_before(source, self.pipe.in_flight):
            return
        self._pass = self._new_pass(source)

    def _at_end(self) -> None:
        """What the end of the data asks for."""

    def _at_stop(self) -> None:
        """What the end of the data and a failure ask for, with nothing in flight."""

    def _has_grad(self) -> bool:
        """Whether batches may have gradients."""
        return True

    def _new_pass(self, source: Iterator[Any], limit: int | None = None) -> Pass:
        return Pass(source, keep_back=self._keep_back, limit=limit, pull=self._pull)

    def _make_ready(self) -> None:
        """What comes before batches in flight are run."""

    def drain(self) -> list[Any]:
        """Finish the batches in flight, and return their outputs, oldest first.

        The iterator keeps its other batches. On several ranks, call it on all after the same step.
        There, one batch more than the plan has in flight may have been pulled; it is finished too.

        Raises:
            RuntimeError: The batches in flight are of another mode.
            BaseException: As ``SWPipeline.progress``.
        """
        if self.pipe.in_flight:
            self._make_ready()
        with nullcontext() if self._has_grad() else torch.no_grad():
            return [ctx.output for ctx in self.pipe.drain()]

    def state_dict(self) -> dict[str, Any]:
        """What to save beside models and optimizers, so that a later run can go on from here.

        Call it between two calls of ``progress``, together with the states of model and optimizers.

        Returns:
            As ``SWPipeline.state_dict``. ``in_flight`` also counts a batch that was pulled early;
            ``rates``, where tables take those of an earlier step, are for the next look-up.

        Raises:
            RuntimeError: A run that is resumed from here would give other numbers; it says why.
                Batches in flight have read stale rows, for example: call ``drain`` first.
        """
        state = self.pipe.state_dict(check=False)
        early = 0 if self._pass is None else self._pass.waiting
        return {**state, "in_flight": state["in_flight"] + early}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the model, the optimizers and the data are yours to set back.

        Raises:
            RuntimeError: Batches are in flight.
            ValueError: ``state`` is not what ``state_dict`` returns.

        Warns:
            RuntimeWarning: DDP on several ranks reduces an accumulation's first batch by itself.
        """
        self.pipe.load_state_dict(state)
        self._pass = None

    def attach(self) -> None:
        """Undo ``detach``."""

    def close(self) -> None:
        """Drop the batches in flight and restore the model. The pipeline cannot be used again."""
        self.pipe.close()
        self._pass = None  # with the batches that were pulled early

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class SparseDistPipeline(PassPipeline):
    """Trains a model under one plan, with TorchRec's ``progress``.

    Between two calls of ``progress`` the model may be detached, evaluated and saved, if the plan
    uses no worker threads (ready-made ones do not). With several ranks, creating one is a
    collective.

    Args:
        tasks: The tasks of the step.
        plan: The plan. ``InputPostproc`` is added where the tasks have it and the plan has not.
        stall_timeout_s: Seconds without progress after which ``StallError`` is raised; None: never.
        seed: Seed of the draws of a random model; None for ``torch.initial_seed()``.
        check_data: Whether the ranks agree on the end of their data: once per pass where all know
            how many batches they have, or else at each pull. They then pull each batch one step
            before it enters the pipeline, except under a serial plan. Without the check, a rank
            that ends alone leaves the others waiting in a collective.
        run_ahead: How far the host may launch ahead of the device, as for ``PipelinePlan``.
    """

    def __init__(
        self,
        tasks: SparseDistTasks,
        plan: PipelinePlan,
        *,
        stall_timeout_s: float | None = 600.0,
        seed: int | None = None,
        check_data: bool = True,
        run_ahead: int | None = None,
    ) -> None:
        self.tasks = tasks
        if tasks.options.pipeline_postproc and plans.POSTPROC not in plan.schedule:
            plan = plans.with_postproc(plan)
        self.pipe = SWPipeline(
            plan,
            plan.tasks or tasks.tasks(),
            device=tasks.device,
            stall_timeout_s=stall_timeout_s,
            seed=seed,
            mode=tasks.mode,
            run_ahead=run_ahead,
            check_data=check_data,
        )
        self._pass = None
        reads = (tasks.task_of(part) for part in (tasks.prefetch, tasks.embedding_forward))
        early = any(runs_early(plan, task) for task in reads)
        self._hooks = _refuse_loading(self.pipe, tasks) if early else []
        tasks.rewrite.refusal = refusal_to_others(self.pipe, tasks)

    @property
    def report(self) -> RewriteReport | None:
        """Which modules are pipelined; None before the first batch."""
        return self.tasks.rewrite.report

    def _make_ready(self) -> None:
        rewrite = self.tasks.rewrite
        if not rewrite.attached:
            rewrite.attach()
        if rewrite.others:
            rewrite.check_others(self.tasks.trains())
        if rewrite.postprocs and (in_flight := self.pipe.in_flight):
            for postproc in rewrite.postprocs:  # they have run already for these batches
                postproc.check_unchanged(in_flight)

    def _at_end(self) -> None:
        if self.tasks.trains():
            self.flush()

    def flush(self) -> None:
        """Update the parameters with what ``TrainStep(accumulate=)`` has left over.

        ``progress`` does so at the end of the data, before it raises StopIteration. ``drain`` does
        not, since training may continue. On several ranks, call it on all.

        Raises:
            RuntimeError: Batches are in flight.
        """
        self.pipe.check_idle("flushing an accumulation")
        self.tasks.flush(self.pipe.next_iteration)

    def state_dict(self) -> dict[str, Any]:
        check_saving(self.pipe, self.tasks)
        return {**super().state_dict(), **self.tasks.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.tasks.load_state_dict(state)

    @property
    def _optimizer(self) -> Any:
        """What TorchRec's ``GradientAccumulationWrapper`` replaces, which has no effect here."""
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

        Batches in flight are kept for ``attach`` or the next ``progress``. Where the plan has
        looked up their rows already, ``load_state_dict`` is refused: call ``drain`` first.
        """
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
    """A ``SparseDistPipeline`` under the plan that ``plan`` makes for the tasks.

    ``optimizer``, one or several, stands for ``TrainStep([optimizer])``; give either that or
    ``step``. The other arguments are those of ``TaskOptions`` and ``SparseDistPipeline``.

    Raises:
        ValueError: Both an optimizer and a step, or neither.
    """
    if (optimizer is None) == (step is None):
        raise ValueError("give either optimizer= or step=TrainStep(...), which has its own")
    if step is None:
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        step = TrainStep([one for one in several if one is not None])
    own = {name: options.pop(name) for name in _OPTIONS & options.keys()}
    tasks = SparseDistTasks(model, step, TaskOptions(**options), device=device)
    return SparseDistPipeline(tasks, plan(tasks), **own)


_OPTIONS = {"stall_timeout_s", "seed", "check_data", "run_ahead"}


def lean(make: Callable[..., PipelinePlan]) -> PlanFor:
    """Makes a ready-made plan that saves memory if the tasks do."""
    return lambda tasks: make(lean=bool(tasks.options.memory))


def split(tasks: SparseDistTasks) -> PipelinePlan:
    """The plan ``split`` for these tasks."""
    early = tasks.rewrite.looks_up_ahead and not (tasks.tables_in_step or tasks.fused)
    return plans.split(after_step=not early, lean=bool(tasks.options.memory))


def semi_sync(tasks: SparseDistTasks) -> PipelinePlan:
    """The plan ``semi_sync`` for these tasks.

    Raises:
        ValueError: Tables that cannot be read stale.
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
