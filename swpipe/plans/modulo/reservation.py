"""Who holds a resource when, modulo the initiation interval: a table of slots for each resource.

A set of slots is an integer, bit k standing for slot k, so that all starts of an operation are
tried at once::

    taken          ..###.....##      slots 2 to 4, 10 and 11 of 12
    blocked for 3  ######..####      an operation of 3 slots cannot start there: it would run into
                                     what is taken, over the end of the table too
"""

from __future__ import annotations


class Table:
    """One resource over one period: what is taken now is taken every period.

    Attributes:
        slots: Of the period.
        taken: Task to the slots that it has.
    """

    __slots__ = ("_all", "slots", "taken")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.taken: dict[int, int] = {}
        self._all = 0

    def put(self, task: int, start: int, time: int) -> None:
        """Take it for a task, from slot ``start`` modulo the period on."""
        mask = self._turn(((1 << time) - 1), start % self.slots)
        self.taken[task] = mask
        self._all |= mask

    def free(self, task: int) -> None:
        """Give back what a task has, if it has anything."""
        if self.taken.pop(task, 0):
            self._all = 0
            for mask in self.taken.values():
                self._all |= mask

    def clashing(self, start: int, time: int) -> set[int]:
        """The tasks that have some of these slots."""
        mask = self._turn(((1 << time) - 1), start % self.slots)
        if not mask & self._all:
            return set()
        return {task for task, has in self.taken.items() if has & mask}

    def blocked(self, time: int) -> int:
        """Where an operation of so many slots cannot start."""
        found, reach = self._all, 1
        if not found or not time:
            return 0
        slots = self.slots
        full = (1 << slots) - 1
        while reach < time:
            step = min(reach, time - reach)
            found |= found >> step | (found << slots - step) & full
            reach += step
        return found

    def _turn(self, mask: int, by: int) -> int:
        turned = mask << by
        return (turned | turned >> self.slots) & ((1 << self.slots) - 1)


class Starts:
    """Where an operation can start: the slots that are not blocked, in every period.

    Args:
        slots: Of the period.
        blocked: The set of slots where it cannot.
    """

    __slots__ = ("_free", "_slots")

    def __init__(self, slots: int, blocked: int) -> None:
        self._slots = slots
        self._free = ~blocked & ((1 << slots) - 1)

    def after(self, start: int) -> int | None:
        """The first at ``start`` or later; None where there are none at all."""
        if not self._free:
            return None
        at = start % self._slots
        rest = self._free >> at
        if rest:
            return start + (rest & -rest).bit_length() - 1
        return start - at + self._slots + (self._free & -self._free).bit_length() - 1

    def before(self, start: int) -> int:
        """The last at ``start`` or sooner; there must be one."""
        at = start % self._slots
        sooner = self._free & ((2 << at) - 1)
        if sooner:
            return start - at + sooner.bit_length() - 1
        return start - at - self._slots + self._free.bit_length() - 1
