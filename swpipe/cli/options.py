"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

LISTS = ("--data", "--held-out")
"""Options that take several values in a row."""

Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="PATH...",
        help="Click logs in the Criteo TSV format; none: a log made up from a planted model.",
    ),
]
HeldOut = Annotated[
    list[Path] | None,
    typer.Option("--held-out", metavar="PATH...", help="Click logs to evaluate on."),
]
Plan = Annotated[
    str,
    typer.Option(
        "--plan",
        metavar="serial|pipelined|auto|FILE.toml",
        help="How to overlap; auto measures briefly and chooses. Under torchrun: serial, "
        "sparse_dist, prefetch, split, semi_sync, auto, FILE.toml.",
        show_default="pipelined; sparse_dist under torchrun",
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows per step.")]
Device = Annotated[str, typer.Option("--device", help="Where the model lives, in torch's words.")]
OptionalDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Where the tasks work, in torch's words.",
        show_default="cpu for the click job, else the machine's accelerator",
    ),
]
Workload = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar="clicks|MODULE:FUNCTION",
        help="The click job, or a function of yours that returns (tasks, batches).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of the model, and of a made-up log.")]
Strict = Annotated[bool, typer.Option("--strict", help="The first malformed row is an error.")]
Cache = Annotated[
    Path, typer.Option("--cache-dir", help="Where a made-up log is kept from run to run.")
]


def cache_home() -> Path:
    """Where programs keep what they can make again; source: XDG Base Directory Specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


CACHE = cache_home() / "swpipe"


def spread_lists(args: Iterable[str]) -> list[str]:
    """``--data a b`` as ``--data a --data b``, which is how the parser wants it."""
    spread: list[str] = []
    option = ""  # whose values may still follow
    for arg in args:
        if arg.startswith("-"):
            option = ""
        elif option and spread[-1] != option:
            spread.append(option)
        spread.append(arg)
        option = arg if arg in LISTS else option
    return spread
