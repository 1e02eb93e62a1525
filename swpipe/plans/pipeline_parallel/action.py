"""Actions: what a rank does to one microbatch at one stage, and the error that names one."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias, get_args

from swpipe.core.messages import shown

Op: TypeAlias = Literal["F", "I", "W", "B"]
OPS: tuple[Op, ...] = get_args(Op)

_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")


class Action(NamedTuple):
    """One entry of a schedule; it prints as ``2F0``: stage 2, forward, microbatch 0.

    Attributes:
        stage: The stage of the model, from 0; the output of stage s is the input of stage s + 1.
        op: ``F``, forward; ``I``, the gradient of the stage's input (the B of the zero-bubble
            papers); ``W``, the gradient of its weights; ``B``, both at once.
        micro: The microbatch, from 0.
    """

    stage: int
    op: Op
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as ``text``.

        Raises:
            ScheduleError: The text is something else, or something follows.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{shown(text)} is no action: write stage, F, I, W or B, and microbatch, as 2F0"
            )
        stage, op, micro = match.groups()
        return cls(int(stage), op, int(micro))  # type: ignore[arg-type]


class ScheduleError(ValueError):
    """A pipeline-parallel schedule cannot run, or does not fit its costs; the message is one line.

    Attributes:
        action: The action at fault; None where it is no single action.
    """

    def __init__(self, text: str, action: Action | None = None) -> None:
        super().__init__(text)
        self.action = action
