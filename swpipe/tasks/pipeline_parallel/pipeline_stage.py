"""A stage for torch's runtime that runs each microbatch once, and computes W by autograd.

Torch's own stage differs in two ways (torch 2.13 to 2.15):

- It runs the first microbatch twice, forward and backward, to find the shapes. Hooks, counters,
  lazy parameters and ``.grad`` see the additional run. Here the shapes are sent with the first
  tensors, and values of any structure can be sent: see ``stage_wires``.
- Its W adds to ``.grad`` itself, so that hooks do not see the gradients. Here autograd does it: see
  ``split_backward``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from swpipe.tasks.pipeline_parallel.paired_passes import PlannedMicrobatch, plan_of
from swpipe.tasks.pipeline_parallel.split_backward import WeightPass, input_pass, whole_pass
from swpipe.tasks.pipeline_parallel.stage_wires import StageWire
from swpipe.tasks.pipeline_parallel.step_link import StepLink
from swpipe.tasks.pipeline_parallel.torch_pipelining import Stage, find_tensors
from swpipe.tasks.pipeline_parallel.wire import Packed, layouts_of, pack, unpack


class OncePerMicrobatch(Stage):  # type: ignore[misc]
    """A torch ``PipelineStage`` that runs each microbatch once.

    Args:
        module: The stage's chunk.
        stage: The stage's number, from 0.
        n_stages: The number of stages on all ranks together.
        device: The device of the stage's tensors.
        link: The process group for sends and receives.
        in_order: Whether the stage runs its I passes in the order of the microbatches.
        varying: Whether shapes and structures may change from microbatch to microbatch.
        planned: The microbatches, from 0, that run by a plan of the module's layers, each with
            whether its backward pass is split into I and W.

    Attributes:
        under_way: The planned microbatches between their forward and backward passes.
        over: The microbatch whose backward pass overlaps the next forward pass; None to run the
            forward pass alone.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        n_stages: int,
        device: torch.device,
        *,
        link: StepLink,
        in_order: bool,
        varying: bool,
        planned: Mapping[int, bool],
    ) -> None:
        super().__init__(module, stage, n_stages, device, group=link.group)
        self._link = link
        # Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch's stage would compare each tensor with the
        # shapes that its additional run found.
        self._runtime_validate = False
        self._previous = StageWire(self, stage - 1, varying)
        self._next = StageWire(self, stage + 1, varying)
        self._packed: dict[int, Packed] = {}
        self._given: dict[int, tuple[Any, ...]] = {}
        self._in_order = in_order
        self._planned = planned
        self.under_way: dict[int, PlannedMicrobatch] = {}
        self.over: PlannedMicrobatch | None = None
        self._micro = 0

    def finish(self) -> None:
        """Wait for sent headers, and release the tensors of the step."""
        for wire in (self._previous, self._next):
            wire.finish()
        self._given.clear()
        self.clear_runtime_states()

    # ------------------------------------------------------------------ sends and receives

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        """Skip torch's additional forward run, which finds shapes."""
        # The rest of torch's method is kept: what later calls read of its result.
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _prepare_backward_infra(self, num_microbatches: int, **more: Any) -> None:
        """Skip torch's additional backward run."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Torch's place to drop the gradients that the additional run left; there was none."""
        # Torch's method sets the gradients of FSDP modules to None, also those of earlier steps.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Wait for the header of the inputs if one is sent, and return the inputs' receives."""
        self._link.place = f"stage {self.stage_index}, the inputs of microbatch {fwd_chunk_id}"
        return self._previous.receive(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Store the outputs of the previous stage on this rank as the inputs of this stage."""
        # Packed, so that tensors within structures are detached, too: each stage has a graph of its
        # own. Their memory is shared, not copied.
        self._previous.put(mb_index, pack(prev_stage_outputs))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """Send the header of the outputs if needed, and return the sends of the outputs."""
        return self._next.send(fwd_chunk_id, self._packed.pop(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """Wait for the header of the outputs' gradients, and return the receives of the gradients.

        The header says which outputs have gradients.
        """
        if not self.has_backward:
            return []
        self._link.place = f"stage {self.stage_index}, the gradients of microbatch {bwd_chunk_id}"
        return self._next.receive(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Store the gradients of this stage's outputs, from the next stage on this rank."""
        self._next.put(mb_index, pack(next_stage_bwd_outputs))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """Send the header of the inputs' gradients, and return the sends of the gradients.

        The header says which inputs have gradients.
        """
        if not self.has_backward:
            return []
        return self._previous.send(bwd_chunk_id, pack(self.bwd_cache.pop(bwd_chunk_id)))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        """Return the module's positional arguments from the received or stored inputs."""
        arrived = self._previous.take(fwd_chunk_id)
        # Only leaves that require gradients in the previous stage, as in one process: otherwise
        # autograd would compute gradients that nobody uses.
        gets_grads = self.has_backward and torch.is_grad_enabled()
        for leaf, layout in zip(arrived.tensors, layouts_of(arrived.header), strict=True):
            leaf.requires_grad_(layout.requires_grad and gets_grads)
        self._given[fwd_chunk_id] = arrived.tensors
        return as_tuple(unpack(*arrived))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """Return the received or stored gradients of the outputs."""
        return unpack(*self._next.take(bwd_chunk_id))

    # ------------------------------------------------------------------ forward

    def forward_maybe_with_nosync(self, *args: Any, **keywords: Any) -> Any:
        """Run the module, or the plan of its layers for a planned microbatch."""
        if self._micro not in self._planned:
            return super().forward_maybe_with_nosync(*args, **keywords)
        if self._planned[self._micro]:
            keywords["extra_block_kwargs"] = {"delay_wgrad_compute": True}
        planned = PlannedMicrobatch(plan_of(self.submod, args, self.is_first, **keywords))
        self.under_way[self._micro] = planned
        # ``over`` holds for one forward pass only.
        over = self.over
        self.over = None
        return planned.run_forward(over)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **more: Any
    ) -> Any:
        """Run the forward pass of a microbatch, and keep what its sends and backward pass need."""
        self._begin("F", fwd_chunk_id)
        if self.is_first:
            self._given[fwd_chunk_id] = tuple(args)
        try:
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, **more)
        except RuntimeError as error:
            # Torch replaces an error of the module by ten lines about the shapes of its arguments.
            # The error's type and message are restored.
            if error.__cause__ is None or "failed to run forward" not in str(error):
                raise
            raise error.__cause__ from None
        given = (*self._given[fwd_chunk_id], *tree_leaves(kwargs or {}))
        if self.is_last:  # the loss function may take values that cannot be sent
            tensors = tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        else:
            packed = pack(output)
            tensors = packed.tensors
            if not self._is_next_here():
                self._packed[fwd_chunk_id] = packed
        self.fwd_cache[fwd_chunk_id] = (tensors, given)
        return output

    def _is_next_here(self) -> bool:
        place = self.stage_index_to_group_rank
        return bool(place[self.stage_index + 1] == place[self.stage_index])

    def _begin(self, op: str, micro: int) -> None:
        self._micro = micro
        self._link.place = f"stage {self.stage_index}, {op} of microbatch {micro}"

    # ------------------------------------------------------------------ backward

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        """Run the backward pass of a microbatch: all of it, or I."""
        self._begin("B" if more.get("full_backward", True) else "I", bwd_chunk_id)
        # Torch's stage passes on as many gradients as its record of shapes (``_stage_meta``, torch
        # 2.13 to 2.15) has inputs.
        self._stage_meta.inputs = (None,) * len(self._given.pop(bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **more)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        """Run W of a microbatch."""
        self._begin("W", bwd_chunk_id)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **more)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run autograd for a whole backward pass, for its I, or for its W."""
        if isinstance(
            self.submod, FSDPModule
        ):  # the schedule's REDUCE_GRAD action reduces all microbatches at once
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if isinstance(self.submod, DistributedDataParallel) and last_backward:
            # This pass completes the gradients, so the hooks of DistributedDataParallel reduce
            # them. The wrapper's forward pass does not prepare its private ``reducer`` for that,
            # because torch's stage runs it under ``no_sync``.
            outputs = find_tensors(bwd_kwargs["stage_output"])
            self.submod.reducer.prepare_for_backward(list(outputs))
        if backward_type == "weight":
            rest: WeightPass | PlannedMicrobatch | None = bwd_kwargs["param_groups"]
            if rest is not None:
                rest.run()
            elif isinstance(self.submod, DistributedDataParallel):
                raise RuntimeError(
                    f"stage {self.stage_index} is a DistributedDataParallel whose backward pass "
                    "cannot be split, and would not be reduced: use B instead of I and W"
                )
            return (), None
        planned = self.under_way.pop(self._micro, None)
        outputs = bwd_kwargs["stage_output"]
        given = bwd_kwargs["input_values"]
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        if backward_type == "full":
            whole = whole_pass if planned is None else planned.whole_pass
            return whole(outputs, bwd_kwargs["output_grads"], given), None
        # A backward pass that cannot be split adds to the weights' gradients in I already. If the I
        # are out of order, the gradients are then added up in another order than in one process,
        # and differ in their last bits. The identity and version of ``.grad`` show such additions.
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
        bwd_kwargs["stage_output"] = ()  # torch would keep the outputs, and their graph, until W
        return grads, left


def as_tuple(values: Any) -> Any:
    """Return the inputs or outputs of a stage as a tuple."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _state(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)
