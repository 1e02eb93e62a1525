"""The nodes of a chunk for one microbatch, and the run of a forward over a backward.

    TransformerModelChunkSchedulePlan
      pre_process    the embedding
      layers         TransformerLayerSchedulePlan, one for each layer
      post_process   the last norm, the output layer, the losses

Source: seed "model_chunk_schedule_plan".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe.core.messages import listed
from swpipe.plans.transformer import LayerKind, chunk_order
from swpipe.tasks.transformer.layer_runs import Side, run_steps
from swpipe.tasks.transformer.layer_schedule import (
    Layer,
    ModelChunkState,
    PostProcessNode,
    PreProcessNode,
    TransformerLayerSchedulePlan,
)
from swpipe.tasks.transformer.model_interface import ChunkModel
from swpipe.tasks.transformer.schedule_node import (
    NoopScheduleNode,
    as_leaf,
    device_of,
    get_comm_stream,
    get_comp_stream,
)

Before: TypeAlias = Callable[[int | None], object]
"""Called with the chunk's ``vp_stage``."""

After: TypeAlias = Callable[[Any, int | None], object]
"""Called with the present value and the chunk's ``vp_stage``."""

# Keys are checked, because a misspelled key would be ignored silently.
_EXTRA = ("delay_wgrad_compute",)

_BEFORE = {"forward": "made", "backward": "forward"}
"""The state in which a plan can be run in a direction."""

_STATES = {
    "made": "was not run forward yet",
    "forward": "was run forward already",
    "backward": "is being run backward, or failed in it",
    "released": "was run backward already, or released",
}


class AbstractSchedulePlan(ABC):
    """The interface of a chunk's plan for pipeline schedules."""

    @staticmethod
    @abstractmethod
    def run(f_schedule_plan: Any, b_schedule_plan: Any, *rest: Any, **more: Any) -> Any:
        """Run one microbatch's forward over another's backward; either may be None."""


