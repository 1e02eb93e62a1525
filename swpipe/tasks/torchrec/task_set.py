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
ahead hold; ``loss``; and one for each exchange, whose collectives keep their order. A shortcut
restores gradients; the other states keep the values of the last run. Tasks without a state are
pure, except those that call ``TrainStep.on_losses`` or its ``watchdog``, of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe._values.stateful import modules_in
from swpipe.core.context import IterContext
from swpipe.core.messages import listed
from swpipe.core.task import DeclaredIO, Mode, Others, PipelineTask, TaskFn
from swpipe.device import Device, resolve
from swpipe.plans.torchrec import sparse_dist as names
from swpipe.tasks.torchrec._torchrec import DMPCollection
from swpipe.tasks.torchrec.forwards import SparseDistContext
from swpipe.tasks.torchrec.grad_reduction import (
    Accumulation,
    DeferredReduction,
    ddp_modules,
    is_megatrons,
)
from swpipe.tasks.torchrec.prefetched import PrefetchedBatches
from swpipe.tasks.torchrec.released import copied_in_place
from swpipe.tasks.torchrec.rewrite import Rewrite
from swpipe.tasks.torchrec.seam import run_embedding_backward
from swpipe.tasks.torchrec.step import TrainStep, by_gradient
from swpipe.tasks.torchrec.table_state import TableState, rates_of, set_rates
from swpipe.tasks.torchrec.task_options import TaskOptions

States: TypeAlias = dict[str, Mode]
"""State to how it is used."""

OTHERS: Mapping[str, Others] = {
    "tables": "r",
    **dict.fromkeys(("shuffler", "shuffled rows", "exchange of sizes", "exchange of ids"), ""),
    **dict.fromkeys(("current batch", "pinned rows", "table cache", "postproc", "loss"), ""),
}
"""How the loop's body touches states, where it is not free to do what it likes.

A model that it evaluates finds the tables' values whatever their cache holds, and exchanges its own
batch. Tables and postprocs that it changes while batches are in flight are refused.
"""


_PLACES = ("offsets", "placements")


def _in_turn(parts: Sequence[TaskFn]) -> TaskFn:
    """Calls several functions of the context, one after the other."""
    if len(parts) == 1:
        return parts[0]

    def call(ctx: Any) -> None:
        for part in parts:
            part(ctx)

    return call


