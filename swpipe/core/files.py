"""Files of plans, costs and timelines: read with checks, and replaced as a whole or not at all."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import torch

from swpipe.core.messages import listed, plain, shown
from swpipe.errors import PlanError, Problem

Readers: TypeAlias = Mapping[type, Callable[[Any], Any]]

_NO_READERS: Readers = MappingProxyType({})

MOST_BYTES = 16 * 2**20
"""The size of the largest plan or cost file that is read."""


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is not UTF-8.
        PlanError: The file has more than ``most_bytes``.
    """
    with Path(path).open("rb") as file:
        # One byte more than allowed tells a file that is too large, whatever its size is.
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        rule = f"it has more than {most_bytes} bytes, the most that is read"
        raise PlanError([Problem(f"the file is too large: {rule}; is it the right file?")])
    return data.decode("utf-8")


# ------------------------------------------------------------------------------------- written


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file; a failure leaves the old file unchanged. See ``replacing``."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary file to write, which replaces ``path`` if the block succeeds.

    The temporary file is in the same folder and has the same suffix. A symbolic link stays, and the
    file that it leads to is replaced. The new file has the permissions of the old one. A path that
    is not a regular file, such as a pipe or ``/dev/stdout``, is given as it is.

    Raises:
        OSError: The file or its folder cannot be written.
    """
    check_writable(path)
    if _written_in_place(path):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    # In the same folder, since a rename is atomic within one file system only.
    temporary = target.with_name(f".swpipe-{os.urandom(8).hex()}{target.suffix}")
    try:
        temporary.touch(exist_ok=False)  # with the permissions that the umask allows
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only here
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a file cannot be written; change nothing."""
    if _written_in_place(path):
        return
    # Opened without O_TRUNC, so that the file keeps its contents.
    if Path(path).exists():
        os.close(os.open(path, os.O_WRONLY))
    else:
        # A new file is tried out in its folder under another name.
        with TemporaryFile(dir=Path(os.path.realpath(path)).parent):
            pass


def _written_in_place(path: str | os.PathLike[str]) -> bool:
    # A device or pipe cannot be replaced by renaming a file: it is written directly.
    special = os.fspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return special or (Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir())


# ---------------------------------------------------------------------------------------- read


def read_typed(value: Any, hint: Any, where: str, readers: Readers = _NO_READERS) -> Any:
    """Return plain data, as ``json.loads`` returns it, as a value of a type.

    Args:
        value: The data.
        hint: ``bool``, ``int``, ``float``, ``str`` or a ``Literal``; a dataclass; a tuple or a
            mapping of these types; or a union of one of them with None and ``torch.Stream``, which
            no file holds.
        where: The data's place, for the message.
        readers: Type to a function from data to a value of that type, which raises ValueError.

    Raises:
        ValueError: The data, or parts of it, have other types; the message names their places.
    """
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if kind is UnionType:
        if value is None and NoneType in parts:
            return None
        (other,) = (part for part in parts if part not in (NoneType, torch.Stream))
        return read_typed(value, other, where, readers)
    if kind is Literal:
        if value not in parts:
            raise ValueError(f"{where} is {shown(value)}: it must be {listed(parts)}")
        return value
    # Before dataclasses, so that a reader may have its own form for one.
    if kind in readers:
        try:
            return readers[kind](value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is {shown(value)}: it must be a list")
        return tuple(
            read_typed(each, parts[0], f"{where}[{n}]", readers) for n, each in enumerate(value)
        )
    if kind in (dict, Mapping) or is_dataclass(kind):
        return _read_table(value, hint, where, readers)
    # type() and not isinstance(), since True is an int. JSON also knows NaN and Infinity, which no
    # field takes.
    number = kind is float and type(value) is int
    is_finite = type(value) is not float or math.isfinite(value)
    if not (number or type(value) is kind) or not is_finite:
        raise ValueError(f"{where} is {shown(value)}: it must be of type {kind.__name__}")
    return value


def _read_table(value: Any, hint: Any, where: str, readers: Readers) -> Any:
    """Return plain data as a dataclass or a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {shown(value)}: it must be a table")
    if not is_dataclass(hint):
        return _read_each(value, dict.fromkeys(value, get_args(hint)[1]), where, readers)
    # A field without a default has to be given.
    missing = [
        field.name
        for field in fields(hint)
        if field.default is field.default_factory is MISSING and field.name not in value
    ]
    if missing:
        raise ValueError(f"{where} has no {listed(missing)}; it has: {listed(value)}")
    make: Any = hint
    return make(**_read_each(value, get_type_hints(hint), where, readers))


def _read_each(
    values: Mapping[str, Any], hints: Mapping[str, Any], where: str, readers: Readers
) -> dict[str, Any]:
    """Return the values, each read by its hint; one error tells all that is wrong."""
    read = {}
    errors = []
    for name, value in values.items():
        if name not in hints:
            errors.append(f"unknown key {shown(name)} in {where}; known are {listed(hints)}")
            continue
        try:
            read[name] = read_typed(value, hints[name], f"{where}.{plain(name)}", readers)
        except PlanError as error:
            errors.append(f"{where}.{plain(name)}: {error.in_one_line}")
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError("; ".join(errors))
    return read
