"""A schedule over the chunks of a model, run step by step on torch's runtime.

Guarantees
    - Losses and gradients are those of a single process that runs the microbatches one after the
      other, bit for bit (``SerialRuntime``).
    - What cannot run is refused when the runtime is made, on all ranks alike.
    - An evaluation between two training steps changes nothing of the training.

How torch's runtime is used
    - Stages of one rank pass tensors directly; all others send and receive. The order of receives
      is that of the sends (``defer_pp_recv`` breaks it, and with it the gradients).
    - Stage 0 does nothing in I, and its whole backward pass in W.
    - An evaluation has a runtime and ``PipelineStage`` objects of its own: if they were shared, the
      next training step would lose gradients. Its I, W, B and reductions do nothing, since the
      runtime's ``eval`` fails on schedules in which a rank has neighbouring stages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swpipe._distributed.rank_checks import gather
from swpipe.plans.pipeline_parallel import PipelineSchedule, ScheduleError
from swpipe.tasks.pipeline_parallel.first_batch import kept_buffers, no_collectives
from swpipe.tasks.pipeline_parallel.run_rules import (
    check_batch,
    check_chunks,
    check_runnable,
    split,
)
from swpipe.tasks.pipeline_parallel.torch_pipelining import (
    BACKWARD,
    OPS,
    Stage,
    TorchAction,
    TorchRuntime,
)

LossFn = Callable[[Any, Tensor], Tensor]


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


class PipelineRuntime:
    """Train and evaluate a model whose chunks are on the ranks of a process group.

    Every rank makes one, and calls the same methods in the same order; making one is a collective.
    Gradients are those of the mean over microbatches of their loss; optimizers are the caller's.

    Args:
        schedule: The order of passes. On a V of n ranks, rank r has stages r and 2n - 1 - r.
        chunks: Stage to module, of this rank's stages. Only the activations of one tensor or of a
            tuple of tensors go from stage to stage. A chunk starts no collectives, has parameters
            of its own, and uses each of them once.
        loss_fn: (output of the last stage, target) to a scalar, for one microbatch.
        device: Where the chunks are.
        group: The ranks; None for the default group.

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
        self._loss_fn, self._device, self._group = loss_fn, torch.device(device), group
        self._training = _Passes(self, self._make(()))
        self._evaluation: _Passes | None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The chunks of this rank, in the order of their stages."""
        return tuple(self.chunks.values())

    def train(
        self, *inputs: Tensor, target: Tensor | None = None, with_output: bool = False
    ) -> StepResult:
        """Run the schedule on one batch; its gradients replace those of the chunks.

        Args:
            *inputs: What stage 0 takes, rows of the batch in dimension 0. Ranks without stage 0 may
                leave them out.
            target: What the loss function takes; ranks without the last stage may leave it out.
            with_output: Keep the output of the whole batch.

        Raises:
            ValueError: The microbatches do not divide the batch, or its shapes are not those of the
                first one. Nothing was run.
        """
        for chunk in self.modules:
            chunk.zero_grad(set_to_none=True)  # the runtime scales whatever it finds at the end
        return self._training.run(inputs, target, with_output)

    def evaluate(
        self, *inputs: Tensor, target: Tensor | None = None, with_output: bool = False
    ) -> StepResult:
        """The forward passes alone, without gradients; arguments and errors as ``train``.

        The modules are in the mode, training or evaluation, in which the caller has put them. A
        batch may have another size than in training.
        """
        if self._evaluation is None:
            self._evaluation = _Passes(self, self._make(BACKWARD), training=False)
        with torch.no_grad():
            return self._evaluation.run(inputs, target, with_output)

    def _make(self, left_out: tuple[Any, ...]) -> Any:
        """A runtime of torch's, with stages of its own, in which some ops do nothing."""
        stages = [
            Stage(chunk, stage, self.schedule.n_stages, self._device, group=self._group)
            for stage, chunk in self.chunks.items()
        ]
        made = TorchRuntime(stages, self.schedule.n_micro, loss_fn=self._loss_fn)
        made._prepare_schedule_with_comms(
            {
                rank: [TorchAction(stage, OPS[op], micro) for stage, op, micro in row]
                for rank, row in enumerate(self.schedule.rows)
            }
        )
        for op in left_out:
            made.register_custom_function(op, _do_nothing)
        return made


