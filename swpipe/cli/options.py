"""Options that several commands share."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from swpipe.tasks.workload import DEFAULT, MOST_COUNT

Plan = Annotated[
    str,
    typer.Option(
        "--plan",
        metavar="NAME|auto|FILE.toml",
        help="How to overlap: a ready-made plan of the workload, or a file; auto measures briefly "
        "and chooses.",
        show_default="the workload's usual plan",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where the tasks work, in torch's words.",
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


_RANGE = re.compile(r"x>=([\d.]+)|([\d.]+)<=x<=([\d.]+)")
_FAR = 10**6  # limits from here on are not shown


class Command(TyperCommand):
    """A command whose help gives ranges in words."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help sections of the arguments and the options."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                name, text = record
                if param.param_type_name == "argument":
                    sections["Arguments"].append((name.partition(" <")[0], text))
                else:
                    sections["Options"].append((name, _RANGE.sub(_in_words, text)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _in_words(limits: re.Match[str]) -> str:
    # Upper limits only guard against overflow if they are huge, so the help leaves them out.
    least = limits[1] or limits[2]
    most = limits[3]
    return f"{least} or more" if most is None or float(most) >= _FAR else f"{least} to {most}"


def flag(name: str) -> str:
    """Return the option of a parameter: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"
