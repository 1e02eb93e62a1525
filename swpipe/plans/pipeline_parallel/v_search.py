"""Local search over orders of a V: one entry of a rank is moved at a time.

A move is taken if the result is no worse than the present order, or than the one some moves ago
(late acceptance: E. K. Burke and Y. Bykov, "The late acceptance hill-climbing heuristic", 2017).
"""

from __future__ import annotations

from random import Random

from swpipe.plans.pipeline_parallel.v_order import Objective, Order, OrderTimes, VOrders

_HISTORY = 50
"""How many moves ago the order was that a new one is compared with."""

_MEAN_DISTANCE = 4
"""How far an entry is moved, on average."""

_SHARE = 0.1
"""The weight of the mean over the ranks beside the maximum: it leads over plateaus."""


class LocalSearch:
    """A search from one order.

    Attributes:
        order: The best order so far.
        value: Its makespan, or largest bubble.
        idle_moves: Moves since it was found.
    """

    def __init__(self, orders: VOrders, objective: Objective, order: Order, rng: Random) -> None:
        self.orders, self.objective, self.rng = orders, objective, rng
        times = orders.times(order)
        if times is None:
            raise ValueError("a search starts from an order that can run")
        self.order, self.value = order, times.value(objective)
        self._present, self._energy = order, self._energy_of(times)
        self._history = [self._energy] * _HISTORY
        self._moves = self.idle_moves = 0

    def _energy_of(self, times: OrderTimes) -> float:
        values = times.values(self.objective)
        return max(values) + _SHARE * sum(values) / len(values)

    def move(self) -> None:
        """Try one move."""
        changed = self._drawn()
        times = None if changed is None else self.orders.times(changed)
        place = self._moves % _HISTORY
        self._moves += 1
        self.idle_moves += 1
        if changed is not None and times is not None:
            energy = self._energy_of(times)
            if energy <= max(self._energy, self._history[place]):
                self._present, self._energy = changed, energy
                if times.value(self.objective) < self.value:
                    self.order, self.value = changed, times.value(self.objective)
                    self.idle_moves = 0
        self._history[place] = self._energy

    def _drawn(self) -> Order | None:
        """The present order with one entry moved; None if that is no other valid order."""
        rng, present = self.rng, self._present
        rank = rng.randrange(len(present))
        row = present[rank]
        source = rng.randrange(1, len(row))
        distance = 1 + int(rng.expovariate(1 / _MEAN_DISTANCE))
        target = source + distance * rng.choice((-1, 1))
        if not 1 <= target < len(row):
            return None
        moved = row.copy()
        moved.insert(target, moved.pop(source))
        if moved == row or not self.orders.is_valid(moved):
            return None
        return [*present[:rank], moved, *present[rank + 1 :]]
