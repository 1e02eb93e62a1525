"""Runs the pairs of a schedule: a chunk's forward over another microbatch's backward.

What torch does around a stage's module (receive, compute the loss, hand on) is done for both parts
of a pair, the one within the other; where both come to their modules, plans of their layers run::

    B   receive, gradient of the loss ── F ───────────────────────── hand on
    F                                    receive ── run ── loss, hand on

A chunk has such plans if it has ``build_schedule_plan``, with the arguments of Megatron's: token
ids for stage 0, ``decoder_input`` for others. A pair of others, or with hooks, runs F and then B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from swpipe.plans.pipeline_parallel import Action, Pair, PipelineSchedule
from swpipe.tasks.pipeline_parallel.split_backward import Grads, whole_pass
from swpipe.tasks.pipeline_parallel.torch_pipelining import wait_for


def has_plans(chunk: nn.Module) -> bool:
    """Whether a chunk has plans of its layers, and no hooks of modules, which these do not call."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return hasattr(chunk, "build_schedule_plan") and not any(
        getattr(module, name) for module in chunk.modules() for name in hooks
    )


def plan_of(chunk: Any, args: Any, is_first: bool, **keywords: Any) -> Any:
    """The plan for what the chunk of the first stage, or of another, is given."""
    if is_first:
        return chunk.build_schedule_plan(*args, **keywords)
    return chunk.build_schedule_plan(None, decoder_input=args[0], **keywords)


class PlannedMicrobatch:
    """A microbatch that a stage runs by a plan of its layers.

    Its ``whole_pass``, ``input_pass`` and ``run`` are what ``split_backward`` has for others.

    Args:
        plan: What the chunk's ``build_schedule_plan`` gave.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._output: Any = None
        self._grad: Any = None
        self._found: list[Tensor | None] = []

    def run_forward(self, over: PlannedMicrobatch | None) -> Any:
        """Run it forward, over a backward that is due or alone; what the chunk gives."""
        plan = self._plan
        self._output = plan.run(plan, None) if over is None else over._run_backward(plan)
        return self._output

    def whole_pass(self, outputs: Any, grads: Any, inputs: Sequence[Any], due: Due | None) -> Grads:
        """Run it backward; ``due``, where there is one, runs it with a forward instead."""
        self._begin(outputs, grads)
        if due is None:
            self._run_backward()
        else:
            due(self)
        return self._of_inputs(inputs)

    def input_pass(self, outputs: Any, grads: Any, inputs: Sequence[Any]) -> tuple[Grads, Any]:
        """Run it backward, but for delayed weight gradients."""
        self._begin(outputs, grads)
        self._found.append(self._plan.run_backward_input(self._grad))
        return self._of_inputs(inputs), self

    def run(self) -> None:
        """Compute these."""
        self._plan.run_backward_dw()

    def _begin(self, outputs: Any, grads: Any) -> None:
        given = whole_pass(outputs, None, [self._output]) if grads is None else grads
        self._grad, self._output = given[0], None

    def _run_backward(self, forward: Any = None) -> Any:
        return self._plan.run(
            forward, self._plan, self._grad, post_backward=lambda grad, _: self._found.append(grad)
        )

    def _of_inputs(self, inputs: Sequence[Any]) -> Grads:
        grads = self._found if isinstance(inputs[0], Tensor) and inputs[0].requires_grad else []
        return (*grads, *[None] * (len(inputs) - len(grads)))


Due: TypeAlias = Callable[[PlannedMicrobatch], None]


class PairedPasses:
    """What torch's runtime calls for a pair.

    Args:
        stages: Those of this rank, ``OncePerMicrobatch``.

    Attributes:
        with_output: Whether the last stage keeps what it gives.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self.with_output = False

    def __call__(self, action: Any, context: Any) -> None:
        """Run both passes."""
        f, b = action.sub_actions
        ahead, back = self._stages[f.stage_index], self._stages[b.stage_index]
        forward = partial(self._forward, ahead, f.microbatch_index, context)
        if b.microbatch_index in back.planned:

            def due(microbatch: PlannedMicrobatch) -> None:
                ahead.over = microbatch
                forward()

            back.due = due
        else:
            forward()
        self._backward(back, b.microbatch_index, context)

    def _forward(self, stage: Any, micro: int, context: Any) -> None:
        runtime, number = context.schedule_ref, stage.stage_index
        runtime._assert_unsharded(stage)
        wait_for(runtime.fwd_recv_ops.pop((number, micro), []))
        given = context.arg_mbs[micro], context.kwarg_mbs[micro]
        output = stage.forward_one_chunk(micro, *given, save_forward_output=self.with_output)
        runtime._maybe_compute_loss(stage, output, context.target_mbs, micro)
        if number + 1 in self._stages:
            self._stages[number + 1].set_local_fwd_input(output, micro)

    def _backward(self, stage: Any, micro: int, context: Any) -> None:
        runtime, number = context.schedule_ref, stage.stage_index
        runtime._assert_unsharded(stage)
        wait_for(runtime.bwd_recv_ops.pop((number, micro), []))
        runtime.backward_counter[number] += 1
        is_last = runtime.backward_counter[number] == runtime._n_microbatches
        loss = runtime._maybe_get_loss(stage, micro)
        stage.backward_one_chunk(micro, loss=loss, last_backward=is_last)
        if number - 1 in self._stages:
            self._stages[number - 1].set_local_bwd_input(stage.get_local_bwd_output(micro), micro)


def planned_micros(
    schedule: PipelineSchedule, stage: int, chunks: Mapping[int, nn.Module]
) -> dict[int, bool]:
    """The microbatches of a stage in pairs of chunks with plans; whether their backward is I, W."""
    actions = set(schedule.actions[schedule.placement[stage]])
    return {
        part.micro: Action(stage, "I", part.micro) in actions
        for row in schedule.rows
        for pair in row
        if isinstance(pair, Pair)
        and all(one.stage in chunks and has_plans(chunks[one.stage]) for one in pair)
        for part in pair
        if part.stage == stage
    }
