"""One layer as nodes, and the run of one layer's forward over another's backward.

    TransformerLayerSchedulePlan
      attn              norm and attention; of multi-token prediction, the embedding before that
      post_attn         norm, router, permutation of tokens; the exchange of counts begins
      moe_dispatch      rows to the experts' ranks
      mlp               the experts and the shared one; of a dense layer, norm and MLP
      moe_combine       rows back, their weighted sum, the residual
      mtp_post_process  the losses of multi-token prediction

Source: seed "model_chunk_schedule_plan".
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from swpipe.core.messages import shown
from swpipe.plans.transformer import (
    LayerKind,
    LayerStep,
    backward_steps,
    forward_steps,
    pair_order,
)
from swpipe.tasks.transformer.chunk_state import ModelChunkState
from swpipe.tasks.transformer.decoder_layer import TransformerLayer
from swpipe.tasks.transformer.layer_nodes import ExchangeNode, PostProcessNode, TransformerLayerNode
from swpipe.tasks.transformer.layer_runs import Side, run_steps
from swpipe.tasks.transformer.layer_streams import LayerStream, device_of
from swpipe.tasks.transformer.mtp_layer import MultiTokenPredictionLayer
from swpipe.tasks.transformer.schedule_node import NoopScheduleNode, used_here
from swpipe.tasks.transformer.token_exchange import PendingExchange

Layer = TransformerLayer | MultiTokenPredictionLayer


class TransformerLayerSchedulePlan:
    """The nodes of one layer, for one microbatch.

    Args:
        layer: A ``TransformerLayer`` or a ``MultiTokenPredictionLayer``.
        event: Shared by the nodes of a chunk; None on a device without streams.
        chunk_state: What the layers of a chunk share; any object. A layer takes an attribute
            ``attention_mask`` from it, where there is one. One for multi-token prediction needs a
            ``ModelChunkState``.
        comp_stream: Of computation: a stream, a function that returns one, or None.
        comm_stream: Of exchanges; likewise.
        extra_args: Copied. ``"delay_wgrad_compute"`` takes the place of the config's.

    Raises:
        TypeError: ``layer`` is of another type, or ``chunk_state`` of one that does not do.
    """

    def __init__(
        self,
        layer: Layer,
        event: Any,
        chunk_state: Any,
        comp_stream: LayerStream,
        comm_stream: LayerStream,
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(layer, Layer):
            raise TypeError(
                f"layer is {shown(layer)}, of an unknown type: give a TransformerLayer or a "
                "MultiTokenPredictionLayer"
            )
        mtp = isinstance(layer, MultiTokenPredictionLayer)
        if mtp and not isinstance(chunk_state, ModelChunkState):
            raise TypeError(
                f"chunk_state is {shown(chunk_state)}: a MultiTokenPredictionLayer embeds tokens "
                "and computes losses, for which it needs a ModelChunkState"
            )
        self.layer, self.event, self.chunk_state = layer, event, chunk_state
        self.comp_stream, self.comm_stream = comp_stream, comm_stream
        self.layer_state = SimpleNamespace()
        self.decoder_layer = decoder_of(layer)
        self.kind = kind_of(layer, extra_args)
        self._build_callable_nodes(event, comp_stream, comm_stream, extra_args or {})

    def _build_callable_nodes(
        self,
        event: Any,
        comp_stream: LayerStream,
        comm_stream: LayerStream,
        extra_args: Mapping[str, Any],
    ) -> None:
        state, chunk_state = self.layer_state, self.chunk_state
        late = {**extra_args, "delay_wgrad_compute": self.kind.delayed}
        at_once = {**extra_args, "delay_wgrad_compute": False}

        def node(name: str, function: Any, extra: Mapping[str, Any] = late) -> Any:
            bound = partial(function, self.layer if name == "attn" else self.decoder_layer)
            return TransformerLayerNode(
                comp_stream, event, state, chunk_state, bound, name, extra_args=extra
            )

        def exchange(name: str, start: Any, back: Any, function: Any) -> Any:
            rest = (comm_stream, event, state, chunk_state, function, name)
            return ExchangeNode(
                partial(start, state), partial(back, state), *rest, extra_args=at_once
            )

        noop = NoopScheduleNode()
        self.attn = node("attn", _attend)
        if self.kind.moe:
            self.post_attn = node("post_attn", _route, at_once)
            self.moe_dispatch = exchange("moe_dispatch", _dispatch, _dispatch_back, _received)
            self.mlp = node("mlp", _experts)
            self.moe_combine = exchange(
                "moe_combine", _combine, _combine_back, partial(_merge, self.decoder_layer)
            )
        else:
            self.mlp = node("mlp", _feed_forward)
            self.post_attn = self.moe_dispatch = self.moe_combine = noop
        self.mtp_post_process: Any = noop
        if isinstance(self.layer, MultiTokenPredictionLayer):
            self.mtp_post_process = PostProcessNode(
                chunk_state.model, chunk_state, event, comp_stream, self.layer
            )

    @property
    def nodes(self) -> tuple[Any, ...]:
        """All nodes, in forward order."""
        first = (self.attn, self.post_attn, self.moe_dispatch)
        return (*first, self.mlp, self.moe_combine, self.mtp_post_process)

    def get_fp8_context(self) -> AbstractContextManager[None]:
        """In which the layer is computed: a context that does nothing, since nothing is in FP8."""
        return nullcontext()

    def release(self) -> None:
        """Let go of what its nodes hold."""
        for node in self.nodes:
            node.release()
        vars(self.layer_state).clear()
        self.chunk_state = None

    @staticmethod
    def run(
        f_layer: TransformerLayerSchedulePlan | None,
        b_layer: TransformerLayerSchedulePlan | None,
        f_input: Tensor | None = None,
        b_grad: Tensor | None = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run one layer's forward over another's backward; either may be None.

        Args:
            f_layer: Of one microbatch.
            b_layer: Of another, which was run forward.
            f_input: (batch, sequence, hidden).
            b_grad: The gradient of what ``b_layer`` returned.
            is_last_layer_in_bwd: Leave the weight gradients of attention to the caller, who then
                calls ``b_layer.attn.backward_dw()``.

        Returns:
            The forward's output, and the gradient of the backward's input; None of what is None.

        Raises:
            ValueError: An input is missing.
            RuntimeError: ``b_layer`` was not run forward, or was run backward already.
        """
        for name, layer, value, argument in (
            ("f_layer", f_layer, f_input, "f_input"),
            ("b_layer", b_layer, b_grad, "b_grad"),
        ):
            if layer is not None and value is None:
                raise ValueError(f"{name} is given and {argument} is not: give it as well")
        ahead = () if f_layer is None else forward_steps(0, f_layer.kind)
        back = () if b_layer is None else backward_steps(0, b_layer.kind)
        if is_last_layer_in_bwd:
            back = tuple(step for step in back if step != LayerStep("b", 0, "attn", "dw"))
        one = f_layer or b_layer
        if one is None:
            return None, None
        return run_steps(
            pair_order(ahead, back),
            None if f_layer is None else Side((f_layer,), f_input),
            None if b_layer is None else Side((b_layer,), b_grad),
            device=device_of(one.layer),
            group=one.decoder_layer.group,
        )


