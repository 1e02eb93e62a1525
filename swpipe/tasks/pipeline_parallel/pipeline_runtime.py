"""A schedule over the chunks of a model, run step by step on torch's runtime; or in one process.

Guarantees
    - Losses and gradients are those of a single process that runs the microbatches one after the
      other, bit for bit (``SerialRuntime``).
    - What cannot run is refused when the runtime is made, on all ranks alike; what one rank refuses
      later, or fails at, all ranks raise that wait for it (``step_link``).
    - An evaluation between two training steps changes nothing of the training.

How torch's runtime is used
    - Stages of one rank pass tensors directly; all others send and receive. The order of receives
      is that of the sends (``defer_pp_recv`` breaks it, and with it the gradients).
    - Stage 0 does nothing in I, and its whole backward pass in W.
    - Each microbatch runs once, from the first on: see ``pipeline_stage``.
    - An evaluation has a runtime and ``PipelineStage`` objects of its own: if they were shared, the
      next training step would lose gradients. Its I, W, B and reductions do nothing, since the
      runtime's ``eval`` fails on schedules in which a rank has neighbouring stages.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swpipe._distributed.rank_checks import gather
from swpipe.errors import add_note
from swpipe.plans.pipeline_parallel import Communication, Pair, PipelineSchedule, ScheduleError
from swpipe.plans.pipeline_parallel.action import Entry
from swpipe.tasks.pipeline_parallel.paired_passes import PairedPasses, planned_micros
from swpipe.tasks.pipeline_parallel.pipeline_stage import OncePerMicrobatch
from swpipe.tasks.pipeline_parallel.run_rules import (
    CollectivesBeside,
    check_batch,
    check_chunks,
    check_runnable,
)
from swpipe.tasks.pipeline_parallel.step_link import StepFailure, StepLink
from swpipe.tasks.pipeline_parallel.torch_pipelining import (
    BACKWARD,
    COMMUNICATION,
    OPS,
    OVERLAP,
    TorchAction,
    TorchRuntime,
    lower,
)

LossFn = Callable[[Any, Tensor], Tensor]

Keywords: TypeAlias = Mapping[str, Tensor]

NONE: Keywords = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives.

    Attributes:
        losses: (n_micro,), one per microbatch, without a graph; None on ranks without the last
            stage.
        output: What the last stage gave for the whole batch, without a graph; None on other ranks,
            and where it was not asked for.
    """

    losses: Tensor | None = None
    output: Any = None


class SerialRuntime:
    """Train and evaluate a whole model in one process, microbatch after microbatch.

    Gradients are those of the mean over microbatches of their loss.

    Args:
        chunks: The model's chunks, in the order of their stages; or the model, alone.
        n_micro: The number of microbatches.
        loss_fn: (output, target) to a scalar, for one microbatch.
    """

    def __init__(self, chunks: Sequence[nn.Module], n_micro: int, loss_fn: LossFn) -> None:
        self.modules, self.n_micro, self._loss_fn = tuple(chunks), n_micro, loss_fn

    def train(
        self,
        *inputs: Tensor,
        target: Tensor,
        with_output: bool = False,
        accumulate: bool = False,
        keywords: Keywords = NONE,
    ) -> StepResult:
        """Run one batch; its gradients replace those of the model.

        Arguments as of ``PipelineRuntime.train``.

        Raises:
            ValueError: The microbatches do not divide the batch.
        """
        with _gradients_of_step(self.modules, accumulate):
            result = self._run(inputs, target, with_output, keywords, backward=True)
            for parameter in (p for chunk in self.modules for p in chunk.parameters()):
                if parameter.grad is not None:
                    parameter.grad.div_(self.n_micro)
        return result

    def evaluate(
        self,
        *inputs: Tensor,
        target: Tensor,
        with_output: bool = False,
        keywords: Keywords = NONE,
    ) -> StepResult:
        """The forward passes alone, without gradients."""
        with torch.no_grad():
            return self._run(inputs, target, with_output, keywords, backward=False)

    def _run(
        self,
        inputs: tuple[Tensor, ...],
        target: Tensor,
        with_output: bool,
        keywords: Keywords,
        *,
        backward: bool,
    ) -> StepResult:
        tensors = check_batch(inputs, target, self.n_micro, keywords)
        parts = {name: one.chunk(self.n_micro) for name, one in tensors.items()}
        losses, outputs = [], []
        for micro in range(self.n_micro):
            named = {name: parts[name][micro] for name in keywords}
            given = [part[micro] for name, part in parts.items() if name not in keywords]
            *first, wanted = given
            output: Any = tuple(first)
            for chunk in self.modules:
                is_several = isinstance(output, tuple | list)
                output = chunk(*output, **named) if is_several else chunk(output, **named)
            loss: Any = self._loss_fn(output, wanted)
            if backward:
                loss.backward()
            losses.append(loss.detach())
            if with_output:
                outputs.append(tree_map(Tensor.detach, output))
        joined = tree_map(lambda *parts: torch.cat(parts), *outputs) if with_output else None
        return StepResult(torch.stack(losses), joined)


