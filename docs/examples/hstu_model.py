"""A small HSTU ranking model: for each event, how will the user like the item?

Items and actions take turns, so that a prediction at an item sees what the user did before, and not
what he will do (J. Zhai et al., "Actions Speak Louder than Words", 2024, sections 2.2 and 3)::

    item 0   action 0   item 1   action 1   ...     tokens of one user: 2 for each event
      |                   |
    heads               heads                       one logit for each task

A layer, for one sequence X of n tokens, shape [n, D], with SiLU written s and heads left out::

    U, V, Q, K = s(Linear(LayerNorm(X)))                       each [n, D]
    A          = s(Q K^T + rab) / N,  A[i, j] = 0 for j > i    [n, n]
    Y          = X + Linear(LayerNorm(A V) * U)                [n, D]

N is the longest allowed. ``rab[i, j]`` is a learnt bias of the distance i - j, plus one of the time
between both, in buckets that grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

ITEM, ACTION = "item", "action"
"""The features of an event."""

ACTIONS = 11
"""Actions are ratings in half stars, 1 to 10; 0 is none."""


class Event(NamedTuple):
    """An item, and how a user rated it.

    Attributes:
        item: A row of the table of items.
        action: The rating in half stars, 1 to 10.
        time: Seconds, from any origin.
    """

    item: int
    action: int
    time: int


@dataclass
class SequenceBatch(Pipelineable):
    """The histories of B users, with T events in all; some may be empty.

    Attributes:
        ids: Features "item" and "action", one pair for each event, in order of time.
        times: The time of each event in seconds, as int64.
    """

    ids: KeyedJaggedTensor
    times: JaggedTensor

    @classmethod
    def of(cls, histories: Sequence[Sequence[Event]]) -> SequenceBatch:
        """Return a batch on the host."""
        events = [event for history in histories for event in history]
        items, actions, times = (
            torch.tensor([event[part] for event in events], dtype=torch.int64) for part in range(3)
        )
        lengths = torch.tensor([len(history) for history in histories], dtype=torch.int32)
        return cls(
            KeyedJaggedTensor(
                [ITEM, ACTION],
                torch.cat([items, actions]),
                lengths=lengths.repeat(2),
                # Known here, and so not computed on the device, where it would make the host wait.
                stride=len(histories),
                length_per_key=[len(events), len(events)],
            ),
            JaggedTensor(times, lengths=lengths),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> SequenceBatch:
        """Return the batch on a device."""
        return SequenceBatch(
            self.ids.to(device, non_blocking=non_blocking),
            self.times.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Note that another stream uses the tensors; TorchRec calls this."""
        self.ids.record_stream(stream)
        self.times.record_stream(stream)

    def pin_memory(self) -> SequenceBatch:
        """Return the batch in page-locked memory, from which a GPU copies asynchronously."""
        times = self.times
        pinned = JaggedTensor(times.values().pin_memory(), lengths=times.lengths().pin_memory())
        return SequenceBatch(self.ids.pin_memory(), pinned)

    def num_loss_tokens(self) -> Tensor:
        """Return how many losses this rank has: one for each event."""
        values: Tensor = self.times.values()
        return values.new_full((), len(values), dtype=torch.float32)

    def work(self) -> Tensor:
        """Return the work of each history, [B], by which a shuffler balances: pairs of events."""
        lengths: Tensor = self.times.lengths()
        return lengths.float().square()


TIME_BUCKETS = 64
"""Buckets of the time between two tokens, in seconds; the last one begins after five years."""

_BUCKET_WIDTH = 0.301  # of the natural logarithm of the seconds


@dataclass(frozen=True, slots=True)
class Places:
    """The places of the tokens of jagged sequences in padded ones.

    Attributes:
        rows: The sequence of each token, [T].
        columns: The token's place within it, from 0, [T].
        batch: The number of sequences.
        longest: The length of the padded ones.
    """

    rows: Tensor
    columns: Tensor
    batch: int
    longest: int

    @classmethod
    def of(cls, lengths: Tensor, tokens: int, longest: int) -> Places:
        """Return the places for sequences of these lengths, [B].

        Raises:
            ValueError: A sequence is longer than ``longest``. On other devices than the CPU this is
                an error of the device, since a check would make the host wait.
        """
        if lengths.is_cpu and lengths.numel() and int(lengths.max()) > longest:
            raise ValueError(
                f"a sequence has {int(lengths.max())} tokens, and the model takes {longest}: cut "
                "it, or give the model a greater RankingConfig.longest"
            )
        order = torch.arange(len(lengths), device=lengths.device)
        rows = torch.repeat_interleave(order, lengths, output_size=tokens)
        starts = lengths.cumsum(0) - lengths
        columns = torch.arange(tokens, device=lengths.device) - starts[rows]
        return cls(rows, columns, len(lengths), longest)

    def pad(self, tokens: Tensor) -> Tensor:
        """Return tokens [T, ...] as [B, N, ...], with zeros where there is no token."""
        padded = tokens.new_zeros(self.batch, self.longest, *tokens.shape[1:])
        return padded.index_put((self.rows, self.columns), tokens)

    def take(self, padded: Tensor) -> Tensor:
        """Return padded tokens [B, N, ...] as [T, ...]."""
        return padded[self.rows, self.columns]


