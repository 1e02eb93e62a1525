"""Every module has its page, every promise its test, every link its end."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import swpipe
from tests.docs.pages import DOCS, PAGES, ROOT

PACKAGE = ROOT / "swpipe"
GUARANTEES = DOCS / "guide" / "guarantees.md"

_LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def modules() -> set[str]:
    """Dotted names of the package's modules, without private ones and those that only gather."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return {".".join(path.parts) for path in paths if not path.name.startswith("_")}


def test_every_module_is_on_an_api_page() -> None:
    """docs/api names each module once, and none that is gone."""
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    named = re.findall(r"automodule:: ([\w.]+)", text)
    assert sorted(named) == sorted(modules())


def test_every_public_name_says_what_it_is() -> None:
    """Each public class and function, and each public method of these classes, has a docstring."""
    silent = []
    for name in swpipe.__all__:
        thing = getattr(swpipe, name)
        if not callable(thing):
            continue
        members = inspect.getmembers(thing, callable) if inspect.isclass(thing) else []
        own = [(f"{name}.{key}", member) for key, member in members if not key.startswith("_")]
        silent += [label for label, obj in [(name, thing), *own] if not inspect.getdoc(obj)]
    assert silent == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures of a page exist."""
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_guarantee_names_its_tests() -> None:
    """The table of guarantees has G1 to G10, each with at least one test beside it."""
    rows = {
        match[1]: line
        for line in GUARANTEES.read_text(encoding="utf-8").splitlines()
        if (match := re.match(r"\| \*\*(G\d+)\*\*", line))
    }
    assert list(rows) == [f"G{n}" for n in range(1, 11)]
    assert [name for name, line in rows.items() if not _TEST.search(line)] == []


def test_the_tests_that_the_guarantees_name_exist() -> None:
    """No row of the table points to a test that was renamed or removed."""
    missing = []
    for file, name in set(_TEST.findall(GUARANTEES.read_text(encoding="utf-8"))):
        path = ROOT / file
        if not path.is_file():
            missing.append(file)
        elif name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            if name not in names:
                missing.append(f"{file}::{name}")
    assert missing == []
