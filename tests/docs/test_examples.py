"""What the documentation shows runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, python_blocks
from tests.support.scripts import Script, Scripts

EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
WITH_CODE = [page for page in PAGES if python_blocks(page)]


def run(scripts: Scripts, script: Path, where: Path) -> str:
    """What the script prints; fails the test with its errors where it does not end well."""
    done = scripts.run(
        Script(path=str(script), folder=str(where), errors=("ResourceWarning",)), deadline_s=360
    )
    if done.returncode:
        pytest.fail(f"{script.name} ended with {done.returncode}:\n{done.stderr}", pytrace=False)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_what_its_page_shows(
    scripts: Scripts, script: Path, tmp_path: Path
) -> None:
    """Each example ends well; its output is that of the .txt beside it, where there is one."""
    printed = run(scripts, script, tmp_path)
    shown = script.with_suffix(".txt")
    if shown.exists():
        assert printed == shown.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_on_a_page_runs(scripts: Scripts, page: Path, tmp_path: Path) -> None:
    """The Python blocks of a page run one after the other, as a reader would paste them."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.code for block in python_blocks(page)), encoding="utf-8")
    run(scripts, script, tmp_path)


def test_the_readme_has_its_example() -> None:
    """The README's first example has some thirty lines without the blank ones; others go on."""
    first, *_ = python_blocks(ROOT / "README.md")
    assert 20 <= len([line for line in first.code.splitlines() if line.strip()]) <= 35
