"""The nodes of a layer and of a chunk: what each runs, and what they pass beside the main value.

Nodes hand the main value on, one to the next. What else a later node needs (the residual, a
router's weights) an earlier one detaches and puts into the layer's state; its backward adds the
gradients that came back there to those of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from swpipe.tasks.transformer.chunk_state import ChunkModel, ModelChunkState
from swpipe.tasks.transformer.layer_streams import LayerStream
from swpipe.tasks.transformer.mtp_layer import MultiTokenPredictionLayer
from swpipe.tasks.transformer.schedule_node import ScheduleNode, Values, as_leaf, used_here
from swpipe.tasks.transformer.token_exchange import PendingExchange
from swpipe.tasks.transformer.weight_gradients import Notes, delaying

Submodule: TypeAlias = Callable[..., Values]
"""A function of the node and its inputs."""


class TransformerLayerNode(ScheduleNode):
    """A node of a layer.

    Args:
        stream: As of ``ScheduleNode``.
        event: As of ``ScheduleNode``.
        layer_state: What the nodes of one layer share; any object with attributes.
        chunk_state: What the layers of a chunk share; any object.
        submodule: Called with the node and its inputs.
        name: For messages.
        bwd_dw_callables: A function, or several, that ``backward_dw`` calls after the weight
            gradients that backward has left.
        extra_args: Copied. With a true ``"delay_wgrad_compute"``, backward leaves the weight
            gradients of ``swpipe.tasks.transformer`` linear maps to ``backward_dw``.
    """

    def __init__(
        self,
        stream: LayerStream,
        event: Any,
        layer_state: Any,
        chunk_state: Any,
        submodule: Submodule,
        name: str = "default",
        bwd_dw_callables: Callable[[], object] | Iterable[Callable[[], object]] | None = None,
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(submodule, stream, event, name=name)
        self.layer_state, self.chunk_state = layer_state, chunk_state
        callables = (bwd_dw_callables,) if callable(bwd_dw_callables) else bwd_dw_callables
        self.bwd_dw_callables = tuple(callables or ())
        self.extra_args = dict(extra_args or {})
        self.delay_wgrad_compute = bool(self.extra_args.get("delay_wgrad_compute"))
        self._notes: Notes = []
        self._detached: list[tuple[Tensor, Tensor]] = []

    def detach(self, tensor: Tensor) -> Tensor:
        """A leaf for other nodes to use; their gradients come back to it."""
        leaf: Tensor = as_leaf(tensor)
        self._detached.append((tensor, leaf))
        return leaf

    def run_backward_dw(self) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            note.compute()
        for function in self.bwd_dw_callables:
            function()

    def default_backward_func(
        self, outputs: tuple[Any, ...], output_grad: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Also from what was detached for other nodes."""
        detached, self._detached = self._detached, []
        grads = [leaf.grad for _, leaf in detached]
        for grad in grads:
            used_here(grad)
        roots = (*outputs, *(tensor for tensor, _ in detached))
        super().default_backward_func(roots, (*output_grad, *grads))
        return output_grad

    def release(self) -> None:
        """Let go of everything, without a backward."""
        super().release()
        self._notes, self._detached = [], []

    def _compute(self, *inputs: Any) -> Values:
        with delaying(self._notes if self.delay_wgrad_compute else None):
            return self.forward_func(self, *inputs)


class ExchangeNode(TransformerLayerNode):
    """A node that sends its one input to other ranks, and computes with what it gets.

    Forward is ``start_forward``, then ``finish_forward``; so is backward. Other work may be done
    between the two.

    Args:
        start: From rows to rows on their way.
        start_back: The same in the other direction, for gradients.
        rest: As ``TransformerLayerNode``; ``submodule`` computes with the rows that came.
    """

    def __init__(
        self,
        start: Callable[[Tensor], PendingExchange],
        start_back: Callable[[Tensor], PendingExchange],
        *rest: Any,
        **more: Any,
    ) -> None:
        super().__init__(*rest, **more)
        self._start, self._start_back = start, start_back

    def start_forward(self, rows: Tensor) -> tuple[PendingExchange, bool]:
        """Send the rows; what to give to ``finish_forward``."""
        self._refuse_again()
        used_here(rows)
        return self._start(rows), rows.requires_grad

    def finish_forward(self, sent: tuple[PendingExchange, bool]) -> Values:
        """Wait for the rows of the others, and compute."""
        pending, requires_grad = sent
        received = pending.wait()
        return super().run_forward(received.detach().requires_grad_(requires_grad))

    def start_backward(self, output_grad: Values) -> PendingExchange | None:
        """Compute the gradient of the rows that came, and send it back."""
        grad = super().run_backward(output_grad)
        return None if grad is None else self._start_back(grad)

    def finish_backward(self, sent: PendingExchange | None) -> Tensor | None:
        """Wait for the gradient of the rows that were sent."""
        return None if sent is None else sent.wait()

    def run_forward(self, inputs: Values = ()) -> Values:
        (rows,) = inputs if isinstance(inputs, tuple) else (inputs,)
        return self.finish_forward(self.start_forward(rows))

    def run_backward(self, output_grad: Values) -> Values:
        return self.finish_backward(self.start_backward(output_grad))


class PreProcessNode(ScheduleNode):
    """The embedding, or the value that the chunk before has sent.

    Args:
        gpt_model: The chunk.
        chunk_state: Its inputs.
        event: As of ``ScheduleNode``.
        stream: As of ``ScheduleNode``.
    """

    def __init__(
        self, gpt_model: ChunkModel, chunk_state: ModelChunkState, event: Any, stream: LayerStream
    ) -> None:
        super().__init__(partial(_embed, gpt_model, chunk_state), stream, event, name="pre_process")
        self.gpt_model, self.chunk_state = gpt_model, chunk_state


def _embed(model: ChunkModel, state: ModelChunkState) -> Tensor:
    if state.decoder_input is not None:
        given: Tensor = as_leaf(state.decoder_input)
        return given
    return model.embed(state.input_ids, state.position_ids)


class PostProcessNode(TransformerLayerNode):
    """The output of a chunk; or the losses of one layer for multi-token prediction.

    Args:
        gpt_model: The chunk.
        chunk_state: Its inputs, and what its layers for multi-token prediction add.
        event: As of ``ScheduleNode``.
        stream: As of ``ScheduleNode``.
        mtp: The layer whose losses it computes; None for the output.
    """

    def __init__(
        self,
        gpt_model: ChunkModel,
        chunk_state: ModelChunkState,
        event: Any,
        stream: LayerStream,
        mtp: MultiTokenPredictionLayer | None = None,
    ) -> None:
        function = _output if mtp is None else _further_losses
        name = "post_process" if mtp is None else "mtp_post_process"
        super().__init__(stream, event, None, chunk_state, function, name)
        self.gpt_model, self.mtp = gpt_model, mtp


def _output(node: PostProcessNode, hidden: Tensor) -> Tensor:
    state: ModelChunkState = node.chunk_state
    if state.main_hidden is not None:  # ``hidden`` is what predicts further tokens
        hidden, state.main_hidden = state.main_hidden, None
    further, state.further_losses = state.further_losses, []
    return node.gpt_model.output(hidden, state.labels, state.loss_mask, further)


def _further_losses(node: PostProcessNode, hidden: Tensor) -> Tensor:
    state: ModelChunkState = node.chunk_state
    if state.labels is not None and node.mtp is not None:
        losses = node.gpt_model.further_losses(node.mtp, hidden, state.labels, state.loss_mask)
        state.further_losses.append(node.detach(losses))
    return hidden
