"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

DEFAULT = "images"
"""The workload of a command that names none: the image model."""

MOST_COUNT = 2**31 - 1
"""The greatest value of an option that is a count, for example of steps."""

Plan = Annotated[
    str,
    typer.Option(
        "--plan",
        metavar="NAME|FILE.toml",
        help="How to overlap: serial; pipelined, in which leading pure tasks run ahead; auto, "
        "which measures briefly and chooses; or a file.",
        show_default="pipelined for the image model, else serial",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="The device of the tasks, as torch names it.",
        show_default="cpu for the image model, else the machine's accelerator",
    ),
]
Workload = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar=f"{DEFAULT}|MODULE:FUNCTION",
        help="The image model, or a function of yours that returns (tasks, batches[, context]).",
    ),
]


def count(text: str, most: int = MOST_COUNT, least: int = 1) -> Any:
    """Return an option whose value is a whole number."""
    return typer.Option(min=least, max=most, metavar="N", help=text)


def file(metavar: str, text: str) -> Any:
    """Return an option whose value names a file."""
    return typer.Option(metavar=metavar, help=text)


def flag(name: str) -> str:
    """Return the option of a parameter: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"


Steps = Annotated[int | None, count("Steps under each plan. Default: once through the data.")]
