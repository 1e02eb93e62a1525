"""The nodes of one layer, and the run of one layer's forward over another's backward.

    TransformerLayerSchedulePlan
      attn              attention; for multi-token prediction, the embedding before it; with
                        experts, the router, which starts the exchange of counts
      moe_dispatch      sends rows to the experts' ranks
      mlp               the experts and the shared expert; in a dense layer, the feed-forward part
      moe_combine       sends rows back; their weighted sum and the residual
      mtp_post_process  the losses of multi-token prediction

Each node passes the main value to the next one. A node that computes another value for a later node
(the residual, a router's weights) detaches it and puts it into the layer's state. Its backward adds
the gradients of these values to those of its outputs. Source: seed "model_chunk_schedule_plan".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from torch import Tensor

from swpipe.core.messages import listed, shown
from swpipe.plans.transformer import LayerKind, LayerStep, layer_steps, pair_order
from swpipe.tasks.transformer.layer_runs import Side, run_steps
from swpipe.tasks.transformer.model_interface import (
    DecoderLayer,
    Exchange,
    MoeLayer,
    PredictionLayer,
)
from swpipe.tasks.transformer.schedule_node import (
    LayerStream,
    NoopScheduleNode,
    ScheduleNode,
    Values,
    as_leaf,
    device_of,
    used_here,
)
from swpipe.tasks.transformer.weight_gradients import Notes, delaying

Layer: TypeAlias = DecoderLayer | PredictionLayer

Submodule: TypeAlias = Callable[..., Values]
"""A function of the node and its inputs."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelChunkState:
    """The inputs of one microbatch, and the values that layers share besides hidden states.

    Attributes:
        model: The chunk, a ``ChunkModel``.
        main_hidden: The last layer's output, while layers for multi-token prediction run.
        further_losses: The losses that these layers have added.

    The other attributes are arguments of ``TransformerModelChunkSchedulePlan``. ``attention_mask``
    is limited to the packed sequences.
    """

    model: Any
    input_ids: Any = None
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    decoder_input: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    packed_seq_params: Any = None
    extra_block_kwargs: Mapping[str, Any] | None = None
    runtime_gather_output: bool | None = None
    padding_mask: Tensor | None = None
    output_processor: Callable[..., Tensor] | None = None
    output_processor_context: Any = None
    main_hidden: Tensor | None = None
    further_losses: list[Tensor] = field(default_factory=list)


