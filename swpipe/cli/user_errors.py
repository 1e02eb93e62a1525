"""The output of the command line, and mistakes of the user, which are reported in one line.

All text goes through ``echo`` or ``exit_code``: file names, names of tasks and texts of exceptions
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

ClickError: Any = typer.BadParameter.__mro__[2]
"""The click exception with a message and an exit code; typer exports only its subclasses."""


class UserError(ValueError):
    """A mistake of the user at the command line; the message is one line."""


class TrainingFailedError(RuntimeError):
    """The error of a training that cannot continue; the message is one line."""


def echo(text: str, *, err: bool = False) -> None:
    """Print text of several lines.

    Raises:
        UserError: The text cannot be written, for example because the disk is full.
        BrokenPipeError: The reader of the output has closed it.
    """
    try:
        typer.echo(escaped(text, keep="\n"), err=err)
    # A closed pipe, as by ``| head``, is no mistake of the user; click ends the process quietly.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"standard output: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return why a file or a plan cannot be used.

    The text leaves out the file's name, which may be that of a temporary file, and the plan's grid.
    """
    if isinstance(error, PlanError):
        return error.in_one_line
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def exit_code(run: Callable[[], int | None], who: str = "swpipe") -> int:
    """Run a command and return its exit code; report its error in one line.

    If a command line was not understood, the line includes the usage of the command.

    Args:
        run: The command.
        who: The beginning of the line.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # some terminals lack characters
    try:
        # Commands return None unless they set an exit code.
        return run() or 0
    except (UserError, TrainingFailedError) as error:
        line = one_line(str(error))
        # Exit code 2 means a mistake of the user, 1 that training failed.
        code = 1 if isinstance(error, TrainingFailedError) else 2
    except ClickError as error:
        line = one_line(error.format_message())
        code = error.exit_code
        if error.ctx is not None:
            line += f" ({' '.join(error.ctx.get_usage().split())}; --help explains it)"
    typer.echo(f"{who}: {line}", err=True)
    return code


@contextmanager
def about_plan(name: str) -> Iterator[None]:
    """Report a mistake in a plan in one line, with the name that the user gave to the plan."""
    try:
        yield
    except PlanError as error:
        raise UserError(f"plan {plain(name)}: {reason(error)}") from error
