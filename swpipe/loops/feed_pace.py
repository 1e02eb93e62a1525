"""Which sample is asked for next, under which version of the policy, and which is handed out.

Samples are handed out at positions 0, 1, 2, ...; position p belongs to batch p // batch, and batch
k is trained by version k. So a sample of version v that may be at most ``staleness`` versions old
has a deadline: position (v + staleness + 1) * batch, exclusive.

    as asked       position p is sample p, of version max(0, p // batch - staleness)
    a replay       position p is what was recorded
    as completed   a sample has the newest version when it is asked for. Of those that arrived, the
                   first is handed out that leaves time for all others: if they are sorted by
                   deadline, the j-th (from 1) fits if p + j <= its deadline

Asking stops at (newest version + staleness + 1) * batch samples. Then all that are asked for fit,
handing one out keeps that, and so does asking for a lost one again, whose deadline is later. The
sample with the earliest deadline may always be handed out, so that nothing can get stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Arrival(NamedTuple):
    """One sample in the order in which samples are handed out.

    Attributes:
        number: Of its request, from 0.
        version: Of the policy that it was made with, from 0.
    """

    number: int
    version: int


class FeedPace:
    """What may be asked for, and what may be handed out. Not for several threads.

    Attributes:
        version: The newest version; -1 before the first.
        arrivals: What was handed out so far.
    """

    def __init__(
        self, batch: int, staleness: int, completed: bool, replay: Sequence[Arrival] | None
    ) -> None:
        self.version = -1
        self.arrivals: list[Arrival] = []
        self.batch = batch
        self.staleness = staleness
        self._completed = completed and replay is None
        self.replay = replay
        self._asked = 0
        self._requests = 0
        self._end = None if replay is None else len(replay)
        self._open: dict[int, int] = {}  # number to version, of those not handed out yet
        self._lost: list[int] = []
        self._arrived: list[int] = []

    def needed(self) -> int:
        """Return how many requests the next version may ask for."""
        if self.replay is None:
            return (self.version + self.staleness + 2) * self.batch
        numbers = [each.number for each in self.replay if each.version <= self.version + 1]
        return 1 + max(numbers, default=-1)

    def publish(self, requests: int) -> None:
        """Begin the next version; there are so many requests, fewer than needed only at the end."""
        if requests < self.needed():
            self._end = requests
        self.version += 1
        self._requests = requests

    @property
    def done(self) -> bool:
        """Whether all samples were handed out."""
        return self._end is not None and len(self.arrivals) >= self._end

    def ask(self) -> Arrival | None:
        """Return the sample to ask for next, or None if none may be asked for now."""
        if self._lost:
            number = self._lost.pop(0)
            if self._completed:
                self._open[number] = self.version
            return Arrival(number, self._open[number])
        if self._asked == self._end:
            return None
        arrival = self._planned(self._asked)
        if arrival.version > self.version or arrival.number >= self._requests:
            return None
        self._asked += 1
        self._open[arrival.number] = arrival.version
        return arrival

    def arrive(self, number: int) -> None:
        """Note that a sample is there."""
        self._arrived.append(number)

    def lose(self, number: int) -> None:
        """Note that a sample that was asked for will not come."""
        self._lost.append(number)

    def take(self) -> Arrival | None:
        """Return the sample to hand out next, or None if it is not there yet."""
        if self.done:
            return None
        candidates = (
            self._arrived if self._completed else [self._planned(len(self.arrivals)).number]
        )
        for number in candidates:
            if number in self._arrived and (not self._completed or self._leaves_time(number)):
                self._arrived.remove(number)
                self.arrivals.append(Arrival(number, self._open.pop(number)))
                return self.arrivals[-1]
        return None

    def _planned(self, position: int) -> Arrival:
        if self.replay is not None:
            return self.replay[position]
        if self._completed:
            return Arrival(position, self.version)
        return Arrival(position, max(0, position // self.batch - self.staleness))

    def _leaves_time(self, number: int) -> bool:
        others = {i: v for i, v in self._open.items() if i != number}
        others |= dict.fromkeys(self._lost, self.version)  # they will have this one or a newer
        return all(
            len(self.arrivals) + 1 + rank <= (version + self.staleness + 1) * self.batch
            for rank, version in enumerate(sorted(others.values()), 1)
        )
