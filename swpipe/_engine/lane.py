"""A lane that runs: its instructions, bound to steps and counters, and where it is."""

from __future__ import annotations

from typing import NamedTuple

from swpipe._engine.bind import Step
from swpipe._engine.program import Instruction, Lane
from swpipe._engine.torch_state import ThreadTorchState
from swpipe._engine.waiting import HostThread, ProgressCounter


class BoundWait(NamedTuple):
    """A wait for another lane's progress: ``period * size + base``."""

    progress: ProgressCounter
    size: int  # instructions in the lane that is waited for
    base: int  # its progress within a period once it has passed the instruction


class BoundInstruction(NamedTuple):
    """One instruction, bound: what ``_run_period`` executes."""

    waits: tuple[BoundWait, ...]
    stage: int
    step: Step
    publish: bool
    ins: Instruction


class LaneRunner:
    """A lane that runs; ``period`` and ``position`` say where it is."""

    def __init__(self, lane: Lane, progress: ProgressCounter) -> None:
        self.group = lane.group
        self.instructions = lane.instructions
        self.size = len(lane.instructions)
        self.progress = progress  # counts the instructions passed, in all periods
        self.period = 0
        self.position = 0
        self.ops: tuple[BoundInstruction, ...] = ()
        self.observed_ops: tuple[BoundInstruction, ...] = ()
        self.torch_state: ThreadTorchState | None = None  # of a worker
        self.thread: HostThread | None = None

    @property
    def instruction(self) -> Instruction:
        """Where the lane is."""
        return self.instructions[self.position]
