"""`swpipe diff`: two saved profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swpipe.cli.arguments import load_profile
from swpipe.cli.user_errors import UserError, echo
from swpipe.core.messages import plain


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE.json", help="From `swpipe profile`.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER.json", help="The same, later.")],
) -> None:
    """Compare two saved profiles; exit with 1 if iterations take longer, beyond the intervals."""
    profiles = [load_profile(path) for path in (before, after)]
    try:
        changes = profiles[0].diff(profiles[1])
    except ValueError as error:
        raise UserError(f"diff: {error}") from error
    for path, results in zip((before, after), profiles, strict=True):
        loads = [each.other_load for each in results if each.other_load is not None]
        for load in [load for load in loads if load.is_busy][:1]:
            echo(f"{plain(str(path))}: {load.text}")
    echo("\n\n".join(map(str, changes)))
    if any(each.iteration.is_longer for each in changes):
        raise typer.Exit(1)
