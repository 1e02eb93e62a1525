"""A slot: a named value of one batch."""

from __future__ import annotations

from dataclasses import dataclass

from swpipe.core.messages import shown

BATCH = "batch_cpu"
"""The slot that holds what the iterator gave; no task writes it."""

RESULT = "step_result"
"""The slot that ``progress`` returns."""


@dataclass(frozen=True, slots=True)
class DataSlot:
    """The slot ``name`` of the batch that is ``batch_offset`` ahead; a value (seed section 3.1).

    A task reads and writes the slots of its own batch, so its slots have its lookahead as their
    offset. A bare name among ``Task(reads=...)`` or ``writes`` stands for that slot.

    Attributes:
        name: Any non-empty string.
        batch_offset: Batches ahead of the one that ``progress`` returns.

    Raises:
        TypeError: ``name`` is no string, or ``batch_offset`` no integer.
        ValueError: ``name`` is empty.
    """

    name: str
    batch_offset: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a slot's name is a string, not {shown(self.name)}")
        if not self.name:
            raise ValueError("a slot needs a name: DataSlot('batch_gpu')")
        if type(self.batch_offset) is not int:
            raise TypeError(
                f"slot {self.name!r}: batch_offset is {shown(self.batch_offset)}: give an integer"
            )
