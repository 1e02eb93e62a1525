"""What the command line prints, and mistakes of the user, reported in one line.

All text goes through ``echo`` or ``line_of``: file names, rows of a log and texts of exceptions
come from outside, and a terminal would obey their escape codes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from swpipe.core.messages import escaped, one_line, plain
from swpipe.errors import PlanError
from swpipe.tasks.workload import InputError, TrainingFailedError

ClickError: Any = typer.BadParameter.__mro__[2]
"""click's exception for a message and an exit code. Typer exports only classes derived from it."""


class Reported(typer.BadParameter):
    """An error that is reported in one line.

    Args:
        message: The line.
        code: The exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code

    def format_message(self) -> str:
        """The message, as it is."""
        return self.message


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


def reason(error: OSError) -> str:
    """Why a file cannot be used, without its name, which may be that of a temporary file."""
    return error.strerror or str(error)


def line_of(error: Any) -> str:
    """One of click's errors in one line; how to use the command, where it was not understood."""
    line = one_line(error.format_message())
    if isinstance(error, Reported) or error.ctx is None:
        return line
    usage = " ".join(error.ctx.get_usage().split())
    return f"{line} ({usage}; --help explains it)"


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a command that raises click's errors; its exit code, an error being reported."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may know few characters
    try:
        return run() or 0
    except ClickError as error:
        typer.echo(f"swpipe: {line_of(error)}", err=True)
        code: int = error.exit_code
        return code


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with exit code 2 for a mistake of the user, with 1 where training cannot go on."""
    try:
        yield
    except InputError as error:
        raise Reported(str(error), 2) from error
    except TrainingFailedError as error:
        raise Reported(str(error), 1) from error


@contextmanager
def about_plan(name: str) -> Iterator[None]:
    """Report what is wrong with a plan in one line, with the name that the user gave it."""
    try:
        yield
    except PlanError as error:
        raise UserError(f"plan {plain(name)}: {error.in_one_line}") from error


def told(error: Exception) -> str:
    """The message of an error; for a plan, the problems without the grid."""
    return error.in_one_line if isinstance(error, PlanError) else str(error)
