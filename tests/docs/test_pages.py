"""The API pages have all public names; guarantees name their checks; links are valid."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT

PACKAGE = ROOT / "swpipe"
GUARANTEES = DOCS / "guide" / "guarantees.md"

_AUTOMODULE = re.compile(r"automodule:: ([\w.]+)(?:\n +:exclude-members: (.*))?")
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")
_SECTION_LINK = re.compile(r"\]\((?!\w+:)([^)#]*)#([^)]+)\)")
_FENCE = re.compile(r"^ *(```|~~~|:::)")
_RULE = re.compile(r"\|( *:?-+:? *\|)+ *$")


def rows_cut_off(text: str) -> list[str]:
    """Return the first lines of tables that have no rule below them, as ``line: text``."""
    found = []
    fenced = False
    lines = ["", *text.splitlines(), ""]
    triples = zip(lines, lines[1:], lines[2:], strict=False)
    for number, (before, line, after) in enumerate(triples, start=1):
        fenced ^= bool(_FENCE.match(line))
        begins = line.startswith("|") and not before.startswith("|")
        if begins and not fenced and not _RULE.match(after):
            found.append(f"{number}: {line}")
    return found


def sections(page: Path) -> set[str]:
    """Return the names that links use for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def public_names() -> dict[str, list[str]]:
    """Return each public module that defines ``__all__``, with the names in it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if any(part.startswith("_") for part in parts):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[".".join(parts)] = ast.literal_eval(node.value)
    return found


PUBLIC = public_names()

needs_every_package = pytest.mark.skipif(
    find_spec("torchrec") is None, reason="imports all of swpipe"
)


def documented_names() -> list[tuple[str, str]]:
    """Return module and name of everything that the API pages show."""
    shown = []
    for page in sorted((DOCS / "api").glob("*.md")):
        for module, excluded in _AUTOMODULE.findall(page.read_text(encoding="utf-8")):
            left_out = re.split(r", *", excluded)
            shown += [(module, name) for name in PUBLIC[module] if name not in left_out]
    return shown


def value_of(module: str, name: str) -> Any:
    """Return the object that a public module offers under a name."""
    return getattr(importlib.import_module(module), name)


@needs_every_package
def test_every_public_name_is_on_exactly_one_api_page() -> None:
    """Each name in a public ``__all__`` is documented once, under one of its modules."""
    shown = Counter(id(value_of(*entry)) for entry in documented_names())
    listed = [(module, name) for module, names in PUBLIC.items() for name in names]
    assert [entry for entry in listed if shown[id(value_of(*entry))] != 1] == []


def test_no_private_name_is_on_an_api_page() -> None:
    """The API pages name public modules only, and no name in their ``__all__`` is private."""
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    assert sorted(module for module, _ in _AUTOMODULE.findall(text)) == sorted(PUBLIC)
    assert [name for names in PUBLIC.values() for name in names if name.startswith("_")] == []


@needs_every_package
def test_every_public_name_has_a_docstring() -> None:
    """Public classes, functions and methods have docstrings; a protocol's speak for its classes."""
    values = {(m, n): value_of(m, n) for m, names in PUBLIC.items() for n in names}
    protocols = [value for value in values.values() if getattr(value, "_is_protocol", False)]
    undocumented = []
    for (module, name), value in values.items():
        if not callable(value):
            continue
        members = inspect.getmembers(value, callable) if inspect.isclass(value) else []
        undocumented += [
            f"{module}.{name}.{key}"
            for key, member in [("", value), *members]
            if not key.startswith("_")
            and not inspect.getdoc(member)
            and not any(inspect.getdoc(getattr(p, key, None)) for p in protocols if hasattr(p, key))
        ]
    assert undocumented == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_tables_are_whole(page: Path) -> None:
    """Files and pictures exist, and so do headings, as README's readers follow these, too.

    A blank line among the rows ends a table: the rows below it are shown as text, with bars.
    """
    text = page.read_text(encoding="utf-8")
    assert [link for link in _LINK.findall(text) if not (page.parent / link).exists()] == []
    links = _SECTION_LINK.findall(text)
    targets = [(page.parent / (file or page), section) for file, section in links]
    assert [target for target in targets if target[1] not in sections(target[0])] == []
    assert rows_cut_off(text) == []


def test_every_guarantee_says_how_it_is_checked() -> None:
    """The page has a section for each of G1 to G12, which ends with how it is checked."""
    text = GUARANTEES.read_text(encoding="utf-8").partition("\n## The other parts")[0]
    titles = re.findall(r"^### (G\d+)\. \w", text, re.MULTILINE)
    assert titles == [f"G{n}" for n in range(1, 13)]
    for section in text.split("\n### ")[1:]:
        assert section.strip().split("\n\n")[-1].startswith("*Checked ")


def test_each_example_has_a_line_on_the_page_of_examples() -> None:
    """The line is the first line of its docstring."""
    rows = []
    for script in sorted((DOCS / "examples").glob("*.py")):
        says = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        name = script.name
        rows.append(f"| [`{name}`](examples/{name}) | {says.partition(chr(10))[0]} |")
    page = (DOCS / "examples.md").read_text(encoding="utf-8").splitlines()
    assert sorted(line for line in page if line.startswith("| [")) == sorted(rows)


def test_each_public_module_has_one_tier() -> None:
    """The page of stability names each public module once, as stable or as provisional."""
    page = (DOCS / "stability.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(swpipe[\w.]*)` \| .+ \|$", page, re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)


def test_each_decision_is_listed() -> None:
    """A record has a row, and the headings of the others."""
    folder = DOCS / "decisions"
    index = (folder / "index.md").read_text(encoding="utf-8")
    records = {page.name for page in folder.glob("*.md")} - {"index.md"}
    assert {*re.findall(r"^\| \[.+\]\((.+)\) \| .+ \|$", index, re.MULTILINE)} == records
    headings = ["Context", "Options", "Decision", "Consequences", "When to look at it again"]
    for name in records:
        text = (folder / name).read_text(encoding="utf-8")
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == headings, name


def test_the_guide_and_the_readme_stay_short() -> None:
    """Both have a limit, so that what is added replaces something."""
    words = [
        len(page.read_text(encoding="utf-8").split()) for page in (DOCS / "guide").glob("*.md")
    ]
    assert sum(words) <= 27_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
