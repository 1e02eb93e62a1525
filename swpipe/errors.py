"""Three kinds of error: the value is wrong, the call is wrong, we are wrong.

- ``PlanError`` (a ``ValueError``): a plan, or a plan together with its tasks, cannot be run. It
  lists everything that is wrong at once.
- ``RuntimeError``: a call that does not fit the moment (``progress`` after ``close``); and those
  below that are derived from it.
- ``InternalError``: a rule of swpipe's own was broken; please report it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from swpipe.core.dependence import ProposedEdge, ProposedStage
from swpipe.core.messages import shorten

__all__ = [
    "InternalError",
    "PlanError",
    "Problem",
    "ShortcutError",
    "StallError",
    "UnsavedStateError",
]

MOST_IN_MESSAGE = 6000
"""Characters of a plan's problems that a message has; the first problem is always there."""

_MOST_IN_PROBLEM = 3000


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a plan.

    Attributes:
        text: What is wrong, and what to change.
        tasks: The tasks at fault, whose cells are marked in the grid.
        terms: The edges and stages that the text proposes; the text has the ``str`` of each. A
            front end replaces them by its own words.
    """

    text: str
    tasks: tuple[str, ...] = ()
    terms: tuple[ProposedEdge | ProposedStage, ...] = ()


class PlanError(ValueError):
    """A plan that cannot be run, with all its problems and the period x task grid.

    Attributes:
        problems: Everything that is wrong, in the order in which it was found. The message has the
            first ``MOST_IN_MESSAGE`` characters of them.
        grid: The plan's grid with the tasks at fault marked, or "" where none can be drawn.
    """

    what = "this"  # the plan may be a front end's own, of which its caller has never heard

    def __init__(self, problems: Sequence[Problem], grid: str = "") -> None:
        self.problems = tuple(problems)
        self.grid = grid
        count = len(self.problems)
        many = "one problem" if count == 1 else f"{count} problems"
        head = f"{self.what} cannot run: {many}"
        told = self._told()
        lines = [head, *(f"  {n}. {text}" for n, text in enumerate(told, start=1))]
        if len(told) < count:
            lines.append(f"  and {count - len(told)} more")
        if grid:
            lines += ["", grid]
        super().__init__("\n".join(lines))

    @property
    def in_one_line(self) -> str:
        """The problems of the message, without the grid."""
        told = self._told()
        more = len(self.problems) - len(told)
        return "; ".join(told) + (f"; and {more} more" if more else "")

    def _told(self) -> list[str]:
        told: list[str] = []
        room = MOST_IN_MESSAGE
        for problem in self.problems:
            text = shorten(" ".join(problem.text.splitlines()), _MOST_IN_PROBLEM)
            room -= len(text)
            if told and room < 0:
                break
            told.append(text)
        return told


class StallError(RuntimeError):
    """Nothing moved for longer than ``stall_timeout_s``; the message says who waits for whom."""


class ShortcutError(RuntimeError):
    """A task cannot be replayed, or its replay would be wrong.

    Attributes:
        task: The name of the task.
        reason: What cannot be replayed, why, and what to do about it.
    """

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(task, reason)
        self.task = task
        self.reason = reason

    def __str__(self) -> str:
        return f"task {self.task!r} cannot be replayed: {self.reason}"


class UnsavedStateError(RuntimeError):
    """Tasks change something that is not restored afterwards.

    Attributes:
        names: What it is.
        mend: What to do about it.
    """

    def __init__(self, names: Sequence[str], what: str, mend: str) -> None:
        super().__init__(tuple(names), what, mend)
        self.names = tuple(names)
        self.what = what
        self.mend = mend

    def __str__(self) -> str:
        names = ", ".join(self.names)
        return f"{self.what}, which is not restored afterwards: {names}. {self.mend}"


class InternalError(RuntimeError):
    """A rule of swpipe's own was broken."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. This is a fault in swpipe, not in your code: please report it.")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to any exception; one that refuses notes has it written to standard error."""
    try:
        error.add_note(note)
    except Exception:  # noqa: BLE001 - a frozen dataclass, say, or notes that are not a list
        write_error(f"{type(error).__name__}: {note}")


def write_error(text: str) -> None:
    """Write to standard error what no exception or warning can carry."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
