"""The entries of a schedule: actions, pairs and communication; and the error of schedules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

from swpipe.core.messages import shown

Op: TypeAlias = Literal["F", "I", "W", "B"]
OPS: tuple[Op, ...] = get_args(Op)

# At most nine digits, because int() raises a ValueError of its own for very long text.
_TEXT = re.compile(r"(0|[1-9][0-9]{0,8})([FIWB])(0|[1-9][0-9]{0,8})")
_COMMUNICATION = re.compile(r"(0|[1-9][0-9]{0,8})(UNSHARD|RESHARD|REDUCE_GRAD)")
_TRANSFER = re.compile(r"[0-9]+(SEND|RECV)_[FB][0-9]+")
# The parts are parsed one by one, for an error that names the part.
_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One pass of a stage over one microbatch, printed as ``2F0``: stage 2, forward, microbatch 0.

    Attributes:
        stage: The stage of the model, from 0. The output of stage s is the input of stage s + 1.
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
        """Return the action that prints as ``text``.

        Raises:
            ScheduleError: The text is not exactly one action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{shown(text)} is no action: write stage, F, I, W or B, and microbatch, as 2F0; a "
                "pair of them as (0F1;3B0)OVERLAP_F_B, and a collective as 1UNSHARD"
            )
        stage, op, micro = match.groups()
        # The pattern ensures the literal type of op, which mypy cannot see.
        return cls(int(stage), op, int(micro))  # type: ignore[arg-type]


class Pair(NamedTuple):
    """A forward pass that a rank overlaps with the backward pass of another microbatch.

    A pair prints as in torch: ``(0F1;3B0)OVERLAP_F_B``.

    Attributes:
        f: The forward pass, an F.
        b: The backward pass, a B.
    """

    f: Action
    b: Action

    def __str__(self) -> str:
        return f"({self.f};{self.b})OVERLAP_F_B"


COLLECTIVES = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""The ops of ``Communication``."""


class Communication(NamedTuple):
    """A collective among the ranks that hold a stage's shards, printed as in torch: ``1UNSHARD``.

    Attributes:
        stage: The stage, from 0.
        op: ``UNSHARD`` gathers the parameters of an FSDP stage while passes run; ``RESHARD`` frees
            them; ``REDUCE_GRAD`` reduces and scales the gradients.
    """

    stage: int
    op: str

    def __str__(self) -> str:
        return f"{self.stage}{self.op}"


Entry: TypeAlias = Action | Pair | Communication
"""The type of the entries of a schedule's rows."""


def parse_entry(text: str) -> Entry:
    """Return the entry that prints as ``text``, with the parts of a pair in either order.

    Raises:
        ScheduleError: The text is not exactly one entry.
    """
    if _TRANSFER.fullmatch(text):
        raise ScheduleError(
            f"{shown(text)} sends or receives, which the runtime places itself: write the schedule "
            'without these cells, or let torch write it in its format "compute_only"'
        )
    # The patterns exclude each other, so that their order does not matter.
    match = _COMMUNICATION.fullmatch(text)
    if match is not None:
        return Communication(int(match[1]), match[2])
    match = _PAIR.fullmatch(text)
    if match is None:
        return Action.parse(text)
    # A file may have the backward pass first.
    parts = {part.op: part for part in (Action.parse(text.strip()) for text in match.groups())}
    if set(parts) != {"F", "B"}:
        raise ScheduleError(
            f"{shown(text)} is no pair: join an F and a B, as (0F1;3B0)OVERLAP_F_B, or write its "
            "passes one after the other"
        )
    return Pair(parts["F"], parts["B"])


def actions_of(row: Iterable[Entry]) -> tuple[Action, ...]:
    """Return the passes of a row without communication, each pair as its F and then its B."""
    return tuple(part for part in parts_of(row) if isinstance(part, Action))


def parts_of(row: Iterable[Entry]) -> tuple[Action | Communication, ...]:
    """Return the entries of a row, each pair as its F and then its B."""
    return tuple(part for entry in row for part in (entry if isinstance(entry, Pair) else (entry,)))


class ScheduleError(ValueError):
    """The error of a schedule that cannot run, or that does not fit its costs.

    The message is one line.

    Attributes:
        action: The action at fault; None if no single action is at fault.
    """

    def __init__(self, text: str, action: Action | None = None) -> None:
        # The message alone is the exception's argument, so that str() shows it without the action.
        super().__init__(text)
        self.action = action
