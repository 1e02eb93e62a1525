"""All-to-all exchange of rows between the ranks of an expert group, as start and wait.

Between the two there is a handle, so that other work overlaps with the exchange, on a CPU too.
Collectives are called by their names in ``torch.distributed``, each time anew: whoever replaces
them there, to measure or to slow them down, replaces them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PendingExchange:
    """Rows on their way.

    Attributes:
        received: What they are written to; not to be read before ``wait``.
        sent: What they are read from, kept until then.
        handle: Of the collective; None where nothing is exchanged.
    """

    received: Tensor
    sent: Tensor
    handle: dist.Work | None = None

    def wait(self) -> Tensor:
        """The rows, when they are here."""
        if self.handle is not None:
            self.handle.wait()
        return self.received


def size_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks share the experts: 1 without a group."""
    return 1 if group is None else dist.get_world_size(group)


def start_exchange(
    rows: Tensor,
    receive: Sequence[int],
    send: Sequence[int],
    group: dist.ProcessGroup | None,
) -> PendingExchange:
    """Begin to send each rank its rows.

    Args:
        rows: (sum of ``send``, ...), those for rank 0 first.
        receive: How many rows come from each rank of the group.
        send: How many rows go to each.
        group: None for this process alone, which keeps its rows.
    """
    rows = rows.detach()
    if size_of(group) == 1:
        return PendingExchange(rows, rows)
    rows = rows.contiguous()
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    handle = dist.all_to_all_single(
        received, rows, list(receive), list(send), group=group, async_op=True
    )
    return PendingExchange(received, rows, handle)


def exchange(
    rows: Tensor,
    receive: Sequence[int],
    send: Sequence[int],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The same at once, with a gradient: the exchange in the other direction."""
    out: Tensor = _Exchange.apply(rows, receive, send, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any
    ) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        received = start_exchange(rows, receive, send, group).wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = start_exchange(grads[0], ctx.send, ctx.receive, ctx.group).wait()
        return back, None, None, None