class PipelineRuntime:
    """Train and evaluate a model whose chunks are on the ranks of a process group.

    Every rank makes one, and calls the same methods in the same order; making one is a collective.
    Gradients are those of the mean over microbatches of their loss; optimizers are the caller's.

    Args:
        schedule: The order of passes. On a V of n ranks, rank r has stages r and 2n - 1 - r.
        chunks: Stage to module, of this rank's stages. What can be pickled goes from stage to
            stage. A chunk has parameters of its own, and starts no collectives but with ranks of
            other pipelines; it may be wrapped as a whole by ``fully_shard``, or
            ``DistributedDataParallel``, over these.
        loss_fn: (output of the last stage, target) to a scalar, for one microbatch.
        device: Where the chunks are.
        group: The ranks; None for the default group.
        varying_shapes: Whether what stages hand on, and batches, may have other shapes, or another
            structure, from one microbatch to the next. Each then has a header of its own.

    Raises:
        ScheduleError: The schedule cannot run on these ranks and chunks, or the ranks have
            different ones; raised on all of them.
        RuntimeError: There is no process group.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        chunks: Mapping[int, nn.Module],
        loss_fn: LossFn,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        varying_shapes: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "a pipeline-parallel runtime runs on the ranks of a process group, and there is "
                "none: call torch.distributed.init_process_group() first, under torchrun"
            )
        self.rank = dist.get_rank(group)
        _check_together(schedule, chunks, group)
        self.schedule, self.chunks = schedule, {stage: chunks[stage] for stage in sorted(chunks)}
        self.has_first = 0 in chunks
        self.has_last = schedule.n_stages - 1 in chunks
        self._loss_fn, self._device, self.group = loss_fn, torch.device(device), group
        self.varying_shapes = varying_shapes
        self._failure: StepFailure | None = None
        self._connect()

    def _connect(self) -> None:
        """Join the ranks, and begin without anything under way."""
        self.link = StepLink(self.group, self._device)
        self._release = weakref.finalize(self, self.link.release)
        self._release.atexit = False
        self._training = _Passes(self, self._make(()))
        self._evaluation: _Passes | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The chunks of this rank, in the order of their stages."""
        return tuple(self.chunks.values())

    def train(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        with_output: bool = False,
        accumulate: bool = False,
        keywords: Keywords = NONE,
    ) -> StepResult:
        """Run the schedule on one batch; its gradients replace those of the chunks.

        Args:
            *inputs: What stage 0 takes, rows of the batch in dimension 0. Ranks without stage 0 may
                leave them out.
            target: What the loss function takes; ranks without the last stage may leave it out.
            with_output: Keep the output of the whole batch.
            accumulate: Add to the gradients of the chunks instead, as between the steps of an
                optimizer that takes several batches.
            keywords: By name, what each stage of this rank takes besides, rows of the batch.

        Raises:
            ValueError: The microbatches do not divide the batch, or its shapes are not those of the
                first one. Nothing was run.
        """
        self._reconnect()
        with _gradients_of_step(self.modules, accumulate):
            return self._training.run(inputs, target, with_output, keywords)

    def evaluate(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        with_output: bool = False,
        keywords: Keywords = NONE,
    ) -> StepResult:
        """The forward passes alone, without gradients; arguments and errors as ``train``.

        The modules are in the mode, training or evaluation, in which the caller has put them. A
        batch may have another size than in training.
        """
        self._reconnect()
        if self._evaluation is None:
            self._evaluation = _Passes(self, self._make(BACKWARD), training=False)
        with torch.no_grad():
            return self._evaluation.run(inputs, target, with_output, keywords)

    def _reconnect(self) -> None:
        """Begin anew where a call refused its arguments, which all ranks know; else say why not."""
        if self._failure is None:
            return
        if not self._failure.before:
            raise RuntimeError(
                f"an earlier step failed ({self._failure}), and microbatches were under "
                "way: make a new runtime on all ranks"
            )
        self._failure = None
        self._release()
        self._connect()

    def fail(self, error: BaseException, *, before: bool) -> None:
        """Raise on this rank what the rank that failed first says; its own error goes on by itself.

        The others wait for what this rank would send, and wake.
        """
        first = self.link.fail(error, before=before)
        self._failure = first
        if first.rank != self.rank and not before:
            raise RuntimeError(str(first)) from error
        add_note(error, f"swpipe: {first}")

    def _make(self, left_out: tuple[Any, ...]) -> Any:
        """A runtime of torch's, with stages of its own, in which some ops do nothing.

        Without any of these, pairs overlap.
        """
        schedule = self.schedule.in_sequence if left_out else self.schedule
        stages = [
            OncePerMicrobatch(
                chunk,
                stage,
                self.schedule.n_stages,
                self._device,
                link=self.link,
                in_order=_inputs_in_order(schedule, stage),
                varying=self.varying_shapes,
                planned=planned_micros(schedule, stage, self.chunks),
            )
            for stage, chunk in self.chunks.items()
        ]
        made = TorchRuntime(stages, self.schedule.n_micro, loss_fn=self._loss_fn)
        rows = {rank: [*map(_of_torch, row)] for rank, row in enumerate(schedule.rows)}
        lower(made, rows, schedule.placement)
        made.register_custom_function(OVERLAP, PairedPasses(stages))
        for op in left_out:
            made.register_custom_function(op, _do_nothing)
        return made


