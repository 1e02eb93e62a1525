"""A small HSTU ranking model: for each event, how will the user like the item?

Items and actions take turns, so that a prediction at an item sees what the user did before, and not
what he will do (Zhai et al., 2024, section 2.2)::

    item 0   action 0   item 1   action 1   ...     tokens of one user: 2 for each event
      |                   |
    heads               heads                       one logit for each task
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swpipe.tasks.torchrec._torchrec import EmbeddingCollection, EmbeddingConfig
from swpipe.tasks.torchrec.hstu.sequence_attention import HSTULayer, Places
from swpipe.tasks.torchrec.hstu.sequence_batch import ACTION, ACTIONS, ITEM, SequenceBatch

TASKS = {"liked": 8, "loved": 10}
"""What is predicted, and the least action that counts as it."""


@dataclass(frozen=True, slots=True)
class RankingConfig:
    """Sizes of the model. The defaults are modest: they suit two CPU cores.

    Attributes:
        items: Rows of the table of items.
        width: Of an embedding and of a token.
        heads: Of the attention; they divide the width.
        layers: How many.
        longest: The greatest number of events in a history.
        learning_rate: Of Adagrad, for all parameters.
    """

    items: int = 2048
    width: int = 16
    heads: int = 2
    layers: int = 2
    longest: int = 24
    learning_rate: float = 0.05

    def __post_init__(self) -> None:
        names = ("items", "width", "heads", "layers", "longest")
        if wrong := [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) < 1]:
            raise ValueError(f"{', '.join(wrong)}: the sizes of a model are 1 or more")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}: it must be above 0")


class HSTURanking(nn.Module):
    """Embeddings of items and actions, layers of HSTU, and a head for each task.

    Args:
        config: The sizes.
        seed: Fixes the first parameters; torch's own generator is left as it was.
    """

    def __init__(self, config: RankingConfig, seed: int = 0) -> None:
        super().__init__()
        width, longest = config.width, 2 * config.longest
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            sizes = {ITEM: config.items, ACTION: ACTIONS}
            tables = [
                EmbeddingConfig(
                    name=name, feature_names=[name], num_embeddings=rows, embedding_dim=width
                )
                for name, rows in sizes.items()
            ]
            self.tables = EmbeddingCollection(tables=tables, device=torch.device("cpu"))
            for table in self.tables.parameters():
                nn.init.normal_(table, std=0.1)
            self.layers = nn.ModuleList(
                HSTULayer(width, config.heads, longest) for _ in range(config.layers)
            )
            self.heads = nn.ModuleDict(
                {
                    task: nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
                    for task in TASKS
                }
            )
        self.longest = longest

    def forward(self, batch: SequenceBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """From a batch of T events to its losses, and logits and labels without a graph.

        Returns:
            The losses [T], added over the tasks; logits [T, tasks] and labels [T, tasks].
        """
        embedded = self.tables(batch.ids)
        parts = [embedded[name].values() for name in (ITEM, ACTION)]
        tokens = torch.stack(parts, dim=1).flatten(0, 1)  # [2 T, D]
        times = batch.times.values().repeat_interleave(2)
        places = Places.of(2 * batch.times.lengths(), len(tokens), self.longest)
        for layer in self.layers:
            tokens = layer(tokens, times, places)
        at_items = tokens[0::2]
        logits = torch.cat([head(at_items) for head in self.heads.values()], dim=1)
        labels = labels_of(batch)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return losses.sum(1), (logits.detach(), labels)


def labels_of(batch: SequenceBatch) -> Tensor:
    """What the model is to predict, 0 or 1: [T, tasks] float32."""
    actions = batch.ids[ACTION].values()
    return torch.stack([actions >= least for least in TASKS.values()], dim=1).float()
