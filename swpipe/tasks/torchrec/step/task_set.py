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

Without the split forward, EmbForward runs the whole model, DenseBackward runs the whole backward,
and DenseForward and EmbBackward do nothing. In evaluation, LossPostprocess and all later tasks do
nothing. InputPostproc is a twelfth task, which exists only with ``pipeline_postproc=True``.

The declared states are: ``tables``; ``table cache``; ``dense``, all other parameters; ``buffers``;
``optimizer``, with learning rates and scaler; ``gradients``; ``postproc``, the state of modules
that run ahead; ``loss``; and one state for each exchange, whose collectives keep their order. A
shortcut restores gradients; the other states keep the values of the last run. Tasks without a state
are pure, except those that call ``TrainStep.on_losses`` or its ``watchdog``, which are undeclared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from swpipe.core.context import IterContext
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask, TaskFn
from swpipe.device import Device, resolve
from swpipe.plans.torchrec import sparse_dist as names
from swpipe.tasks.torchrec._torchrec import DMPCollection
from swpipe.tasks.torchrec.embedding_tables.prefetched import PrefetchedBatches
from swpipe.tasks.torchrec.embedding_tables.released import copied_in_place
from swpipe.tasks.torchrec.embedding_tables.table_state import TableState, rates_of, set_rates
from swpipe.tasks.torchrec.rewriting.forwards import SparseDistContext
from swpipe.tasks.torchrec.rewriting.rewrite import Rewrite
from swpipe.tasks.torchrec.rewriting.seam import run_embedding_backward
from swpipe.tasks.torchrec.step.grad_reduction import GradientFlow
from swpipe.tasks.torchrec.step.module_modes import module_modes
from swpipe.tasks.torchrec.step.task_options import TaskOptions
from swpipe.tasks.torchrec.step.task_states import (
    DRAWS,
    States,
    declared,
    gradients,
    idle_parts,
    states_of_parts,
    undeclared_parts,
)
from swpipe.tasks.torchrec.step.train_step import TrainStep, by_gradient


def in_turn(parts: Sequence[TaskFn]) -> TaskFn:
    """Return a function that calls several functions of the context, one after the other."""
    if len(parts) == 1:
        return parts[0]

    def call(ctx: Any) -> None:
        for part in parts:
            part(ctx)

    return call


