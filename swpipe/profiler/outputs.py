"""How results leave the program: text, JSON, and rows for other tools."""

from __future__ import annotations

import sys
from abc import abstractmethod
from pathlib import Path
from typing import Self, TextIO

from swpipe.core.files import write_atomically
from swpipe.core.records import Rows


class Report(Rows):
    """What prints as a table, saves as JSON, and has rows for other tools."""

    __slots__ = ()

    @abstractmethod
    def format_report(self) -> str:
        """The table that ``print_report`` prints."""

    @abstractmethod
    def to_json(self) -> str:
        """JSON text; ``from_json`` returns an equal object."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: ``text`` is something else.
        """

    def as_text(self) -> str:
        return self.format_report()

    def print_report(self, file: TextIO | None = None) -> None:
        """Print one row per task; to standard output by default."""
        (sys.stdout if file is None else file).write(self.format_report() + "\n")

    def save(self, path: str | Path) -> None:
        """Write JSON to a file."""
        write_atomically(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))