class _Passes:
    """A runtime of torch's for training or for evaluation, and the shapes it was prepared for."""

    def __init__(self, owner: PipelineRuntime, runtime: Any, *, training: bool = True) -> None:
        self._owner, self._runtime = owner, runtime
        self._step = runtime.step if training else runtime.eval
        self._training = training
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._ready = self._failed = False

    def run(
        self, inputs: tuple[Tensor, ...], target: Tensor | None, with_output: bool
    ) -> StepResult:
        if self._failed:
            raise RuntimeError(
                "an earlier step failed, and its microbatches are still under way on other ranks: "
                "make a new runtime on all of them"
            )
        self._check(inputs, target)
        inputs = inputs if self._owner.has_first else ()
        target = target if self._owner.has_last else None
        losses: list[Tensor] | None = [] if self._owner.has_last else None
        self._failed = True
        if not self._ready:
            self._prepare(inputs, target)
        output = self._step(*inputs, target=target, losses=losses, return_outputs=with_output)
        for stage in self._runtime._stages:
            stage.clear_runtime_states()
        # What backward passes would have used up; an evaluation has none.
        self._runtime.bwd_recv_ops.clear()
        self._failed = False
        if losses is None:
            return StepResult()
        return StepResult(torch.stack(losses).detach(), _detached(output))

    def _check(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> None:
        named = {f"input {number}": tensor for number, tensor in enumerate(inputs)}
        if target is not None:
            named["target"] = target
        wanted = {"inputs": self._owner.has_first, "target": self._owner.has_last}
        given = {"inputs": bool(inputs), "target": target is not None}
        for name, needed in wanted.items():
            if needed and not given[name]:
                stage = "first" if name == "inputs" else "last"
                raise ValueError(f"{name}: rank {self._owner.rank} has the {stage} stage; give it")
        check_batch(named, self._owner.schedule.n_micro)
        for name, tensor in named.items():
            found = (tensor.dtype, tensor.shape)
            before = self._shapes.get(name, found)
            if found != before:
                raise ValueError(
                    f"{name} is {_described(*found)}, and the first batch had "
                    f"{_described(*before)}: the ranks receive into memory of that shape; give "
                    "batches of one shape, or make another runtime"
                )
        self._shapes |= {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}

    def _prepare(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> None:
        """Have the runtime find the shapes, with the first microbatch."""
        n_micro = self._owner.schedule.n_micro
        args = split(inputs, n_micro)[0] if inputs else ()
        first = None if target is None else target.chunk(n_micro)[0]
        self._runtime._has_backward = self._training
        modules = self._owner.modules
        with no_collectives(modules), kept_buffers(modules):
            self._runtime._initialize_stages(args, {}, first)
        self._ready = True


def _check_together(
    schedule: PipelineSchedule, chunks: Mapping[int, nn.Module], group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks what is wrong on one; else some would wait for the others."""
    rank, problem = dist.get_rank(group), ""
    try:
        check_runnable(schedule, dist.get_world_size(group))
        check_chunks(schedule, rank, chunks)
    except ScheduleError as error:
        problem = str(error)
    digest = hashlib.sha256(repr((schedule.rows, schedule.n_micro)).encode()).hexdigest()
    digests, problems = zip(*gather((digest, problem), group), strict=True)
    wrong = {text: number for number, text in reversed([*enumerate(problems)]) if text}
    if wrong:
        raise ScheduleError(
            "; ".join(
                text if len(set(problems)) == 1 else f"rank {number}: {text}"
                for text, number in sorted(wrong.items(), key=lambda item: item[1])
            )
        )
    if len(set(digests)) > 1:
        other = next(number for number, one in enumerate(digests) if one != digests[0])
        raise ScheduleError(
            f"ranks 0 and {other} have different schedules, and would wait for each other for "
            "ever: make it on one rank and broadcast it"
        )


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype} {tuple(shape)}"


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return output if output is None else tuple(one.detach() for one in output)


def _do_nothing(action: Any, context: Any) -> None:
    """What an evaluation does in place of a backward pass."""
