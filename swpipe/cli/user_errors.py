"""Errors of the user, told in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import typer

from swpipe.core.errors import PlanError

ClickError: Any = typer.BadParameter.__mro__[2]
"""What ends a command: a message and an exit code. Typer has it from click, and names it no more
than by its heirs."""


class Reported(typer.BadParameter):
    """An error that is told in one line.

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


class UserError(Exception):
    """Something the user got wrong; the message is one line."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with exit code 2 where the user got something wrong, 1 where training diverged."""
    try:
        yield
    except _user_errors() as error:
        raise Reported(str(error), 2) from error
    except _diverged() as error:
        raise Reported(str(error), 1) from error


@contextmanager
def about_plan(name: str) -> Iterator[None]:
    """Tell what is wrong with a plan in one line, with the name that the user gave it."""
    try:
        yield
    except PlanError as error:
        raise UserError(f"plan {name}: {in_one_line(error)}") from error


def in_one_line(error: Exception) -> str:
    """What an error says; of a plan's all problems, without the picture."""
    if isinstance(error, PlanError):
        return "; ".join(problem.text for problem in error.problems)
    return str(error)


# The click job's own errors, if the click job was loaded at all.


def _user_errors() -> tuple[type[Exception], ...]:
    clicks = sys.modules.get("swpipe.tasks.clicks")
    return (UserError,) if clicks is None else (UserError, clicks.ClickDataError)


def _diverged() -> tuple[type[Exception], ...]:
    clicks = sys.modules.get("swpipe.tasks.clicks")
    return () if clicks is None else (clicks.TrainingDivergedError,)
