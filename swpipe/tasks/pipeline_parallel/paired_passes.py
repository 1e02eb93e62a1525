"""Execution of a schedule's pairs: a forward pass overlapped with another microbatch's backward.

Both passes of a pair receive, compute the loss and send as in torch's stage, with the forward pass
inside the backward pass. When both have reached their modules, the plans of their layers run
together::

    B   (1) receive, gradient of the loss ─┐                      ┌─ (4) send
    F                     (2) receive ── (3) run both plans ── loss, send

A chunk has plans of its layers if it has ``build_schedule_plan`` with the arguments of Megatron's
method: token ids for stage 0, ``decoder_input`` for other stages. A pair of chunks without plans,
or with hooks, runs F and then B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from swpipe.plans.pipeline_parallel import Action, Pair, PipelineSchedule
from swpipe.tasks.pipeline_parallel.split_backward import Grads, whole_pass
from swpipe.tasks.pipeline_parallel.torch_pipelining import wait_for


def has_plans(chunk: nn.Module) -> bool:
    """Return whether a chunk has plans of its layers, and no module hooks."""
    # The plans call the layers' functions directly, without ``Module.__call__``, which runs the
    # hooks. The names of the dicts of hooks are private in torch (2.13 to 2.15).
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return hasattr(chunk, "build_schedule_plan") and not any(
        getattr(module, name) for module in chunk.modules() for name in hooks
    )


def plan_of(chunk: Any, args: Any, is_first: bool, **keywords: Any) -> Any:
    """Build the plan of a chunk's layers for the positional arguments of its stage."""
    if is_first:
        return chunk.build_schedule_plan(*args, **keywords)
    return chunk.build_schedule_plan(None, decoder_input=args[0], **keywords)


class PlannedMicrobatch:
    """A microbatch that a stage runs by a plan of its layers.

    The methods ``whole_pass``, ``input_pass`` and ``run`` replace those of ``split_backward``.

    Args:
        plan: The result of the chunk's ``build_schedule_plan``.

    Attributes:
        due: A function that runs the backward pass, overlapped with a forward pass; None to run
            the backward pass alone.
    """

    def __init__(self, plan: Any) -> None:
        self.due: Callable[[PlannedMicrobatch], None] | None = None
        self._plan = plan
        self._output: Any = None
        self._grad: Any = None
        self._input_grads: list[Tensor | None] = []

    def run_forward(self, over: PlannedMicrobatch | None) -> Any:
        """Run the forward pass, alone or overlapped with ``over``'s backward; return its output."""
        plan = self._plan
        self._output = plan.run(plan, None) if over is None else over._run_backward(plan)
        return self._output

    def whole_pass(self, outputs: Any, grads: Any, inputs: Sequence[Any]) -> Grads:
        """Run the backward pass, or let ``due`` run it, and return the gradients of the inputs."""
        self._begin(outputs, grads)
        if self.due is None:
            self._run_backward()
        else:
            self.due(self)
        return self._of_inputs(inputs)

    def input_pass(self, outputs: Any, grads: Any, inputs: Sequence[Any]) -> tuple[Grads, Any]:
        """Run I, and return the gradients of the inputs, and this object, whose ``run`` is W."""
        self._begin(outputs, grads)
        self._input_grads.append(self._plan.run_backward_input(self._grad))
        return self._of_inputs(inputs), self

    def run(self) -> None:
        """Run W: compute the delayed gradients of the weights."""
        self._plan.run_backward_dw()

    def _begin(self, outputs: Any, grads: Any) -> None:
        # On the last stage ``outputs`` is the loss, which autograd computes outside of the plan:
        # first get the gradient of the plan's output from it.
        given = whole_pass(outputs, None, [self._output]) if grads is None else grads
        self._grad = given[0]
        self._output = None

    def _run_backward(self, forward: Any = None) -> Any:
        grads = self._input_grads
        return self._plan.run(
            forward, self._plan, self._grad, post_backward=lambda grad, _: grads.append(grad)
        )

    def _of_inputs(self, inputs: Sequence[Any]) -> Grads:
        # A plan gives the gradient of its first input only.
        requires_grad = isinstance(inputs[0], Tensor) and inputs[0].requires_grad
        grads = self._input_grads if requires_grad else []
        return (*grads, *[None] * (len(inputs) - len(grads)))


class PairedPasses:
    """The function that torch's runtime calls for a pair.

    Args:
        stages: The stages of this rank, each a ``OncePerMicrobatch``.

    Attributes:
        with_output: Whether the last stage keeps its outputs.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self.with_output = False

    def __call__(self, action: Any, context: Any) -> None:
        """Run both passes of a pair."""
        f, b = action.sub_actions
        ahead = self._stages[f.stage_index]
        back = self._stages[b.stage_index]
        forward = partial(self._forward, ahead, f.microbatch_index, context)
        planned = back.under_way.get(b.microbatch_index)
        if planned is None:
            forward()
        else:
            # Called within the backward pass, at (3): the forward pass runs up to its module, where
            # the stage runs both plans. The microbatch is an argument, because a function that held
            # it would keep its graph in a reference cycle.
            def due(microbatch: PlannedMicrobatch) -> None:
                ahead.over = microbatch
                forward()

            planned.due = due
        self._backward(back, b.microbatch_index, context)

    def _forward(self, stage: Any, micro: int, context: Any) -> None:
        # The same steps as the runtime's ``_step_microbatches`` takes for FORWARD, with the same
        # private members (torch 2.13 to 2.15).
        runtime = context.schedule_ref
        number = stage.stage_index
        runtime._assert_unsharded(stage)
        wait_for(runtime.fwd_recv_ops.pop((number, micro), []))
        given = context.arg_mbs[micro], context.kwarg_mbs[micro]
        output = stage.forward_one_chunk(micro, *given, save_forward_output=self.with_output)
        runtime._maybe_compute_loss(stage, output, context.target_mbs, micro)
        if number + 1 in self._stages:
            self._stages[number + 1].set_local_fwd_input(output, micro)

    def _backward(self, stage: Any, micro: int, context: Any) -> None:
        # The same for FULL_BACKWARD.
        runtime = context.schedule_ref
        number = stage.stage_index
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
    """Return the microbatches that a stage runs by a plan, each with whether its backward is split.

    These are the microbatches in pairs whose two chunks have plans; ``planned`` of
    ``OncePerMicrobatch`` takes the result.
    """
    actions = set(schedule.actions[schedule.placement[stage]])
    return {
        part.micro: Action(stage, "I", part.micro) in actions
        for row in schedule.rows
        for pair in row
        if isinstance(pair, Pair)
        and all(a.stage in chunks and has_plans(chunks[a.stage]) for a in pair)
        for part in pair
        if part.stage == stage
    }