class RelativeBias(nn.Module):
    """The bias of each pair of tokens, by their distance and by the time between them.

    Args:
        longest: The greatest number of tokens in a sequence.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()
        # As tables: the gradients of an indexed vector would be added in any order of threads.
        self.of_distance = nn.Parameter(torch.zeros(longest, 1))
        self.of_time = nn.Parameter(torch.zeros(TIME_BUCKETS, 1))
        place = torch.arange(longest)
        distance = (place[:, None] - place).clamp(min=0)
        self.distance: Tensor
        self.register_buffer("distance", distance, persistent=False)

    def forward(self, times: Tensor) -> Tensor:
        """Return the biases [B, N, N] (token, earlier token) of padded times in seconds, [B, N]."""
        between = (times[:, :, None] - times[:, None, :]).abs().clamp(min=1)
        bucket = (between.double().log() / _BUCKET_WIDTH).long().clamp(max=TIME_BUCKETS - 1)
        embedding = nn.functional.embedding
        biases = embedding(self.distance, self.of_distance) + embedding(bucket, self.of_time)
        return biases.squeeze(-1)


class HSTULayer(nn.Module):
    """A layer of HSTU.

    Args:
        width: The width of a token, D.
        heads: The number of heads; it divides the width.
        longest: The greatest number of tokens in a sequence, N.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not divide a width of {width}: choose another one")
        self.heads = heads
        self.longest = longest
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 4 * width)
        self.bias = RelativeBias(longest)
        self.attended = nn.LayerNorm(width)
        self.output = nn.Linear(width, width)
        later = torch.ones(longest, longest, dtype=torch.bool).triu(1)
        self.later: Tensor
        self.register_buffer("later", later, persistent=False)

    def forward(self, tokens: Tensor, times: Tensor, places: Places) -> Tensor:
        """Return tokens [T, D] for tokens [T, D] and their times in seconds, [T]."""
        mixed = nn.functional.silu(self.project(self.norm(tokens)))
        gate, *rest = mixed.chunk(4, dim=1)
        value, query, key = (
            places.pad(torch.stack(part.chunk(self.heads, dim=1), 1)).transpose(1, 2)
            for part in rest
        )  # [B, heads, N, D / heads]
        bias = self.bias(places.pad(times)).unsqueeze(1)
        weights = nn.functional.silu(query @ key.transpose(2, 3) + bias) / self.longest
        weights = weights.masked_fill(self.later, 0)
        attended = places.take((weights @ value).transpose(1, 2).flatten(2))
        result: Tensor = tokens + self.output(self.attended(attended) * gate)
        return result


TASKS = {"liked": 8, "loved": 10}
"""The predictions, and the least action for which each is true."""


@dataclass(frozen=True, slots=True)
class RankingConfig:
    """The sizes of the model. The defaults are small: they suit two CPU cores.

    Attributes:
        items: Rows of the table of items.
        width: The width of an embedding and of a token.
        heads: The number of heads of the attention; it divides the width.
        layers: The number of layers.
        longest: The greatest number of events in a history.
        learning_rate: Adagrad's learning rate, for all parameters.
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
        """Return the losses of a batch of T events, and logits and labels without a graph.

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
    """Return what the model is to predict, 0 or 1: [T, tasks] float32."""
    actions = batch.ids[ACTION].values()
    return torch.stack([actions >= least for least in TASKS.values()], dim=1).float()


def generate_ratings(
    users: int, items: int, longest: int, seed: int, *, least: int = 1
) -> list[list[Event]]:
    """Draw histories from a model of tastes, which a ranking model can learn in part.

    An item's rating follows its quality, how well it suits the user, and chance; users come back to
    what suits them. Histories have ``least`` to ``longest`` events.
    """
    draws = np.random.default_rng(seed)
    quality = draws.normal(size=items)
    kinds, tastes = draws.normal(size=(items, 4)), draws.normal(size=(users, 4))
    histories = []
    for taste in tastes:
        count = int(draws.integers(least, longest + 1))
        offered = draws.integers(0, items, size=(count, 2))
        suits = (kinds[offered] @ taste) / 2
        rows = offered[np.arange(count), suits.argmax(axis=1)]
        stars = 3.2 + 0.7 * quality[rows] + 0.5 * suits.max(axis=1, initial=-9.0)
        stars = stars + draws.normal(scale=0.5, size=count)
        actions = np.clip(np.rint(2 * stars), 1, 10)
        times = np.exp(draws.uniform(0, 14, size=count)).cumsum()
        columns = zip(rows, actions, times, strict=True)
        histories.append([Event(*map(int, row)) for row in columns])
    return histories
