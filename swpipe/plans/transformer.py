"""Plans that run one microbatch's forward over another's backward, layer by layer.

A layer is a chain of steps. An exchange (dispatch and combine, of "moe" layers) has two: start and
wait. The exchange of counts, which precedes them, begins in "attn.route".

    forward    attn[.route]  dispatch.start .wait  mlp  combine.start .wait  [mtp_post_process]
    backward   [mtp_post_process]  combine.start .wait  mlp  mlp.dw  dispatch.start .wait
               attn  attn.dw

One layer's forward and another's backward, in the order in which they are submitted: exchanges
overlap with what stands below them. Steps ".dw" compute delayed weight gradients::

    comm   -- combine b --   -- dispatch f --   -- dispatch b --   -- combine f --
    comp   attn f            mlp b  mlp.dw b    mlp f              attn b  attn.dw b

Layers meet by kind: the forward's first "moe" layer the backward's last one, and so on, so that
exchanges overlap with exchanges; others fill the time of these. Source: seed
"model_chunk_schedule_plan", ``TransformerLayerSchedulePlan.run`` and
``TransformerModelChunkSchedulePlan.run``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """What of a layer decides its steps.

    Attributes:
        moe: It exchanges tokens with the experts of other ranks.
        mtp: It is one for multi-token prediction.
        delayed: Its weight gradients have steps of their own.
        early: Attention's backward comes before the forward's experts, which frees its memory early
            and leaves less to overlap with their combine.
    """

    moe: bool = False
    mtp: bool = False
    delayed: bool = False
    early: bool = False


class LayerStep(NamedTuple):
    """One task of a chunk's forward or backward.

    Attributes:
        side: "f" for forward, "b" for backward.
        layer: Index in the chunk, from 0; None for what is before or after the layers.
        node: The node's attribute in the plan of the layer, or of the chunk.
        part: "start" or "wait" of an exchange, "route" of attention that also routes tokens, "dw"
            of weight gradients, "" of all else.
    """

    side: Side
    layer: int | None
    node: str
    part: str = ""

    @property
    def name(self) -> str:
        """The task's name: "f0.moe_dispatch.start", "b.post_process"."""
        part = f".{self.part}" if self.part else ""
        return f"{self.side}{'' if self.layer is None else self.layer}.{self.node}{part}"

    @property
    def exchanges(self) -> bool:
        """Whether it is part of an exchange of tokens."""
        return self.node in EXCHANGES

    @property
    def issues_collectives(self) -> bool:
        """Exchanges, and the router, which starts that of counts."""
        return self.part in ("start", "route")

    @property
    def is_weight_gradient(self) -> bool:
        """Whether nothing but the optimizer waits for it."""
        return self.part == "dw"


Steps: TypeAlias = tuple[LayerStep, ...]

_Numbered: TypeAlias = tuple[int, LayerKind]


def layer_steps(side: Side, layer: int, kind: LayerKind) -> Steps:
    """A layer's forward ("f") or backward ("b") in serial order."""
    return tuple(_steps(side, layer, kind))


