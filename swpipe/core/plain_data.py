"""Read the entries of a TOML or JSON table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from swpipe.core.errors import Problem


def read_rows(
    table: Mapping[str, Any],
    key: str,
    known: Collection[str],
    problems: list[Problem],
    form: str = "a table",
) -> dict[str, dict[str, Any]]:
    """The known fields of each entry of ``table``, with lists as tuples; the rest are problems."""
    rows = {}
    for name, entry in table.items():
        where = f"{key}.{name}"
        if not isinstance(entry, Mapping):
            problems.append(Problem(f"{where} is {entry!r}: it must be {form}", (name,)))
            continue
        unknown = [field for field in entry if field not in known]
        listed = ", ".join(known)
        problems += [Problem(f"{where}: unknown key {k!r}; known are {listed}") for k in unknown]
        fields = {k: entry[k] for k in entry if k in known}
        rows[name] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return rows
