"""The eleven tasks of a recommender's training step, on TorchRec's sharded modules.

What goes through an iteration's context::

    ctx.batch ── H2DAndShuffle ──> ctx.batch, on the device
              ── EmbInputDistStart ──> ctx.pipeline: sizes under way
              ── EmbInputDistWait ──>               ids under way
              ── EmbPrefetch ──>                    ids of this rank; caches warm
              ── EmbForward ──>                     embeddings under way
              ── DenseForward ──> ctx.losses, ctx.output
              ── LossPostprocess ──> ctx.loss, one number
              ── DenseBackward ──> gradients, those of the embeddings in ctx.pipeline
              ── EmbBackward ──> (tables)
              ── FinalizeGrads, OptimStep ──> (gradients, parameters)

``ctx.pipeline`` is described in ``swpipe.tasks.sparse_dist.contexts``. Without the split forward
EmbForward runs the whole model, DenseBackward goes through all of it, and DenseForward and
EmbBackward have nothing to do. In evaluation mode the tasks from LossPostprocess on have nothing to
do.

States that outlive the iteration, as the tasks declare them:

==============  ===========================================================  =====================
state           what it is                                                   capture and restore
==============  ===========================================================  =====================
tables          embedding tables                                             a task that is not
table cache     which of their rows are cached, and what is held there       run leaves these as
dense           all other parameters                                         its last run did;
buffers         running statistics of the dense half                         that is its replay
optimizer       optimizer states, learning rates, scaler
gradients       of all that optimizers step                                  kept, put back
==============  ===========================================================  =====================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, Mode, PipelineTask
from swpipe.device import Device, resolve
from swpipe.plans import sparse_dist as names
from swpipe.tasks.sparse_dist.contexts import SparseDistContext, new_context
from swpipe.tasks.sparse_dist.forwards import Kind
from swpipe.tasks.sparse_dist.rewrite import Find, Rewrite
from swpipe.tasks.sparse_dist.seam import go_on
from swpipe.tasks.sparse_dist.shuffle import Shuffler
from swpipe.tasks.sparse_dist.step import TrainStep, by_gradient, ddp_modules


class SparseDistTasks:
    """A model in training, cut into the eleven tasks.

    Args:
        model: A model with sharded modules, in whatever wrappers.
        step: The user's own step.
        device: Where the work goes: None for the machine's accelerator, or else the CPU.
        forward: "pipelined", "prefetch" or "split" (``swpipe.tasks.sparse_dist.forwards``).
        find: How the sharded modules' inputs are found, "trace" or "direct".
        inputs: Module name to the path of its input within the batch, where that is known.
        strict: A sharded module that cannot be pipelined is an error.
        shuffler: Deals the rows of all ranks' batches anew (``swpipe.tasks.sparse_dist.shuffle``):
            begun with the batch before it is copied, finished before its ids are exchanged.
        random: The model draws random numbers (dropout): each forward is then seeded from the
            pipeline's seed, so that all plans draw alike.

    Attributes:
        rewrite: The model's replaced forwards; its ``report`` says what was pipelined.
        tables_in_step: Some tables are updated by the optimizers rather than inside backward.

    Raises:
        RewriteError: The model has no sharded module.
        RuntimeError: There is no process group.
        ValueError: A scaler, and tables that update themselves inside backward.
    """

    def __init__(
        self,
        model: nn.Module,
        step: TrainStep,
        *,
        device: Device | torch.device | str | None = None,
        forward: Kind = "split",
        find: Find = "trace",
        inputs: Mapping[str, str] | None = None,
        strict: bool = True,
        shuffler: Shuffler | None = None,
        random: bool = False,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "sharded modules exchange ids between ranks, and there is no process group: call "
                "torch.distributed.init_process_group() first, under torchrun or with one rank"
            )
        self.model = model
        self.step = step
        self.device = resolve(device)
        self.rewrite = Rewrite(
            model, self.device, kind=forward, find=find, inputs=inputs, strict=strict
        )
        self._target = _torch_device(self.device)
        self._shuffler = shuffler
        self._random = random
        self._ddp = tuple(ddp_modules(model))
        self._parameters = step.parameters()
        self._first: int | None = None
        # The stream of the caller, which a cache must know when it is filled from another.
        self._home = self.device.current_stream()
        self._tables = [p for module in self.rewrite.sharded for p in module.parameters()]
        self.tables_in_step = any(map(by_gradient, self._tables))
        if step.scaler is not None and not all(map(by_gradient, self._tables)):
            raise ValueError(
                "TrainStep.scaler scales the loss, and the tables update themselves inside "
                "backward, with the scaled gradients: use bfloat16, which needs no scaler, or "
                "shard the tables without a fused optimizer"
            )

    # -------------------------------------------------------------------- tasks

    def copy(self, ctx: IterContext) -> None:
        """The batch, on the device; which rows go to which rank is worked out meanwhile."""
        batch = ctx.batch
        lacks = [m for m in ("to", "record_stream") if not callable(getattr(batch, m, None))]
        if lacks:
            raise TypeError(
                f"batch {ctx.iter_idx} is a {type(batch).__name__} without {' and '.join(lacks)}: "
                "give it to(device, non_blocking) and record_stream(stream), as "
                "torchrec.streamable.Pipelineable asks"
            )
        if self._shuffler is not None:
            ctx.shuffle_ticket = self._shuffler.start(batch)
        ctx.batch = batch.to(device=self._target, non_blocking=True)

    def start_input_dist(self, ctx: IterContext) -> None:
        """The rows of this rank; their ids into buckets; the exchange of their numbers begins."""
        if self._shuffler is not None:
            ctx.batch = self._shuffler.finish(ctx.batch, ctx.shuffle_ticket)
            del ctx.shuffle_ticket
        ctx.pipeline = new_context(ctx.iter_idx)
        self.rewrite.start(ctx.batch, ctx.pipeline)

    def wait_input_dist(self, ctx: IterContext) -> None:
        """Their numbers are known; the exchange of the ids begins."""
        context: SparseDistContext = ctx.pipeline
        for module_names, splits in context.fused_splits_awaitables:
            requests, _ = splits.wait_with_context()
            context.input_dist_tensors_requests.update(zip(module_names, requests, strict=True))
        context.input_dist_splits_requests.clear()
        context.fused_splits_awaitables.clear()

    def prefetch(self, ctx: IterContext) -> None:
        """The ids of this rank are here; modules with a cache warm it."""
        context: SparseDistContext = ctx.pipeline
        here = self.device.current_stream()
        for forward in self.rewrite.forwards:
            if not forward.prefetches:
                continue
            name = forward.name
            request = context.input_dist_tensors_requests.pop(name)
            data, module_context = request.wait_with_context()
            forward._module.prefetch(
                ctx=module_context,
                dist_input=data,
                forward_stream=None if here == self._home else self._home,
            )
            context.module_input_post_prefetch[name] = data
            context.module_contexts_post_prefetch[name] = module_context
            del context.module_contexts[name]

    def embedding_forward(self, ctx: IterContext) -> None:
        """Embeddings, looked up; the exchange of them begins."""
        self._begin_forward(ctx)
        if self.rewrite.kind != "split":
            self._run_model(ctx)
            return
        for forward in self.rewrite.forwards:
            forward.look_up()

    def dense_forward(self, ctx: IterContext) -> None:
        """Losses and output."""
        if self.rewrite.kind == "split":
            self._begin_forward(ctx)
            self._run_model(ctx)

    def postprocess_loss(self, ctx: IterContext) -> None:
        """The number to differentiate."""
        if ctx.training:
            losses = ctx.losses if self.step.on_losses is None else self.step.on_losses(ctx.losses)
            ctx.loss = self.step.total(losses)

    def dense_backward(self, ctx: IterContext) -> None:
        """Gradients of the dense half, down to the embeddings; the exchange of theirs begins."""
        if ctx.training:
            self.step.backward(ctx.loss, ctx.iter_idx)

    def embedding_backward(self, ctx: IterContext) -> None:
        """Gradients of the embeddings back to the tables; these update themselves where fused."""
        go_on(ctx.pipeline.seams.values())
        ctx.pipeline.seams.clear()

    def finalize_gradients(self, ctx: IterContext) -> None:
        """Gradients that all ranks agree on."""
        if ctx.training and self.step.finalize is not None and self.step.ends(ctx.iter_idx):
            self.step.finalize(self.model)

    def optimizer_step(self, ctx: IterContext) -> None:
        """Parameters, from the gradients."""
        if ctx.training:
            self.step.update(ctx.iter_idx)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """The eleven, in serial order."""
        fns = (
            self.copy,
            self.start_input_dist,
            self.wait_input_dist,
            self.prefetch,
            self.embedding_forward,
            self.dense_forward,
            self.postprocess_loss,
            self.dense_backward,
            self.embedding_backward,
            self.finalize_gradients,
            self.optimizer_step,
        )
        drawing = {names.EMBED, names.DENSE} if self._random else frozenset()
        return tuple(
            PipelineTask(name, fn, self._io(name), random=name in drawing)
            for name, fn in zip(names.TASKS, fns, strict=True)
        )

    # ------------------------------------------------------------------ private

    def _io(self, task: str) -> list[DeclaredIO]:
        """What a task touches outside of its iteration's context."""
        split = self.rewrite.kind == "split"
        dense: dict[str, Mode] = {"dense": "r", "buffers": "rw"}
        tables: dict[str, Mode] = {"tables": "rw", "optimizer": "r"}
        looked_up: dict[str, Mode] = {"tables": "r", "table cache": "rw"}
        in_step: Mapping[str, Mode] = {"tables": "rw"} if self.tables_in_step else {}
        # Which batch the replaced forwards work on: each task that runs them says so first.
        forwards: dict[str, Mode] = {"batch at hand": "rw"}
        touched: dict[str, Mapping[str, Mode]] = {
            names.PREFETCH: {"table cache": "rw"},
            names.EMBED: forwards | (looked_up if split else looked_up | dense),
            names.DENSE: forwards | dense if split else {},
            names.DENSE_BACK: {"gradients": "rw"} if split else {"gradients": "rw", **tables},
            names.EMBED_BACK: tables if split else {},
            names.FINALIZE: {"gradients": "rw"},
            names.STEP: {"gradients": "rw", "dense": "rw", "optimizer": "rw", **in_step},
        }
        if split and self.tables_in_step:
            touched[names.EMBED_BACK] = {**tables, "gradients": "rw"}
        return [self._declare(task, state, mode) for state, mode in touched.get(task, {}).items()]

    def _declare(self, task: str, state: str, mode: Mode) -> DeclaredIO:
        if state == "gradients" and task != names.STEP:
            return DeclaredIO(self._get_gradients, self._set_gradients, state, mode)
        memory = self._tables if state == "tables" else None
        return DeclaredIO(state=state, mode=mode, memory=memory)

    def _get_gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _begin_forward(self, ctx: IterContext) -> None:
        self.rewrite.use(ctx.pipeline)
        if self.step.accumulate > 1:
            if self._first is None and self.model.training and torch.is_grad_enabled():
                self._first = ctx.iter_idx
            # DDP takes its static graph from a first iteration that reduces; to reduce gradients
            # once more than needed does not change their mean.
            reduces = self.step.ends(ctx.iter_idx) or ctx.iter_idx == self._first
            for module in self._ddp:  # what DDP's no_sync() does, for one forward
                module.require_backward_grad_sync = reduces

    def _run_model(self, ctx: IterContext) -> None:
        ctx.training = self.model.training and torch.is_grad_enabled()
        result = (self.step.forward or self.model)(ctx.batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the model returned a {type(result).__name__}, not (losses, output): return these "
                "two, or give TrainStep.forward, which calls the model and does"
            )
        ctx.losses, ctx.output = result


def _torch_device(device: Device) -> torch.device:
    if device.has_streams:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device(device.type)
