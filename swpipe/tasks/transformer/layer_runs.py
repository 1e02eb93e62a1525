"""Runs the steps of layers on the engine: the task of each step, and one call's pipeline.

    run_steps(order, f, b)
      the pipeline of this order      cached, since to make one takes longer than to run it
        context:  f_value ─ f0.attn ─ f0.mlp ─ ...      the value that each of the two
                  b_value ─ b1.mlp ─ b1.attn ─ ...      microbatches has reached

A call is a run of its own: the engine's streams begin after the caller's, and the caller's goes on
after them. So what the caller has made may be read on every stream, and freed after the call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from swpipe.core.context import IterContext
from swpipe.core.task import PipelineTask, TaskFn
from swpipe.device import Device
from swpipe.pipeline import SWPipeline
from swpipe.plans.transformer import LayerStep, Steps, paired_plan
from swpipe.tasks.transformer.layer_streams import get_comm_stream, get_comp_stream
from swpipe.tasks.transformer.same_order import SameOrder
from swpipe.tasks.transformer.schedule_node import as_leaf

MOST_PIPELINES = 32
"""How many pipelines a thread keeps: for each combination of kinds of layers, one."""


@dataclass(frozen=True, slots=True)
class Side:
    """One microbatch of a call.

    Attributes:
        layers: The plans of its layers.
        value: What forward or backward begins with.
        chunk: The plan of its chunk; None for layers alone.
        before: Called before all else.
        after: Called with the value after the layers.
    """

    layers: Sequence[Any]
    value: Any
    chunk: Any = None
    before: Callable[[], object] | None = None
    after: Callable[[Any], object] | None = None


class PairContext(IterContext):
    """A call's two sides, and the values that they have reached."""

    def __init__(self, batch: dict[str, Any], iter_idx: int) -> None:
        super().__init__(None, iter_idx)
        vars(self).update(batch)


def run_steps(
    order: Steps,
    forward: Side | None,
    backward: Side | None,
    *,
    device: Device,
    group: dist.ProcessGroup | None,
) -> tuple[Any, Any]:
    """Run both sides; the value that each has reached, None of one that is None.

    Raises:
        RuntimeError: Ranks of the expert group run different orders.
    """
    same_order = SameOrder(order, group, device.name)
    pipeline = _pipelines.of(order, device)
    sides = {"f": forward, "b": backward}
    values = {f"{k}_value": None if side is None else side.value for k, side in sides.items()}
    pipeline.push({**sides, **values, "same_order": same_order})
    (ctx,) = pipeline.flush()
    return as_leaf(ctx.f_value), ctx.b_value


class _Pipelines(threading.local):
    """The pipelines of each thread: a pipeline runs one call at a time."""

    def __init__(self) -> None:
        self._made: OrderedDict[Any, SWPipeline[PairContext]] = OrderedDict()

    def of(self, order: Steps, device: Device) -> SWPipeline[PairContext]:
        """The pipeline of an order; made where there is none."""
        streams = (get_comp_stream(), get_comm_stream()) if device.has_streams else (None, "comm")
        key = (order, device.name, streams)
        if key not in self._made:
            plan = paired_plan(order, comp_stream=streams[0], comm_stream=streams[1])
            self._made[key] = SWPipeline(
                plan,
                [PipelineTask(step.name, step_function(step)) for step in order],
                device=device,
                context=PairContext,
                check_ranks=False,  # it would compare all ranks: see same_order
                check_effects=False,
            )
            while len(self._made) > MOST_PIPELINES:
                self._made.popitem(last=False)[1].close()
        self._made.move_to_end(key)
        return self._made[key]


_pipelines = _Pipelines()


def step_function(step: LayerStep) -> TaskFn:
    """What a step does with its context."""
    if step.layer is not None:
        return _on_layer(step, step.layer)
    if step.node.endswith("_process"):
        return _on_chunk(step)
    return _AROUND[step.side, step.node]


def _on_layer(step: LayerStep, layer: int) -> TaskFn:
    side, value, node_name = step.side, f"{step.side}_value", step.node
    checks = step.issues_collectives
    calls = {"start": "start_", "wait": "finish_"}
    direction = "forward" if side == "f" else "backward"
    method = "run_backward_dw" if step.part == "dw" else calls.get(step.part, "run_") + direction

    def run(ctx: Any) -> None:
        if checks and ctx.same_order is not None:
            ctx.same_order.check()
        node = getattr(getattr(ctx, side).layers[layer], node_name)
        if method == "run_backward_dw":
            node.run_backward_dw()
        else:
            setattr(ctx, value, getattr(node, method)(getattr(ctx, value)))

    return run


def _on_chunk(step: LayerStep) -> TaskFn:
    node_name = step.node

    def forward(ctx: Any) -> None:
        node = getattr(ctx.f.chunk, node_name)
        ctx.f_value = node.run_forward(() if node_name == "pre_process" else ctx.f_value)

    def backward(ctx: Any) -> None:
        ctx.b_value = getattr(ctx.b.chunk, node_name).run_backward(ctx.b_value)

    return forward if step.side == "f" else backward


def _begin_forward(ctx: Any) -> None:
    if ctx.f.before is not None:
        ctx.f.before()


def _begin_backward(ctx: Any) -> None:
    if ctx.b.before is not None:
        ctx.b.before()


def _after_forward(ctx: Any) -> None:
    if ctx.f.after is not None:
        ctx.f.after(as_leaf(ctx.f_value))


def _after_backward(ctx: Any) -> None:
    if ctx.b.after is not None:
        ctx.b.after(ctx.b_value)


def _end_forward(ctx: Any) -> None:
    ctx.f_value = as_leaf(ctx.f_value)


def _end_backward(ctx: Any) -> None:
    ctx.b.chunk.release_state()
    ctx.b = None


_AROUND: dict[tuple[str, str], TaskFn] = {
    ("f", "begin"): _begin_forward,
    ("b", "begin"): _begin_backward,
    ("f", "post_layers"): _after_forward,
    ("b", "post_layers"): _after_backward,
    ("f", "end"): _end_forward,
    ("b", "end"): _end_backward,
}
"""What is around a chunk's layers, beside its nodes."""