class _Passes:
    """A runtime of torch's for training or for evaluation, and the shapes it was prepared for."""

    def __init__(self, owner: PipelineRuntime, runtime: Any, *, training: bool = True) -> None:
        self._owner, self._runtime, self._training = owner, runtime, training
        self._shapes: dict[str, str] = {}
        self._ready = False

    def run(
        self,
        inputs: tuple[Tensor, ...],
        target: Tensor | None,
        with_output: bool,
        keywords: Keywords,
    ) -> StepResult:
        owner, runtime = self._owner, self._runtime
        try:
            self._check(inputs, target, keywords)
        except ValueError as error:
            owner.fail(error, before=True)
            raise
        inputs = inputs if owner.has_first else ()
        target = target if owner.has_last else None
        losses: list[Tensor] | None = [] if owner.has_last else None
        runtime._comp_type_to_function_map[OVERLAP].with_output = with_output
        step = runtime.step if self._training else runtime.eval
        try:
            with nullcontext() if self._ready else CollectivesBeside(owner.group):
                output = step(
                    *inputs, target=target, losses=losses, return_outputs=with_output, **keywords
                )
            for stage in runtime._stages:
                stage.finish()
        except BaseException as error:
            owner.fail(error, before=False)
            raise
        self._ready = True
        # What backward passes would have used up; an evaluation has none.
        runtime.bwd_recv_ops.clear()
        if losses is None:
            return StepResult()
        output = output if output is None else tree_map(Tensor.detach, output)
        return StepResult(torch.stack(losses).detach(), output)

    def _check(self, inputs: tuple[Tensor, ...], target: Tensor | None, keywords: Keywords) -> None:
        owner = self._owner
        for what, needed, given, stage in (
            ("inputs", owner.has_first, bool(inputs), "first"),
            ("target", owner.has_last, target is not None, "last"),
        ):
            if needed and not given:
                raise ValueError(f"{what}: rank {owner.rank} has the {stage} stage; give it")
        for name, tensor in check_batch(inputs, target, owner.schedule.n_micro, keywords).items():
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            before = self._shapes.setdefault(name, found)
            if before != found and not owner.varying_shapes:
                raise ValueError(
                    f"{name} is {found}, and the first batch had {before}: the ranks receive into "
                    "memory of that shape; give batches of one shape, or make the runtime with "
                    "varying_shapes=True"
                )


@contextmanager
def _gradients_of_step(modules: Sequence[nn.Module], accumulate: bool) -> Iterator[None]:
    """A step begins without gradients, since it scales all that it finds at its end."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, grad in zip(parameters, before, strict=True):
        if accumulate and grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def _of_torch(entry: Entry) -> Any:
    if isinstance(entry, Pair):
        return TorchAction(-1, OVERLAP, None, tuple(map(_of_torch, entry)))
    ops = COMMUNICATION if isinstance(entry, Communication) else OPS
    return TorchAction(entry.stage, ops[entry.op], entry.micro)


def _inputs_in_order(schedule: PipelineSchedule, stage: int) -> bool:
    """Whether a stage's I come in the order of the microbatches."""
    micros = [a.micro for row in schedule.actions for a in row if a.stage == stage and a.op in "IB"]
    return micros == sorted(micros)


def _check_together(
    schedule: PipelineSchedule, chunks: Mapping[int, nn.Module], group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks what is wrong on one; else some would wait for the others."""
    rank, problem = dist.get_rank(group), ""
    try:
        check_runnable(schedule, dist.get_world_size(group))
        check_chunks(schedule, rank, chunks, dist.get_process_group_ranks(group))
    except ScheduleError as error:
        problem = str(error)
    digest = hashlib.sha256(repr((schedule.rows, schedule.n_micro)).encode()).hexdigest()
    digests, problems = zip(*gather((digest, problem), group), strict=True)
    if any(problems):
        told = [f"rank {number}: {text}" for number, text in enumerate(problems) if text]
        raise ScheduleError(problem if len(set(problems)) == 1 else "; ".join(told))
    if len(set(digests)) > 1:
        other = next(number for number, one in enumerate(digests) if one != digests[0])
        raise ScheduleError(
            f"ranks 0 and {other} have different schedules, and would wait for each other for "
            "ever: make it on one rank and broadcast it"
        )


def _do_nothing(action: Any, context: Any) -> None:
    """What an evaluation does in place of a backward pass."""
