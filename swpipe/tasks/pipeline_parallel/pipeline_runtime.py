"""Runtimes that train and evaluate a model in chunks: on torch's runtime, or in one process.

Guarantees
    - Losses and gradients equal, bit for bit, those of a single process that runs the microbatches
      one after the other (``SerialRuntime``).
    - A schedule or chunk that cannot run is refused on all ranks when the runtime is made. If a
      rank refuses its arguments or fails later, all ranks that wait for it raise (``step_link``).
    - An evaluation between two training steps does not change the training.

How torch's runtime is used
    - Stages on the same rank pass tensors directly; all other stages send and receive. A rank
      receives in the order in which its peer sends (torch's option ``defer_pp_recv`` breaks this
      order, and with it the gradients).
    - Stage 0 does nothing in I, and runs its whole backward pass in W.
    - Each microbatch runs exactly once, including the first one: see ``pipeline_stage``.
    - An evaluation has its own runtime and its own ``PipelineStage`` objects: if they were shared,
      the next training step would lose gradients. The evaluation runs the training schedule with
      I, W, B and reductions that do nothing, because the ``eval`` of torch's runtime fails on
      schedules in which a rank has neighbouring stages.
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

from swpipe.distributed import gather
from swpipe.errors import add_note
from swpipe.plans.pipeline_parallel import PipelineSchedule, ScheduleError
from swpipe.tasks.pipeline_parallel.gradient_reductions import Reductions
from swpipe.tasks.pipeline_parallel.paired_passes import PairedPasses, planned_micros
from swpipe.tasks.pipeline_parallel.pipeline_stage import OncePerMicrobatch, as_tuple
from swpipe.tasks.pipeline_parallel.run_rules import (
    CollectivesBeside,
    check_batch,
    check_chunks,
    check_runnable,
)
from swpipe.tasks.pipeline_parallel.step_link import StepFailure, StepLink
from swpipe.tasks.pipeline_parallel.torch_pipelining import (
    BACKWARD,
    OVERLAP,
    REDUCE_GRAD,
    TorchRuntime,
    lower,
)

LossFn = Callable[[Any, Tensor], Tensor]

Keywords: TypeAlias = Mapping[str, Tensor]

NONE: Keywords = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepResult:
    """The losses of a step, and its output if requested.

    Attributes:
        losses: Shape (n_micro,): the loss of each microbatch, detached; None on ranks without the
            last stage.
        output: The last stage's output for the whole batch, detached; None on ranks without the
            last stage, and if it was not requested.
    """

    losses: Tensor | None = None
    output: Any = None


class SerialRuntime:
    """A runtime that trains and evaluates a whole model in one process, microbatch by microbatch.

    Gradients are those of the mean of the microbatches' losses.

    Args:
        chunks: The model's chunks, in the order of their stages; or the whole model as one chunk.
        n_micro: The number of microbatches.
        loss_fn: Maps (output, target) of one microbatch to a scalar.
    """

    def __init__(self, chunks: Sequence[nn.Module], n_micro: int, loss_fn: LossFn) -> None:
        self.modules = tuple(chunks)
        self.n_micro = n_micro
        self._loss_fn = loss_fn

    def train(
        self,
        *inputs: Tensor,
        target: Tensor,
        with_output: bool = False,
        accumulate: bool = False,
        keywords: Keywords = NONE,
    ) -> StepResult:
        """Run the forward and backward passes of one batch, and replace the model's gradients.

        See ``PipelineRuntime.train`` for the arguments.

        Raises:
            ValueError: The number of rows of the batch is no multiple of ``n_micro``.
        """
        with _gradients_of_step(self.modules, accumulate):
            result = self._run(inputs, target, with_output, keywords, backward=True)
            # Torch's runtime divides once, after the last microbatch. Dividing each loss instead
            # would round differently.
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
        """Run the forward passes of one batch without gradients."""
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
        losses = []
        outputs = []
        for parts in zip(*(t.chunk(self.n_micro) for t in tensors.values()), strict=True):
            micro = dict(zip(tensors, parts, strict=True))
            named = {name: micro.pop(name) for name in keywords}
            *given, wanted = micro.values()  # check_batch puts the target after the inputs
            output: Any = tuple(given)
            for chunk in self.modules:
                output = chunk(*as_tuple(output), **named)
            loss: Any = self._loss_fn(output, wanted)
            if backward:
                loss.backward()
            losses.append(loss.detach())
            if with_output:
                outputs.append(tree_map(Tensor.detach, output))
        joined = tree_map(lambda *parts: torch.cat(parts), *outputs) if with_output else None
        return StepResult(torch.stack(losses), joined)


class PipelineRuntime:
    """A runtime that trains and evaluates a model whose chunks are on the ranks of a process group.

    Every rank makes a runtime, and all ranks call the same methods in the same order. Making a
    runtime is a collective. Gradients are those of the mean of the microbatches' losses. The caller
    makes and runs the optimizers.

    Args:
        schedule: The order of passes. On a V of n ranks, rank r has stages r and 2n - 1 - r.
        chunks: The module of each stage of this rank, by stage, from 0. A chunk may return any
            value that can be pickled. A chunk shares no parameters with other chunks, and starts
            collectives only with ranks of other pipelines. ``fully_shard`` or
            ``DistributedDataParallel`` over ranks of other pipelines may wrap a chunk as a whole.
        loss_fn: Maps (output of the last stage, target) of one microbatch to a scalar.
        device: The device of the chunks.
        group: The ranks; None for the default group.
        varying_shapes: Whether batches, and the values that stages pass on, may change shape or
            structure from one microbatch to the next. If so, every microbatch is sent with its own
            header.

    Raises:
        ScheduleError: The schedule cannot run on these ranks and chunks, or the ranks have
            different schedules; raised on all ranks.
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
        self.schedule = schedule
        self.chunks = {stage: chunks[stage] for stage in sorted(chunks)}
        self.has_first = 0 in chunks
        self.has_last = schedule.n_stages - 1 in chunks
        self.loss_fn = loss_fn
        self.device = torch.device(device)
        self.group = group
        self.varying_shapes = varying_shapes
        self._failure: StepFailure | None = None
        self._connect()

    def _connect(self) -> None:
        """Create the link between the ranks, and a training runtime with no step under way."""
        self.link = StepLink(self.group, self.device)
        # At exit the process may have destroyed the default group already, or other ranks may be
        # gone: the operating system closes the connections then.
        self._release = weakref.finalize(self, self.link.release)
        self._release.atexit = False
        self._training = _Passes(self)
        self._evaluation: _Passes | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """This rank's chunks, in the order of their stages."""
        return tuple(self.chunks.values())

    def train(
        self,
        *inputs: Tensor,
        target: Tensor | None = None,
        with_output: bool = False,
        accumulate: bool = False,
        keywords: Keywords = NONE,
    ) -> StepResult:
        """Run the schedule on one batch, and replace the gradients of the chunks.

        Args:
            *inputs: The positional inputs of stage 0, with the rows of the batch in dimension 0.
                Ranks without stage 0 may omit them.
            target: The second argument of the loss function, with the rows of the batch in
                dimension 0. Ranks without the last stage may omit it.
            with_output: Whether to return the output of the whole batch.
            accumulate: Whether to add to the gradients of the chunks instead of replacing them, for
                an optimizer that steps once per several batches.
            keywords: The keyword arguments of every stage of this rank, with the rows of the batch
                in dimension 0.

        Raises:
            ValueError: The number of rows of the batch is no multiple of the number of
                microbatches, or its shapes differ from those of the first batch. Nothing was run.
            RuntimeError: An earlier step failed after it had started, or another rank failed in
                this one.
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
        """Run the forward passes of one batch without gradients.

        See ``train`` for the arguments and errors. The modules stay in the mode (train or eval)
        that the caller has set. The batch size may differ from that of the training batches.
        """
        self._reconnect()
        if self._evaluation is None:
            self._evaluation = _Passes(self, training=False)
        with torch.no_grad():
            return self._evaluation.run(inputs, target, with_output, keywords)

    def _reconnect(self) -> None:
        """Reconnect the ranks if the last call refused its arguments.

        Raises:
            RuntimeError: The last call failed within the step.
        """
        # All ranks have read the same failure, so all take the same branch here.
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
        """Publish an error of this rank, and wake the ranks that wait for this rank.

        Returns if this rank failed first, or refused its arguments; the caller then raises
        ``error``, with the failure as a note.

        Raises:
            RuntimeError: Another rank failed first, and the step had started.
        """
        first = self.link.fail(error, before=before)
        self._failure = first
        # This rank's error is then a mere consequence, usually of a closed connection.
        if first.rank != self.rank and not before:
            raise RuntimeError(str(first)) from error
        add_note(error, f"swpipe: {first}")


class _Passes:
    """A torch runtime for training or evaluation, with the shapes of its first batch.

    An evaluation runs pairs as single passes: without its backward pass, a pair has nothing to
    overlap.
    """

    def __init__(self, owner: PipelineRuntime, *, training: bool = True) -> None:
        schedule = owner.schedule if training else owner.schedule.in_sequence
        stages = [
            OncePerMicrobatch(
                chunk,
                stage,
                schedule.n_stages,
                owner.device,
                link=owner.link,
                in_order=_inputs_in_order(schedule, stage),
                varying=owner.varying_shapes,
                planned=planned_micros(schedule, stage, owner.chunks),
            )
            for stage, chunk in owner.chunks.items()
        ]
        runtime = TorchRuntime(stages, schedule.n_micro, loss_fn=owner.loss_fn)
        lower(runtime, schedule)
        self._owner = owner
        self._runtime = runtime
        self._training = training
        self._shapes: dict[str, str] = {}
        self._ready = False
        self._stages = stages
        self._pairs = PairedPasses(stages)
        runtime.register_custom_function(OVERLAP, self._pairs)
        self._reductions = Reductions(stages, schedule.n_micro)
        if training:
            runtime.register_custom_function(REDUCE_GRAD, self._reductions)
        else:
            for op in BACKWARD:
                runtime.register_custom_function(op, _do_nothing)

    def run(
        self,
        inputs: tuple[Tensor, ...],
        target: Tensor | None,
        with_output: bool,
        keywords: Keywords,
    ) -> StepResult:
        owner = self._owner
        runtime = self._runtime
        try:
            # Before anything is sent: if this fails, the ranks can reconnect and go on.
            self._check(inputs, target, keywords)
        except ValueError as error:
            owner.fail(error, before=True)
            raise
        inputs = inputs if owner.has_first else ()
        target = target if owner.has_last else None
        losses: list[Tensor] | None = [] if owner.has_last else None
        self._pairs.with_output = with_output
        step = runtime.step if self._training else runtime.eval
        try:
            # A dispatch mode slows every operator down. The passes of later steps start the same
            # collectives, so that checking the first complete step is enough.
            with nullcontext() if self._ready else CollectivesBeside(owner.group):
                output = step(
                    *inputs, target=target, losses=losses, return_outputs=with_output, **keywords
                )
            if self._training:
                self._reductions.finish()
            for stage in self._stages:
                stage.finish()
        except BaseException as error:
            owner.fail(error, before=False)
            raise
        self._ready = True
        # Backward passes remove their receives from this private dict. An evaluation has no
        # backward passes, and the runtime's next RECV_B would fail on the leftovers.
        runtime.bwd_recv_ops.clear()
        if losses is None:
            return StepResult()
        # Attached results would keep the graphs of all microbatches alive.
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
            shape = f"{tensor.dtype} {tuple(tensor.shape)}"
            # Only its own shapes: training and evaluation have one object each, so that their
            # batch sizes may differ.
            before = self._shapes.setdefault(name, shape)
            if before != shape and not owner.varying_shapes:
                raise ValueError(
                    f"{name} is {shape}, and the first batch had {before}: the ranks receive into "
                    "memory of that shape; give batches of one shape, or make the runtime with "
                    "varying_shapes=True"
                )


@contextmanager
def _gradients_of_step(modules: Sequence[nn.Module], accumulate: bool) -> Iterator[None]:
    """Hide existing gradients from a step, and add them again afterwards if ``accumulate``."""
    # At the end of a step the runtime scales all gradients that it finds by 1 / n_micro, and would
    # scale those of earlier steps a second time.
    parameters = [parameter for module in modules for parameter in module.parameters()]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, grad in zip(parameters, before, strict=True):
        if accumulate and grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def _inputs_in_order(schedule: PipelineSchedule, stage: int) -> bool:
    """Return whether a stage runs its I and B passes in the order of the microbatches."""
    micros = [a.micro for row in schedule.actions for a in row if a.stage == stage and a.op in "IB"]
    return micros == sorted(micros)


def _check_together(
    schedule: PipelineSchedule, chunks: Mapping[int, nn.Module], group: dist.ProcessGroup | None
) -> None:
    """Check the schedule and the chunks on each rank, and raise on all ranks if one rank fails.

    Raises:
        ScheduleError: A rank cannot run its part, or the ranks have different schedules.
    """
    # A rank that raised before the collective would leave the other ranks waiting in it.
    rank = dist.get_rank(group)
    problem = ""
    try:
        check_runnable(schedule, dist.get_world_size(group))
        check_chunks(schedule, rank, chunks, dist.get_process_group_ranks(group))
    except ScheduleError as error:
        problem = str(error)
    # The gathered values travel as pickles; a digest is shorter than a long schedule.
    digest = hashlib.sha256(repr((schedule.rows, schedule.n_micro)).encode()).hexdigest()
    digests, problems = zip(*gather((digest, problem), group), strict=True)
    if any(problems):
        lines = [f"rank {number}: {text}" for number, text in enumerate(problems) if text]
        raise ScheduleError(problem if len(set(problems)) == 1 else "; ".join(lines))
    if len(set(digests)) > 1:
        other = next(number for number, text in enumerate(digests) if text != digests[0])
        raise ScheduleError(
            f"ranks 0 and {other} have different schedules, and would wait for each other for "
            "ever: make it on one rank and broadcast it"
        )


def _do_nothing(action: Any, context: Any) -> None:
    """Replace a backward pass or a reduction in an evaluation."""
