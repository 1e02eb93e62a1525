"""Plans that overlap one microbatch's forward pass with another's backward, layer by layer.

A layer is a chain of steps. Layers with experts ("moe") exchange tokens with other ranks twice:
dispatch and combine. Each exchange has two steps, start and wait. The exchange of token counts,
which precedes both, begins in "attn.route".

    forward    attn[.route]  dispatch.start .wait  mlp  combine.start .wait  [mtp_post_process]
    backward   [mtp_post_process]  combine.start .wait  mlp  mlp.dw  dispatch.start .wait
               attn  attn.dw

One layer's forward pass and another's backward pass are submitted in the following order. Each
exchange overlaps with the computation below it. The steps ".dw" compute delayed weight gradients::

    comm   -- combine b --   -- dispatch f --   -- dispatch b --   -- combine f --
    comp   attn f            mlp b  mlp.dw b    mlp f              attn b  attn.dw b

Layers are paired by kind: the first "moe" layer of the forward pass with the last "moe" layer of
the backward pass, and so on, so that exchanges overlap with exchanges. All other layers run during
these exchanges.

Source: Megatron-Core's ``model_chunk_schedule_plan``, ``TransformerLayerSchedulePlan.run`` and
``TransformerModelChunkSchedulePlan.run``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple, TypeAlias

from swpipe.core.plan import PipelinePlan, StreamRef, TaskSchedule

__all__ = [
    "LayerKind",
    "LayerStep",
    "chunk_order",
    "layer_overlap_plan",
    "layer_steps",
    "pair_order",
    "paired_plan",
]

Side: TypeAlias = Literal["f", "b"]

EXCHANGES = ("moe_dispatch", "moe_combine")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The properties of a layer that determine its steps.

    Attributes:
        moe: Whether the layer exchanges tokens with the experts of other ranks.
        mtp: Whether the layer is for multi-token prediction.
        delayed: Whether the weight gradients are computed in steps of their own.
        early: Whether attention's backward pass runs before the experts of the paired forward pass.
            This frees attention's memory early, and leaves less computation to overlap with the
            experts' combine.
    """

    moe: bool = False
    mtp: bool = False
    delayed: bool = False
    early: bool = False


class LayerStep(NamedTuple):
    """One task of a chunk's forward or backward pass.

    Attributes:
        side: "f" for forward, "b" for backward.
        layer: The index of the layer in the chunk, from 0; None for a step before or after the
            layers.
        node: The name of the node's attribute in the plan of the layer or of the chunk.
        part: "start" or "wait" for an exchange, "route" for attention that also routes tokens, "dw"
            for weight gradients, "" otherwise.
    """

    side: Side
    layer: int | None
    node: str
    part: str = ""

    @property
    def name(self) -> str:
        """The name of the task, for example "f0.moe_dispatch.start" or "b.post_process"."""
        part = f".{self.part}" if self.part else ""
        return f"{self.side}{'' if self.layer is None else self.layer}.{self.node}{part}"

    @property
    def exchanges(self) -> bool:
        """Whether the step is part of an exchange of tokens."""
        return self.node in EXCHANGES

    @property
    def issues_collectives(self) -> bool:
        """Whether the step starts an exchange of tokens or, in the router, of token counts."""
        return self.part in ("start", "route")

    @property
    def is_weight_gradient(self) -> bool:
        """Whether the step computes delayed weight gradients, which only the optimizer needs."""
        return self.part == "dw"


Steps: TypeAlias = tuple[LayerStep, ...]

Streams: TypeAlias = tuple[StreamRef, StreamRef]

_Numbered: TypeAlias = tuple[int, LayerKind]


def layer_steps(side: Side, layer: int, kind: LayerKind) -> Steps:
    """Return the steps of a layer's forward ("f") or backward ("b") in serial order."""
    return tuple(_steps(side, layer, kind))


