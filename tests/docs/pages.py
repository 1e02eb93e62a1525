"""The documentation's pages, and the Python in them."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    if "_build" not in page.relative_to(ROOT).parts
)

_LESS = {
    "README.md": ("torch.randint(50, (1600,", "torch.randint(50, (320,"),
    "rollouts.py": ("worker_processes(rollout, 4)", "worker_processes(rollout, 2)"),
}
"""Replacements that shorten measurements whose figures no test compares, by page or example."""

_FENCE = re.compile(r"^(`{3,}|:{3,})([^\n]*)\n(.*?)^\1 *$", re.DOTALL | re.MULTILINE)

_INCLUDED = re.compile(r"\{literalinclude\} *\.\./examples/([\w.]+)")


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        line: The line it starts on, from 1.
        kind: The text after the fence: the language, or a directive with its argument.
        code: Its text; for an included example, that of the file.
        before: The text between the block before it and this one.
    """

    line: int
    kind: str
    code: str
    before: str

    @property
    def runs(self) -> bool:
        """Whether the tests run the block; a ``{code-block} python`` is a fragment."""
        return self.kind == "python" or self.kind.endswith(".py")

    @property
    def is_output(self) -> bool:
        """Whether the block shows printed output."""
        shows = self.kind in ("console", "text") and not self.code.startswith("$ ")
        return shows or self.kind.endswith(".txt")


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page in order, with the text of included examples."""
    text = page.read_text(encoding="utf-8")
    found, end = [], 0
    for match in _FENCE.finditer(text):
        kind, code = match[2].strip(), match[3]
        if included := _INCLUDED.match(kind):
            code = (DOCS / "examples" / included[1]).read_text(encoding="utf-8")
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(line, kind, code, text[end : match.start()]))
        end = match.end()
    return found


def python_blocks(page: Path) -> list[Block]:
    """Return all ```` ```python ```` blocks of a page in order."""
    return [block for block in blocks(page) if block.kind == "python"]


def printed_by(page: Path) -> list[tuple[Block, Block | None]]:
    """Return each block that runs and prints, with the output that the page shows after it."""
    some = [block for block in blocks(page) if block.runs or block.is_output]
    return [
        (block, after if after is not None and after.is_output else None)
        for block, after in zip_longest(some, some[1:])
        if block.runs and re.search(r"\bprint(_report)?\(", block.code)
    ]


def quicker(path: Path, code: str) -> str:
    """Return the code of a page or example, with its long computations shortened."""
    if path.name in _LESS:
        long, short = _LESS[path.name]
        assert long in code
        code = code.replace(long, short)
    return code
