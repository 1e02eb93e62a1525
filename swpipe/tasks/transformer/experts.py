"""Mixture of experts: router, permutation of tokens, the experts of this rank.

    tokens (N, H) -> route: the k best of E experts each; N·k rows, those for expert 0 first
                  -> exchange: each rank gets the rows for its experts, by rank, then by expert
                  -> experts of this rank
                  -> exchange back -> merge: N tokens, weighted sums of k rows

The counts of rows are exchanged first. That exchange is started by ``route``, and waited for where
the rows are to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from swpipe.tasks.transformer.token_exchange import PendingExchange, size_of, start_exchange
from swpipe.tasks.transformer.transformer_config import TransformerConfig
from swpipe.tasks.transformer.weight_gradients import Linear


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

    @property
    def send(self) -> list[int]:
        """How many rows go to each rank."""
        return [sum(row) for row in self.sent]

    @property
    def receive(self) -> list[int]:
        """How many rows come from each rank."""
        return [sum(row) for row in self.received]

    def start_dispatch(self, rows: Tensor) -> PendingExchange:
        """Send rows to the experts."""
        return start_exchange(rows, self.receive, self.send, self.group)

    def start_combine(self, rows: Tensor) -> PendingExchange:
        """Send rows back from the experts."""
        return start_exchange(rows, self.send, self.receive, self.group)


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
        inner = config.moe_ffn_size
        self.experts = nn.ModuleDict(
            {
                str(number): Mlp(config.hidden_size, inner)
                for number in range(first, first + self.local)
            }
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