def _steps(side: Side, layer: int, kind: LayerKind) -> Iterator[LayerStep]:
    nodes = ["attn", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process"]
    left_out = {
        *(() if kind.moe else EXCHANGES),
        *(() if kind.mtp else ("mtp_post_process",)),
    }
    for node in nodes if side == "f" else reversed(nodes):
        if node in left_out:
            continue
        if node in EXCHANGES:
            yield LayerStep(side, layer, node, "start")
            yield LayerStep(side, layer, node, "wait")
            continue
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
"""One layer's forward over another's backward.

The wait for the combine's gradients comes before the dispatch of tokens, which may still wait for
their counts; the wait for dispatched tokens comes after the dispatch of gradients has begun.
"""

_MOVED = (("b", "moe_dispatch", "wait"), ("b", "attn", ""))
"""What comes before the forward's experts where attention's backward comes early."""


def pair_order(forward: Steps, backward: Steps, early: bool = False) -> Steps:
    """The order of one layer's forward and another's backward; either may be ().

    ``early`` is as of the backward's kind.
    """
    places = [*_PAIR]
    if early:
        places = [place for place in _PAIR if place not in _MOVED]
        at = places.index(("f", "moe_dispatch", "wait"))
        places[at:at] = _MOVED
    by_place = {(step.side, step.node, step.part): step for step in (*forward, *backward)}
    return tuple(by_place[place] for place in places if place in by_place)


def chunk_order(
    forward: Sequence[LayerKind] | None,
    backward: Sequence[LayerKind] | None,
    *,
    hooks: bool = True,
) -> Steps:
    """The order of a chunk's forward and another's backward, with what is around the layers.

    Layers meet by kind; then come the rest of backward, and the rest of forward. The weight
    gradients of the first layer's attention come after ``post_layers``, where gradients are sent
    on.

    Args:
        forward: The kinds of the one's layers; None for no forward.
        backward: Those of the other; None for no backward.
        hooks: With steps "post_layers", directly after the layers.
    """
    steps: list[LayerStep] = [*_around("f", forward, "begin", "pre_process")]
    steps += _around("b", backward, "begin", "post_process")
    ahead, back = [*enumerate(forward or ())], [*enumerate(backward or ())][::-1]
    last = LayerStep("b", 0, "attn", "dw")
    ordered = _met(ahead, back)
    steps += [step for step in ordered if step != last]
    if hooks:
        steps += [*_around("f", forward, "post_layers"), *_around("b", backward, "post_layers")]
    steps += [last] if last in ordered else []
    steps += _around("f", forward, "post_process", "end")
    steps += _around("b", backward, "pre_process", "end")
    return tuple(steps)


def _met(ahead: list[_Numbered], back: list[_Numbered]) -> list[LayerStep]:
    """The order of all layers: those with experts meet, others fill the time of their exchanges.

    The forward's others run while gradients are combined, the backward's while rows are::

        b.combine.start  (f dense)  f.attn  ...  b.attn  (next b dense)  f.combine.wait
    """
    found: list[LayerStep] = []
    pair: list[LayerStep] = []
    while True:
        (dense_f, ahead), (dense_b, back) = _until_moe(ahead), _until_moe(back)
        meets = bool(ahead and back)
        if meets or (pair and not back):
            waits = [k for k, step in enumerate(pair) if step.side == "f" and step.part == "wait"]
            at = waits[-1] if waits else 0
            pair[at:at] = [step for layer in dense_b for step in _pair(None, layer)]
            dense_b = []
        found += pair
        if not meets:
            rest = zip_longest([*dense_f, *ahead], [*dense_b, *back])
            return found + [step for layers in rest for step in _pair(*layers)]
        pair = [*_pair(ahead[0], back[0])]
        at = next(k for k, step in enumerate(pair) if step.side == "f")
        pair[at:at] = [step for layer in dense_f for step in _pair(layer, None)]
        ahead, back = ahead[1:], back[1:]


def _until_moe(layers: list[_Numbered]) -> tuple[list[_Numbered], list[_Numbered]]:
    at = next((k for k, (_, kind) in enumerate(layers) if kind.moe), len(layers))
    return layers[:at], layers[at:]


def _pair(one: _Numbered | None, other: _Numbered | None) -> Steps:
    ahead = () if one is None else layer_steps("f", *one)
    back = () if other is None else layer_steps("b", *other)
    return pair_order(ahead, back, other is not None and other[1].early)


def _around(side: Side, kinds: Sequence[LayerKind] | None, *nodes: str) -> list[LayerStep]:
    return [] if kinds is None else [LayerStep(side, None, node) for node in nodes]


def layer_overlap_plan(
    layers: Sequence[LayerKind],
    *,
    comp_stream: StreamRef = None,
    comm_stream: StreamRef = "comm",
    shared: bool = False,
) -> PipelinePlan:
    """The plan that trains on microbatches: an iteration is one.

    Its forward is in stage 0, its backward in stage 1, so that each period has the forward of one
    microbatch and the backward of the one before. The first period has forward alone, and the last
    backward alone.

    Args:
        layers: The kinds of the chunk's layers, in order.
        comp_stream: Where all but exchanges runs; None for the caller's stream.
        comm_stream: Where exchanges run.
        shared: Some parameters are used by several steps, such as a tied embedding: a microbatch's
            backward then begins after the backward of the one before has ended.
    """
    order = chunk_order(layers, layers, hooks=False)
    stages = {step: 0 if step.side == "f" else 1 for step in order}
    # "f.end" makes the gradient that "b.begin" goes on with.
    return _plan(order, stages, (comp_stream, comm_stream), joined=True, shared=shared)


def paired_plan(
    order: Steps, *, comp_stream: StreamRef = None, comm_stream: StreamRef = "comm"
) -> PipelinePlan:
    """The plan of one call: a forward of one microbatch and a backward of another, in this order.

    Args:
        order: What ``pair_order`` or ``chunk_order`` gives.
        comp_stream: Where all but exchanges runs; None for the caller's stream.
        comm_stream: Where exchanges run.
    """
    return _plan(order, dict.fromkeys(order, 0), (comp_stream, comm_stream), depth=2)


def _plan(
    order: Steps,
    stages: dict[LayerStep, int],
    streams: tuple[StreamRef, StreamRef],
    *,
    depth: int | None = None,
    joined: bool = False,
    shared: bool = False,
) -> PipelinePlan:
    ahead, back = _in_serial_order(order, "f"), _in_serial_order(order, "b")
    chains = [[s for s in side if not s.is_weight_gradient] for side in (ahead, back)]
    deps = [(after, before) for chain in chains for before, after in pairwise(chain)]
    late = [step for step in back if step.is_weight_gradient]
    deps += [(step, step._replace(part="")) for step in late]
    deps += [(end, step) for end in back if end.node == "end" for step in late]
    deps += [(back[0], ahead[-1])] if joined else []
    # Gradients of one parameter are added in the order of the microbatches.
    carried = [(step, step) for step in back]
    carried += [(chains[1][0], chains[1][-1])] if shared else []
    return PipelinePlan(
        schedule={
            step.name: TaskSchedule(
                stage=stages[step],
                stream=streams[step.exchanges],
                globally_ordered=step.issues_collectives,
            )
            for step in (*ahead, *back)
        },
        deps=[(after.name, before.name) for after, before in deps],
        cross_iter_deps=[(after.name, before.name) for after, before in carried],
        order=[step.name for step in order],
        pipeline_depth=depth,
    )


def _in_serial_order(order: Steps, side: Side) -> list[LayerStep]:
    """One side's steps, with the weight gradients of a node directly after it."""
    mine = [step for step in order if step.side == side]
    late = {step for step in mine if step.is_weight_gradient}
    found = []
    for step in mine:
        if step not in late:
            found.append(step)
            gradient = step._replace(part="dw")
            found += [gradient] if gradient in late else []
    return found
