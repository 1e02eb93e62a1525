"""A stage of torch's runtime that runs each microbatch once, and whose W does what a backward does.

Torch's own stage runs a first microbatch once more, forward and backward, to find shapes: hooks,
counters, lazy parameters and ``.grad`` see that. Here shapes go with the first tensors, and values
of any structure arrive: see ``stage_wires``.

Its W adds to gradients without autograd, which hooks do not see: see ``split_backward``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from swpipe.tasks.pipeline_parallel.paired_passes import Due, PlannedMicrobatch, plan_of
from swpipe.tasks.pipeline_parallel.split_backward import WeightPass, input_pass, whole_pass
from swpipe.tasks.pipeline_parallel.stage_wires import Arrived, Receiver, Sender
from swpipe.tasks.pipeline_parallel.step_link import StepLink
from swpipe.tasks.pipeline_parallel.torch_pipelining import Stage, find_tensors
from swpipe.tasks.pipeline_parallel.wire import Packed, layouts_of, pack, unpack


class OncePerMicrobatch(Stage):  # type: ignore[misc]
    """A stage.

    Args:
        module: What it runs.
        stage: Its number, from 0.
        n_stages: Of all ranks.
        device: Where its tensors are.
        link: Joins the ranks.
        in_order: Whether its I come in the order of the microbatches.
        varying: Whether what stages hand on may differ from microbatch to microbatch.
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
        link: StepLink,
        in_order: bool,
        varying: bool,
        planned: Mapping[int, bool] = MappingProxyType({}),
    ) -> None:
        super().__init__(module, stage, n_stages, device, group=link.group)
        self._link = link
        self._runtime_validate = False  # by torch's records of shapes, of which there are none
        self._outputs, self._input_grads = (
            Sender(self, stage + away, what, varying)
            for away, what in ((1, "outputs"), (-1, "gradients of inputs"))
        )
        self._inputs, self._output_grads = (
            Receiver(self, stage + away, varying) for away in (-1, 1)
        )
        self._packed: dict[int, Packed] = {}
        self._given: dict[int, tuple[Any, ...]] = {}
        self._arrived_inputs: dict[int, Arrived] = {}
        self._arrived_grads: dict[int, Any] = {}
        self._in_order, self.planned = in_order, planned
        self.over: PlannedMicrobatch | None = None
        self.due: Due | None = None
        self._plans: dict[int, PlannedMicrobatch] = {}
        self._micro = 0

    def finish(self) -> None:
        """Wait until what was sent has left, and release a step's tensors."""
        for sender in (self._outputs, self._input_grads):
            sender.finish()
        self._arrived_inputs.clear()
        self._given.clear()
        self._arrived_grads.clear()
        self.clear_runtime_states()

    # ------------------------------------------------------------------ what arrives, and what goes

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> None:
        """Torch's place to run the stage once more."""
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _prepare_backward_infra(self, num_microbatches: int, **more: Any) -> None:
        """Torch's place to run its backward pass."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Torch's place to drop the gradients that the additional run left; there was none."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Return what receives the inputs; their header comes first."""
        self._link.place = f"stage {self.stage_index}, the inputs of microbatch {fwd_chunk_id}"
        return self._inputs.start(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the inputs of the stage before on the same rank."""
        packed = pack(prev_stage_outputs)
        leaves = [tensor.detach() for tensor in packed.tensors]
        self._arrived_inputs[mb_index] = Arrived(packed.header, leaves)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """Return what sends the outputs; their header goes first."""
        return self._outputs.start(fwd_chunk_id, self._packed.pop(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """Return what receives the gradients of the outputs; which ones there are comes first."""
        if not self.has_backward:
            return []
        self._link.place = f"stage {self.stage_index}, the gradients of microbatch {bwd_chunk_id}"
        return self._output_grads.start(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of the outputs of the stage after on the same rank."""
        self._arrived_grads[mb_index] = next_stage_bwd_outputs

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """Return what sends the gradients of the inputs; which ones there are goes first."""
        if not self.has_backward:
            return []
        return self._input_grads.start(bwd_chunk_id, pack(self.bwd_cache.pop(bwd_chunk_id)))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        """Return the arguments of the module, of what has arrived."""
        arrived = self._arrived_inputs.pop(fwd_chunk_id, None) or self._inputs.take(fwd_chunk_id)
        gets_grads = self.has_backward and torch.is_grad_enabled()
        for leaf, layout in zip(arrived.tensors, layouts_of(arrived.header), strict=True):
            leaf.requires_grad_(layout.requires_grad and gets_grads)
        self._given[fwd_chunk_id] = tuple(arrived.tensors)
        return as_tuple(unpack(arrived.header, arrived.tensors))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        """Return the gradients of the outputs."""
        if bwd_chunk_id in self._arrived_grads:
            return self._arrived_grads.pop(bwd_chunk_id)
        arrived = self._output_grads.take(bwd_chunk_id)
        return unpack(arrived.header, arrived.tensors)

    # ------------------------------------------------------------------ forward

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

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **more: Any
    ) -> Any:
        """Run it forward."""
        self._begin("F", fwd_chunk_id)
        if self.is_first:
            self._given[fwd_chunk_id] = tuple(args)
        try:
            output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, **more)
        except RuntimeError as error:
            # Torch replaces an error of the module by ten lines of the shapes of its arguments.
            if error.__cause__ is None or "failed to run forward" not in str(error):
                raise
            raise error.__cause__ from None
        given = (*self._given[fwd_chunk_id], *tree_leaves(kwargs or {}))
        if self.is_last:  # of any type, for the loss function
            tensors = tuple(one for one in tree_leaves(output) if isinstance(one, Tensor))
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
        """Run it backward."""
        self._begin("B" if more.get("full_backward", True) else "I", bwd_chunk_id)
        # Torch takes as many gradients, for the stage before, as there are inputs in its records.
        self._stage_meta.inputs = (None,) * len(self._given.pop(bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, **more)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **more: Any) -> Any:
        """What is left of it."""
        self._begin("W", bwd_chunk_id)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **more)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Torch's place to run autograd: all of a backward pass, its I, or its W."""
        if isinstance(
            self.submod, FSDPModule
        ):  # all microbatches are reduced at once, by an action
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if isinstance(self.submod, DistributedDataParallel) and last_backward:
            # What runs now completes the gradients: its hooks are to reduce them.
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
