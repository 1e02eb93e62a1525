"""Batches of users' histories: what HSTU is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swpipe.tasks.torchrec._torchrec import JaggedTensor, KeyedJaggedTensor, Pipelineable

ITEM, ACTION = "item", "action"
"""The features of an event."""

ACTIONS = 11
"""Actions are ratings in half stars, 1 to 10; 0 is none."""


class Event(NamedTuple):
    """A user has rated an item.

    Attributes:
        item: A row of the table of items.
        action: The rating in half stars, 1 to 10.
        time: Seconds, from any origin.
    """

    item: int
    action: int
    time: int


@dataclass
class SequenceBatch(Pipelineable):  # type: ignore[misc]
    """The histories of B users, in all T events; some may be empty.

    Attributes:
        ids: Features "item" and "action", one pair for each event, in order of time.
        times: The time of each event in seconds, as int64.
    """

    ids: KeyedJaggedTensor
    times: JaggedTensor

    @classmethod
    def of(cls, histories: Sequence[Sequence[Event]]) -> SequenceBatch:
        """A batch on the host."""
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
        """The batch on a device."""
        return SequenceBatch(
            self.ids.to(device, non_blocking=non_blocking),
            self.times.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Another stream uses the tensors; TorchRec asks batches for this."""
        self.ids.record_stream(stream)
        self.times.record_stream(stream)

    def pin_memory(self) -> SequenceBatch:
        """The batch in page-locked memory, from which a GPU copies by itself."""
        times = self.times
        pinned = JaggedTensor(times.values().pin_memory(), lengths=times.lengths().pin_memory())
        return SequenceBatch(self.ids.pin_memory(), pinned)

    def num_loss_tokens(self) -> Tensor:
        """How many losses this rank has: one for each event."""
        values: Tensor = self.times.values()
        return values.new_full((), len(values), dtype=torch.float32)

    def work(self) -> Tensor:
        """The work of each history, [B], for a shuffler that balances it: pairs of events."""
        lengths: Tensor = self.times.lengths()
        return lengths.float().square()
