"""The layer of HSTU: pointwise attention over jagged sequences.

For one sequence X of n tokens, shape [n, D], with SiLU written s and heads left out::

    U, V, Q, K = s(Linear(LayerNorm(X)))                       each [n, D]
    A          = s(Q K^T + rab) / N,  A[i, j] = 0 for j > i    [n, n]
    Y          = X + Linear(LayerNorm(A V) * U)                [n, D]

There is no softmax, so that the weights of a token's history keep their size: N is the same for
all sequences, the longest allowed. ``rab[i, j]`` is a learnt bias of the distance i - j, plus one
of the time between both, in buckets that grow with it.

Source: J. Zhai et al., "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers
for Generative Recommendations", 2024, section 3. The division by N and the layer norms are those of
the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

TIME_BUCKETS = 64
"""Buckets of the time between two tokens, in seconds; the last one begins after five years."""

_BUCKET_WIDTH = 0.301  # of the natural logarithm of the seconds


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of jagged sequences lie in padded ones.

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
        """Of sequences with these lengths, [B]; ``tokens`` is their sum, known on the host.

        Raises:
            ValueError: A sequence is longer than ``longest``. On other devices than the CPU this is
                an error of the device, since looking would make the host wait.
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
        """[T, ...] to [B, N, ...], with zeros where there is no token."""
        padded = tokens.new_zeros(self.batch, self.longest, *tokens.shape[1:])
        return padded.index_put((self.rows, self.columns), tokens)

    def take(self, padded: Tensor) -> Tensor:
        """[B, N, ...] to [T, ...]."""
        return padded[self.rows, self.columns]


class RelativeBias(nn.Module):
    """The bias of each pair of tokens: of their distance, and of the time between them.

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
        """From padded times in seconds, [B, N], to [B, N, N]: token, earlier token."""
        between = (times[:, :, None] - times[:, None, :]).abs().clamp(min=1)
        bucket = (between.double().log() / _BUCKET_WIDTH).long().clamp(max=TIME_BUCKETS - 1)
        embedding = nn.functional.embedding
        biases = embedding(self.distance, self.of_distance) + embedding(bucket, self.of_time)
        return biases.squeeze(-1)


class HSTULayer(nn.Module):
    """One layer.

    Args:
        width: Of a token, D.
        heads: How many; they divide the width.
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
        """From tokens [T, D] and their times in seconds, [T], to tokens [T, D]."""
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
