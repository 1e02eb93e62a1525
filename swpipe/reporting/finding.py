"""The findings of a report about what keeps work from overlapping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact that keeps work from overlapping.

    Attributes:
        rule: The kind of the finding, such as "host-sync"; the guide lists them.
        place: ``file:line`` and the task; or a variable, a setting, "plan", "loader" or "machine".
        text: The fact, and what it prevents.
        fix: The way to fix it.
    """

    rule: str
    place: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text} [{self.rule}]\n  fix: {self.fix}"
