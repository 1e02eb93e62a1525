"""What the command line prints, and mistakes of the user, reported in one line.

All text goes through ``echo`` or ``verdict_on``: file names, rows of a log and texts of exceptions
come from outside, and a terminal would obey their escape codes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer

from swpipe.core.messages import escaped, one_line, plain
from swpipe.errors import PlanError
from swpipe.tasks.workload import InputError, TrainingFailedError

ClickError: Any = typer.BadParameter.__mro__[2]
"""click's exception for a message and an exit code. Typer exports only classes derived from it."""

REPORTED: Any = (InputError, TrainingFailedError, ClickError)
"""What a command ends with in one line, and not with a traceback."""


class Verdict(NamedTuple):
    """How a command ends: a message of one line, and the exit code."""

    message: str
    code: int


class UserError(InputError):
    """A mistake of the user at the command line; the message is one line."""


def echo(text: str, *, err: bool = False) -> None:
    """Print text of several lines.

    Raises:
        UserError: It cannot be written, as on a full disk.
        BrokenPipeError: Nobody reads it any more.
    """
    try:
        typer.echo(escaped(text, keep="\n"), err=err)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why a file or a plan cannot be used.

    Without the file's name, which may be that of a temporary file, and without the plan's grid.
    """
    if isinstance(error, PlanError):
        return error.in_one_line
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def verdict_on(error: Any) -> Verdict:
    """What is said of one of ``REPORTED``; how to use a command, where it was not understood."""
    if not isinstance(error, ClickError):
        return Verdict(one_line(str(error)), 1 if isinstance(error, TrainingFailedError) else 2)
    line = one_line(error.format_message())
    if error.ctx is not None:
        line += f" ({' '.join(error.ctx.get_usage().split())}; --help explains it)"
    return Verdict(line, error.exit_code)


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a command; its exit code, its error being reported in one line."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know few characters
    try:
        return run() or 0
    except REPORTED as error:
        message, code = verdict_on(error)
        typer.echo(f"swpipe: {message}", err=True)
        return code


@contextmanager
def about_plan(name: str) -> Iterator[None]:
    """Report what is wrong with a plan in one line, with the name that the user gave it."""
    try:
        yield
    except PlanError as error:
        raise UserError(f"plan {plain(name)}: {reason(error)}") from error
