"""The order in which samples are requested and handed out, and the policy version of each.

Samples are handed out at positions 0, 1, 2, ...; position p belongs to batch p // batch, and batch
k is trained by version k. So a sample of version v that may be at most ``staleness`` versions old
has a deadline: position (v + staleness + 1) * batch, exclusive.

    as asked       position p is sample p, of version max(0, p // batch - staleness)
    a replay       position p is what was recorded
    as completed   a sample has the newest version when it is asked for. Of those that arrived, the
                   first is handed out that leaves time for all others: if they are sorted by
                   deadline, the j-th (from 1) fits if p + j <= its deadline

No more than (newest version + staleness + 1) * batch samples are requested. All requested samples
then meet their deadlines. Handing out a sample keeps this property, and so does requesting a lost
sample again, because its deadline becomes later. The sample with the earliest deadline may always
be handed out, so that the feed cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Arrival(NamedTuple):
    """The record of one sample that was handed out.

    Attributes:
        number: The index of the sample's request, from 0.
        version: The version of the policy that made the sample, from 0.
    """

    number: int
    version: int


class FeedPace:
    """The state that decides which samples may be requested and handed out; not thread-safe.

    Attributes:
        version: The newest version of the policy; -1 before the first.
        requests: How many requests were pulled in all.
        arrivals: The samples handed out so far, in order.
    """

    def __init__(
        self, batch: int, staleness: int, completed: bool, replay: Sequence[Arrival] | None
    ) -> None:
        self.version = -1
        self.arrivals: list[Arrival] = []
        self.batch = batch
        self.staleness = staleness
        self._completed = completed and replay is None
        self._replay = replay
        self._asked = 0
        self.requests = 0
        self._end = None if replay is None else len(replay)
        self._open: dict[int, int] = {}  # sample to version, from request to hand-over
        self._lost: list[int] = []

    def needed(self) -> int:
        """Return the number of requests to pull in all before the next version is published."""
        if self._replay is None:
            return (self.version + self.staleness + 2) * self.batch
        numbers = [each.number for each in self._replay if each.version <= self.version + 1]
        return 1 + max(numbers, default=-1)

    def publish(self, requests: int) -> None:
        """Begin the next version, for which ``requests`` requests have been pulled in all.

        Raises:
            ValueError: A replay needs more requests.
        """
        needed = self.needed()
        # Fewer requests than needed mean that the source of requests has ended.
        if requests < needed:
            if self._replay is not None:
                raise ValueError(
                    f"replay has sample {needed - 1}, of {requests} requests: give the requests of "
                    "the run that was recorded"
                )
            self._end = requests
        self.version += 1
        self.requests = requests

    @property
    def done(self) -> bool:
        """Whether all samples were handed out."""
        return self._end is not None and len(self.arrivals) >= self._end

    def ask(self) -> Arrival | None:
        """Return the sample to ask for next, or None if none may be asked for now."""
        # A lost sample comes first. In the order of completion it takes the newest version, which
        # makes its deadline later; in the other orders its version is part of the promised result.
        if self._lost:
            number = self._lost.pop(0)
            if self._completed:
                self._open[number] = self.version
            return Arrival(number, self._open[number])
        if self._asked == self._end:
            return None
        arrival = self._planned(self._asked)
        if arrival.version > self.version or arrival.number >= self.requests:
            return None
        self._asked += 1
        self._open[arrival.number] = arrival.version
        return arrival

    def lose(self, number: int) -> None:
        """Record that a requested sample is lost and must be requested again."""
        self._lost.append(number)

    def take(self, arrived: Collection[int]) -> Arrival | None:
        """Return the sample to hand out next, or None if it has not arrived yet.

        Not to be called when all samples are ``done``.

        Args:
            arrived: The samples that have arrived and were not handed out, in this order.
        """
        if self._completed:
            number = next(filter(self._leaves_time, arrived), -1)
        else:
            number = self._planned(len(self.arrivals)).number
        if number not in arrived:
            return None
        self.arrivals.append(Arrival(number, self._open.pop(number)))
        return self.arrivals[-1]

    def _planned(self, position: int) -> Arrival:
        if self._replay is not None:
            return self._replay[position]
        if self._completed:
            return Arrival(position, self.version)
        return Arrival(position, max(0, position // self.batch - self.staleness))

    def _leaves_time(self, number: int) -> bool:
        # The remaining samples, sorted by deadline, take the next positions. Version order is
        # deadline order, since the deadline (version + staleness + 1) * batch grows with it.
        others = {i: v for i, v in self._open.items() if i != number}
        others |= dict.fromkeys(self._lost, self.version)  # made with this version or a newer one
        return all(
            len(self.arrivals) + 1 + rank <= (version + self.staleness + 1) * self.batch
            for rank, version in enumerate(sorted(others.values()), 1)
        )