class TransformerLayerNode(ScheduleNode):
    """A node of a layer.

    Args:
        stream: See ``ScheduleNode``.
        event: See ``ScheduleNode``.
        layer_state: The values that the nodes of one layer share; any object with attributes.
        chunk_state: The values that the layers of a chunk share; any object.
        submodule: Called with the node and its inputs.
        name: The node's name in messages.
        extra_args: Copied. If ``"delay_wgrad_compute"`` is true, backward delays the weight
            gradients of ``swpipe.tasks.transformer.Linear`` maps until ``backward_dw``.
    """

    def __init__(
        self,
        stream: LayerStream,
        event: Any,
        layer_state: Any,
        chunk_state: Any,
        submodule: Submodule,
        name: str = "default",
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(submodule, stream, event, name=name)
        self.layer_state = layer_state
        self.chunk_state = chunk_state
        self.extra_args = dict(extra_args or {})
        self.delay_wgrad_compute = bool(self.extra_args.get("delay_wgrad_compute"))
        self._notes: Notes = []
        self._detached: list[tuple[Tensor, Tensor]] = []

    def detach(self, tensor: Tensor) -> Tensor:
        """Return a leaf of a tensor for other nodes, which add their gradients to the leaf."""
        # The pair joins the two graphs: other nodes add gradients to the leaf, and this node's
        # backward passes them on to the tensor.
        leaf: Tensor = as_leaf(tensor)
        self._detached.append((tensor, leaf))
        return leaf

    def run_backward_dw(self) -> None:
        # Emptied first: a failed computation must not run again with the next call.
        notes = self._notes
        self._notes = []
        for note in notes:
            note.compute()

    def _run_autograd(self, outputs: Sequence[Any], grads: Sequence[Any]) -> None:
        """Run autograd's backward from the outputs and from the values detached for other nodes."""
        detached = self._detached
        self._detached = []
        # The nodes that use the leaves come later in forward, so their backwards have run by now.
        of_leaves = [leaf.grad for _, leaf in detached]
        # Another node may have allocated them on the other stream.
        for grad in of_leaves:
            used_here(grad)
        roots = (*outputs, *(tensor for tensor, _ in detached))
        super()._run_autograd(roots, (*grads, *of_leaves))

    def release(self) -> None:
        super().release()
        self._notes = []
        self._detached = []

    def _compute(self, *inputs: Any) -> Values:
        # Forward decides: the autograd function of each linear map keeps these notes for backward.
        with delaying(self._notes if self.delay_wgrad_compute else None):
            return self.forward_func(self, *inputs)


class ExchangeNode(TransformerLayerNode):
    """A node that exchanges its input with other ranks, and computes with the received rows.

    Forward is ``start_forward`` and ``finish_forward``, and backward likewise. Other work may run
    between the two. With ``to_experts`` rows go to the experts and their gradients back; without
    it, the other way round.
    """

    def __init__(self, to_experts: bool, *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **more)
        self._to_experts = to_experts

    def start_forward(self, rows: Tensor) -> tuple[Exchange, bool]:
        """Start to send the rows; return the argument of ``finish_forward``."""
        # Checked before rows are sent, so that a refused call has started no exchange.
        self._refuse_again()
        used_here(rows)
        # Outside autograd: the exchange of the gradients is started by ``start_backward``, so that
        # the schedule decides when it runs.
        sent = self.layer_state.routing.start(rows, to_experts=self._to_experts)
        return sent, rows.requires_grad

    def finish_forward(self, sent: tuple[Exchange, bool]) -> Values:
        """Wait for the received rows, and compute with them."""
        pending, requires_grad = sent
        received = pending.wait()
        # The received rows are this node's leaf; they need a gradient if the sent rows do.
        return super().run_forward(received.detach().requires_grad_(requires_grad))

    def start_backward(self, output_grad: Values) -> Exchange | None:
        """Compute the gradient of the received rows, and start to send it back."""
        grad = super().run_backward(output_grad)
        routing = self.layer_state.routing
        if self._to_experts:  # the last exchange of a microbatch
            del self.layer_state.routing
        # All ranks of the group run the same layers, so no rank waits for this exchange.
        if grad is None:
            return None
        sent: Exchange = routing.start(grad, to_experts=not self._to_experts)
        return sent

    def finish_backward(self, sent: Exchange | None) -> Tensor | None:
        """Wait for the gradient of the sent rows, and return it."""
        return None if sent is None else sent.wait()

    def run_forward(self, inputs: Values = ()) -> Values:
        # Without other work between the two halves, for callers that run whole nodes.
        (rows,) = inputs if isinstance(inputs, tuple) else (inputs,)
        return self.finish_forward(self.start_forward(rows))

    def run_backward(self, output_grad: Values) -> Values:
        return self.finish_backward(self.start_backward(output_grad))


class PreProcessNode(ScheduleNode):
    """The node of the embedding, or of the value that the previous chunk has sent.

    Args:
        gpt_model: The chunk.
        chunk_state: Its inputs.
        event: See ``ScheduleNode``.
        stream: See ``ScheduleNode``.
    """

    def __init__(
        self, gpt_model: Any, chunk_state: ModelChunkState, event: Any, stream: LayerStream
    ) -> None:
        super().__init__(partial(_embed, gpt_model, chunk_state), stream, event, name="pre_process")
        self.gpt_model = gpt_model
        self.chunk_state = chunk_state


class PostProcessNode(TransformerLayerNode):
    """The node of a chunk's output, or of one layer's losses for multi-token prediction.

    Args:
        gpt_model: The chunk.
        chunk_state: Its inputs, and the losses of its layers for multi-token prediction.
        event: See ``ScheduleNode``.
        stream: See ``ScheduleNode``.
        mtp: The layer whose losses are computed; None for the chunk's output.
    """

    def __init__(
        self,
        gpt_model: Any,
        chunk_state: ModelChunkState,
        event: Any,
        stream: LayerStream,
        mtp: PredictionLayer | None = None,
    ) -> None:
        function = _output if mtp is None else _further_losses
        name = "post_process" if mtp is None else "mtp_post_process"
        super().__init__(stream, event, None, chunk_state, function, name)
        self.gpt_model = gpt_model
        self.mtp = mtp


class TransformerLayerSchedulePlan:
    """The nodes of one layer for one microbatch.

    Args:
        layer: A ``DecoderLayer``, with experts a ``MoeLayer``, or a ``PredictionLayer``.
        event: The event that the nodes of a chunk share; None on a device without streams.
        chunk_state: The values that the layers of a chunk share; any object. A layer reads its
            attributes ``attention_mask`` and ``padding_mask``, if there are any. A layer for
            multi-token prediction needs a ``ModelChunkState``.
        comp_stream: The stream of computation: a stream, a function that returns one, or None.
        comm_stream: The stream of exchanges, likewise.
        extra_args: Copied. ``"delay_wgrad_compute"`` overrides the config's.

    Raises:
        TypeError: ``layer`` or ``chunk_state`` lacks what is needed.
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
        decoder = decoder_of(layer)
        mtp = predicts(layer)
        # Checked here, because a missing method would only be noticed during the run.
        wanted: dict[str, Any] = {"attend": layer, "feed_forward": decoder}
        if missing := [name for name, of in wanted.items() if not hasattr(of, name)]:
            raise TypeError(
                f"layer is {shown(layer)}, which has no method {listed(missing)}: give one with "
                "the methods of swpipe.tasks.transformer.DecoderLayer"
            )
        # Other layers read optional attributes only, so any object is enough for them.
        if mtp and not hasattr(chunk_state, "model"):
            raise TypeError(
                f"chunk_state is {shown(chunk_state)}: a layer for multi-token prediction embeds "
                "tokens and computes losses, for which it needs a ModelChunkState"
            )
        self.layer = layer
        self.event = event
        self.chunk_state = chunk_state
        self.comp_stream = comp_stream
        self.comm_stream = comm_stream
        # The node that computes a value sets it here; the last node that uses it removes it.
        self.layer_state = SimpleNamespace()
        self.config = getattr(decoder, "config", None)
        self.expert_group = getattr(decoder, "expert_group", None)
        self.kind = kind_of(layer, extra_args)
        self._build_callable_nodes(event, comp_stream, comm_stream, extra_args)

    def _build_callable_nodes(
        self,
        event: Any,
        comp_stream: LayerStream,
        comm_stream: LayerStream,
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the nodes; a subclass may override it and replace some."""
        layer = self.layer
        chunk_state = self.chunk_state
        decoder = decoder_of(layer)
        shared = (event, self.layer_state, chunk_state)
        # ``kind`` has merged the argument and the config.
        late = {**(extra_args or {}), "delay_wgrad_compute": self.kind.delayed}
        computing = partial(TransformerLayerNode, comp_stream, *shared, extra_args=late)
        noop: Any = NoopScheduleNode()
        self.post_attn = noop  # Megatron's older name for the router, which ``attn`` contains here
        self.attn = computing(partial(_attend, layer), "attn")
        # A dense layer keeps these: callers may run all five nodes of any layer.
        self.moe_dispatch = noop
        self.moe_combine = noop
        self.mtp_post_process = noop
        feed_forward = _experts if self.kind.moe else _feed_forward
        self.mlp = computing(partial(feed_forward, decoder), "mlp")
        if self.kind.moe:
            # An exchange computes no linear map, so it has no weight gradient to delay.
            to_experts = (comm_stream, *shared, lambda node, rows: rows, "moe_dispatch")
            back = (comm_stream, *shared, partial(_merge, decoder), "moe_combine")
            self.moe_dispatch = ExchangeNode(True, *to_experts)
            self.moe_combine = ExchangeNode(False, *back)
        if predicts(layer):
            self.mtp_post_process = PostProcessNode(
                chunk_state.model, chunk_state, event, comp_stream, cast(PredictionLayer, layer)
            )

    @property
    def nodes(self) -> tuple[Any, ...]:
        """All nodes, in forward order."""
        first = (self.attn, self.moe_dispatch, self.mlp)
        return (*first, self.moe_combine, self.mtp_post_process)

    def get_fp8_context(self) -> AbstractContextManager[None]:
        """Return a context for the layer's computation that does nothing: no layer uses FP8."""
        return nullcontext()

    def release(self) -> None:
        """Drop the inputs, outputs and graphs of the nodes."""
        for node in self.nodes:
            node.release()
        # The nodes share the namespace, so it is emptied in place.
        vars(self.layer_state).clear()
        self.chunk_state = None

    release_state = release

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
            f_layer: The layer that runs forward.
            b_layer: The layer of another microbatch that runs backward; it was run forward.
            f_input: The input of the forward, (batch, sequence, hidden).
            b_grad: The gradient of the output of ``b_layer``.
            is_last_layer_in_bwd: Leave the weight gradients of attention to the caller, who then
                calls ``b_layer.attn.backward_dw()``.

        Returns:
            The forward's output, and the gradient of the backward's input; None for a layer that is
            None.

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
        ahead = () if f_layer is None else layer_steps("f", 0, f_layer.kind)
        back = () if b_layer is None else layer_steps("b", 0, b_layer.kind)
        # The caller sends the input's gradient to the previous chunk first, and computes
        # these weight gradients while it is under way.
        if is_last_layer_in_bwd:
            back = tuple(step for step in back if step != LayerStep("b", 0, "attn", "dw"))
        either = f_layer or b_layer
        if either is None:
            return None, None
        return run_steps(
            pair_order(ahead, back, b_layer is not None and b_layer.kind.early),
            None if f_layer is None else Side((f_layer,), f_input),
            None if b_layer is None else Side((b_layer,), b_grad),
            device=device_of(either.layer),
            group=either.expert_group,
        )


def predicts(layer: Layer) -> bool:
    """Return whether a layer is for multi-token prediction."""
    return hasattr(layer, "transformer_layer")


def decoder_of(layer: Any) -> Any:
    """Return the transformer layer of a layer for multi-token prediction, or the layer itself."""
    return getattr(layer, "transformer_layer", layer)


def kind_of(layer: Layer, extra_args: Mapping[str, Any] | None = None) -> LayerKind:
    """Return the layer properties that determine its steps, with the ``extra_args`` of its plan."""
    decoder = decoder_of(layer)
    config = getattr(decoder, "config", None)
    delayed = getattr(config, "delay_wgrad_compute", False)
    return LayerKind(
        moe=hasattr(decoder, "route"),
        mtp=predicts(layer),
        delayed=bool((extra_args or {}).get("delay_wgrad_compute", delayed)),
        early=bool(getattr(config, "ep_overlap_early_attn_memory_release", False)),
    )


# ------------------------------------------------------------------------ what the nodes compute


def _embed(model: Any, state: ModelChunkState) -> Tensor:
    hidden: Tensor
    if state.decoder_input is None:
        hidden = model.embed(state.input_ids, state.position_ids)
    else:
        hidden = as_leaf(state.decoder_input)
    return hidden


def _attend(layer: Layer, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    mask = getattr(node.chunk_state, "attention_mask", None)
    if predicts(layer):
        hidden = _attend_ahead(cast(PredictionLayer, layer), node, hidden, mask)
    else:
        hidden = cast(DecoderLayer, layer).attend(hidden, mask)
    decoder = decoder_of(layer)
    return _route(decoder, node, hidden) if hasattr(decoder, "route") else hidden


def _attend_ahead(
    layer: PredictionLayer, node: TransformerLayerNode, hidden: Tensor, mask: Tensor | None
) -> Tensor:
    state = node.chunk_state
    # The chunk's own output comes from the last layer before multi-token prediction. It is set
    # aside until ``_output``, and its gradient returns through the leaf.
    if layer.number == 0:
        state.main_hidden = node.detach(hidden)
    embedded = state.model.embed(layer.moved(state.input_ids), state.position_ids)
    return layer.attend(hidden, embedded, mask)


def _route(layer: MoeLayer, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    state = node.layer_state
    padding = getattr(node.chunk_state, "padding_mask", None)
    # Only the rows are this node's output. The other values skip the exchange and the experts.
    rows, weights, normed, state.routing = layer.route(hidden, padding)
    state.hidden = node.detach(hidden)
    state.weights = node.detach(weights)
    state.normed = None if normed is None else node.detach(normed)
    return rows


def _feed_forward(layer: DecoderLayer, node: TransformerLayerNode, hidden: Tensor) -> Tensor:
    return layer.feed_forward(hidden)


def _experts(layer: MoeLayer, node: TransformerLayerNode, rows: Tensor) -> Tensor:
    state = node.layer_state
    # ``pop``: the state must not keep the memory of a value after its only use.
    rows, shared = layer.through_experts(rows, vars(state).pop("normed"), state.routing)
    state.shared = None if shared is None else node.detach(shared)
    return rows


def _merge(layer: MoeLayer, node: TransformerLayerNode, rows: Tensor) -> Tensor:
    state = vars(node.layer_state)
    routing = state["routing"]
    hidden, weights, shared = (state.pop(name) for name in ("hidden", "weights", "shared"))
    for tensor in (hidden, weights, shared, *routing.tensors):  # allocated on another stream
        used_here(tensor)
    return layer.merge(rows, weights, shared, hidden, routing)


def _output(node: PostProcessNode, hidden: Tensor) -> Tensor:
    state = node.chunk_state
    model = node.gpt_model
    if state.main_hidden is not None:  # ``hidden`` comes from a layer for multi-token prediction
        hidden = state.main_hidden
        state.main_hidden = None
    # The nodes ``mtp_post_process`` of this microbatch have filled the list.
    further = state.further_losses
    state.further_losses = []
    out: Tensor
    if state.output_processor is None:
        out = model.output(hidden, state.labels, state.loss_mask, further)
    else:
        arguments = {name: getattr(state, name) for name in _PROCESSOR_ARGUMENTS}
        arguments |= {"model": model, "further": further, "context": state.output_processor_context}
        out = state.output_processor(hidden_states=hidden, **arguments)
    return out


_PROCESSOR_ARGUMENTS = (
    *("labels", "loss_mask", "input_ids", "position_ids", "attention_mask", "decoder_input"),
    *("packed_seq_params", "runtime_gather_output"),
)
"""The attributes of the state that are arguments of an ``output_processor``."""


def _further_losses(node: PostProcessNode, hidden: Tensor) -> Tensor:
    state = node.chunk_state
    # The hidden state passes to the next layer; the losses reach ``_output`` by the state.
    if state.labels is not None and node.mtp is not None:
        losses = node.gpt_model.further_losses(node.mtp, hidden, state.labels, state.loss_mask)
        state.further_losses.append(node.detach(losses))
    return hidden
