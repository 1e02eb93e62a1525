"""One microbatch's way through a chunk as nodes, and the run of a forward over a backward.

    TransformerModelChunkSchedulePlan
      pre_process    the embedding
      layers         TransformerLayerSchedulePlan, one for each layer
      post_process   the last norm, the output layer, the losses

Source: seed "model_chunk_schedule_plan".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from swpipe.core.messages import listed
from swpipe.plans.transformer import LayerKind, chunk_order
from swpipe.tasks.transformer.chunk_state import ChunkModel, ModelChunkState
from swpipe.tasks.transformer.layer_nodes import PostProcessNode, PreProcessNode
from swpipe.tasks.transformer.layer_runs import Side, run_steps
from swpipe.tasks.transformer.layer_schedule import TransformerLayerSchedulePlan
from swpipe.tasks.transformer.layer_streams import device_of, get_comm_stream, get_comp_stream
from swpipe.tasks.transformer.schedule_node import NoopScheduleNode

Before: TypeAlias = Callable[[int | None], object]
"""Called with the chunk's ``vp_stage``."""

After: TypeAlias = Callable[[Any, int | None], object]
"""Called with the value that was reached, and the chunk's ``vp_stage``."""

_EXTRA = ("delay_wgrad_compute",)

_BEFORE = {"forward": "made", "backward": "forward"}
"""What a plan has done before it is run in a direction."""


