"""Values and lists in messages: on one line and short, whatever a plan or a file contains."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from itertools import islice
from typing import Any

MOST_LISTED = 12
MOST_CHARACTERS = 200
MOST_IN_LINE = 8_000


class _Repr(reprlib.Repr):
    """A ``repr`` of limited length for nested data of any depth and length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = MOST_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits; of a very long integer, the number of its bits."""
        # Python refuses to print integers of more than 4,300 digits, with a ValueError.
        bits = x.bit_length()
        return repr(x) if bits <= MOST_CHARACTERS else f"an integer of {bits} bits"


_repr: Any = _Repr()


def shown(value: object) -> str:
    """Return ``repr(value)``, shortened, on one line."""
    # The repr of an object, such as a tensor, may have several lines.
    return shorten(" ".join(_repr.repr(value).split("\n")))


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text, its middle replaced by dots if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = (most - len("...")) // 2
    return f"{text[:half]}...{text[-half:]}"


def listed(names: Collection[str], most: int = MOST_LISTED) -> str:
    """Return the names as "a, b, c"; of many names, the first few and how many more there are."""
    first = ", ".join(plain(name) for name in islice(names, most))
    more = len(names) - most
    return f"{first} and {more} more" if more > 0 else first or "none"


def counted(number: int, what: str) -> str:
    """Return a number with its noun, such as "1 thread" and "2 threads"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def in_ms(us: float) -> str:
    """Return microseconds in milliseconds, such as "1.250 ms"."""
    return f"{us / 1e3:.3f} ms"


def escaped(text: str, keep: str = "") -> str:
    """Return the text with control characters escaped, except for those in ``keep``.

    A terminal would obey or cannot show these characters. A new line, for example, becomes a
    backslash and an n.
    """
    if text.isprintable():
        return text
    # Names come from files of other people: an escape sequence could rewrite the terminal.
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def one_line(text: str, most: int = MOST_IN_LINE) -> str:
    """Return the text on one line, escaped and shortened; see ``escaped``."""
    return shorten(escaped(" ".join(text.splitlines())), most)


def plain(name: object) -> str:
    """Return a plain name as it is, and any other as ``shown`` returns it."""
    # Without quotes, if nobody can mistake where the name begins and ends.
    is_plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MOST_CHARACTERS
    return str(name) if is_plain else shown(name)


def in_bytes(size: int) -> str:
    """Return a size in bytes with a binary unit, such as "1.5 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"
