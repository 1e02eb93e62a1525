"""The reductions of an FSDP stage's gradients, which run while the rank runs other passes.

::

    rank    last W ── (1) issues the reduce-scatter ── passes of other stages ... ── (2) waits
    link                      |──────────────────────────────|

FSDP waits for each reduce-scatter at once. In a schedule, nothing needs the gradients before the
end of the step, at (2). FSDP itself needs them at once where it divides, casts, copies or
all-reduces them, or calls hooks on them: there it still waits at (1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from swpipe.tasks.pipeline_parallel.torch_pipelining import DefaultReduceScatter, sharded_groups


class Reductions:
    """The reduce-scatters that are under way."""

    def __init__(self) -> None:
        self._running: list[tuple[dist.Work, Tensor]] = []

    @contextmanager
    def in_background(self, chunk: nn.Module) -> Iterator[None]:
        """Let the reduce-scatters that FSDP issues in this block run in the background."""
        with ExitStack() as stack:
            for module, group in sharded_groups(chunk):
                if not _is_read_at_once(group):
                    default = group._reduce_scatter_comm
                    module.set_custom_reduce_scatter(_Background(self._running, group))
                    stack.callback(module.set_custom_reduce_scatter, default)
            yield

    def finish(self) -> None:
        """Wait until all reduce-scatters have ended."""
        for work, _ in self._running:
            work.wait()
        self._running.clear()


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
