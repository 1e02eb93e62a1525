"""The memory that the tasks of an iteration hold: bytes, from which task to which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from swpipe.core.messages import listed, shown
from swpipe.core.plan import PULL
from swpipe.core.task import is_name
from swpipe.errors import PlanError, Problem

KEPT = ""
"""The ``end`` of a block that the iteration holds until it is retired."""

WORKING = "while it runs"
"""The ``attribute`` that stands for the memory a task needs while it runs."""


def holder(task: str, attribute: str) -> str:
    """Return a description of what holds memory of a task."""
    if attribute == WORKING:
        return f"{task} {WORKING}"
    return f"ctx.{attribute} of {task}" if attribute else f"other memory of {task}"


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that one iteration holds from one task to another.

    Attributes:
        begin: The task that allocates it; ``PULL`` for the batch.
        end: The task in which it is freed; ``KEPT`` if the iteration's end frees it.
        bytes: Its size.
        attribute: The attribute of the context that leads to it; "" if none does, as for tensors
            that autograd has saved for the backward.
        removed: Whether ``end`` frees it by deleting or replacing an attribute. A plan with streams
            holds this memory until the iteration is retired.
        later: 1 if ``end`` frees it in the next iteration, as with gradients that are set to None
            before the next backward; else 0.
        users: Under a plan with ``keep``: the attribute is deleted after all of these tasks, and
            the block with it. ``end`` is then ``KEPT``, as in a plan that keeps all.
    """

    begin: str
    end: str = KEPT
    bytes: int = 0
    attribute: str = ""
    removed: bool = False
    later: int = 0
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """The memory of one iteration, by its tasks.

    Attributes:
        blocks: The memory that is held beyond the end of the task that allocated it. A storage
            counts once, however many tensors and attributes share it.
        working: Task to the peak of the memory that it needs while it runs, in addition to blocks.
            Blocks count from the task that allocates them to the task that frees them, both
            included. So the peak is negative if a task frees before it allocates, as a backward.

    Raises:
        PlanError: A size is not an integer of 0 or more, or a name is no task's.
    """

    blocks: tuple[Block, ...] = ()
    working: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise PlanError(problems)

    def _problems(self) -> Iterator[Problem]:
        for block in self.blocks:
            # type() and not isinstance(), since True is an int.
            if type(block.bytes) is not int or block.bytes < 0 or block.later not in (0, 1):
                rule = "bytes is an integer of 0 or more, and later 0 or 1"
                yield Problem(f"memory from {shown(block.begin)} is {shown(block)}: {rule}")
        for name, size in self.working.items():
            if type(size) is not int:
                yield Problem(f"task {shown(name)} needs {shown(size)}: give a number of bytes")
        # Names of tasks only: PULL and KEPT are left out of this set.
        for name in self.tasks:
            if not (isinstance(name, str) and is_name(name)):
                yield Problem(f"memory of {shown(name)}: it is no task's name")

    @property
    def tasks(self) -> frozenset[str]:
        """The tasks that allocate, free or need memory."""
        ends = {name for block in self.blocks for name in (block.begin, block.end, *block.users)}
        return frozenset((ends | {*self.working}) - {PULL, KEPT})

    def under(self, keep: Sequence[str] | None) -> tuple[Block, ...]:
        """Return the blocks under a plan with this ``keep``, whatever they were measured under."""
        # An attribute that this plan keeps is not deleted after its users.
        return tuple(
            replace(block, users=()) if keep is None or block.attribute in keep else block
            for block in self.blocks
        )

    def held(self, order: Sequence[str]) -> list[int]:
        """Return the bytes of blocks in a serial loop during each task, and last after the pull."""
        # Index -1, the last entry of ``held``, is the time between the pull and the first task.
        place = {PULL: -1, **{name: k for k, name in enumerate(order)}, KEPT: len(order)}
        held = [0] * (len(order) + 1)
        for block in self.blocks:
            begin = place[block.begin]
            end = place[block.end]
            end = max((place[user] for user in block.users), default=end)
            for k in range(-1, len(order)):
                # A block that the next iteration frees is held from its begin on, by this one, and
                # until its end, by the previous one. Any other needs both conditions.
                count = (begin <= k) + (k <= end)
                held[k] += block.bytes * (count if block.later else count // 2)
        return held

    def serial_peak(self, order: Iterable[str]) -> int:
        """Return the peak memory of a serial loop that runs its tasks in this order."""
        names = [*order]
        held = self.held(names)
        return max([held[-1], *(held[k] + self.working.get(n, 0) for k, n in enumerate(names))])

    def check(self, tasks: Iterable[str]) -> None:
        """Check that the memory belongs to no other tasks than these.

        Raises:
            PlanError: It names other tasks.
        """
        if other := sorted(self.tasks - {*tasks}):
            mend = "measure those of this plan"
            raise PlanError([Problem(f"memory is given for tasks {listed(other)}: {mend}")])

    def to_dict(self) -> dict[str, Any]:
        """Return the memory as plain data, without default values."""
        rows = [{key: v for key, v in asdict(block).items() if v} for block in self.blocks]
        return {"blocks": rows, "working": dict(self.working)}


def joined(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return blocks that differ only in their bytes as one block, the largest first."""
    sizes: dict[Block, int] = defaultdict(int)
    for block in blocks:
        sizes[replace(block, bytes=0)] += block.bytes
    merged = (replace(block, bytes=size) for block, size in sizes.items())
    return tuple(sorted(merged, key=lambda block: (-block.bytes, astuple(block))))
