"""Errors of the user, told in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from swpipe.errors import PlanError


class UserError(Exception):
    """Something the user got wrong; the message is one line."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with exit code 2 where the user got something wrong, 1 where training diverged."""
    try:
        yield
    except _user_errors() as error:
        _fail(str(error), 2)
    except _diverged() as error:
        _fail(str(error), 1)


@contextmanager
def about_plan(name: str) -> Iterator[None]:
    """Tell what is wrong with a plan in one line, with the name that the user gave it."""
    try:
        yield
    except PlanError as error:
        problems = "; ".join(problem.text for problem in error.problems)
        raise UserError(f"plan {name}: {problems}") from error


# The click job's own errors, if the click job was loaded at all.


def _user_errors() -> tuple[type[Exception], ...]:
    clicks = sys.modules.get("swpipe.tasks.clicks")
    return (UserError,) if clicks is None else (UserError, clicks.ClickDataError)


def _diverged() -> tuple[type[Exception], ...]:
    clicks = sys.modules.get("swpipe.tasks.clicks")
    return () if clicks is None else (clicks.TrainingDivergedError,)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"swpipe: {message}", err=True)
    raise typer.Exit(code)