class TransformerModelChunkSchedulePlan(AbstractSchedulePlan):
    """The nodes of a chunk for one microbatch; it is run forward once, and backward once.

    Args:
        model: The chunk, a ``ChunkModel``.
        input_ids: The tokens, (batch, sequence); None if ``decoder_input`` is given.
        position_ids: See the model's forward.
        attention_mask: Boolean, True where a key is hidden from a query, as in Megatron; None for
            the layers' own.
        decoder_input: The first layer's input instead of an embedding, in the layout that the
            model's layers take; required by a chunk without ``pre_process``.
        labels: See the model's forward.
        packed_seq_params: An object whose attribute ``cu_seqlens_q``, (sequences + 1,), has the
            ends of the sequences in a row, beginning with 0. Tokens attend within their sequence.
        extra_block_kwargs: The ``extra_args`` of each layer: ``"delay_wgrad_compute"``.
        runtime_gather_output: No effect: the output layer is not split over ranks, so the logits
            are always whole.
        loss_mask: See the model's forward.
        padding_mask: The mask for ``route``, (batch, sequence); True where there is no token.
        output_processor: Called instead of the model's ``output``, in the last node, with keyword
            arguments: ``hidden_states`` of the last layer, ``model``, ``further`` losses of
            multi-token prediction, ``context``, and arguments of this class.
        output_processor_context: The ``context``.

    Attributes:
        state: The values that the nodes share; None when released.
        event: The event that the nodes' streams wait for and record; None on a device without
            streams.
        layers: The plans of the layers in order; with labels, those for multi-token prediction are
            included. Empty when released.

    Raises:
        ValueError: There is no input, an unknown key in ``extra_block_kwargs``, or a mask that is
            not boolean.
    """

    def __init__(
        self,
        model: ChunkModel,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: Mapping[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        *,
        output_processor: Callable[..., Tensor] | None = None,
        output_processor_context: Any = None,
    ) -> None:
        # Multi-token prediction only adds losses, so without labels its layers are left out.
        predictors = model.predictors if labels is not None else []
        layers: list[Layer] = [*model.decoder_layers, *predictors]
        if decoder_input is None and not model.pre_process:
            raise ValueError(
                "decoder_input is None: this chunk has no embedding (pre_process=False); give what "
                "the chunk before has returned"
            )
        if input_ids is None and (decoder_input is None or predictors):
            raise ValueError("input_ids is None: this chunk embeds tokens; give their ids")
        extra = dict(extra_block_kwargs or {})
        if unknown := [key for key in extra if key not in _EXTRA]:
            raise ValueError(
                f"extra_block_kwargs has {listed(unknown)}, which layers do not take: they take "
                f"{listed(_EXTRA)}"
            )
        mask = _mask(attention_mask, packed_seq_params)
        state = ModelChunkState(
            model, input_ids, position_ids, mask, decoder_input, labels, loss_mask,
            packed_seq_params, extra, runtime_gather_output, padding_mask,
            output_processor, output_processor_context,
        )  # fmt: skip
        self.state: ModelChunkState | None = state
        self.vp_stage = model.vp_stage
        self.expert_group = model.expert_group
        self.device = device_of(model)
        streams = self.device.has_streams
        # One event for all nodes, so that their own ``forward`` and ``backward`` are ordered
        # across both streams.
        self.event: Any = self.device.new_event() if streams else None
        # The functions and not their results, so that the exchange stream is made at first use.
        comp, comm = (get_comp_stream, get_comm_stream) if streams else (None, None)
        self.pre_process: Any = PreProcessNode(model, state, self.event, comp)
        self.layers = [
            TransformerLayerSchedulePlan(layer, self.event, state, comp, comm, extra)
            for layer in layers
        ]
        # A chunk without an output layer passes its hidden state to the next chunk.
        self.post_process: Any = NoopScheduleNode()
        if model.post_process:
            self.post_process = PostProcessNode(model, state, self.event, comp)
        self._done = "made"

    def record_current_stream(self) -> None:
        """Make the nodes wait for the work on the current stream."""
        if self.event is not None:
            self.event.record(self.device.current_stream())

    def wait_current_stream(self) -> None:
        """Make the current stream wait for the last node that ran."""
        if self.event is not None:
            self.event.wait(self.device.current_stream())

    def get_layer(self, i: int) -> TransformerLayerSchedulePlan:
        """Return the layer at an index, from 0.

        Raises:
            IndexError: There is no such layer.
        """
        if not 0 <= i < len(self.layers):
            raise IndexError(
                f"layer {i} was asked for, and the plan has {self.num_layers()}: give an index "
                "from 0 to num_layers() - 1"
            )
        return self.layers[i]

    def pop_layer(self) -> TransformerLayerSchedulePlan:
        """Remove and return the last layer, whose backward the caller runs next.

        Raises:
            IndexError: No layer is left.
        """
        # Raises the error with a message for an empty plan.
        self.get_layer(self.num_layers() - 1)
        return self.layers.pop()

    def num_layers(self) -> int:
        """Return the number of layers; 0 when released."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The properties of each layer that determine its steps."""
        return tuple(layer.kind for layer in self.layers)

    def release_state(self) -> None:
        """Drop all nodes with their inputs, outputs and graphs."""
        # After the first call there are no parts; a second call does nothing.
        for part in (self.pre_process, *self.layers, self.post_process):
            if part is not None:
                part.release()
        self.state = None
        self.pre_process = None
        self.post_process = None
        self.layers = []
        self._done = "released"

    def check_turn(self, direction: str) -> None:
        """Check that the plan can be run in a direction: "forward" once, then "backward" once.

        Raises:
            RuntimeError: The plan cannot be run in this direction now.
        """
        if self._done != _BEFORE[direction]:
            raise RuntimeError(
                f"a schedule plan is to be run {direction}, and it {_STATES[self._done]}: build a "
                "plan for each microbatch, run it forward once, and then backward once"
            )

    def begin(self, direction: str) -> None:
        """Record that a run of the plan in a direction begins."""
        self._done = direction

    def run_backward_input(self, grad: Tensor) -> Tensor | None:
        """Run the backward without delayed weight gradients, which ``run_backward_dw`` computes.

        Args:
            grad: The gradient of the forward's output.

        Returns:
            The gradient of the first layer's input.

        Raises:
            RuntimeError: The plan was not run forward, or was run backward.
        """
        self.check_turn("backward")
        self.begin("backward")
        self.record_current_stream()
        # Backward of all nodes in reverse order, without overlap: the counterpart of ``run`` for
        # schedules that separate input gradients from weight gradients.
        value: Any = self.post_process.backward(grad)
        for node in reversed([node for layer in self.layers for node in layer.nodes]):
            value = node.backward(value)
        self.pre_process.backward(value)
        self.wait_current_stream()
        # Also holds the memory for the caller's stream, on which it was not allocated.
        input_grad: Tensor | None = as_leaf(value)
        return input_grad

    def run_backward_dw(self) -> None:
        """Compute the weight gradients that ``run_backward_input`` delayed; release the plan."""
        self.record_current_stream()
        # The order in which a backward would have computed them. Exchanges delay nothing.
        for layer in reversed(self.layers):
            layer.mlp.backward_dw()
            layer.attn.backward_dw()
        self.wait_current_stream()
        self.release_state()

    @staticmethod
    def run(
        f_schedule_plan: TransformerModelChunkSchedulePlan | None,
        b_schedule_plan: TransformerModelChunkSchedulePlan | None,
        b_grad: Tensor | None = None,
        pre_forward: Before | None = None,
        pre_backward: Before | None = None,
        post_forward: After | None = None,
        post_backward: After | None = None,
    ) -> Tensor | None:
        """Run one microbatch's forward over another's backward; either may be None.

        The order is that of ``swpipe.plans.transformer.chunk_order``. The plan that was run
        backward is released.

        Args:
            f_schedule_plan: The plan to run forward.
            b_schedule_plan: The plan to run backward.
            b_grad: The gradient of its forward's output.
            pre_forward: Called before the forward, with the chunk's ``vp_stage``.
            pre_backward: Called before the backward.
            post_forward: Called with the output of the last layer, to send it to the next chunk.
            post_backward: Called with the gradient of the first layer's input, to send it to the
                previous chunk; the weight gradients of the first layer's attention come after it.

        Returns:
            The forward's output without its graph; it requires a gradient if the output did, and
            its ``.grad`` can then be the ``b_grad`` of the backward. None without a forward.

        Raises:
            ValueError: ``b_schedule_plan`` is given without ``b_grad``.
            RuntimeError: A plan was run before, or released.
        """
        if b_schedule_plan is not None and b_grad is None:
            raise ValueError(
                "b_schedule_plan is given and b_grad is not: give the gradient of its forward's "
                "output"
            )
        turns = {"forward": f_schedule_plan, "backward": b_schedule_plan}
        plans = {direction: plan for direction, plan in turns.items() if plan is not None}
        for direction, plan in plans.items():  # checked for both before anything changes
            plan.check_turn(direction)
        for direction, plan in plans.items():
            # Before the run: a plan that fails halfway must not be run again.
            plan.begin(direction)
        either = f_schedule_plan or b_schedule_plan
        if either is None:
            return None
        output, _ = run_steps(
            chunk_order(*(None if plan is None else plan.kinds for plan in turns.values())),
            _side(f_schedule_plan, None, pre_forward, post_forward),
            _side(b_schedule_plan, b_grad, pre_backward, post_backward),
            device=either.device,
            group=either.expert_group,
        )
        # Only a forward has a result: the gradient of the input goes to ``post_backward``.
        result: Tensor | None = output
        return result


def _side(
    plan: TransformerModelChunkSchedulePlan | None,
    value: Tensor | None,
    before: Before | None,
    after: After | None,
) -> Side | None:
    if plan is None:
        return None
    return Side(
        plan.layers,
        value,
        plan,
        before and partial(before, plan.vp_stage),
        after and (lambda value: after(value, plan.vp_stage)),
    )


def _mask(mask: Tensor | None, packed: Any) -> Tensor | None:
    """Return the attention mask, limited to each packed sequence."""
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"the attention mask is of {mask.dtype}: give a boolean one, True where a key is "
            "hidden from a query"
        )
    if packed is None:
        return mask
    ends = torch.as_tensor(packed.cu_seqlens_q)
    if ends.ndim != 1 or ends[0] != 0 or (ends.diff() < 0).any():
        raise ValueError(
            f"packed_seq_params.cu_seqlens_q is {ends.tolist()}: give where sequences end, in "
            "increasing order, beginning with 0"
        )
    # ``number`` is the sequence of each token. A key is hidden if it belongs to another sequence,
    # or comes after the query.
    places = torch.arange(int(ends[-1]), device=ends.device)
    number = torch.searchsorted(ends, places, right=True)
    hidden = (number[:, None] != number[None]) | (places[:, None] < places[None])
    return hidden if mask is None else hidden | mask
