"""swpipe declares all packages that it imports, so that it works without any others.

The README's example once failed: numpy came with other packages, and was not declared.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_layout import PACKAGE, ROOT, imported, parsed

PROJECT = ROOT / "pyproject.toml"
needs_repository = pytest.mark.skipif(not PROJECT.exists(), reason="needs the repository")

WORKLOADS = "tasks"
"""The package of the workloads, whose modules may need additional libraries."""

EXTRA_OF_WORKLOADS = "torchrec"
EXTRAS = ("torchrec", "plot")
"""Libraries that the user may install in addition; functions that need one say so."""

NOT_DECLARED = {"torchrec", "typing_extensions"}
"""Libraries that are not declared. The first asks for the CUDA build of fbgemm, which the user
chooses (docs/guide/install.md). Only type checkers read the second, and bring it."""


class Declared(NamedTuple):
    """The names of the packages that pyproject.toml requires.

    Requirements with a marker are those that only some systems have; functions import them.
    """

    always: set[str]
    for_workloads: set[str]
    for_functions: set[str]


def declared(project: Path) -> Declared:
    """Return the dependencies and extras of a pyproject.toml."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras = table["optional-dependencies"]
    dependencies = table["dependencies"]
    always = _names([one for one in dependencies if ";" not in one])
    optional = {extra: _names(extras[extra]) for extra in EXTRAS}
    return Declared(
        always,
        always | optional[EXTRA_OF_WORKLOADS] | NOT_DECLARED,
        _names(dependencies).union(*optional.values()) | NOT_DECLARED,
    )


def _names(requirements: list[str]) -> set[str]:
    """Return the import names of requirements; ``tomli-w>=1.1`` is imported as tomli_w."""
    return {re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in requirements}


def undeclared(package: Path, names: Declared) -> list[str]:
    """Return the imports below ``package`` of undeclared packages, as ``file:line: why``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        for name, line, at_load in imported(parsed(path), "swpipe"):
            top = name.partition(".")[0]
            if top == "swpipe" or top in sys.stdlib_module_names:
                continue
            if not at_load:
                allowed, why = names.for_functions, "no dependency and in no extra"
            elif where.parts[0] == WORKLOADS:
                allowed, why = names.for_workloads, f"no dependency and not in {EXTRA_OF_WORKLOADS}"
            else:
                allowed, why = names.always, "no dependency"
            if top not in allowed:
                found.append(f"{where}:{line}: {top} is {why}")
    return found


@needs_repository
def test_all_that_swpipe_imports_is_declared() -> None:
    """Imports at load are dependencies, or a workload's extra; in functions, any extra."""
    assert undeclared(PACKAGE, declared(PROJECT)) == []


@needs_repository
def test_every_dependency_has_a_least_version() -> None:
    """CI installs the least version of each, which without a bound is the first ever released."""
    table = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    named = [table["dependencies"], *table["optional-dependencies"].values()]
    asked = [one for some in named for one in some if not one.startswith("swpipe[")]
    assert [one for one in asked if not re.match(r"[\w.-]+>=\d", one)] == []
    assert len(asked) > 20


@needs_repository
def test_the_guide_lists_the_dependencies() -> None:
    """It lists all of them, and no others: once one was missing, and one was obsolete."""
    page = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"The first asks for ([^.]*)\.", page)
    names = re.split(r", | and ", re.sub(r" \(.*?\)", "", listed))
    table = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    assert names == [re.match(r"[\w-]+", one)[0] for one in table["dependencies"]]


@needs_repository
def test_the_python_versions_that_are_claimed_are_those_that_are_pinned() -> None:
    """The metadata claimed 3.12 and 3.13, on which no check had run."""
    table = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(table["classifiers"]))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert claimed == re.findall(r"^# .* on Python (3\.\d+)", pins, re.MULTILINE)
    assert table["requires-python"] == f">={claimed[0]}"
