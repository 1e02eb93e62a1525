"""The run of layers' steps on the engine: the task of each step, and the pipeline of one call.

    run_steps(order, f, b)
      the pipeline of this order      cached, since making it takes longer than running it
        context:  f_value ─ f0.attn ─ f0.mlp ─ ...      the present value of each of the two
                  b_value ─ b1.mlp ─ b1.attn ─ ...      microbatches

Guarantees
    - Each call is one run: the engine's streams wait for the caller's stream, which waits for them
      afterwards. The caller's tensors may be read on every stream, and freed after the call.
    - Ranks that share experts run the same steps in the same order, or raise before they exchange
      tokens. Each call first starts an exchange of a few bytes. It is the call's first collective
      on every rank, whatever steps the rank runs, so these exchanges match each other.

Assumptions
    - Ranks of other groups, such as another pipeline stage, may run other layers: only ranks of one
      expert group are compared.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from swpipe.core.context import IterContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask, TaskFn
from swpipe.device import Device
from swpipe.distributed import differences, gather, name_ranks, plan_facts
from swpipe.pipeline import SWPipeline
from swpipe.plans.transformer import LayerStep, Steps, Streams, paired_plan
from swpipe.tasks.transformer.schedule_node import as_leaf, get_comm_stream, get_comp_stream

_WAYS_OUT = (
    "and would wait for each other's exchanges forever. Build and run the same layers on all of "
    "them, forward and backward"
)


@dataclass(frozen=True, slots=True)
class Side:
    """One microbatch of a call.

    Attributes:
        layers: The plans of its layers.
        value: The input of the forward, or the gradient for the backward.
        chunk: The plan of its chunk; None for layers without a chunk.
        before: Called before all steps.
        after: Called with the value after the layers.
    """

    layers: Sequence[Any]
    value: Any
    chunk: Any = None
    before: Callable[[], object] | None = None
    after: Callable[[Any], object] | None = None


class PairContext(IterContext):
    """The context of a call: its two sides and their present values."""

    def __init__(self, batch: dict[str, Any], iter_idx: int) -> None:
        super().__init__(None, iter_idx)
        # The call's values are attributes, which the functions of the steps read and replace.
        vars(self).update(batch)


def run_steps(
    order: Steps,
    forward: Side | None,
    backward: Side | None,
    *,
    device: Device,
    group: dist.ProcessGroup | None,
) -> tuple[Any, Any]:
    """Run both sides, and return the last value of each; None for a side that is None.

    Raises:
        RuntimeError: Ranks of the expert group run different orders.
    """
    # Started first: the call's first collective must be the same on every rank.
    same_order = SameOrder(order, group, device.name)
    pipeline = _pipelines.of(order, device)
    sides = {"f": forward, "b": backward}
    values = {f"{k}_value": None if side is None else side.value for k, side in sides.items()}
    # One iteration and no iterator: the pipeline stays open for the next call.
    pipeline.push({**sides, **values, "same_order": same_order})
    (ctx,) = pipeline.flush()
    return as_leaf(ctx.f_value), ctx.b_value


class _Pipelines(threading.local):
    """The pipelines of each thread: a pipeline runs one call at a time.

    There is one for each combination of kinds of layers that the thread has run, about as many as
    there are pairs of chunks on the rank.
    """

    def __init__(self) -> None:
        self._made: dict[Any, SWPipeline[PairContext]] = {}

    def of(self, order: Steps, device: Device) -> SWPipeline[PairContext]:
        """Return the pipeline that runs an order; the first call for an order makes it."""
        streams: Streams = (None, "comm")
        if device.has_streams:
            streams = (get_comp_stream(), get_comm_stream())
        # The streams belong to the key, since ``set_streams`` can change them between calls.
        key = (order, device.name, streams)
        if key not in self._made:
            self._made[key] = SWPipeline(
                paired_plan(order, streams),
                [PipelineTask(step.name, step_function(step)) for step in order],
                device=device,
                context=PairContext,
                check_ranks=False,  # it compares all ranks; SameOrder compares the group
                check_effects=False,
                stall_timeout_s=None,  # the only thread waits for collectives, which time out
            )
        return self._made[key]


_pipelines = _Pipelines()


def step_function(step: LayerStep) -> TaskFn:
    """Return the function of a step's task."""
    side = step.side
    value = f"{side}_value"
    node = step.node
    direction = "forward" if side == "f" else "backward"
    if step.layer is None and not node.endswith("_process"):
        return _AROUND[node, side]
    method = {
        "start": f"start_{direction}",
        "wait": f"finish_{direction}",
        "dw": "run_backward_dw",
    }.get(step.part, f"run_{direction}")
    layer = step.layer
    # The comparison is awaited as late as possible, but before tokens are exchanged.
    checks = step.issues_collectives
    # The embedding reads its input from the chunk's state, not from a previous step.
    takes_value = (node, side) != ("pre_process", "f")

    def run(ctx: Any) -> None:
        if checks and ctx.same_order is not None:
            ctx.same_order.check()
        owner = getattr(ctx, side)
        call = getattr(getattr(owner.chunk if layer is None else owner.layers[layer], node), method)
        if method == "run_backward_dw":
            call()
        else:
            setattr(ctx, value, call(getattr(ctx, value) if takes_value else ()))

    return run