class TransformerModelChunkSchedulePlan:
    """The nodes of a chunk, for one microbatch: it is run forward once, and backward once.

    Args:
        model: The chunk, a ``GPTModel``.
        input_ids: Tokens, (batch, sequence); None for a chunk that is given ``decoder_input``.
        position_ids: As of the model's forward.
        attention_mask: As of the model's forward.
        decoder_input: The first layer's input, (batch, sequence, hidden), instead of an embedding;
            required by a chunk without ``pre_process``.
        labels: As of the model's forward.
        packed_seq_params: Its attribute ``cu_seqlens_q``, (sequences + 1,), says where in a row the
            sequences end, from 0: tokens attend within their own sequence only.
        extra_block_kwargs: Copied for each layer, as ``extra_args``: ``"delay_wgrad_compute"``.
        runtime_gather_output: Whether the logits are gathered. The output layer is not split over
            ranks, so the logits are whole in either case.
        loss_mask: As of the model's forward.

    Raises:
        ValueError: There is no input, or an unknown key in ``extra_block_kwargs``.
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
    ) -> None:
        _check_inputs(model, input_ids, decoder_input, labels)
        extra = dict(extra_block_kwargs or {})
        if unknown := [key for key in extra if key not in _EXTRA]:
            raise ValueError(
                f"extra_block_kwargs has {listed(unknown)}, which layers do not take: they take "
                f"{listed(_EXTRA)}"
            )
        mask = _mask(attention_mask, packed_seq_params)
        self._state: ModelChunkState | None = ModelChunkState(
            model, input_ids, position_ids, mask, decoder_input, labels, loss_mask,
            packed_seq_params, extra, runtime_gather_output,
        )  # fmt: skip
        self.vp_stage, self.expert_group = model.vp_stage, model.expert_group
        self.device = device_of(model if isinstance(model, nn.Module) else nn.Module())
        streams = self.device.has_streams
        self._event = self.device.new_event() if streams else None
        comp, comm = (get_comp_stream, get_comm_stream) if streams else (None, None)
        shared = (self._event, self._state, comp, comm, extra)
        self.pre_process: Any = PreProcessNode(model, self._state, self._event, comp)
        self._layers = [
            TransformerLayerSchedulePlan(layer, *shared)
            for layer in (*model.decoder_layers, *(model.predictors if labels is not None else ()))
        ]
        self.post_process: Any = NoopScheduleNode()
        if model.post_process:
            self.post_process = PostProcessNode(model, self._state, self._event, comp)
        self._done = "made"

    @property
    def event(self) -> Any:
        """What the nodes' streams wait for and record; None on a device without streams."""
        return self._event

    def record_current_stream(self) -> None:
        """Let nodes wait for what is on the current stream by now."""
        if self._event is not None:
            self._event.record(self.device.current_stream())

    def wait_current_stream(self) -> None:
        """Let the current stream wait for the node that ran last."""
        if self._event is not None:
            self._event.wait(self.device.current_stream())

    def get_layer(self, i: int) -> TransformerLayerSchedulePlan:
        """The layer at an index, from 0.

        Raises:
            IndexError: There is no such layer.
        """
        if not 0 <= i < len(self._layers):
            raise IndexError(
                f"layer {i} was asked for, and the plan has {self.num_layers()}: give an index "
                "from 0 to num_layers() - 1"
            )
        return self._layers[i]

    def num_layers(self) -> int:
        """How many layers there are; 0 when released.

        With labels, those for multi-token prediction are among them.
        """
        return len(self._layers)

    @property
    def state(self) -> ModelChunkState | None:
        """What the nodes share; None when released."""
        return self._state

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What of each layer decides its steps."""
        return tuple(layer.kind for layer in self._layers)

    def release_state(self) -> None:
        """Let go of all nodes, their inputs, outputs and graphs."""
        for layer in self._layers:
            layer.release()
        for node in (self.pre_process, self.post_process):
            if node is not None:
                node.release()
        self._state = self.pre_process = self.post_process = None
        self._layers, self._done = [], "released"

    @property
    def layers(self) -> list[TransformerLayerSchedulePlan]:
        """The plans of the layers, in order."""
        return self._layers

    def check_turn(self, direction: str) -> None:
        """Each plan is run "forward" and then "backward", once.

        Raises:
            RuntimeError: It is not its turn.
        """
        if self._done != _BEFORE[direction]:
            states = {
                "made": "was not run forward yet",
                "forward": "was run forward already",
                "backward": "is being run backward, or failed in it",
                "released": "was run backward already, or released",
            }
            raise RuntimeError(
                f"a schedule plan is to be run {direction}, and it {states[self._done]}: build a "
                "plan for each microbatch, run it forward once, and then backward once"
            )

    def begin(self, direction: str) -> None:
        """Note that it is run in this direction."""
        self._done = direction

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

        Layer i of the one is paired with layer last - i of the other; then comes the rest of
        backward, and the rest of forward. The plan that was run backward is released.

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
        turns = ((f_schedule_plan, "forward"), (b_schedule_plan, "backward"))
        for plan, direction in turns:
            if plan is not None:
                plan.check_turn(direction)
        for plan, direction in turns:
            if plan is not None:
                plan.begin(direction)
        forward = _side(f_schedule_plan, None, pre_forward, post_forward)
        backward = _side(b_schedule_plan, b_grad, pre_backward, post_backward)
        one = f_schedule_plan or b_schedule_plan
        if one is None:
            return None
        output, _ = run_steps(
            chunk_order(*(None if plan is None else plan.kinds for plan, _ in turns)),
            forward,
            backward,
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
    stage = plan.vp_stage
    return Side(
        plan.layers,
        value,
        plan,
        None if before is None else lambda: before(stage),
        None if after is None else lambda reached: after(reached, stage),
    )


def _check_inputs(
    model: ChunkModel, input_ids: Any, decoder_input: Tensor | None, labels: Tensor | None
) -> None:
    if decoder_input is None and not model.pre_process:
        raise ValueError(
            "decoder_input is None: this chunk has no embedding (pre_process=False); give what the "
            "chunk before has returned"
        )
    embeds = decoder_input is None or (model.predictors and labels is not None)
    if input_ids is None and embeds:
        raise ValueError("input_ids is None: this chunk embeds tokens; give their ids")


def _mask(mask: Tensor | None, packed: Any) -> Tensor | None:
    """The attention mask, limited to each packed sequence."""
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
    own = (number[:, None] == number[None]) & (places[:, None] >= places[None])
    return own if mask is None else own & mask
