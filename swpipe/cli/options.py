"""Options of the commands: those that several commands share, and those of the workload."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from swpipe.tasks.workload import DEFAULT, MOST_COUNT, Option, workloads

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
Workload = Annotated[
    str,
    typer.Option(
        "--workload",
        metavar=f"{DEFAULT}|NAME|MODULE:FUNCTION",
        help="A workload by name, or a function of yours that returns (tasks, batches[, context]). "
        "With --help: that workload's options.",
    ),
]


def count(text: str, most: int = MOST_COUNT, least: int = 1) -> Any:
    """Return an option whose value is a whole number."""
    return typer.Option(min=least, max=most, metavar="N", help=text)


def file(metavar: str, text: str) -> Any:
    """Return an option whose value names a file."""
    return typer.Option(metavar=metavar, help=text)


_DEVICE = inspect.Parameter(
    "device",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Where the tasks work, in torch's words.",
            show_default="cpu for the image model, else the machine's accelerator",
        ),
    ],
)

_KINDS = {int: "N", str: "NAME", Path: "PATH"}
"""The placeholder of an option's value in the help, by its type."""

_RANGE = re.compile(r"x>=([\d.]+)|([\d.]+)<=x<=([\d.]+)")
_FAR = 10**6  # limits from here on are not shown


class Command(TyperCommand):
    """A command whose help lists the workload's options separately, and gives ranges in words."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help sections of the arguments and the options."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                name, text = record
                if param.param_type_name == "argument":
                    sections["Arguments"].append((name.partition(" <")[0], text))
                else:
                    heading = getattr(param, "rich_help_panel", None) or "Options"
                    sections[heading].append((name, _RANGE.sub(_in_words, text)))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _in_words(found: re.Match[str]) -> str:
    # Upper limits only guard against overflow if they are huge, so the help leaves them out.
    least = found[1] or found[2]
    most = found[3]
    return f"{least} or more" if most is None or float(most) >= _FAR else f"{least} to {most}"


_TAKES_OPTIONS: list[tuple[Callable[..., Any], list[inspect.Parameter]]] = []
"""Commands with their own parameters, to which the workload's options are added."""


def takes_workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Register a command whose ``**given`` are the device and the options of the workload."""
    hints = get_type_hints(command, include_extras=True)
    # Annotations are strings here (``from __future__ import annotations``). They are resolved now,
    # since typer will read them from a signature that was built by hand.
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    _TAKES_OPTIONS.append((command, own))
    return command


def declare_workload_options(args: Sequence[str]) -> None:
    """Give the registered commands the options of the workload that a command line names.

    Typer reads a command's signature each time it parses a command line.
    """
    known = workloads()
    # This runs before typer parses anything, because the options that typer should accept depend on
    # the workload. So ``--workload`` is searched for in the raw arguments.
    named = [arg.partition("=")[2] for arg in args if arg.startswith("--workload=")]
    named += [arg for before, arg in pairwise(args) if before == "--workload"]
    # ``report`` takes its workload as an argument, wherever it stands among the options.
    if args[0] == "report":
        named = [arg for arg in args if arg in known or ":" in arg]
    usual = "" if args[0] in ("report", "trace") else DEFAULT
    name = named[-1] if named else usual
    declared = known[name].options if name in known else ()
    extra = [_DEVICE, *(_parameter(option, name) for option in declared)]
    for command, own in _TAKES_OPTIONS:
        # Both have to be set: typer takes parameters from the signature and types from the
        # annotations.
        command.__signature__ = inspect.Signature([*own, *extra])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in (*own, *extra)}


def _parameter(option: Option, workload: str) -> inspect.Parameter:
    kind: Any = option.kind
    declared = typer.Option(
        flag(option.name),
        help=option.help,
        min=option.minimum,
        max=option.maximum if option.kind is int else None,
        metavar=_KINDS.get(option.kind),
        rich_help_panel=f"Options of the workload {workload}",
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[kind | None if option.default is None else kind, declared],
    )


def flag(name: str) -> str:
    """Return the option of a parameter: ``--batch-size`` for ``batch_size``."""
    return f"--{name.replace('_', '-')}"
