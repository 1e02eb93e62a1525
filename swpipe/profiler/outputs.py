"""How results leave the program: text, JSON, CSV, a data frame, a notebook."""

from __future__ import annotations

import csv
import html
import importlib
import io
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self, TextIO

from swpipe.core.files import write_atomically


class Report(ABC):
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

    def print_report(self, file: TextIO | None = None) -> None:
        """Print one row per task; to standard output by default."""
        (sys.stdout if file is None else file).write(self.format_report() + "\n")

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """A row per task, of plain values; all times are milliseconds."""

    def to_csv(self) -> str:
        """``records`` as CSV text, with a line of titles."""
        text = io.StringIO()
        rows = self.records()
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_dataframe(self) -> Any:
        """``records`` as a pandas data frame.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "to_dataframe needs pandas: install it, or use records() or to_csv()"
            ) from error
        return pandas.DataFrame(self.records())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.format_report())}</pre>"

    def save(self, path: str | Path) -> None:
        """Write JSON to a file."""
        write_atomically(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))
