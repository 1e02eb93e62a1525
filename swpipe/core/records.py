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
    """A repr of what prints as ``text``: its class, and the first lines."""
    lines = text.splitlines()
    more = ["..."] if len(lines) > _MOST_LINES else []
    return "\n".join([f"<{type(value).__name__}>", *lines[:_MOST_LINES], *more])


class Rows(ABC):
    """What has rows of plain values, and a text that shows it."""

    __slots__ = ()

    @abstractmethod
    def records(self) -> list[dict[str, Any]]:
        """The rows; all of them have the same keys."""

    @abstractmethod
    def as_text(self) -> str:
        """The text that a notebook shows."""

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

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return first_lines(self, self.as_text())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.as_text())}</pre>"