class SparseDistTasks:
    """The eleven tasks of a model's training step: each calls one or several of these methods.

    Args:
        model: A model with sharded modules, with or without wrappers.
        step: The user's step.
        options: How the tasks treat the model and its batches.
        device: The device; None for the machine's accelerator, or else the CPU.

    Attributes:
        model: As given.
        step: As given.
        options: As given.
        rewrite: The model's replaced forwards; its ``report`` says which modules are pipelined.
        prefetched: The queued prefetches of the batches in flight, for tables with a queue of
            prefetches; None without any such table.
        table_state: The rows that only ``tables_state`` can restore, or that nothing can; None
            where all rows lie in parameters or buffers.
        mode: Returns which modules are in training mode.
        gradients: When gradients are cleared, reduced and used.
        functions: The functions that the methods call, with those of ``TaskOptions.functions``.
        tables_in_step: Whether some tables are updated by the optimizers rather than inside
            backward.
        fused: The step's optimizers that are fused into the tables. A look-up uses their learning
            rate, which ``OptimStep`` may change.
        replicates: Whether the tables have replicas on other ranks.

    Raises:
        RewriteError: The model has no sharded module, and ``forward`` is not "own".
        ValueError: A scaler is given and tables are updated inside backward; the step does not suit
            Megatron's wrapper; or ``options.functions`` has a name that no task calls.
    """

    def __init__(
        self,
        model: nn.Module,
        step: TrainStep,
        options: TaskOptions = TaskOptions(),  # noqa: B008 - frozen
        *,
        device: Device | torch.device | str | None = None,
    ) -> None:
        self.model = model
        self.step = step
        self.options = options
        self.device = resolve(device)
        self.rewrite = Rewrite(model, self.device, options)
        sharded = self.rewrite.sharded
        self.prefetched = PrefetchedBatches.of(sharded)
        self.table_state = TableState(sharded, options.tables_state) or None
        self.mode = module_modes(model)
        # Without the split, DenseBackward is the whole backward: it has nothing to do before DDP's
        # reductions must be waited for.
        self.gradients = GradientFlow(model, step, defers=options.forward == "split")
        self.fused = step.fused()
        self.replicates = isinstance(model, DMPCollection)
        by_step = [by_gradient(p) for module in sharded.values() for p in module.parameters()]
        self.tables_in_step = any(by_step)
        if step.scaler is not None and not all(by_step):
            raise ValueError(
                "TrainStep.scaler scales the loss, and the tables are updated inside backward with "
                "the scaled gradients: use bfloat16, which needs no scaler, or shard the tables "
                "without a fused optimizer"
            )
        own: dict[str, Callable[..., Any] | None] = {
            "copy": self.to_device,
            "start_input_dist": self.rewrite.start,
            "wait_input_dist": SparseDistContext.wait_for_sizes,
            "postprocess_loss": step.total,
            "dense_backward": step.backward,
            "optimizer_step": step.update,
            "watch": step.watchdog,
        }
        if unknown := options.functions.keys() - own.keys():
            raise ValueError(
                f"TaskOptions.functions has {listed(sorted(unknown))}, which no task calls: give "
                f"functions of {listed([*own])}"
            )
        self.functions: dict[str, Any] = {**own, **options.functions}

    # --------------------------------------------------------------------- the parts of the tasks

    def start_shuffle(self, ctx: IterContext) -> None:
        """Hand the batch to the shuffler."""
        shuffler: Any = self.options.shuffler
        ctx.shuffle_ticket = shuffler.start(ctx.batch)

    def copy(self, ctx: IterContext) -> None:
        """Copy the batch to the device."""
        ctx.batch = self.functions["copy"](ctx.batch)

    def to_device(self, batch: Any) -> Any:
        """Return the batch on the device.

        Raises:
            TypeError: The batch cannot be copied, or cannot be copied in place.
        """
        lacks = [name for name in ("to", "record_stream") if not hasattr(batch, name)]
        if lacks:
            raise TypeError(
                f"a batch is a {type(batch).__name__} without {' and '.join(lacks)}: "
                "give it to(device, non_blocking) and record_stream(stream), as "
                "torchrec.streamable.Pipelineable asks"
            )
        target = torch.device(self.device.name)
        if self.options.memory.enable_inplace_copy_batch and self.device.has_streams:
            return copied_in_place(batch, target, self.device, self.rewrite.home)
        return batch.to(device=target, non_blocking=True)

    # The ticket goes with the batch: other batches may have been started in between.
    def finish_shuffle(self, ctx: IterContext) -> None:
        """Take the rows that the shuffler assigns to this rank."""
        shuffler: Any = self.options.shuffler
        ctx.batch = shuffler.finish(ctx.batch, ctx.shuffle_ticket)
        del ctx.shuffle_ticket

    def postprocess_input(self, ctx: IterContext) -> None:
        """Compute the inputs that modules of the model compute."""
        ctx.postproc = self.rewrite.compute(ctx.batch, ctx.iter_idx)

    def start_input_dist(self, ctx: IterContext) -> None:
        """Start the exchange of the sizes of ids."""
        computed = ctx.postproc if self.options.pipeline_postproc else None
        ctx.pipeline = SparseDistContext(index=ctx.iter_idx, computed=computed)
        self.functions["start_input_dist"](ctx.batch, ctx.pipeline)

    def wait_input_dist(self, ctx: IterContext) -> None:
        """Wait for the sizes and start the exchange of ids."""
        self.functions["wait_input_dist"](ctx.pipeline)

    def prefetch(self, ctx: IterContext) -> None:
        """Wait for the ids; modules with a cache fill it."""
        pins = self.prefetched
        with nullcontext() if pins is None else pins.prefetching():
            self.rewrite.prefetch(ctx.pipeline, nullcontext if pins is None else pins.counting)

    def embedding_forward(self, ctx: IterContext) -> None:
        """Look the embeddings up with the current learning rate, and start their exchange."""
        if self.options.zero_grad is None and self.fused and self.trains():
            # A fused optimizer has no gradients to clear: its zero_grad hands its learning rate
            # over to the tables, which apply it in their backward.
            for optimizer in self.fused:
                optimizer.zero_grad()
        look_up = self._look_up if self.rewrite.looks_up_ahead else self._run_model
        with nullcontext() if self.prefetched is None else self.prefetched.looking_up():
            look_up(ctx)

    def _look_up(self, ctx: IterContext) -> None:
        self._use(ctx)
        for forward in self.rewrite.forwards:
            if forward.looks_up_ahead:
                forward.look_up()

    def count_tokens(self, ctx: IterContext) -> None:
        """Count the tokens of all ranks, for a loss per token."""
        per_token: Any = self.step.per_token
        target = torch.device(self.device.name)
        ctx.tokens = per_token.count(ctx.batch, target) if self.trains() else None

    def dense_forward(self, ctx: IterContext) -> None:
        """Compute losses and output."""
        self._run_model(ctx)

    def postprocess_loss(self, ctx: IterContext) -> None:
        """Compute the scalar loss."""
        if self.step.per_token is not None:
            self.step.per_token.report(ctx)
        elif ctx.training:
            losses = ctx.losses if self.step.on_losses is None else self.step.on_losses(ctx.losses)
            ctx.loss = self.functions["postprocess_loss"](losses)

    def zero_grad(self, ctx: IterContext) -> None:
        """Clear the gradients at the beginning of an optimizer step."""
        self.gradients.zero(ctx.iter_idx, trains=self.trains())

    def dense_backward(self, ctx: IterContext) -> None:
        """Run the backward pass to the embeddings and start the exchange of their gradients."""
        if ctx.training:
            with self.gradients.backward(ctx.iter_idx):
                self.functions["dense_backward"](ctx.loss)

    def embedding_backward(self, ctx: IterContext) -> None:
        """Run the backward of the tables, which updates fused ones, and average replicas."""
        # A shortcut of DenseForward replays the cut of an earlier batch, in another graph.
        cuts = [seam for seam in ctx.pipeline.seams.values() if seam.iteration == ctx.iter_idx]
        run_embedding_backward(cuts)
        ctx.pipeline.seams.clear()
        # Not inside backward, which does not run for an evaluation batch.
        if self.prefetched is not None:
            self.prefetched.finish_backward()
        every = self.step.sync_interval
        if self.replicates and ctx.training and every and ctx.iter_idx % every == 0:
            replicas: Any = self.model
            replicas.sync()

    def finalize_gradients(self, ctx: IterContext) -> None:
        """Wait for DDP's reductions, then call the user's ``finalize``, which may communicate."""
        self.gradients.reduction.finish()
        if ctx.training and self.gradients.ends(ctx.iter_idx):
            self.gradients.finalize()

    def optimizer_step(self, ctx: IterContext) -> None:
        """Update the parameters."""
        if not ctx.training:
            self.gradients.skip()
        elif self.gradients.ends(ctx.iter_idx):
            self.functions["optimizer_step"]()

    def watch(self, ctx: IterContext) -> None:
        """Call the watchdog."""
        self.functions["watch"]()

    def _use(self, ctx: IterContext) -> None:
        self.rewrite.use(ctx.pipeline, ctx.iter_idx)
        # Asked here, since each call costs host time in every step.
        if self.step.accumulate > 1:
            self.gradients.set_reduction(ctx.iter_idx, trains=self.trains())

    def _run_model(self, ctx: IterContext) -> None:
        # Kept in the context: the mode may change while the batch is in flight.
        ctx.training = self.trains()
        self._use(ctx)
        run = self.step.forward or self.model
        try:
            result = run(ctx.batch)
        finally:
            # The inputs keep ids alive that only the forward needed, also if the forward failed.
            ctx.pipeline.inputs.clear()
            if self.rewrite.postprocs:
                self.rewrite.done()
        if self.options.memory:
            # No later task uses the batch, and its memory is wanted.
            ctx.batch = None
        # Checked for every batch, since a model's result may differ between train and eval mode.
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the model returned a {type(result).__name__}, not (losses, output): return these "
                "two, or give TrainStep.forward, which calls the model and does"
            )
        ctx.losses, ctx.output = result

    # ----------------------------------------------------------------------- the tasks as a list

    def parts(self) -> Mapping[str, Sequence[str]]:
        """Return the tasks in serial order, each with the methods that it calls in this order."""
        if self.options.grouped:
            return self.options.grouped
        first = {names.START: ["finish_shuffle", "start_input_dist"]}
        if self.options.pipeline_postproc:
            rows = ["finish_shuffle", "postprocess_input"]
            first = {names.POSTPROC: rows, names.START: ["start_input_dist"]}
        parts = {
            names.COPY: ["start_shuffle", "copy"],
            **first,
            names.WAIT: ["wait_input_dist"],
            names.PREFETCH: ["prefetch"],
            names.EMBED: ["embedding_forward"],
            names.DENSE: ["dense_forward"],
            names.LOSS: ["postprocess_loss"],
            names.DENSE_BACK: ["dense_backward"],
            names.EMBED_BACK: ["embedding_backward"],
            names.FINALIZE: ["finalize_gradients"],
            names.STEP: ["optimizer_step", "watch"],
        }
        # Tokens are counted before the forward, since the loss needs their sum over all ranks.
        forward = names.DENSE if self.rewrite.looks_up_ahead else names.EMBED
        parts[forward].insert(0, "count_tokens")
        # Gradients are cleared before the forward or the backward, or after the optimizer's step.
        zero = self.options.zero_grad or names.DENSE_BACK
        parts[zero].insert(1 if zero == names.STEP else 0, "zero_grad")
        return parts

    def task_of(self, part: str) -> str:
        """Return the name of the task that calls a method."""
        return next(name for name, parts in self.parts().items() if part in parts)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """Return the tasks in serial order."""
        states = states_of_parts(self)
        return tuple(self._task(name, parts, states) for name, parts in self.parts().items())

    def _task(self, name: str, parts: Sequence[str], used: Mapping[str, States]) -> PipelineTask:
        modes: dict[str, Any] = {}
        for part in parts:
            for state, mode in used.get(part, {}).items():
                # A state that one part reads and another writes is declared as read and written.
                modes[state] = mode if modes.get(state, mode) == mode else "rw"
        # A shortcut restores gradients, except those of the optimizer's task, which has used them.
        states = [
            gradients(self, mode)
            if state == "gradients" and "optimizer_step" not in parts
            else declared(self, state, mode)
            for state, mode in modes.items()
        ]
        pinned = () if self.prefetched is None else self.prefetched.io(parts)
        return PipelineTask(
            name,
            in_turn([getattr(self, part) for part in parts if part not in idle_parts(self)]),
            [*states, *pinned],
            random=self.options.random and not DRAWS.isdisjoint(parts),
            pure=not states and undeclared_parts(self).isdisjoint(parts),
        )

    # ------------------------------------------------------------------------ between two batches

    def trains(self) -> bool:
        """Return whether batches are trained on in the current mode."""
        return self.model.training and torch.is_grad_enabled()

    def flush(self, next_iteration: int) -> None:
        """Update the parameters with the gradients of an unfinished accumulation, if there is one.

        ``next_iteration`` is the number of the next batch. No batch may be in flight. A collective.
        """
        if self.gradients.take_rest(next_iteration):
            self.gradients.finalize()
            self.functions["optimizer_step"]()

    def state_dict(self) -> dict[str, list[float]]:
        """Return the learning rates handed to the tables, which no optimizer's state has."""
        if self.options.zero_grad in (None, names.EMBED) or not self.fused:
            return {}
        return {"rates": rates_of(self.rewrite.sharded.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand saved rates over to the tables and restart at ``next_iteration``; none is in flight.

        Raises:
            ValueError: The rates belong to a different number of tables.
        """
        # Absent where each look-up uses the optimizer's current rate.
        if "rates" in state:
            set_rates(self.rewrite.sharded.values(), state["rates"])
        self.gradients.restart(state["next_iteration"])
