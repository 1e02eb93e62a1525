"""Mixture of experts: router, permutation of tokens, exchange of rows, the experts of this rank.

    tokens (N, H) -> route: the k best of E experts each; N·k rows, those for expert 0 first
                  -> exchange: each rank gets the rows for its experts, by rank, then by expert
                  -> experts of this rank
                  -> exchange back -> merge: N tokens, weighted sums of k rows

The counts of rows are exchanged first. That exchange is started by ``route``, and waited for where
the rows are to be sent. Between start and wait of an exchange there is a handle, so that other work
overlaps with it, on a CPU too. Collectives are called by their names in ``torch.distributed``, each
time anew: whoever replaces them there, to measure or to slow them down, replaces them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from swpipe.tasks.transformer.transformer_config import TransformerConfig
from swpipe.tasks.transformer.weight_gradients import Linear


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
    rows: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup | None
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


@dataclass(slots=True)
class Routing:
    """Where the rows of a microbatch go, without any tensor that has a gradient.

    Attributes:
        order: Row to be sent to its place among tokens x k, (N·k,).
        sent: How many rows go to each expert, (ranks, experts of a rank).
        counts: ``received``, on its way.
        group: Of the ranks that share the experts.
    """

    order: Tensor
    sent: list[list[int]]
    counts: PendingExchange
    group: dist.ProcessGroup | None
    _received: list[list[int]] | None = None

    @property
    def received(self) -> list[list[int]]:
        """How many rows come for each expert, (ranks, experts of a rank); waits for the counts."""
        if self._received is None:
            self._received = self.counts.wait().tolist()
        return self._received

    def start(self, rows: Tensor, *, to_experts: bool) -> PendingExchange:
        """Send rows to the experts, or back from them."""
        here, there = (list(map(sum, counts)) for counts in (self.received, self.sent))
        if not to_experts:
            here, there = there, here
        return start_exchange(rows, here, there, self.group)

    def exchange(self, rows: Tensor, *, to_experts: bool) -> Tensor:
        """The same at once, with a gradient: the exchange in the other direction."""
        out: Tensor = _Exchange.apply(rows, self, to_experts)  # type: ignore[no-untyped-call]
        return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing, to_experts: bool) -> Tensor:
        ctx.routing, ctx.to_experts = routing, to_experts
        received = routing.start(rows, to_experts=to_experts).wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.routing.start(grads[0], to_experts=not ctx.to_experts).wait(), None, None


class Mlp(nn.Module):
    """Two linear maps with a GELU between."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.fc1 = Linear(size, inner)
        self.fc2 = Linear(inner, size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of (..., size), the same shape."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(hidden)))
        return out


class MixtureOfExperts(nn.Module):
    """The router, this rank's experts, and the shared expert where there is one.

    Args:
        config: The model's.
        group: The ranks that share the experts; None for this process alone.

    Raises:
        ValueError: The ranks do not divide the experts.
    """

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, self.topk, self.num_experts = group, config.moe_router_topk, config.num_experts
        ranks = size_of(group)
        if self.num_experts % ranks:
            raise ValueError(
                f"num_experts is {self.num_experts} and the expert group has {ranks} ranks, which "
                f"do not divide it: give a multiple of {ranks}, or a smaller group"
            )
        self.local = self.num_experts // ranks
        first = 0 if group is None else dist.get_rank(group) * self.local
        self.router = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        mine = range(first, first + self.local)
        self.experts = nn.ModuleDict(
            {str(number): Mlp(config.hidden_size, config.moe_ffn_size) for number in mine}
        )
        shared = config.moe_shared_expert_size
        self.shared_expert = None if shared is None else Mlp(config.hidden_size, shared)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """Choose experts and sort rows by them; start the exchange of counts.

        Args:
            hidden: (batch, sequence, hidden), normalised.

        Returns:
            Rows (N·k, hidden), weights (N, k), and where the rows go.
        """
        flat = hidden.flatten(0, 1)
        probabilities = functional.softmax(self.router(flat).float(), dim=-1).to(flat.dtype)
        weights, chosen = probabilities.topk(self.topk, dim=-1)
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts).view(-1, self.local)
        ranks = [1] * size_of(self.group)
        pending = start_exchange(counts, ranks, ranks, self.group)
        # A permutation, not a selection: the sum over a token's rows has a fixed order.
        rows = flat.unsqueeze(1).expand(-1, self.topk, -1).flatten(0, 1)[order]
        return rows, weights, Routing(order, counts.tolist(), pending, self.group)

    def compute(self, rows: Tensor, routing: Routing) -> Tensor:
        """Each row through its expert; rows come by rank, then by expert, and leave so."""
        parts = torch.split(rows, [count for counts in routing.received for count in counts])
        done: list[list[Tensor]] = []
        for number, expert in enumerate(self.experts.values()):
            mine = parts[number :: self.local]
            lengths = [len(part) for part in mine]
            done.append([*torch.split(expert(torch.cat(mine)), lengths)])
        return torch.cat([part for source in zip(*done, strict=True) for part in source])

    def merge(self, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """(N, hidden): for each token the weighted sum of its rows."""
        places = torch.empty_like(routing.order)
        places[routing.order] = torch.arange(len(places), device=places.device)
        by_token = rows[places].view(*weights.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1)