def decoder_of(layer: Layer) -> TransformerLayer:
    """The transformer layer of a layer for multi-token prediction; of another, itself."""
    return layer.transformer_layer if isinstance(layer, MultiTokenPredictionLayer) else layer


def kind_of(layer: Layer, extra_args: Mapping[str, Any] | None = None) -> LayerKind:
    """What of a layer decides its steps; ``extra_args`` as of its plan."""
    decoder = decoder_of(layer)
    delayed = (extra_args or {}).get("delay_wgrad_compute", decoder.config.delay_wgrad_compute)
    mtp = isinstance(layer, MultiTokenPredictionLayer)
    return LayerKind(moe=decoder.layer_type == "moe", mtp=mtp, delayed=bool(delayed))


def _attend(layer: Layer, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    state = node.chunk_state
    mask = getattr(state, "attention_mask", None)
    if isinstance(layer, TransformerLayer):
        return layer.attend(hidden, mask)
    if layer.number == 0:
        state.main_hidden = node.detach(hidden)
    embedded = state.model.embed(layer.moved(state.input_ids), state.position_ids)
    return layer.attend(hidden, embedded, mask)


def _feed_forward(layer: TransformerLayer, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    return layer.feed_forward(hidden)


def _route(layer: TransformerLayer, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    state = node.layer_state
    normed = layer.mlp_norm(hidden)
    rows, weights, state.routing = layer.mixture.route(normed)
    state.hidden, state.weights = node.detach(hidden), node.detach(weights)
    if layer.mixture.shared_expert is not None:
        state.normed = node.detach(normed)
    return rows


def _received(node: TransformerLayerNode, rows: Tensor) -> Tensor:
    return rows


def _experts(layer: TransformerLayer, node: TransformerLayerNode, rows: Tensor) -> Tensor:
    state = node.layer_state
    normed = vars(state).pop("normed", None)
    rows, shared = layer.through_experts(rows, normed, state.routing)
    state.shared = None if shared is None else node.detach(shared)
    return rows


def _merge(layer: TransformerLayer, node: TransformerLayerNode, rows: Tensor) -> Tensor:
    taken = vars(node.layer_state)
    hidden, weights, shared = (taken.pop(name) for name in ("hidden", "weights", "shared"))
    for tensor in (hidden, weights, shared, taken["routing"].order):  # made on another stream
        used_here(tensor)
    return layer.merge(rows, weights, shared, hidden, taken["routing"])


def _dispatch(state: Any, rows: Tensor) -> PendingExchange:
    pending: PendingExchange = state.routing.start_dispatch(rows)
    return pending


def _dispatch_back(state: Any, grad: Tensor) -> PendingExchange:
    pending: PendingExchange = vars(state).pop("routing").start_combine(grad)
    return pending


def _combine(state: Any, rows: Tensor) -> PendingExchange:
    pending: PendingExchange = state.routing.start_combine(rows)
    return pending


def _combine_back(state: Any, grad: Tensor) -> PendingExchange:
    pending: PendingExchange = state.routing.start_dispatch(grad)
    return pending
