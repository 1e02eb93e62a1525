"""One microbatch's way through a chunk as nodes, and the run of a forward over a backward.

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
"""Called with the value that was reached, and the chunk's ``vp_stage``."""

_EXTRA = ("delay_wgrad_compute",)

_BEFORE = {"forward": "made", "backward": "forward"}
"""What a plan has done before it is run in a direction."""

_STATES = {
    "made": "was not run forward yet",
    "forward": "was run forward already",
    "backward": "is being run backward, or failed in it",
    "released": "was run backward already, or released",
}


class AbstractSchedulePlan(ABC):
    """What a pipeline schedule asks of a chunk's plan."""

    @staticmethod
    @abstractmethod
    def run(f_schedule_plan: Any, b_schedule_plan: Any, *rest: Any, **more: Any) -> Any:
        """Run one microbatch's forward over another's backward; either may be None."""


class TransformerModelChunkSchedulePlan(AbstractSchedulePlan):
    """The nodes of a chunk, for one microbatch: it is run forward once, and backward once.

    Args:
        model: The chunk, a ``ChunkModel``.
        input_ids: Tokens, (batch, sequence); None for a chunk that is given ``decoder_input``.
        position_ids: As of the model's forward.
        attention_mask: Boolean, True where a key is hidden from a query, as Megatron's; None for
            the layers' own.
        decoder_input: The first layer's input instead of an embedding, in the layout that the
            model's layers take; required by a chunk without ``pre_process``.
        labels: As of the model's forward.
        packed_seq_params: Its attribute ``cu_seqlens_q``, (sequences + 1,), says where in a row the
            sequences end, from 0: tokens attend within their own sequence only.
        extra_block_kwargs: Copied for each layer, as ``extra_args``: ``"delay_wgrad_compute"``.
        runtime_gather_output: Whether the logits are gathered. The output layer is not split over
            ranks, so the logits are whole in either case.
        loss_mask: As of the model's forward.
        padding_mask: For the layers' ``route``, (batch, sequence), True where a token is none.
        output_processor: Called in place of the model's ``output``, in the last node, with keyword
            arguments: ``hidden_states`` of the last layer, ``model``, ``further`` losses, of
            multi-token prediction, ``context``, and the arguments of this class that concern it.
        output_processor_context: The ``context``.

    Attributes:
        state: What the nodes share; None when released.
        event: What the nodes' streams wait for and record; None on a device without streams.
        layers: The plans of the layers, in order; those for multi-token prediction are among them
            where there are labels. None of them when released.

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
        self.vp_stage, self.expert_group = model.vp_stage, model.expert_group
        self.device = device_of(model)
        streams = self.device.has_streams
        self.event: Any = self.device.new_event() if streams else None
        comp, comm = (get_comp_stream, get_comm_stream) if streams else (None, None)
        self.pre_process: Any = PreProcessNode(model, state, self.event, comp)
        self.layers = [
            TransformerLayerSchedulePlan(layer, self.event, state, comp, comm, extra)
            for layer in layers
        ]
        self.post_process: Any = NoopScheduleNode()
        if model.post_process:
            self.post_process = PostProcessNode(model, state, self.event, comp)
        self._done = "made"

    def record_current_stream(self) -> None:
        """Let nodes wait for what is on the current stream by now."""
        if self.event is not None:
            self.event.record(self.device.current_stream())

    def wait_current_stream(self) -> None:
        """Let the current stream wait for the node that ran last."""
        if self.event is not None:
            self.event.wait(self.device.current_stream())

    def get_layer(self, i: int) -> TransformerLayerSchedulePlan:
        """The layer at an index, from 0.

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
        """The last layer, taken out: its backward is the next one, run by the caller.

        Raises:
            IndexError: There is none left.
        """
        self.get_layer(self.num_layers() - 1)
        return self.layers.pop()

    def num_layers(self) -> int:
        """How many layers there are; 0 when released."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What of each layer decides its steps."""
        return tuple(layer.kind for layer in self.layers)

    def release_state(self) -> None:
        """Let go of all nodes, their inputs, outputs and graphs."""
        for part in (self.pre_process, *self.layers, self.post_process):
            if part is not None:
                part.release()
        self.state = self.pre_process = self.post_process = None
        self.layers, self._done = [], "released"

    def check_turn(self, direction: str) -> None:
        """Each plan is run "forward" and then "backward", once.

        Raises:
            RuntimeError: It is not its turn.
        """
        if self._done != _BEFORE[direction]:
            raise RuntimeError(
                f"a schedule plan is to be run {direction}, and it {_STATES[self._done]}: build a "
                "plan for each microbatch, run it forward once, and then backward once"
            )

    def begin(self, direction: str) -> None:
        """Note that it is run in this direction."""
        self._done = direction

    def run_backward_input(self, grad: Tensor) -> Tensor | None:
        """Run backward alone, and leave delayed weight gradients to ``run_backward_dw``.

        Args:
            grad: The gradient of what forward returned.

        Returns:
            The gradient of the first layer's input.

        Raises:
            RuntimeError: The plan was not run forward, or was run backward.
        """
        self.check_turn("backward")
        self.begin("backward")
        self.record_current_stream()
        value: Any = self.post_process.backward(grad)
        for node in reversed([node for layer in self.layers for node in layer.nodes]):
            value = node.backward(value)
        self.pre_process.backward(value)
        self.wait_current_stream()
        found: Tensor | None = as_leaf(value)
        return found

    def run_backward_dw(self) -> None:
        """Compute the weight gradients that ``run_backward_input`` has left, and release all."""
        self.record_current_stream()
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
            f_schedule_plan: To be run forward.
            b_schedule_plan: To be run backward.
            b_grad: The gradient of what its forward returned.
            pre_forward: Called before forward, with the chunk's ``vp_stage``.
            pre_backward: Called before backward.
            post_forward: Called with the output of the last layer, where it can be sent on.
            post_backward: Called with the gradient of the first layer's input, where it can be
                sent on; the weight gradients of the first layer's attention come after it.

        Returns:
            The forward's output, detached, requiring a gradient as before: ``b_grad`` of its
            backward may be its ``.grad``. None without a forward.

        Raises:
            ValueError: There is a plan to be run backward, and no ``b_grad``.
            RuntimeError: A plan was run before, or released.
        """
        if b_schedule_plan is not None and b_grad is None:
            raise ValueError(
                "b_schedule_plan is given and b_grad is not: give the gradient of what its forward "
                "returned"
            )
        turns = {"forward": f_schedule_plan, "backward": b_schedule_plan}
        given = {direction: plan for direction, plan in turns.items() if plan is not None}
        for direction, plan in given.items():
            plan.check_turn(direction)
        for direction, plan in given.items():
            plan.begin(direction)
        one = f_schedule_plan or b_schedule_plan
        if one is None:
            return None
        output, _ = run_steps(
            chunk_order(*(None if plan is None else plan.kinds for plan in turns.values())),
            _side(f_schedule_plan, None, pre_forward, post_forward),
            _side(b_schedule_plan, b_grad, pre_backward, post_backward),
            device=one.device,
            group=one.expert_group,
        )
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
        after and (lambda reached: after(reached, plan.vp_stage)),
    )


def _mask(mask: Tensor | None, packed: Any) -> Tensor | None:
    """The attention mask, limited to each packed sequence."""
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
    places = torch.arange(int(ends[-1]), device=ends.device)
    number = torch.searchsorted(ends, places, right=True)
    hidden = (number[:, None] != number[None]) | (places[:, None] < places[None])
    return hidden if mask is None else hidden | mask
