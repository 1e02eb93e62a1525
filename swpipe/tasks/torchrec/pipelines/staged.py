"""TorchRec's ``StagedTrainPipeline`` and ``SparseDataDistUtil``; the user runs the model.

::

    progress   stage 0   stage 1   ...   stage n - 1   returned to the user, who runs the model
    batch      i + n     i + n - 1       i + 1         i

Each of the pipeline's stages is a task, in a plan that gives each task a stage of its own.
``SparseDataDistUtil`` uses hooks of the model to find a batch's exchange when the model is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Generic

import torch
from torch import nn

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan, TaskSchedule
from swpipe.core.task import DeclaredIO, PipelineTask
from swpipe.device import resolve
from swpipe.pipeline import SWPipeline, check_idle
from swpipe.tasks.torchrec._torchrec import PipelineStage, torchrec_pipelines
from swpipe.tasks.torchrec.pipelines.drop_in import PassPipeline
from swpipe.tasks.torchrec.pipelines.named import In, Out
from swpipe.tasks.torchrec.pipelines.refused_arguments import no_internal, refuse
from swpipe.tasks.torchrec.rewriting.forwards import SparseDistContext
from swpipe.tasks.torchrec.rewriting.rewrite import Rewrite
from swpipe.tasks.torchrec.step.task_options import TaskOptions

_HAND_OUT = "hand out"


class SparseDataDistUtil(Generic[In]):
    """Counterpart of TorchRec's class, without ``embedding_lookup_stream``.

    A stream may be None on a CPU. The model must be called once for each batch, in order, with the
    batch as it was exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: Any,
        apply_jit: bool = False,
        prefetch_stream: Any = None,
        pipeline_postproc: bool = False,
        embedding_lookup_stream: Any = None,
    ) -> None:
        # Only values other than the defaults are refused: scripts pass the defaults explicitly.
        given = {"apply_jit": apply_jit, "embedding_lookup_stream": embedding_lookup_stream}
        refuse(self, {name: value for name, value in given.items() if value})
        self.model = model
        self.data_dist_stream = data_dist_stream
        self.prefetch_stream = prefetch_stream
        options = TaskOptions(
            forward="pipelined" if prefetch_stream is None else "prefetch",
            strict=False,
            pipeline_postproc=pipeline_postproc,
        )
        self._rewrite = Rewrite(model, resolve(_device([data_dist_stream])), options)
        self._started = 0
        # The batches that the model has not used yet, oldest first.
        self._exchanged: deque[SparseDistContext] = deque()
        self._hooks: list[Any] = []

    def start_sparse_data_dist(self, batch: In) -> In:
        """Start the exchange of the sizes of ids; the runnable of a stage."""
        self.attach()
        computed = self._rewrite.compute(batch, self._started)
        context = SparseDistContext(index=self._started, computed=computed)
        self._rewrite.start(batch, context)
        self._started += 1
        self._exchanged.append(context)
        return batch

    def prefetch(self, batch: In) -> In:
        """Wait for the ids and fill caches; the runnable of a later stage."""
        waiting = [c for c in self._exchanged if not c.module_input_post_prefetch]
        context = waiting[0]  # the oldest one
        context.wait_for_sizes()
        self._rewrite.prefetch(context)
        return batch

    def load_prefetch(self) -> None:
        """Do nothing, since each exchange belongs to its batch, which waits for it."""

    wait_sdd_fill_callback = data_exhausted_callback = load_prefetch

    def start_sparse_data_dist_stage(
        self, name: str = "start_sparse_data_dist", runnable: Callable[..., Any] | None = None
    ) -> PipelineStage:
        """Return the stage that runs ``start_sparse_data_dist``."""
        return PipelineStage(
            name=name,
            runnable=runnable or self.start_sparse_data_dist,
            stream=self.data_dist_stream,
            fill_callback=self.wait_sdd_fill_callback,
            data_exhausted_callback=self.data_exhausted_callback,
        )

    def detach(self) -> nn.Module:
        """Restore and return the model; batches in flight are kept."""
        self._rewrite.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self.model

    def attach(self) -> None:
        """Undo ``detach``, as the pipeline's ``progress`` also does."""
        self._rewrite.attach()
        # Called for every batch, so that another pipeline's batches in flight are noticed.
        self._rewrite.check_others(self.model.training and torch.is_grad_enabled())
        if not self._hooks:
            before = self.model.register_forward_pre_hook(self._use_next)
            self._hooks = [before, self.model.register_forward_hook(self._start_next)]

    def drop(self) -> None:
        """Forget the exchanges of batches that were dropped."""
        self._exchanged.clear()

    @property
    def _pipelined_modules(self) -> list[nn.Module]:
        return [forward._module for forward in self._rewrite.forwards]

    def _use_next(self, *_: Any) -> None:
        """Use the exchange of the oldest batch; runs before the model's forward."""
        # Another pipeline of the model has detached this one, and may run the model now.
        if not self._rewrite.attached:
            return
        if not self._exchanged:
            raise RuntimeError(
                f"{type(self.model).__name__} is called, and no exchanged batch is left: call it "
                "once for each batch of the pipeline, and detach() it for other batches"
            )
        context = self._exchanged.popleft()
        context.wait_for_sizes()
        self._rewrite.use(context, context.index)

    def _start_next(self, *_: Any) -> None:
        """Start the exchange of ids of the batches that follow; runs after the model's forward."""
        if not self._rewrite.attached:
            return
        self._rewrite.done()
        for context in self._exchanged:
            context.wait_for_sizes()


