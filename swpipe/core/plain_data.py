"""Read TOML and JSON: the text, and the entries of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from swpipe.core.messages import MOST_CHARACTERS, listed, plain, shorten, shown
from swpipe.errors import PlanError, Problem

_MOST_DOTS = 100


def parse_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text.

    Raises:
        tomllib.TOMLDecodeError: It is not TOML.
        PlanError: It is nested too deeply, or a number has too many digits.
    """
    # tomllib takes quadratic time and memory for keys of many parts, such as a.a.a = 1.
    lines = "\n".join(line for line in text.split("\n") if line.count(".") > _MOST_DOTS)
    if any(part.count(".") > _MOST_DOTS for part in re.findall(r"[^,=\[\]{}\n#]+", lines)):
        raise _unreadable(f"a key has more than {_MOST_DOTS} dots")
    if re.search(rf"0[xob][\da-fA-F_]{{{MOST_CHARACTERS}}}", text):  # int() limits decimals only
        raise _unreadable(f"a number has more than {MOST_CHARACTERS} digits")
    import tomllib

    data: dict[str, Any] = _parsed(tomllib.loads, tomllib.TOMLDecodeError, text)
    return data


def parse_json(text: str) -> Any:
    """The data of a JSON text.

    Raises:
        json.JSONDecodeError: It is not JSON.
        PlanError: It is nested too deeply, or a number has too many digits.
    """
    return _parsed(json.loads, json.JSONDecodeError, text)


def _parsed(loads: Callable[[str], Any], bad_format: type[ValueError], text: str) -> Any:
    try:
        return loads(text)
    except bad_format:
        raise
    except RecursionError:
        raise _unreadable("it is nested too deeply") from None
    except ValueError as error:  # int() refuses long numbers
        raise _unreadable(shorten(str(error))) from error


def _unreadable(why: str) -> PlanError:
    rule = "plans, costs and timelines have few levels and short numbers"
    return PlanError([Problem(f"the text cannot be read: {why}; {rule}: correct it there")])


def read_rows(
    table: Mapping[str, Any],
    key: str,
    known: Collection[str],
    problems: list[Problem],
    form: str = "a table",
) -> dict[str, dict[str, Any]]:
    """The known fields of each entry of ``table``, with lists as tuples; the rest are problems."""
    rows = {}
    rule = f"known are {listed(known)}"
    for name, entry in table.items():
        if not isinstance(entry, Mapping):
            where = f"{key}.{plain(name)}"
            problems.append(Problem(f"{where} is {shown(entry)}: it must be {form}", (name,)))
            continue
        problems += [
            Problem(f"{key}.{plain(name)}: unknown key {shown(field)}; {rule}")
            for field in entry
            if field not in known
        ]
        fields = {k: entry[k] for k in entry if k in known}
        rows[name] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return rows


def read_table(
    data: Mapping[str, Any], key: str, kind: type[Any], problems: list[Problem]
) -> dict[str, Any]:
    """Read ``data[key]`` as name -> ``kind``, checking the type of each field."""
    table = data.get(key, {})
    if not isinstance(table, Mapping):
        problems.append(Problem(f"{key} is {shown(table)}: it must be a table"))
        return {}
    kinds = {name: _kinds(hint) for name, hint in get_type_hints(kind).items()}
    rows = read_rows(table, key, kinds, problems)
    for name, row in rows.items():
        for field_name, value in row.items():
            if type(value) not in kinds[field_name]:
                wanted = " or ".join(each.__name__ for each in kinds[field_name])
                where = f"{key}.{plain(name)}.{field_name}"
                text = f"{where} is {shown(value)}: it must be of type {wanted}"
                problems.append(Problem(text))
    return {name: kind(**row) for name, row in rows.items()}


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types of a field that a file can hold."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(k) or k for k in kinds if k not in (type(None), torch.Stream))
