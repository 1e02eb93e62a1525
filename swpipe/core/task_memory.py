"""What the tasks of an iteration hold: bytes, from which task to which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Self

from swpipe.core.messages import listed, shown
from swpipe.core.plan import PULL
from swpipe.core.task import is_name
from swpipe.errors import PlanError, Problem

KEPT = ""
"""The end of a block that the iteration holds until it is retired."""

WORKING = "while it runs"
"""The ``attribute`` of what a task needs while it runs."""


def holder(task: str, attribute: str) -> str:
    """What holds memory of a task, in words."""
    if attribute == WORKING:
        return f"{task} {WORKING}"
    return f"ctx.{attribute} of {task}" if attribute else f"other memory of {task}"


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that one iteration holds from one task to another.

    Attributes:
        begin: The task that makes it; ``PULL`` for the batch.
        end: The task in which it is freed; ``KEPT`` where the iteration's end frees it.
        bytes: Its size.
        attribute: Where on the context it is found; "" where no attribute leads to it, such as
            tensors that autograd has saved for the backward.
        removed: ``end`` frees it by deleting or replacing an attribute. A plan with streams holds
            such memory until the iteration is retired.
        later: 1 where it is ``end`` of the next iteration that frees it, as with gradients that
            are set to None before the next backward; else 0.
        users: Under a plan with ``keep``: the tasks after all of which the attribute goes, and the
            block with it. ``end`` is then ``KEPT``, as it is where all is kept.
    """

    begin: str
    end: str
    bytes: int
    attribute: str = ""
    removed: bool = False
    later: int = 0
    users: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskMemory:
    """The memory of one iteration, by its tasks.

    Attributes:
        blocks: What is held beyond the end of the task that made it. A storage counts once,
            however many tensors and attributes share it.
        working: Task to what it needs at most while it runs, beside the blocks from those that it
            makes to those that it frees. Negative where it frees before it makes, as a backward.

    Raises:
        PlanError: A size is not an integer of 0 or more, or a name is none.
    """

    blocks: tuple[Block, ...] = ()
    working: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problems := [*self._problems()]:
            raise PlanError(problems)

    def _problems(self) -> Iterator[Problem]:
        for block in self.blocks:
            if type(block.bytes) is not int or block.bytes < 0 or block.later not in (0, 1):
                rule = "bytes is an integer of 0 or more, and later 0 or 1"
                yield Problem(f"memory from {shown(block.begin)} is {shown(block)}: {rule}")
        for name, size in self.working.items():
            if type(size) is not int:
                yield Problem(f"task {shown(name)} needs {shown(size)}: give a number of bytes")
        for name in self.tasks:
            if not (isinstance(name, str) and is_name(name)):
                yield Problem(f"memory of {shown(name)}: it is no task's name")

    @property
    def tasks(self) -> frozenset[str]:
        """The tasks that make, free or need something."""
        ends = {name for one in self.blocks for name in (one.begin, one.end, *one.users)}
        return frozenset((ends | {*self.working}) - {PULL, KEPT})

    def under(self, keep: Sequence[str] | None) -> tuple[Block, ...]:
        """The blocks under a plan with this ``keep``, whatever they were measured under."""
        return tuple(
            replace(one, users=()) if keep is None or one.attribute in keep else one
            for one in self.blocks
        )

    def held(self, order: Sequence[str]) -> list[int]:
        """Bytes of blocks while each task runs, and last after the pull, of a serial loop."""
        place = {PULL: -1, **{name: k for k, name in enumerate(order)}, KEPT: len(order)}
        held = [0] * (len(order) + 1)
        for block in self.blocks:
            begin, end = place[block.begin], place[block.end]
            end = max((place[user] for user in block.users), default=end)
            for k in range(-1, len(order)):
                count = (begin <= k) + (k <= end)  # of this iteration, and of the one before
                held[k] += block.bytes * (count if block.later else count // 2)
        return held

    def serial_peak(self, order: Iterable[str]) -> int:
        """What a serial loop holds at most, its tasks run in this order."""
        names = [*order]
        held = self.held(names)
        return max([held[-1], *(held[k] + self.working.get(n, 0) for k, n in enumerate(names))])

    def check(self, tasks: Iterable[str]) -> None:
        """Check that it is of these tasks.

        Raises:
            PlanError: It names others.
        """
        if other := sorted(self.tasks - {*tasks}):
            mend = "measure those of this plan"
            raise PlanError([Problem(f"memory is given for tasks {listed(other)}: {mend}")])

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what has its default is left out."""
        rows = [{key: v for key, v in asdict(block).items() if v} for block in self.blocks]
        return {"blocks": rows, "working": dict(self.working)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Read what ``to_dict`` made.

        Raises:
            PlanError: It is something else.
        """
        try:
            rows = ({**row, "users": tuple(row.get("users", ()))} for row in data["blocks"])
            blocks = tuple(Block(**{"end": KEPT, "bytes": 0, **row}) for row in rows)
            working = dict(data["working"])
        except (TypeError, ValueError, LookupError) as error:
            rule = 'memory is an object of "blocks", a list of objects, and "working", an object'
            raise PlanError([Problem(f"{rule}: {shown(str(error))}")]) from error
        return cls(blocks, working)


def joined(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Blocks that differ in their bytes alone as one, the largest first."""
    sizes: dict[Block, int] = defaultdict(int)
    for block in blocks:
        sizes[replace(block, bytes=0)] += block.bytes
    found = (replace(block, bytes=size) for block, size in sizes.items())
    return tuple(sorted(found, key=lambda block: (-block.bytes, astuple(block))))
