"""A stage of torch's runtime that runs each microbatch once, and whose W does what a backward does.

Torch's own stage runs a first microbatch once more, forward and backward, to find shapes: hooks,
counters, lazy parameters and ``.grad`` see that. Here shapes go with the first tensors::

    sender      F ── shapes, once ──> ── tensors ──>      receiver: waits for the shapes, makes
                I <── which ones, once ── <── gradients ──      memory, and receives

Its W adds to gradients without autograd, which hooks do not see: see ``split_backward``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from swpipe.tasks.pipeline_parallel.paired_passes import Due, PlannedMicrobatch, plan_of
from swpipe.tasks.pipeline_parallel.split_backward import WeightPass, input_pass, whole_pass
from swpipe.tasks.pipeline_parallel.torch_pipelining import Stage, metas_of


class OncePerMicrobatch(Stage):  # type: ignore[misc]
    """A stage.

    Args:
        module: What it runs.
        stage: Its number, from 0.
        n_stages: Of all ranks.
        device: Where its tensors are.
        group: The ranks.
        in_order: Whether its I come in the order of the microbatches.
        planned: The microbatches that it runs by plans of the module's layers; whether their
            backward pass is I and W.

    Attributes:
        over: What the next forward pass is run over; None to run it alone.
        due: Called with the next backward pass, instead of running it, when it is due.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        n_stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None,
        in_order: bool,
        planned: Mapping[int, bool] = MappingProxyType({}),
    ) -> None:
        super().__init__(module, stage, n_stages, device, group=group)
        self._in_order, self.planned = in_order, planned
        self.over: PlannedMicrobatch | None = None
        self.due: Due | None = None
        self._plans: dict[int, PlannedMicrobatch] = {}
        self._micro = 0
        self._told: list[tuple[dist.Work | None, Tensor]] = []
        self._told_outputs = False

    def finish(self) -> None:
        """Wait for what was sent of shapes, and let go of a step's tensors."""
        for handle, _ in self._told:
            if handle is not None:
                handle.wait()
        self._told.clear()
        self.clear_runtime_states()

    # ------------------------------------------------------------------ shapes

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        """Torch's place to run the stage once more."""
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        if self.is_first:
            self._stage_meta.inputs = metas_of(args if isinstance(args, tuple) else (args,))
            self._setup_forward_recv_info(num_microbatches, has_backward)

    def _prepare_backward_infra(self, num_microbatches: int, **more: Any) -> None:
        """Torch's place to run its backward pass."""

    def _tell(self, stage: int, metas: Any) -> None:
        """Send them without waiting: the receiver may come to them much later."""
        text = bytearray(pickle.dumps(metas))
        for one in (torch.tensor([len(text)]), torch.frombuffer(text, dtype=torch.uint8)):
            sent = one.to(self.device)
            handle = dist.isend(sent, self._resolve_peer_global_rank(stage), self.group)
            self._told.append((handle, sent))

    def _hear(self, stage: int) -> Any:
        source, length = self._resolve_peer_global_rank(stage), torch.empty(1, dtype=torch.int64)
        length = length.to(self.device)
        dist.recv(length, source, self.group)
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        dist.recv(text, source, self.group)
        return pickle.loads(text.cpu().numpy().tobytes())

    def _expect(self, metas: Any) -> None:
        self._stage_meta.inputs = metas
        self._setup_forward_recv_info(self.chunks, self.has_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """What receives the inputs; their shapes come first."""
        if self._stage_meta.inputs is None:
            self._expect(self._hear(self.stage_index - 1))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The inputs, of the stage before on the same rank."""
        if self._stage_meta.inputs is None:
            self._expect(metas_of(as_tuple(prev_stage_outputs)))
        super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """What sends the outputs; their shapes go first."""
        if not self._told_outputs:
            self._told_outputs = True
            self._tell(self.stage_index + 1, self._stage_meta.outputs)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def _expect_grads(self, metas: Any) -> None:
        self._stage_meta.output_grads = metas
        self._setup_backward_recv_info(self.chunks)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """What receives the gradients of the outputs; which ones there are comes first."""
        if self.has_backward and self._stage_meta.output_grads is None:
            self._expect_grads(self._hear(self.stage_index + 1))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The gradients of the outputs, of the stage after on the same rank."""
        if self._stage_meta.output_grads is None:
            self._expect_grads(metas_of(next_stage_bwd_outputs, allow_none=True))
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """What sends the gradients of the inputs; which ones there are goes first."""
        if self.has_backward and self._stage_meta.input_grads is None:
            metas = metas_of(self.bwd_cache[bwd_chunk_id], allow_none=True)
            self._stage_meta.input_grads = metas
            self._tell(self.stage_index - 1, metas)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def forward_maybe_with_nosync(self, *args: Any, **keywords: Any) -> Any:
        """Torch's place to run the module."""
        if self._micro not in self.planned:
            return super().forward_maybe_with_nosync(*args, **keywords)
        if self.planned[self._micro]:
            keywords["extra_block_kwargs"] = {"delay_wgrad_compute": True}
        planned = PlannedMicrobatch(plan_of(self.submod, args, self.is_first, **keywords))
        self._plans[self._micro] = planned
        over, self.over = self.over, None
        return planned.run_forward(over)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        """Run it forward."""
        self._micro = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **more)
        values = as_tuple(output)
        if self.is_last:  # of any type, for the loss function: torch looks at its tensors alone
            tensors = tuple(one for one in tree_leaves(output) if isinstance(one, Tensor))
            self.fwd_cache[fwd_chunk_id] = (tensors, self.fwd_cache[fwd_chunk_id][1])
        elif not all(isinstance(one, Tensor) for one in values):
            raise TypeError(
                f"stage {self.stage_index} gives a {type(output).__name__}, of which not all is a "
                "tensor: give the next stage a tensor, or a tuple of tensors"
            )
        if self._stage_meta.outputs is None:
            self._stage_meta.outputs = () if self.is_last else metas_of(values)
            self._setup_forward_send_info()
        return output

    # ------------------------------------------------------------------ backward

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        """Run it backward."""
        self._micro = bwd_chunk_id
        return super().backward_one_chunk(bwd_chunk_id, *args, **more)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        """What is left of it."""
        self._micro = bwd_chunk_id
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **more)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Torch's place to run autograd: all of a backward pass, its I, or its W."""
        if backward_type == "weight":
            rest: WeightPass | PlannedMicrobatch | None = bwd_kwargs["param_groups"]
            if rest is not None:
                rest.run()
            return (), None
        planned = self._plans.pop(self._micro, None)
        outputs, given = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        if backward_type == "full":
            if planned is not None:
                due, self.due = self.due, None
                return planned.whole_pass(outputs, bwd_kwargs["output_grads"], given, due), None
            return whole_pass(outputs, bwd_kwargs["output_grads"], given), None
        own = [] if self._in_order else list(self.submod.parameters())
        before = [_state(parameter) for parameter in own]
        split = input_pass if planned is None else planned.input_pass
        grads, left = split(outputs, bwd_kwargs["output_grads"], given)
        if before != [_state(parameter) for parameter in own]:
            raise RuntimeError(
                f"stage {self.stage_index} has a backward pass that cannot be split (a function of "
                "its own that uses weights, a compiled one, or a reentrant checkpoint), and its I "
                "are not in the order of the microbatches, in which gradients are added up: use a "
                "schedule in which they are, or B instead of I and W"
            )
        bwd_kwargs["stage_output"] = ()  # torch would keep it, and so its graph, until W
        return grads, left


def as_tuple(values: Any) -> Any:
    """What a stage is given, or gives, as a tuple."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _state(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)
