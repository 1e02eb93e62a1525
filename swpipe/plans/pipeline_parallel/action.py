"""Actions: what a rank does to one microbatch at one stage, pairs, communication; their error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

from swpipe.core.messages import shown

Op: TypeAlias = Literal["F", "I", "W", "B"]
OPS: tuple[Op, ...] = get_args(Op)

_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")
_COMMUNICATION = re.compile(
    r"(0|[1-9][0-9]{0,8})(?:(UNSHARD|RESHARD|REDUCE_GRAD)|((?:SEND|RECV)_[FB])(0|[1-9][0-9]{0,8}))"
)
_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


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


class Pair(NamedTuple):
    """A forward pass that a rank runs over the backward pass of another microbatch.

    It prints as torch writes it, ``(0F1;3B0)OVERLAP_F_B``.

    Attributes:
        f: An F.
        b: A B.
    """

    f: Action
    b: Action

    def __str__(self) -> str:
        return f"({self.f};{self.b})OVERLAP_F_B"


COLLECTIVES = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""What a rank does to a stage's parameters together with the ranks that hold the other shards."""


class Communication(NamedTuple):
    """An entry that moves data; it prints as torch writes it, ``1UNSHARD``, ``2SEND_F0``.

    Attributes:
        stage: The stage.
        op: ``UNSHARD``, which gathers the parameters of an FSDP stage while passes run;
            ``RESHARD``, which frees them; ``REDUCE_GRAD``, which reduces and scales the gradients.
            ``SEND_F``, ``SEND_B``: of a pass's result to a neighbouring stage; ``RECV_F``,
            ``RECV_B``: by the stage that needs it.
        micro: The microbatch of a send or receive, else None.
    """

    stage: int
    op: str
    micro: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.micro is None else self.micro}"

    @property
    def is_collective(self) -> bool:
        """Whether it concerns parameters or gradients, and no microbatch."""
        return self.op in COLLECTIVES


Entry: TypeAlias = Action | Pair | Communication
"""What a row of a schedule consists of."""


def parse_entry(text: str) -> Entry:
    """Return the entry that prints as ``text``; the parts of a pair come in any order.

    Raises:
        ScheduleError: The text is something else.
    """
    match = _COMMUNICATION.fullmatch(text)
    if match is not None:
        stage, collective, transfer, micro = match.groups()
        return Communication(
            int(stage), collective or transfer, None if micro is None else int(micro)
        )
    match = _PAIR.fullmatch(text)
    if match is None:
        return Action.parse(text)
    parts = {one.op: one for one in (Action.parse(part.strip()) for part in match.groups())}
    if set(parts) != {"F", "B"}:
        raise ScheduleError(f"{shown(text)} is no pair: an F and a B overlap, as (0F1;3B0)")
    return Pair(parts["F"], parts["B"])


def actions_of(row: Iterable[Entry]) -> tuple[Action, ...]:
    """Return the passes of a row, without communication; a pair is its F, and then its B."""
    return tuple(part for part in parts_of(row) if isinstance(part, Action))


def parts_of(row: Iterable[Entry]) -> tuple[Action | Communication, ...]:
    """Return the entries of a row; a pair is its F, and then its B."""
    return tuple(part for entry in row for part in (entry if isinstance(entry, Pair) else (entry,)))


class ScheduleError(ValueError):
    """A pipeline-parallel schedule cannot run, or does not fit its costs; the message is one line.

    Attributes:
        action: The action at fault; None where it is no single action.
    """

    def __init__(self, text: str, action: Action | None = None) -> None:
        super().__init__(text)
        self.action = action
