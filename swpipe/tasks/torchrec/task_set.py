"""The eleven tasks of a recommender's training step, on TorchRec's sharded modules.

    ctx.batch ── H2DAndShuffle ──> ctx.batch, on the device
             (── InputPostproc ──> ctx.postproc: inputs that modules of the model compute)
              ── EmbInputDistStart ──> ctx.pipeline: exchange of sizes started
              ── EmbInputDistWait ──>               exchange of ids started
              ── EmbPrefetch ──>                    ids of this rank; caches filled
              ── EmbForward ──>                     exchange of embeddings started
              ── DenseForward ──> ctx.losses, ctx.output
              ── LossPostprocess ──> ctx.loss, a scalar
              ── DenseBackward ──> gradients, those of the embeddings in ctx.pipeline
              ── EmbBackward ──> (tables)
              ── FinalizeGrads, OptimStep ──> (gradients, parameters)

Without the split forward, EmbForward runs the whole model, DenseBackward the whole backward, and
DenseForward and EmbBackward do nothing. In evaluation, nothing from LossPostprocess on runs.
InputPostproc is a twelfth task, there with ``pipeline_postproc=True`` only.

Declared states: ``tables``; ``table cache``; ``dense``, all other parameters; ``buffers``;
``optimizer``, with learning rates and scaler; ``gradients``; ``postproc``, what modules that run
ahead hold; and one for each exchange, whose collectives keep their order. A shortcut restores
gradients; the other states keep the values of the last run. Tasks without a state are pure, except
``LossPostprocess`` with a function of the user's (``TrainStep.on_losses``), of which nothing is
declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe.core.context import IterContext
from swpipe.core.task import DeclaredIO, Mode, PipelineTask, TaskFn
from swpipe.device import Device, resolve
from swpipe.plans.torchrec import sparse_dist as names
from swpipe.tasks.torchrec._torchrec import DMPCollection
from swpipe.tasks.torchrec.accumulation import Accumulation
from swpipe.tasks.torchrec.contexts import SparseDistContext, new_context
from swpipe.tasks.torchrec.forwards import Kind
from swpipe.tasks.torchrec.module_modes import ModuleModesOf
from swpipe.tasks.torchrec.postproc import PostprocResults
from swpipe.tasks.torchrec.prefetched import PrefetchedBatches
from swpipe.tasks.torchrec.reduction import DeferredReduction
from swpipe.tasks.torchrec.released import MemoryOptions, copied_in_place
from swpipe.tasks.torchrec.rewrite import Find, Rewrite
from swpipe.tasks.torchrec.seam import run_embedding_backward
from swpipe.tasks.torchrec.shuffle import Shuffler
from swpipe.tasks.torchrec.step import TrainStep, by_gradient
from swpipe.tasks.torchrec.table_rates import rates_of, set_rates
from swpipe.tasks.torchrec.table_state import CaptureRestore, TableState
from swpipe.tasks.torchrec.used_states import OTHERS, InTurn, together, used_states
from swpipe.tasks.torchrec.wrappers import GradientBuffers


class SparseDistTasks:
    """The eleven tasks of a model's training step.

    Args:
        model: A model with sharded modules, with or without wrappers.
        step: The user's step.
        device: None for the machine's accelerator, or else the CPU.
        forward: "split" (embeddings and dense part in separate tasks), "ahead" (the same, with one
            backward), "prefetch", "pipelined", or "own": the model runs as it is, and needs no
            sharded module.
        find: How the sharded modules' inputs are found: "trace" with torch.fx, or "direct" by type.
        inputs: Module name to the path of its input within the batch, for inputs not to be found.
        strict: A sharded module that cannot be pipelined is an error; otherwise it keeps its own
            forward, and the report says so.
        shuffler: Redistributes the rows of all ranks' batches.
        pipeline_postproc: Modules without parameters that compute inputs of sharded modules run
            ahead of the forward, in a twelfth task (see ``plans.sparse_dist.with_postproc``).
        zero_grad: The task that calls the optimizers' ``zero_grad``, which also hands the learning
            rates over to fused tables: EmbForward (first), DenseBackward (first) or OptimStep
            (last). A look-up then takes the rate that was handed over last, as in TorchRec's
            pipelines. None: DenseBackward, and each look-up takes the rate of its moment.
        memory: What saves device memory; the numbers are the same.
        random: The model draws random numbers (dropout): each forward is then seeded.
        tables_state: Two functions that capture and restore this rank's rows, for profiling and
            recording, where the rows lie in no parameter or buffer. What ``capture`` returns is
            copied with ``copy.deepcopy``, once to keep it and once for each ``restore``.

    Attributes:
        pipeline_postproc, memory: As given.
        copy_batch: Copies a batch to the device instead of ``batch.to``, if set.
        rewrite: The model's replaced forwards; its ``report`` says which modules are pipelined.
        prefetched: What tables with a queue of prefetches keep for the batches in flight.
        table_state: The rows that ``tables_state`` restores, or that nothing does; None where all
            rows lie in parameters or buffers.
        mode: Says which modules are in training mode.
        tables_in_step: Some tables are updated by the optimizers rather than inside backward.
        fused: The step's optimizers that are fused into the tables. A look-up takes their learning
            rate, which ``OptimStep`` may change.

    Raises:
        RewriteError: The model has no sharded module, and ``forward`` is not "own".
        RuntimeError: There is no process group.
        ValueError: A scaler, and tables that are updated inside backward.
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
        pipeline_postproc: bool = False,
        random: bool = False,
        tables_state: CaptureRestore | None = None,
        zero_grad: str | None = None,
        memory: MemoryOptions = MemoryOptions(),  # noqa: B008 - frozen
    ) -> None:
        if forward != "own" and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "sharded modules exchange ids between ranks, and there is no process group: call "
                "torch.distributed.init_process_group() first, under torchrun or with one rank"
            )
        self.model = model
        self.step = step
        self.device = resolve(device)
        self.pipeline_postproc, self.memory = pipeline_postproc, memory
        self.rewrite = Rewrite(
            model, self.device, kind=forward, find=find, inputs=inputs, strict=strict,
            pipeline_postproc=pipeline_postproc, memory=memory,
        )  # fmt: skip
        self.prefetched = PrefetchedBatches(self.rewrite.sharded)
        table_state = TableState(self.rewrite.sharded, tables_state)
        self.table_state = table_state if table_state.needed else None
        self._target = _torch_device(self.device)
        self.shuffler = shuffler
        self._random = random
        self._zero_grad_in = zero_grad
        self.copy_batch: Callable[[Any], Any] | None = None
        self._replicas: Any = model if isinstance(model, DMPCollection) else None
        self._accumulation = Accumulation(model, step.accumulate)
        self.mode = ModuleModesOf(model)
        self._parameters = step.parameters()
        self._buffers = GradientBuffers(model)
        self._reduction = DeferredReduction(model)
        # The caller's stream, which a cache that is filled on another stream must know.
        self._home = self.device.current_stream()
        self._tables = [p for module in self.rewrite.sharded.values() for p in module.parameters()]
        self.fused = step.fused()
        self.tables_in_step = any(map(by_gradient, self._tables))
        self._check_gradients(step)

    def _check_gradients(self, step: TrainStep) -> None:
        if self._buffers and (step.scaler is not None or isinstance(step.clip, int | float)):
            raise ValueError(
                "TrainStep.scaler, and a number as TrainStep.clip, use parameter.grad; Megatron's "
                "DistributedDataParallel keeps the gradients in parameter.main_grad: let its "
                "optimizer scale and clip (OptimizerConfig), or give a function as clip"
            )
        if step.scaler is not None and not all(map(by_gradient, self._tables)):
            raise ValueError(
                "TrainStep.scaler scales the loss, and the tables are updated inside backward with "
                "the scaled gradients: use bfloat16, which needs no scaler, or shard the tables "
                "without a fused optimizer"
            )

    def start_shuffle(self, ctx: IterContext) -> None:
        """Hand the batch to the shuffler."""
        if self.shuffler is not None:
            ctx.shuffle_ticket = self.shuffler.start(ctx.batch)

    def copy(self, ctx: IterContext) -> None:
        """Copy the batch to the device."""
        ctx.batch = (self.copy_batch or self.to_device)(ctx.batch)

    def to_device(self, batch: Any) -> Any:
        """The batch on the device.

        Raises:
            TypeError: It cannot be copied, or not in place.
        """
        lacks = [m for m in ("to", "record_stream") if not callable(getattr(batch, m, None))]
        if lacks:
            raise TypeError(
                f"a batch is a {type(batch).__name__} without {' and '.join(lacks)}: "
                "give it to(device, non_blocking) and record_stream(stream), as "
                "torchrec.streamable.Pipelineable asks"
            )
        if self.memory.enable_inplace_copy_batch and self.device.has_streams:
            return copied_in_place(batch, self._target, self.device, self._home)
        return batch.to(device=self._target, non_blocking=True)

    def finish_shuffle(self, ctx: IterContext) -> None:
        """Take the rows that the shuffler gives this rank."""
        if self.shuffler is not None:
            ctx.batch = self.shuffler.finish(ctx.batch, ctx.shuffle_ticket)
            del ctx.shuffle_ticket

    def postprocess_input(self, ctx: IterContext) -> None:
        """Compute the inputs that modules of the model compute."""
        ctx.postproc = self.rewrite.compute(ctx.batch, ctx.iter_idx)

    def start_input_dist(self, ctx: IterContext) -> None:
        """Start the exchange of the sizes of ids."""
        ctx.pipeline = new_context(ctx.iter_idx)
        self.rewrite.start(ctx.batch, ctx.pipeline, self._results(ctx))

    def wait_input_dist(self, ctx: IterContext) -> None:
        """Wait for the sizes; start the exchange of ids."""
        context: SparseDistContext = ctx.pipeline
        context.wait_for_sizes()

    def prefetch(self, ctx: IterContext) -> None:
        """Wait for the ids; modules with a cache fill it."""
        home = None if self.device.current_stream() == self._home else self._home
        with self.prefetched.prefetching():
            self.rewrite.prefetch(ctx.pipeline, home, self._results(ctx))

    def embedding_forward(self, ctx: IterContext) -> None:
        """Look the embeddings up, with the current learning rate; start their exchange."""
        self._begin_forward(ctx)
        if self._zero_grad_in is None and self.trains():
            for optimizer in self.fused:  # has no gradients: this gives the tables its rate
                optimizer.zero_grad()
        with self.prefetched.looking_up():
            if not self.rewrite.looks_up_ahead:
                self._run_model(ctx)
                return
            for forward in self.rewrite.forwards:
                if forward.looks_up_ahead:
                    forward.look_up()

    def dense_forward(self, ctx: IterContext) -> None:
        """Compute losses and output."""
        if self.rewrite.looks_up_ahead:
            self._begin_forward(ctx)
            self._run_model(ctx)

    def postprocess_loss(self, ctx: IterContext) -> None:
        """Compute the scalar loss."""
        if ctx.training:
            losses = ctx.losses if self.step.on_losses is None else self.step.on_losses(ctx.losses)
            ctx.loss = self.step.total(losses)

    def zero_grad(self, ctx: IterContext) -> None:
        """Begin an optimizer step without gradients."""
        self._reduction.finish()
        if self.trains() and self._accumulation.begins(ctx.iter_idx):
            self.step.zero_grad()
            self._buffers.zero()

    def dense_backward(self, ctx: IterContext) -> None:
        """Backward down to the embeddings; start the exchange of their gradients."""
        self._reduction.finish()  # of a batch that failed
        if ctx.training:
            ends = self._accumulation.ends(ctx.iter_idx)
            with nullcontext() if ends else self._buffers.unreduced(), self._deferring():
                self.step.backward(ctx.loss)

    def embedding_backward(self, ctx: IterContext) -> None:
        """Backward of the tables, which updates those with a fused optimizer; sync of replicas."""
        # A shortcut of DenseForward replays the cut of an earlier batch, whose graph is not ours.
        cuts = [seam for seam in ctx.pipeline.seams.values() if seam.iteration == ctx.iter_idx]
        run_embedding_backward(cuts)
        ctx.pipeline.seams.clear()
        self.prefetched.finish_backward()
        every = self.step.sync_interval
        if self._replicas is not None and ctx.training and every and ctx.iter_idx % every == 0:
            self._replicas.sync()

    def finalize_gradients(self, ctx: IterContext) -> None:
        """Wait for DDP's reductions; call the user's ``finalize``, which may communicate."""
        self._reduction.finish()
        if ctx.training and self._accumulation.ends(ctx.iter_idx):
            self._finalize()

    def optimizer_step(self, ctx: IterContext) -> None:
        """Update the parameters."""
        if not ctx.training:
            self._accumulation.skip()
        elif self._accumulation.ends(ctx.iter_idx):
            self.step.update()

    def flush(self, next_iteration: int) -> None:
        """Update the parameters with the gradients of an unfinished accumulation, if there is one.

        ``next_iteration`` is the number of the next batch; none may be in flight. A collective.
        """
        if self._accumulation.take_rest(next_iteration):
            self._finalize()
            self.step.update()

    def accumulated(self, next_iteration: int) -> int:
        """How many batches have added to gradients that wait for their optimizer step."""
        return self._accumulation.rest(next_iteration)

    def resume(self, next_iteration: int) -> None:
        """Begin with this batch; none may be in flight."""
        self._accumulation.restart(next_iteration)

    def state_dict(self) -> dict[str, list[float]]:
        """Learning rates that were handed to the tables; no optimizer's state has them."""
        if self._zero_grad_in in (None, names.EMBED) or not self.fused:
            return {}
        return {"rates": rates_of(self.rewrite.sharded.values())}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Hand saved rates over.

        Raises:
            ValueError: They are of another number of tables.
        """
        if "rates" in state:
            set_rates(self.rewrite.sharded.values(), state["rates"])

    def parts(self) -> dict[str, tuple[TaskFn, ...]]:
        """The tasks in serial order, each with the methods that it calls, one after the other."""
        first: dict[str, tuple[TaskFn, ...]]
        first = {names.START: (self.finish_shuffle, self.start_input_dist)}
        if self.pipeline_postproc:
            rows = (self.finish_shuffle, self.postprocess_input)
            first = {names.POSTPROC: rows, names.START: (self.start_input_dist,)}
        zero = {self._zero_grad_in or names.DENSE_BACK: (self.zero_grad,)}
        return {
            names.COPY: (self.start_shuffle, self.copy),
            **first,
            names.WAIT: (self.wait_input_dist,),
            names.PREFETCH: (self.prefetch,),
            names.EMBED: (*zero.get(names.EMBED, ()), self.embedding_forward),
            names.DENSE: (self.dense_forward,),
            names.LOSS: (self.postprocess_loss,),
            names.DENSE_BACK: (*zero.get(names.DENSE_BACK, ()), self.dense_backward),
            names.EMBED_BACK: (self.embedding_backward,),
            names.FINALIZE: (self.finalize_gradients,),
            names.STEP: (self.optimizer_step, *zero.get(names.STEP, ())),
        }

    def task_of(self, part: TaskFn) -> str:
        """The name of the task that calls a method."""
        return next(name for name, parts in self.parts().items() if part in parts)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """The tasks, in serial order."""
        return tuple(self._task(name, parts) for name, parts in self.parts().items())

    def _task(self, name: str, parts: tuple[TaskFn, ...]) -> PipelineTask:
        states = self._io(parts)
        draws = (self.postprocess_input, self.embedding_forward, self.dense_forward)
        return PipelineTask(
            name,
            parts[0] if len(parts) == 1 else InTurn(parts),
            states + [io for part in parts for io in self.prefetched.io(part.__name__)],
            random=self._random and any(part in draws for part in parts),
            pure=not states and not self._unknown(parts),
        )

    def _unknown(self, parts: Sequence[TaskFn]) -> bool:
        """Whether a task with these methods calls a function of which nothing is known."""
        return self.postprocess_loss in parts and self.step.on_losses is not None

    def _io(self, parts: Sequence[TaskFn]) -> list[DeclaredIO]:
        """The states that a task with these methods uses."""
        used = used_states(
            split=self.rewrite.looks_up_ahead,
            late=bool(self.rewrite.late) or self.rewrite.kind == "ahead",
            fused=bool(self.fused),
            hands_over=bool(self.fused) and self._zero_grad_in is not None,
            in_step=self.tables_in_step,
            pinned=bool(self.prefetched),
            shuffled=self.shuffler is not None,
            replicas=self._replicas is not None,
        )
        modes = together((part.__name__ for part in parts), used)
        return [self._declare(parts, state, mode) for state, mode in modes.items()]

    def _declare(self, parts: Sequence[TaskFn], state: str, mode: Mode) -> DeclaredIO:
        if state == "gradients" and self.optimizer_step not in parts:
            return DeclaredIO(self._get_gradients, self._set_gradients, state, mode)
        rows = [*self._tables, *([] if self.table_state is None else [self.table_state])]
        memory = {"tables": rows, "optimizer": [*self.step.schedules]}.get(state) or None
        return DeclaredIO(state=state, mode=mode, memory=memory, others=OTHERS.get(state, "rw"))

    def _deferring(self) -> AbstractContextManager[None]:
        # Without the split, this is the whole backward: there is nothing to do before the wait.
        return self._reduction.deferring() if self.rewrite.kind == "split" else nullcontext()

    def _finalize(self) -> None:
        if self.step.finalize is not None:
            self.step.finalize(self.model)
        else:
            self._buffers.reduce()

    def _get_gradients(self) -> tuple[list[Tensor | None], list[Tensor]]:
        self._reduction.finish()
        # Copies: a gradient is often a part of a bucket, which the next backward writes to.
        own = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters]
        return own, self._buffers.copies()

    def _set_gradients(self, gradients: tuple[list[Tensor | None], list[Tensor]]) -> None:
        own, buffered = gradients
        for parameter, gradient in zip(self._parameters, own, strict=True):
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        self._buffers.put_back(buffered)

    def trains(self) -> bool:
        """Whether batches are trained on in the present mode."""
        return self.model.training and torch.is_grad_enabled()

    def check_computed(self, in_flight: int) -> None:
        """Refuse changes to modules that have run already for batches in flight.

        Raises:
            RuntimeError: As said.
        """
        for postproc in self.rewrite.postprocs:
            postproc.check_unchanged(in_flight)

    def _results(self, ctx: IterContext) -> PostprocResults | None:
        return ctx.postproc if self.pipeline_postproc else None

    def _begin_forward(self, ctx: IterContext) -> None:
        self.rewrite.use(ctx.pipeline, ctx.iter_idx, self._results(ctx))
        if self.step.accumulate > 1:
            self._accumulation.set_reduction(ctx.iter_idx, trains=self.trains())

    def _run_model(self, ctx: IterContext) -> None:
        ctx.training = self.trains()
        with self.rewrite.watching(self._results(ctx), ctx.iter_idx):
            result = (self.step.forward or self.model)(ctx.batch)
        ctx.pipeline.inputs = None
        self.rewrite.done()
        if self.memory:
            ctx.batch = None  # nothing uses it any more
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the model returned a {type(result).__name__}, not (losses, output): return these "
                "two, or give TrainStep.forward, which calls the model and does"
            )
        ctx.losses, ctx.output = result


def _torch_device(device: Device) -> torch.device:
    index = [torch.accelerator.current_device_index()] if device.has_streams else []
    return torch.device(device.type, *index)
