"""The list of planted faults: one TOML file for each room of the package."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent
ROOT = LISTS.parents[1]


@dataclass(frozen=True)
class Fault:
    """One edit that breaks a promise, and the tests of which one must fail under it.

    Attributes:
        room: The list that has it, without its ending.
        name: The fault of the code, in kebab case; unique in all lists.
        promise: The page in ``docs/guide``, a colon, and the promise that the fault breaks.
        file: The file to edit, from the root of the repository.
        find: Text that occurs exactly once in the file.
        replace: The text that stands there in the faulty code.
        tests: Files or node ids of tests, the quickest first.
        survives: Why no test fails, and how loud the fault is; empty where one must fail.
    """

    room: str
    name: str
    promise: str
    file: str
    find: str
    replace: str
    tests: list[str]
    survives: str = ""

    def problem(self) -> str:
        """Return why the entry is useless, or an empty string."""
        page, _, promise = self.promise.partition(":")
        if not promise.strip() or not (ROOT / "docs/guide" / page).is_file():
            return f"promise {self.promise!r} does not begin with a page of docs/guide and a colon"
        path = ROOT / self.file
        count = path.read_text(encoding="utf-8").count(self.find) if path.is_file() else 0
        if count != 1 or self.find == self.replace:
            return f"the text to find must occur once in {self.file} and change; it occurs {count}x"
        missing = [test for test in self.tests if not (ROOT / test.partition("::")[0]).exists()]
        if missing or not self.tests:
            return f"these tests do not exist: {', '.join(missing) or 'none is named'}"
        return ""


def all_faults() -> list[Fault]:
    """Return the faults of all lists, in the order of the lists' names and of their entries."""
    faults = []
    for path in sorted(LISTS.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        faults += [Fault(path.stem, **entry) for entry in table["fault"]]
    return faults
