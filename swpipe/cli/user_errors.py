"""Mistakes of the user, reported in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import typer

from swpipe.core.errors import PlanError
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
        """The line, as it is."""
        return self.message

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it."""
        typer.echo(f"swpipe: {self.message}", file=file, err=True)


class UserError(InputError):
    """A mistake of the user at the command line; the message is one line."""


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
        raise UserError(f"plan {name}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The message of an error; for a plan, the problems without the grid."""
    return error.in_one_line if isinstance(error, PlanError) else str(error)