class SparseDistTasks:
    """The eleven tasks of a model's training step.

    Args:
        model: A model with sharded modules, with or without wrappers.
        step: The user's step.
        options: How they treat the model and its batches.
        device: None for the machine's accelerator, or else the CPU.

    Attributes:
        options: As given, as are ``model`` and ``step``.
        rewrite: The model's replaced forwards; its ``report`` says which modules are pipelined.
        prefetched: What tables with a queue of prefetches keep for the batches in flight; None
            without such tables.
        table_state: The rows that ``tables_state`` restores, or that nothing does; None where all
            rows lie in parameters or buffers.
        mode: Says which modules are in training mode.
        tables_in_step: Some tables are updated by the optimizers rather than inside backward.
        fused: The step's optimizers that are fused into the tables. A look-up takes their learning
            rate, which ``OptimStep`` may change.

    Raises:
        RewriteError: The model has no sharded module, and ``forward`` is not "own".
        RuntimeError: There is no process group.
        ValueError: A scaler, and tables that are updated inside backward; or a function in
            ``options.functions`` for nothing that is called.
    """

    def __init__(
        self,
        model: nn.Module,
        step: TrainStep,
        options: TaskOptions = TaskOptions(),  # noqa: B008 - frozen
        *,
        device: Device | torch.device | str | None = None,
    ) -> None:
        if options.forward != "own" and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "sharded modules exchange ids between ranks, and there is no process group: call "
                "torch.distributed.init_process_group() first, under torchrun or with one rank"
            )
        self.model = model
        self.step = step
        self.options = options
        self.device = resolve(device)
        self.rewrite = Rewrite(model, self.device, options)
        sharded = self.rewrite.sharded
        self.prefetched = PrefetchedBatches.of(sharded)
        self.table_state = TableState(sharded, options.tables_state) or None
        self.mode = ModuleModesOf(model)
        # The caller's stream, which a cache that is filled on another stream must know.
        self._home = self.device.current_stream()
        self._megatrons: list[Any] = [m for m in model.modules() if is_megatrons(m)]
        self._accumulation = Accumulation(model, step.accumulate)
        # Without the split, DenseBackward is the whole backward: it has nothing to do before DDP's
        # reductions must be waited for.
        split = options.forward == "split"
        self._reduction = DeferredReduction(ddp_modules(model) if split else ())
        self._replicates = isinstance(model, DMPCollection)
        self.fused = step.fused()
        tables = [p for module in sharded.values() for p in module.parameters()]
        self.tables_in_step = any(map(by_gradient, tables))
        self._check_gradients(step, tables)
        own = {
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
        self._calls: dict[str, Any] = {**own, **options.functions}

    def _check_gradients(self, step: TrainStep, tables: Sequence[Tensor]) -> None:
        if self._megatrons and (step.scaler is not None or isinstance(step.clip, int | float)):
            raise ValueError(
                "TrainStep.scaler, and a number as TrainStep.clip, use parameter.grad; Megatron's "
                "DistributedDataParallel keeps the gradients in parameter.main_grad: let its "
                "optimizer scale and clip (OptimizerConfig), or give a function as clip"
            )
        if step.scaler is not None and not all(map(by_gradient, tables)):
            raise ValueError(
                "TrainStep.scaler scales the loss, and the tables are updated inside backward with "
                "the scaled gradients: use bfloat16, which needs no scaler, or shard the tables "
                "without a fused optimizer"
            )

    # --------------------------------------------------------------------------------- the tasks

    def start_shuffle(self, ctx: IterContext) -> None:
        """Hand the batch to the shuffler."""
        if self.options.shuffler is not None:
            ctx.shuffle_ticket = self.options.shuffler.start(ctx.batch)

    def copy(self, ctx: IterContext) -> None:
        """Copy the batch to the device."""
        ctx.batch = self._calls["copy"](ctx.batch)

    def to_device(self, batch: Any) -> Any:
        """The batch on the device.

        Raises:
            TypeError: It cannot be copied, or not in place.
        """
        if not (hasattr(batch, "to") and hasattr(batch, "record_stream")):
            lacks = [name for name in ("to", "record_stream") if not hasattr(batch, name)]
            raise TypeError(
                f"a batch is a {type(batch).__name__} without {' and '.join(lacks)}: "
                "give it to(device, non_blocking) and record_stream(stream), as "
                "torchrec.streamable.Pipelineable asks"
            )
        target = torch.device(self.device.name)
        if self.options.memory.enable_inplace_copy_batch and self.device.has_streams:
            return copied_in_place(batch, target, self.device, self._home)
        return batch.to(device=target, non_blocking=True)

    def finish_shuffle(self, ctx: IterContext) -> None:
        """Take the rows that the shuffler gives this rank."""
        if self.options.shuffler is not None:
            ctx.batch = self.options.shuffler.finish(ctx.batch, ctx.shuffle_ticket)
            del ctx.shuffle_ticket

    def postprocess_input(self, ctx: IterContext) -> None:
        """Compute the inputs that modules of the model compute."""
        ctx.postproc = self.rewrite.compute(ctx.batch, ctx.iter_idx)

    def start_input_dist(self, ctx: IterContext) -> None:
        """Start the exchange of the sizes of ids."""
        computed = ctx.postproc if self.options.pipeline_postproc else None
        ctx.pipeline = SparseDistContext(index=ctx.iter_idx, version=1, computed=computed)
        self._calls["start_input_dist"](ctx.batch, ctx.pipeline)

    def wait_input_dist(self, ctx: IterContext) -> None:
        """Wait for the sizes; start the exchange of ids."""
        self._calls["wait_input_dist"](ctx.pipeline)

    def prefetch(self, ctx: IterContext) -> None:
        """Wait for the ids; modules with a cache fill it."""
        if self.prefetched is None:
            self._prefetch(ctx)
        else:
            with self.prefetched.prefetching():
                self._prefetch(ctx, self.prefetched.counting)

    def _prefetch(self, ctx: IterContext, *counting: Any) -> None:
        if self.options.forward != "own":
            home = None if self.device.current_stream() == self._home else self._home
            self.rewrite.prefetch(ctx.pipeline, home, *counting)

    def embedding_forward(self, ctx: IterContext) -> None:
        """Look the embeddings up, with the current learning rate; start their exchange."""
        if self.options.zero_grad is None and self.fused and self.trains():
            for optimizer in self.fused:  # has no gradients: this gives the tables its rate
                optimizer.zero_grad()
        look_up = self._look_up if self.rewrite.looks_up_ahead else self._run_model
        if self.prefetched is None:
            look_up(ctx)
        else:
            with self.prefetched.looking_up():
                look_up(ctx)

    def _look_up(self, ctx: IterContext) -> None:
        self._use(ctx)
        for forward in self.rewrite.forwards:
            if forward.looks_up_ahead:
                forward.look_up()

    def count_tokens(self, ctx: IterContext) -> None:
        """Count the tokens of all ranks, for a loss per token."""
        if self.step.per_token is not None:
            target, trains = torch.device(self.device.name), self.trains()
            ctx.tokens = self.step.per_token.count(ctx.batch, target) if trains else None

    def dense_forward(self, ctx: IterContext) -> None:
        """Compute losses and output."""
        self._run_model(ctx)

    def postprocess_loss(self, ctx: IterContext) -> None:
        """Compute the scalar loss."""
        if self.step.per_token is not None:
            self.step.per_token.report(ctx)
        elif ctx.training:
            losses = ctx.losses if self.step.on_losses is None else self.step.on_losses(ctx.losses)
            ctx.loss = self._calls["postprocess_loss"](losses)

    def zero_grad(self, ctx: IterContext) -> None:
        """Begin an optimizer step without gradients."""
        self._reduction.finish()  # of a batch that failed
        if self._accumulation.begins(ctx.iter_idx) and self.trains():
            self.step.zero_grad()
            for wrapper in self._megatrons:
                wrapper.zero_grad_buffer()

    def drop_gradients(self) -> None:
        """Set the gradients of a batch that failed to zero, after its reductions have ended."""
        self._reduction.finish()
        self.step.zero_grad()

    def dense_backward(self, ctx: IterContext) -> None:
        """Backward down to the embeddings; start the exchange of their gradients."""
        if not ctx.training:
            return
        around = [self._reduction.deferring()] if self.options.forward == "split" else []
        if not self._accumulation.ends(ctx.iter_idx):
            around += [wrapper.no_sync() for wrapper in self._megatrons]
        backward = self._calls["dense_backward"]
        if not around:
            backward(ctx.loss)
            return
        with ExitStack() as stack:
            for context in around:
                stack.enter_context(context)
            backward(ctx.loss)

    def embedding_backward(self, ctx: IterContext) -> None:
        """Backward of the tables, which updates those with a fused optimizer; sync of replicas."""
        if self.options.forward == "split":
            # A shortcut of DenseForward replays the cut of an earlier batch, and another graph.
            cuts = [seam for seam in ctx.pipeline.seams.values() if seam.iteration == ctx.iter_idx]
            run_embedding_backward(cuts)
            ctx.pipeline.seams.clear()
        if self.prefetched is not None:
            self.prefetched.finish_backward()
        every = self.step.sync_interval
        if self._replicates and ctx.training and every and ctx.iter_idx % every == 0:
            replicas: Any = self.model
            replicas.sync()

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
            self._calls["optimizer_step"]()

    def watch(self, ctx: IterContext) -> None:
        """Call the watchdog."""
        self._calls["watch"]()

    def _use(self, ctx: IterContext) -> None:
        if self.options.forward != "own":
            self.rewrite.use(ctx.pipeline, ctx.iter_idx)
        if self.step.accumulate > 1:
            self._accumulation.set_reduction(ctx.iter_idx, trains=self.trains())

    def _run_model(self, ctx: IterContext) -> None:
        ctx.training = self.trains()
        self._use(ctx)
        run = self.step.forward or self.model
        own, postprocs = self.options.forward == "own", self.rewrite.postprocs
        try:
            if postprocs:
                with self.rewrite.watching(ctx.pipeline, ctx.iter_idx):
                    result = run(ctx.batch)
            else:
                result = run(ctx.batch)
        finally:
            if not own:
                ctx.pipeline.inputs.clear()
            if postprocs:
                self.rewrite.done()
        if self.options.memory:
            ctx.batch = None  # nothing uses it any more
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"the model returned a {type(result).__name__}, not (losses, output): return these "
                "two, or give TrainStep.forward, which calls the model and does"
            )
        ctx.losses, ctx.output = result

    def _finalize(self) -> None:
        if self.step.finalize is not None:
            self.step.finalize(self.model)
            return
        for wrapper in self._megatrons:
            wrapper.finish_grad_sync()

    # ----------------------------------------------------------------------- the tasks as a list

    def parts(self) -> dict[str, tuple[TaskFn, ...]]:
        """The tasks in serial order, each with the methods that it calls, one after the other."""
        grouped = self.options.grouped or self._eleven()
        return {name: tuple(getattr(self, p) for p in parts) for name, parts in grouped.items()}

    def _eleven(self) -> dict[str, Sequence[str]]:
        """The eleven, or twelve, with the names of their methods."""
        zero = {self.options.zero_grad or names.DENSE_BACK: ["zero_grad"]}
        counts = {names.DENSE if self.rewrite.looks_up_ahead else names.EMBED: ["count_tokens"]}
        first = {names.START: ["finish_shuffle", "start_input_dist"]}
        if self.options.pipeline_postproc:
            rows = ["finish_shuffle", "postprocess_input"]
            first = {names.POSTPROC: rows, names.START: ["start_input_dist"]}
        return {
            names.COPY: ["start_shuffle", "copy"],
            **first,
            names.WAIT: ["wait_input_dist"],
            names.PREFETCH: ["prefetch"],
            names.EMBED: [
                *zero.get(names.EMBED, ()), *counts.get(names.EMBED, ()), "embedding_forward"
            ],
            names.DENSE: [*counts.get(names.DENSE, ()), "dense_forward"],
            names.LOSS: ["postprocess_loss"],
            names.DENSE_BACK: [*zero.get(names.DENSE_BACK, ()), "dense_backward"],
            names.EMBED_BACK: ["embedding_backward"],
            names.FINALIZE: ["finalize_gradients"],
            names.STEP: ["optimizer_step", *zero.get(names.STEP, ()), "watch"],
        }  # fmt: skip

    def task_of(self, part: TaskFn) -> str:
        """The name of the task that calls a method."""
        return next(name for name, parts in self.parts().items() if part in parts)

    def tasks(self) -> tuple[PipelineTask, ...]:
        """The tasks, in serial order."""
        return tuple(self._task(name, parts) for name, parts in self.parts().items())

    def _task(self, name: str, parts: tuple[TaskFn, ...]) -> PipelineTask:
        used, modes = self._used_states(), States()
        for part in parts:
            for state, mode in used.get(part.__name__, {}).items():
                modes[state] = mode if modes.get(state, mode) == mode else "rw"
        states = [self._declare(parts, state, mode) for state, mode in modes.items()]
        unknown = (self.step.on_losses, self.postprocess_loss), (self._calls["watch"], self.watch)
        draws = (self.postprocess_input, self.embedding_forward, self.dense_forward)
        live = tuple(part for part in parts if part not in self._idle())
        prefetched = () if self.prefetched is None else self.prefetched.io(parts)
        return PipelineTask(
            name,
            _in_turn(live),
            [*states, *prefetched],
            random=self.options.random and any(part in draws for part in parts),
            pure=not (states or any(asked and part in parts for asked, part in unknown)),
        )

    def _idle(self) -> list[TaskFn]:
        """The methods that would do nothing."""
        kind, replicates = self.options.forward, self._replicates
        replaced = {"start_input_dist", "wait_input_dist"} & self.options.functions.keys()
        exchanges = kind != "own" or bool(replaced)
        fills = kind not in ("own", "pipelined") or (kind != "own" and bool(self.options.memory))
        late = kind == "split" or self.step.finalize is not None
        idle = {
            self.start_shuffle: self.options.shuffler is None,
            self.finish_shuffle: self.options.shuffler is None,
            self.postprocess_input: kind == "own",
            self.start_input_dist: not exchanges,
            self.wait_input_dist: not exchanges,
            self.prefetch: not fills and self.prefetched is None,
            self.count_tokens: self.step.per_token is None,
            self.watch: self._calls["watch"] is None,
            self.dense_forward: not self.rewrite.looks_up_ahead,
            self.embedding_backward: kind != "split" and not replicates and self.prefetched is None,
            self.finalize_gradients: not late and not self._megatrons,
        }
        return [part for part, nothing in idle.items() if nothing]

    def _used_states(self) -> dict[str, States]:
        """Method to the states that it uses."""
        split, shuffles = self.rewrite.looks_up_ahead, self.options.shuffler is not None
        late = bool(self.rewrite.late) or self.options.forward == "ahead"
        hands_over = bool(self.fused) and self.options.zero_grad is not None
        dense: States = {"dense": "r", "buffers": "rw"}
        tables: States = {"tables": "rw", "optimizer": "r"}
        looked_up: States = {"tables": "r", "table cache": "rw"}
        if self.fused:
            looked_up["optimizer"] = "r"
        # Besides the gradients, it uses what the forward has used.
        backward: States = {"gradients": "rw", "optimizer": "r", "dense": "r", "buffers": "rw"}
        # The replaced forwards use the context of one batch; each task that runs them sets it.
        forwards: States = {"current batch": "rw"}
        # What each batch has pinned in the tables' cache, whose queue keeps their order.
        embedding_backward: States = {"pinned rows": "rw"}
        if split or self._replicates:
            embedding_backward = tables
        if split and self.tables_in_step:
            embedding_backward = {**tables, "gradients": "rw"}
        step: States = {"gradients": "rw", "dense": "rw", "optimizer": "rw"}
        return {
            "start_shuffle": {"shuffler": "rw"} if shuffles else {},
            # It takes a batch and its ticket, so that other batches may be started before.
            "finish_shuffle": {"shuffled rows": "rw"} if shuffles else {},
            "postprocess_input": {"postproc": "rw"},
            "start_input_dist": {"exchange of sizes": "rw"},
            "wait_input_dist": {"exchange of ids": "rw"},
            "prefetch": {"table cache": "rw"},
            "embedding_forward": forwards | (looked_up if split else looked_up | dense),
            "dense_forward": forwards | (dense | (looked_up if late else {}) if split else {}),
            # It is ours, unless it calls the user's; and pure tasks are watched, which takes time.
            "postprocess_loss": {} if self.step.on_losses is not None else {"loss": "rw"},
            "zero_grad": {"gradients": "rw", **({"optimizer": "rw"} if hands_over else {})},
            "dense_backward": backward if split and not late else backward | tables,
            "embedding_backward": embedding_backward,
            "finalize_gradients": {"gradients": "rw"},
            "optimizer_step": step | ({"tables": "rw"} if self.tables_in_step else {}),
        }

    def _declare(self, parts: Sequence[TaskFn], state: str, mode: Mode) -> DeclaredIO:
        if state == "gradients" and self.optimizer_step not in parts:
            return DeclaredIO(self._get_gradients, self._set_gradients, state, mode)
        memory: list[Any] = [*self.step.schedules] if state == "optimizer" else []
        if state == "tables":
            memory = [*self._rows(), *([] if self.table_state is None else [self.table_state])]
        others = OTHERS.get(state, "rw")
        return DeclaredIO(state=state, mode=mode, memory=memory or None, others=others)

    def _rows(self) -> Iterator[Tensor]:
        """Yield the tables, and where their rows lie: fbgemm's backward writes both, since 1.9."""
        for module in self.rewrite.sharded.values():
            yield from module.parameters()
            for part in modules_in(module):
                places = (getattr(part, f"weights_{name}", None) for name in _PLACES)
                yield from (place for place in places if isinstance(place, Tensor))

    def _get_gradients(self) -> tuple[list[Tensor | None], list[Tensor]]:
        self._reduction.finish()
        # Copies: a gradient is often a part of a bucket, which the next backward writes to.
        parameters = self.step.parameters()
        own = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        return own, [parameter.main_grad.clone() for parameter in self._buffered()]

    def _set_gradients(self, gradients: tuple[list[Tensor | None], list[Tensor]]) -> None:
        own, buffered = gradients
        for parameter, gradient in zip(self.step.parameters(), own, strict=True):
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        for parameter, copy in zip(self._buffered(), buffered, strict=True):
            parameter.main_grad.copy_(copy)  # in place: it is a part of a buffer

    def _buffered(self) -> list[Any]:
        """Return the parameters whose gradients Megatron's wrappers keep."""
        return [p for p in self.model.parameters() if hasattr(p, "main_grad")]

    # ------------------------------------------------------------------------ between two batches

    def trains(self) -> bool:
        """Whether batches are trained on in the present mode."""
        return self.model.training and torch.is_grad_enabled()

    def flush(self, next_iteration: int) -> None:
        """Update the parameters with the gradients of an unfinished accumulation, if there is one.

        ``next_iteration`` is the number of the next batch; none may be in flight. A collective.
        """
        if self._accumulation.take_rest(next_iteration):
            self._finalize()
            self._calls["optimizer_step"]()

    def accumulated(self, next_iteration: int) -> int:
        """How many batches have added to gradients that wait for their optimizer step."""
        return self._accumulation.rest(next_iteration)

    def state_dict(self) -> dict[str, list[float]]:
        """Learning rates that were handed to the tables; no optimizer's state has them."""
        if self.options.zero_grad in (None, names.EMBED) or not self.fused:
            return {}
        return {"rates": rates_of(self.rewrite.sharded.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand saved rates over, and begin with ``next_iteration``; no batch may be in flight.

        Raises:
            ValueError: The rates are of another number of tables.
        """
        if "rates" in state:
            set_rates(self.rewrite.sharded.values(), state["rates"])
        self._accumulation.restart(state["next_iteration"])


class ModuleModes(NamedTuple):
    """The names of the modules in training mode, and how many modules there are."""

    training: tuple[str, ...] = ()
    modules: int = 0

    def __str__(self) -> str:
        if len(self.training) in (0, self.modules):
            return f"the model in {'training' if self.training else 'evaluation'} mode"
        named = listed([name or "the model" for name in self.training])
        return f"{len(self.training)} of {self.modules} modules in training mode ({named})"


class ModuleModesOf:
    """Called before each batch, returns the modes of a model's modules; mostly as before."""

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_modules())
        self._modules = [module for _, module in self._named]
        self._training: list[bool] = []
        self._modes = ModuleModes()

    def __call__(self) -> ModuleModes:
        training = list(map(attrgetter("training"), self._modules))
        if training != self._training:
            trained = tuple(name for name, module in self._named if module.training)
            self._training, self._modes = training, ModuleModes(trained, len(training))
        return self._modes