def _begin(side: str) -> TaskFn:
    def begin(ctx: Any) -> None:
        before = getattr(ctx, side).before
        if before is not None:
            before()

    return begin


def _after(side: str) -> TaskFn:
    def after_layers(ctx: Any) -> None:
        after = getattr(ctx, side).after
        if after is not None:
            after(as_leaf(getattr(ctx, f"{side}_value")))

    return after_layers


def _end_forward(ctx: Any) -> None:
    ctx.f_value = as_leaf(ctx.f_value)


def _end_backward(ctx: Any) -> None:
    # A microbatch's graph is not needed after its backward.
    ctx.b.chunk.release_state()
    ctx.b = None


_AROUND: dict[tuple[str, str], TaskFn] = {
    **{("begin", side): _begin(side) for side in "fb"},
    **{("post_layers", side): _after(side) for side in "fb"},
    ("end", "f"): _end_forward,
    ("end", "b"): _end_backward,
}
"""The functions of the steps before and after a chunk's layers that run no node."""


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks that share the experts: 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


class SameOrder:
    """A comparison of steps between ranks, which starts when the object is made.

    Args:
        order: The steps that this rank is about to run.
        group: The ranks to compare with; None for none.
        device: The device of the group's collectives.
    """

    def __init__(
        self, order: Steps, group: dist.ProcessGroup | None, device: torch.device | str
    ) -> None:
        self._handle: dist.Work | None = None
        if size_of(group) > 1:
            # Seven bytes, so that the number fits into a signed tensor element of 64 bits.
            digest = hashlib.sha256(" ".join(step.name for step in order).encode()).digest()
            own = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
            self._all = own.new_empty(size_of(group))
            # Asynchronous, so that it overlaps the steps before the first exchange.
            self._handle = dist.all_gather_into_tensor(self._all, own, group=group, async_op=True)

    def check(self) -> None:
        """Wait for the comparison; later calls do nothing.

        Raises:
            RuntimeError: The ranks run different orders; raised on all ranks of the group.
        """
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        digests: list[int] = self._all.tolist()
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeError(
                "ranks of one expert group run different layers, or in different orders (rank 0 "
                f"of the group differs from {name_ranks(others)}), {_WAYS_OUT}"
            )


def check_same_plan_in_group(plan: PipelinePlan, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks of an expert group have the same plan; a collective of the group.

    Raises:
        RuntimeError: The ranks have different plans; raised on all of them.
    """
    # Digests first: the facts are larger, and are only gathered for the message.
    if size_of(group) > 1 and len(set(gather(plan.digest(), group))) > 1:
        raise RuntimeError(
            "ranks of one expert group train layers by different plans: "
            f"{differences(gather(plan_facts(plan), group))}, {_WAYS_OUT}"
        )
