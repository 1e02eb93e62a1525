"""The documentation's pages, and the Python in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    if "_build" not in page.relative_to(ROOT).parts
)

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced piece of Python: the line it starts on (from 1) and its text."""

    line: int
    code: str


def python_blocks(page: Path) -> list[Block]:
    """All ```` ```python ```` blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in _BLOCK.finditer(text)]
