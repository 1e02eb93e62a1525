"""A model of towers with tables of their own: each tower's exchanges are independent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.dlrm import Batch, Size, bags, sharded  # first: it quiets TorchRec

from torchrec.modules.mlp import MLP  # isort: skip

TOWERS = 4


class Tower(nn.Module):
    """A network over the embeddings of some of the tables."""

    def __init__(self, size: Size, which: range) -> None:
        super().__init__()
        self.tables = bags(size, which)
        self.network = MLP(len(which) * size.dim, list(size.bottom))

    def forward(self, batch: Batch) -> Any:
        return self.network(self.tables(batch.sparse_features).values())


class Towers(nn.Module):
    """A dense network, towers, and a network over their outputs; returns what DLRMTrain does."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        share = size.tables // TOWERS
        self.dense = MLP(size.features, list(size.bottom))
        self.towers = nn.ModuleList(
            Tower(size, range(share * k, share * (k + 1))) for k in range(TOWERS)
        )
        *layers, last = size.top
        self.top = MLP((TOWERS + 1) * size.bottom[-1], list(layers))
        self.last = nn.Linear(layers[-1], last)
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        parts = [self.dense(batch.dense_features), *(tower(batch) for tower in self.towers)]
        logits = self.last(self.top(torch.cat(parts, dim=1))).squeeze(-1)
        loss = self.criterion(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def sharded_towers(size: Size) -> nn.Module:
    """Return a model with the same weights on every rank; its tables are updated in backward."""
    torch.manual_seed(0)
    model = Towers(size)
    towers: Any = model.towers
    return sharded(model, {f"towers.{k}.tables": tower.tables for k, tower in enumerate(towers)})
