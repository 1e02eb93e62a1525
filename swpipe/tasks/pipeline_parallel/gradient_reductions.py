"""The reductions of gradients, which for FSDP stages run while the rank runs other passes.

::

    rank    last W of stage 2 ── (1) ── passes of stage 1 ... last W ── (2), (1) ── ... end (2)
    link                          |─ reduce-scatters ─|                  |────────|

FSDP waits for each reduce-scatter at once. In a schedule, nothing needs the gradients before the
end of the step: a stage issues its reduce-scatters at (1) without waiting. The rank waits at (2),
before the next stage is reduced, and at the end of the step. So their inputs take as much memory
as on torch's runtime: those of one stage at a time.

FSDP itself needs the results at once where it divides, casts, copies or all-reduces them, or calls
hooks on them: there it still waits at (1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.pipeline_parallel.torch_pipelining import DefaultReduceScatter, sharded_groups


class Reductions:
    """The function that torch's runtime calls for REDUCE_GRAD.

    Args:
        stages: The stages of this rank, each a ``PipelineStage``.
        n_micro: The number of microbatches, by which the gradients are divided.
    """

    def __init__(self, stages: Sequence[Any], n_micro: int) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._n_micro = n_micro
        self._running: list[tuple[dist.Work, Tensor]] = []

    def __call__(self, action: Any, context: Any) -> None:
        """Start to reduce the gradients of a stage."""
        # (2): frees the inputs of the stage before, ahead of the memory for this stage's inputs.
        self._wait()
        stage = self._stages[action.stage_index]
        # (1): FSDP sets ``.grad`` to views of memory that the collectives still have to fill.
        with self._in_background(stage.submod):
            stage.perform_reduce_grad(1)

    def finish(self) -> None:
        """Wait until all reductions have ended, and divide the gradients of all stages."""
        self._wait()
        # Torch's stage divides in ``perform_reduce_grad``, before the results are there.
        for stage in self._stages.values():
            stage.scale_grads(self._n_micro)

    def _wait(self) -> None:
        for work, _ in self._running:
            work.wait()
        self._running.clear()

    @contextmanager
    def _in_background(self, chunk: nn.Module) -> Iterator[None]:
        """Let the reduce-scatters that FSDP issues in this block run in the background."""
        with ExitStack() as stack:
            for module, group in sharded_groups(chunk):
                if not _is_read_at_once(group):
                    default = group._reduce_scatter_comm
                    module.set_custom_reduce_scatter(_Background(self._running, group))
                    stack.callback(module.set_custom_reduce_scatter, default)
            yield


class _Background(DefaultReduceScatter):  # type: ignore[misc]
    """FSDP's reduce-scatter, which returns when the collective has been issued."""

    def __init__(self, running: list[tuple[dist.Work, Tensor]], group: Any) -> None:
        self._running = running
        self._group = group

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **more: Any
    ) -> None:
        # FSDP divides the results of other operations, and casts a result of another type.
        is_final = op == dist.ReduceOp.AVG and output_tensor.dtype == self._group._orig_dtype
        work = super().__call__(output_tensor, input_tensor, group, op, async_op=is_final)
        if work is not None:
            # The collective reads the input until it ends.
            self._running.append((work, input_tensor))


def _is_read_at_once(group: Any) -> bool:
    """Return whether FSDP uses the result of a group's reduce-scatter before the step ends."""
    return (
        type(group._reduce_scatter_comm) is not DefaultReduceScatter
        or group._all_reduce_hook is not None
        or group.mesh_info.replicate_mesh_dim is not None
        or any(
            parameter.offload_to_cpu
            or getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
            for parameter in group.fsdp_params
        )
    )
