"""The three kinds of error: a wrong value, a call at the wrong time, a fault in swpipe.

- ``PlanError`` (a ``ValueError``): a plan, or a plan together with its tasks, cannot be run. The
  message lists everything that is wrong.
- ``RuntimeError``: a call at the wrong time (``progress`` after ``close``), and the classes below
  that are derived from it.
- ``InternalError``: swpipe has broken one of its own rules; please report it.
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
"""The largest number of characters of problems in a message; it always has the first problem."""

_MOST_IN_PROBLEM = 3000


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a plan.

    Attributes:
        text: The fault, and the change that removes it.
        tasks: The tasks at fault, whose cells are marked in the grid.
        terms: The edges and stages that the text proposes; the text contains the ``str`` of each. A
            front end replaces them by its own terms.
    """

    text: str
    tasks: tuple[str, ...] = ()
    terms: tuple[ProposedEdge | ProposedStage, ...] = ()


class PlanError(ValueError):
    """A plan that cannot be run, with all its problems and the period x task grid.

    Attributes:
        problems: All faults, in the order in which they were found. The message has their first
            ``MOST_IN_MESSAGE`` characters.
        grid: The plan's grid with the tasks at fault marked; "" if no grid can be drawn.
    """

    # Not "the plan": a front end may have made the plan, and its user has never seen one.
    what = "this"

    def __init__(self, problems: Sequence[Problem], grid: str = "") -> None:
        self.problems = tuple(problems)
        self.grid = grid
        count = len(self.problems)
        many = "one problem" if count == 1 else f"{count} problems"
        head = f"{self.what} cannot run: {many}"
        texts = self._told()
        lines = [head, *(f"  {n}. {text}" for n, text in enumerate(texts, start=1))]
        if len(texts) < count:
            lines.append(f"  and {count - len(texts)} more")
        if grid:
            lines += ["", grid]
        super().__init__("\n".join(lines))

    @property
    def in_one_line(self) -> str:
        """The problems of the message on one line, without the grid."""
        texts = self._told()
        more = len(self.problems) - len(texts)
        return "; ".join(texts) + (f"; and {more} more" if more else "")

    def _told(self) -> list[str]:
        texts: list[str] = []
        room = MOST_IN_MESSAGE
        for problem in self.problems:
            # One line per problem, and a limit on each: names and values in the text come from the
            # user.
            text = shorten(" ".join(problem.text.splitlines()), _MOST_IN_PROBLEM)
            room -= len(text)
            # The first problem is always shown, however long it is.
            if texts and room < 0:
                break
            texts.append(text)
        return texts


class StallError(RuntimeError):
    """No progress for longer than ``stall_timeout_s``.

    The message says for each thread group which task it is in or what it waits for.
    """


class ShortcutError(RuntimeError):
    """A task cannot be replayed, or its replay would be wrong.

    Attributes:
        task: The name of the task.
        reason: The part that cannot be replayed, the cause, and the remedy.
    """

    def __init__(self, task: str, reason: str) -> None:
        # All arguments go to ``Exception``, so that the error can be pickled and sent between
        # processes.
        super().__init__(task, reason)
        self.task = task
        self.reason = reason

    def __str__(self) -> str:
        return f"task {self.task!r} cannot be replayed: {self.reason}"


class UnsavedStateError(RuntimeError):
    """Tasks change a state that is not restored after a trial.

    Attributes:
        names: The names of the states.
        what: The beginning of the message, which says what changes them.
        mend: The remedy.
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
    """A broken rule of swpipe's own, which is a fault in swpipe."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. This is a fault in swpipe, not in your code: please report it.")


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, or write it to standard error if the exception refuses notes."""
    try:
        error.add_note(note)
    except Exception:  # noqa: BLE001 - a frozen dataclass, say, or notes that are not a list
        write_error(f"{type(error).__name__}: {note}")


def write_error(text: str) -> None:
    """Write a text that no exception or warning can carry to standard error."""
    # One call for text and newline, so that the lines of several threads do not mix.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
