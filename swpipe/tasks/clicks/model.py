"""A DLRM-style click model from TorchRec's parts, and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swpipe.device import on_cpu
from swpipe.tasks.clicks._torchrec import DLRM_DCN, EmbeddingBagCollection, EmbeddingBagConfig
from swpipe.tasks.clicks.config import ModelConfig
from swpipe.tasks.clicks.encode import ClickBatch
from swpipe.tasks.clicks.log import IDS, INTEGERS


class ClickModel(nn.Module):
    """Embedding bags of the ids and a bottom network of the integers, crossed, then a top network.

    The interaction is the low-rank cross network of DCN v2 (Wang et al., 2021), as in MLPerf's
    DLRM-DCNv2.

    Args:
        config: The sizes.
        seed: Fixes the first parameters; torch's own generator is left as it was.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            tables = [
                EmbeddingBagConfig(
                    name=f"table_{name}",
                    feature_names=[name],
                    num_embeddings=config.buckets,
                    embedding_dim=config.embedding_dim,
                )
                for name in IDS
            ]
            self.net = DLRM_DCN(
                EmbeddingBagCollection(tables=tables, device=torch.device("cpu")),
                dense_in_features=len(INTEGERS),
                dense_arch_layer_sizes=[*config.bottom_layers, config.embedding_dim],
                over_arch_layer_sizes=[*config.top_layers, 1],
                dcn_num_layers=config.cross_layers,
                dcn_low_rank_dim=config.cross_rank,
            )

    def embed(self, batch: ClickBatch) -> torch.Tensor:
        """The embeddings of each row's ids: [B, 26, embedding_dim] float32."""
        embedded: torch.Tensor = self.net.sparse_arch(batch.ids)
        return embedded

    def predict(self, batch: ClickBatch, embedded: torch.Tensor) -> torch.Tensor:
        """The logit of a click for each label, from integers and what ``embed`` gave: [B]."""
        crossed = self.net.inter_arch(self.net.dense_arch(batch.dense), embedded)
        logits: torch.Tensor = self.net.over_arch(crossed)
        return logits.squeeze(1)[: len(batch.labels)]

    def forward(self, batch: ClickBatch) -> torch.Tensor:
        """Both in one: [B] float32."""
        return self.predict(batch, self.embed(batch))


def click_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy; 0 for a batch without rows (all of them malformed)."""
    total = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return total / max(len(labels), 1)


def make_optimizer(
    parameters: Sequence[torch.Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    """Adagrad: the learning rate of an id follows how often it occurs.

    The tables' gradients are dense: they add up in a fixed order on every device, where sparse ones
    on a GPU do not, and at these sizes they cost no more.
    """
    return torch.optim.Adagrad(
        parameters,
        lr=learning_rate,
        fused=True if on_cpu(parameters[0]) else None,
    )