class StagedTrainPipeline(PassPipeline, torchrec_pipelines.TrainPipeline, Generic[In, Out]):  # type: ignore[misc]
    """Counterpart of TorchRec's class: runs the stages ahead and returns each batch after the last.

    The stages are assumed to communicate, so all ranks run them in the same order. They are assumed
    to share nothing but their batches, since each works on a different batch. The batches are for
    the caller's current stream. A stage's ``stream`` may be None on a CPU. ``run_ahead`` is as for
    ``PipelinePlan``.
    """

    def __init__(
        self,
        pipeline_stages: Sequence[PipelineStage],
        debug_mode: bool = False,
        compute_stream: Any = None,
        on_flush_end: Callable[[], None] | None = None,
        *,
        run_ahead: int | None = None,
    ) -> None:
        super().__init__()
        refuse(self, {"debug_mode": True} if debug_mode else {})
        self.num_stages = len(pipeline_stages)
        self.on_flush_end = on_flush_end
        self._flushing = False
        self._exchanges: list[SparseDataDistUtil[Any]] = []
        # The number keeps the names unique: two stages may have the same name in TorchRec.
        tasks = [self._task(f"{k} {stage.name}", stage) for k, stage in enumerate(pipeline_stages)]
        streams = [stage.stream for stage in pipeline_stages]
        plan = replace(_staged([task.name for task in tasks], streams), run_ahead=run_ahead)
        # The last task only hands the batch out, in the period in which the user runs the model.
        tasks.append(PipelineTask(_HAND_OUT, _hand_out, pure=True))
        self.pipe = SWPipeline(plan, tasks, device=_device(streams))

    def progress(self, dataloader_iter: Iterator[In]) -> Out | None:
        """Run the stages for the batches in flight; return None at the end of the data.

        If it gets another iterator while batches are in flight, these are finished first.
        """
        # The last batch of the flush was returned by the call before, so the user has trained on
        # it.
        if self._flushing and not self.pipe.in_flight:
            self.flush_end()
        try:
            batch: Out = super().progress(dataloader_iter)
        except StopIteration:
            return None
        return batch

    def set_flush(self, flush: bool) -> None:
        """Pull no further batch until those in flight are finished, then call ``on_flush_end``."""
        self._flushing = flush
        if flush and self._pass is not None:
            self._pass.stopped = True

    def flush_end(self) -> None:
        """End the flush and call ``on_flush_end``."""
        self._flushing = False
        if self.on_flush_end is not None:
            self.on_flush_end()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as ``SparseDistPipeline.state_dict`` does, with no batch in flight.

        Raises:
            RuntimeError: Batches are in flight. Their stages may draw random numbers, count, or
                read the model. ``on_flush_end`` is a place to save.
        """
        check_idle(self.pipe, "saving: set_flush(True), train on these, and save in on_flush_end")
        self.pipe.state_dict()  # raises if a failure has dropped batches
        return super().state_dict()

    def attach(self) -> None:
        for exchange in self._exchanges:
            exchange.attach()

    _make_ready = attach

    def _task(self, name: str, stage: PipelineStage) -> PipelineTask:
        """Return the task that runs a stage; dropping its batches also drops their exchanges."""
        # TorchRec calls these around its queues. Ours has none, so only callbacks that are known to
        # be unnecessary may be ignored.
        for callback in ("fill_callback", "data_exhausted_callback"):
            given = getattr(stage, callback)
            if given is not None and _util_of(given) is None:
                raise NotImplementedError(
                    f"stage {stage.name!r}: {callback}={given!r}: only those of SparseDataDistUtil "
                    "can be left out here: do this work in the stage's runnable"
                )
        util = _util_of(stage.runnable)
        self._exchanges += [] if util is None else [util]
        own = DeclaredIO(state=name, others="", reset=None if util is None else util.drop)
        return PipelineTask(name, partial(_run_stage, stage.runnable), [own])

    def __getattr__(self, name: str) -> Any:
        raise no_internal(self, name)


torchrec_pipelines.StagedTrainPipeline.register(StagedTrainPipeline)  # for isinstance()


def _util_of(method: Any) -> SparseDataDistUtil[Any] | None:
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, SparseDataDistUtil) else None


def _run_stage(runnable: Callable[[Any], Any], ctx: IterContext) -> None:
    ctx.batch = runnable(ctx.batch)


def _hand_out(ctx: IterContext) -> None:
    """Set the output, in the period in which the user has the batch."""
    ctx.output = ctx.batch


def _staged(names: Sequence[str], streams: Sequence[Any]) -> PipelinePlan:
    """Return a plan with one stage per task, in which older batches run before newer ones."""
    schedule = {
        # Stages may hold collectives, so every rank submits them in the same order.
        name: TaskSchedule(stage=k, stream=stream, globally_ordered=True)
        for k, (name, stream) in enumerate(zip(names, streams, strict=True))
    }
    schedule[_HAND_OUT] = TaskSchedule(stage=len(names))
    order = [*names, _HAND_OUT]
    return PipelinePlan(
        schedule,
        deps=[(after, before) for before, after in pairwise(order)],
        # Reversed, so that each period runs the oldest batch first.
        order=order[::-1],
    )


def _device(streams: Sequence[Any]) -> torch.device:
    devices = (stream.device for stream in streams if stream is not None)
    return next(devices, torch.device("cpu"))