def _steps(side: Side, layer: int, kind: LayerKind) -> Iterator[LayerStep]:
    nodes = ["attn", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process"]
    left_out = {
        *(() if kind.moe else EXCHANGES),
        *(() if kind.mtp else ("mtp_post_process",)),
    }
    # The backward pass runs the same nodes in reverse order.
    for node in nodes if side == "f" else reversed(nodes):
        if node in left_out:
            continue
        if node in EXCHANGES:
            # Two steps, so that other work can be submitted while the exchange is under way.
            yield LayerStep(side, layer, node, "start")
            yield LayerStep(side, layer, node, "wait")
            continue
        # Only the forward pass routes; the backward pass reuses its counts.
        routes = side == "f" and kind.moe and node == "attn"
        yield LayerStep(side, layer, node, "route" if routes else "")
        if side == "b" and kind.delayed and node in ("attn", "mlp"):
            yield LayerStep(side, layer, node, "dw")


_PAIR = (
    ("b", "mtp_post_process", ""),
    ("b", "moe_combine", "start"),
    ("f", "attn", ""),
    ("f", "attn", "route"),
    ("b", "moe_combine", "wait"),
    ("f", "moe_dispatch", "start"),
    ("b", "mlp", ""),
    ("b", "mlp", "dw"),
    ("b", "moe_dispatch", "start"),
    ("f", "moe_dispatch", "wait"),
    ("f", "mlp", ""),
    ("b", "moe_dispatch", "wait"),
    ("f", "moe_combine", "start"),
    ("b", "attn", ""),
    ("b", "attn", "dw"),
    ("f", "moe_combine", "wait"),
    ("f", "mtp_post_process", ""),
)
"""The order of one layer's forward steps and another's backward steps.

The backward pass waits for the combine's gradients before the forward pass dispatches its tokens,
because the dispatch may still wait for the token counts. The forward pass waits for the dispatched
tokens after the backward pass has started to dispatch its gradients.
"""

_MOVED = (("b", "moe_dispatch", "wait"), ("b", "attn", ""))
"""The backward steps that run before the forward pass's experts if ``LayerKind.early`` is set."""


def pair_order(forward: Steps, backward: Steps, early: bool = False) -> Steps:
    """Return the order of one layer's forward steps and another layer's backward steps.

    Args:
        forward: The steps of the forward pass; () for none.
        backward: The steps of the backward pass; () for none.
        early: The attribute ``early`` of the backward layer's kind.
    """
    places = [*_PAIR]
    if early:
        places = [place for place in _PAIR if place not in _MOVED]
        at = places.index(("f", "moe_dispatch", "wait"))
        places[at:at] = _MOVED
    # Steps that a layer does not have are skipped.
    by_place = {(step.side, step.node, step.part): step for step in (*forward, *backward)}
    return tuple(by_place[place] for place in places if place in by_place)


def chunk_order(
    forward: Sequence[LayerKind] | None,
    backward: Sequence[LayerKind] | None,
    *,
    hooks: bool = True,
) -> Steps:
    """Return the order of all steps of one chunk's forward pass and another's backward pass.

    Layers are paired by kind; the remaining layers follow in pairs. The steps "post_layers" come
    directly after the layers.

    Args:
        forward: The kinds of the layers that run forward; None for no forward pass.
        backward: The kinds of the layers that run backward; None for no backward pass.
        hooks: Whether to include the steps "post_layers".
    """
    # The backward pass sends its gradients to the previous chunk in "post_layers". The weight
    # gradients of the first layer's attention are not needed for that, and come after it.
    steps: list[LayerStep] = [*_around("f", forward, "begin", "pre_process")]
    steps += _around("b", backward, "begin", "post_process")
    last = LayerStep("b", 0, "attn", "dw")
    ordered = _paired([*enumerate(forward or ())], [*enumerate(backward or ())][::-1])
    steps += [step for step in ordered if step != last]
    if hooks:
        steps += [*_around("f", forward, "post_layers"), *_around("b", backward, "post_layers")]
    steps += [last] if last in ordered else []
    steps += _around("f", forward, "post_process", "end")
    steps += _around("b", backward, "pre_process", "end")
    return tuple(steps)


def _paired(ahead: list[_Numbered], back: list[_Numbered]) -> list[LayerStep]:
    """Return the order of all layers: pairs with experts, and dense layers during their exchanges.

    Dense forward layers run while gradients are combined, and dense backward layers while tokens
    are combined::

        b.combine.start  (f dense)  f.attn  ...  b.attn  (next b dense)  f.combine.wait
    """
    order: list[LayerStep] = []
    pair: list[LayerStep] = []
    while True:
        dense_f, ahead = _until_moe(ahead)
        dense_b, back = _until_moe(back)
        both_left = bool(ahead and back)
        # The dense backward layers go into the previous pair, before its last wait of the forward
        # pass. After the last pair they go there only if no backward layer with experts is left;
        # otherwise they follow with the rest.
        if both_left or (pair and not back):
            waits = [k for k, step in enumerate(pair) if step.side == "f" and step.part == "wait"]
            at = waits[-1] if waits else 0
            pair[at:at] = [step for layer in dense_b for step in _pair(None, layer)]
            dense_b = []
        order += pair
        if not both_left:
            rest = zip_longest([*dense_f, *ahead], [*dense_b, *back])
            return order + [step for layers in rest for step in _pair(*layers)]
        pair = [*_pair(ahead[0], back[0])]
        # The dense forward layers go into this pair, before its first forward step.
        at = next(k for k, step in enumerate(pair) if step.side == "f")
        pair[at:at] = [step for layer in dense_f for step in _pair(layer, None)]
        ahead = ahead[1:]
        back = back[1:]


def _until_moe(layers: list[_Numbered]) -> tuple[list[_Numbered], list[_Numbered]]:
    at = next((k for k, (_, kind) in enumerate(layers) if kind.moe), len(layers))
    return layers[:at], layers[at:]


def _pair(forward: _Numbered | None, backward: _Numbered | None) -> Steps:
    ahead = () if forward is None else layer_steps("f", *forward)
    back = () if backward is None else layer_steps("b", *backward)
    return pair_order(ahead, back, backward is not None and backward[1].early)


def _around(side: Side, kinds: Sequence[LayerKind] | None, *nodes: str) -> list[LayerStep]:
    return [] if kinds is None else [LayerStep(side, None, node) for node in nodes]


def layer_overlap_plan(layers: Sequence[LayerKind], *, shared: bool = False) -> PipelinePlan:
    """Return the plan that trains on one microbatch in each iteration.

    The forward pass is in stage 0 and the backward pass in stage 1. Each period runs the forward
    pass of one microbatch and the backward pass of the previous microbatch. The first period has
    only a forward pass, and the last period only a backward pass.

    Args:
        layers: The kinds of the chunk's layers, in order.
        shared: Whether several steps use the same parameter, for example a tied embedding. If so, a
            microbatch's backward pass begins after that of the previous microbatch has ended.
    """
    plan = _plan(chunk_order(layers, layers, hooks=False), backward_stage=1)
    return replace(
        plan,
        # "f.end" computes the gradient with which "b.begin" starts.
        deps=[*plan.deps, ("b.begin", "f.end")],
        # Two steps that add to one parameter's gradient must not run for two microbatches at once.
        cross_iter_deps=[*plan.cross_iter_deps, *([("b.begin", "b.end", 1)] if shared else [])],
    )


def paired_plan(order: Steps, streams: Streams = (None, "comm")) -> PipelinePlan:
    """Return the plan of one call: a forward pass and a backward pass in the given order.

    Args:
        order: The result of ``pair_order`` or ``chunk_order``.
        streams: The streams of computation and of exchanges; None for the caller's stream.
    """
    return replace(_plan(order, streams), pipeline_depth=2)


def _plan(
    order: Steps, streams: Streams = (None, "comm"), *, backward_stage: int = 0
) -> PipelinePlan:
    ahead = _in_serial_order(order, "f")
    back = _in_serial_order(order, "b")
    # The chain leaves out the weight gradients: each comes after its own node, and "end" after all.
    chains = [[s for s in side if not s.is_weight_gradient] for side in (ahead, back)]
    deps = [(after, before) for chain in chains for before, after in pairwise(chain)]
    late = [step for step in back if step.is_weight_gradient]
    deps += [(step, step._replace(part="")) for step in late]
    deps += [(end, step) for end in back if end.node == "end" for step in late]
    return PipelinePlan(
        schedule={
            step.name: TaskSchedule(
                stage=backward_stage if step.side == "b" else 0,
                stream=streams[step.exchanges],
                globally_ordered=step.issues_collectives,
            )
            for step in (*ahead, *back)
        },
        deps=[(after.name, before.name) for after, before in deps],
        # The gradients of a parameter are added in the order of the microbatches: the rounding of a
        # sum depends on the order of its terms.
        cross_iter_deps=[(step.name, step.name) for step in back],
        order=[step.name for step in order],
    )


def _in_serial_order(order: Steps, side: Side) -> list[LayerStep]:
    """Return the steps of one side, with the weight gradients of a node directly after it."""
    # The schedule is listed in serial order. In the order of submission a weight gradient may come
    # much later than its node.
    place = {step: at for at, step in enumerate(order)}

    def key(step: LayerStep) -> tuple[int, bool]:
        late = step.is_weight_gradient
        return place[step._replace(part="") if late else step], late

    return sorted((step for step in order if step.side == side), key=key)
