"""Results as rows for other tools: CSV, a data frame, a notebook."""

from __future__ import annotations

import csv
import html
import importlib
import io
from abc import ABC, abstractmethod
from typing import Any

_MOST_LINES = 4


def first_lines(value: object, text: str) -> str:
    """Return a repr of an object that prints as ``text``: its class, and the first lines."""
    lines = text.splitlines()
    more = ["..."] if len(lines) > _MOST_LINES else []
    return "\n".join([f"<{type(value).__name__}>", *lines[:_MOST_LINES], *more])


class Rows(ABC):
    """The base class of results that have rows of plain values, and a text that shows them."""

    # Some results are dataclasses with slots, which a base without them would undo.
    __slots__ = ()

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """Return the rows, which all have the same keys."""

    @abstractmethod
    def as_text(self) -> str:
        """Return the text that a notebook shows."""

    def to_csv(self) -> str:
        """Return ``records`` as CSV text, with a line of titles."""
        text = io.StringIO()
        rows = self.records()
        # csv ends lines with "\r\n" by default; files that Python opens as text add their own.
        writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_dataframe(self) -> Any:
        """Return ``records`` as a pandas data frame.

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

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return first_lines(self, self.as_text())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.as_text())}</pre>"
