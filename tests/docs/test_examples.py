"""All code in the documentation runs."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from swpipe.cli import main
from swpipe.cli.app import app
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, printed_by, python_blocks, quicker
from tests.support import servers
from tests.support.scripts import Script, Scripts
from tests.support.virtual_clock import TimedHost, tell_time

EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
WITH_CODE = [page for page in PAGES if python_blocks(page)]
END = "(end of a block)"

QUICKLY = """
import swpipe.tuning.autotuning as a
a.EFFORT, a._ROUNDS, a._WINDOWS, a._BATCHES = 0.1, 2, 1, 1
del a
"""
"""Settings of short searches and measurements; the page does not depend on them."""

TIMED = ("faster_plan",)
"""Examples whose point is their times: they run on a virtual clock."""

MEASURED = {
    "README.md": ("before #, after # steps per second",),
    "swpipe plan auto --workload my_loop:loop --seconds 2 --output mine.toml": (
        "plan per iteration spread predicted in flight threads",
        "serial # ms # ms # ms # #",
        "written to mine.toml",
    ),
    "planning.md": (
        "plan per iteration spread predicted in flight threads",
        "serial # ms # ms # ms # #",
    ),
    "faster_plan": (
        "task exposed own host blocked",
        "promised # ± # ms:",
        "before ms after ms saved ms ± ms beyond ±",
    ),
    "overlap": ("ahead: the loader, decode", "in turn: forward, backward, step"),
    "timeline": (
        "row busy waits idle task runs mean ms mean wait ms",
        "default #% #% #% <admit> # # #",
    ),
    "swpipe report my_loop:loop --rounds 2 -o report.html": (
        "step: # ± # ms",
        "written to report.html",
    ),
}
"""Outputs with times: these lines are compared, without their figures. The other lines, such as
which task bounds a step, depend on the machine."""

DRAWN = ("for x, y in loader:", "io       ▌", "comm   --", "finding 1: ", "loader          pull")
"""Beginnings of blocks that are drawings, or one example of possible output."""

KINDS = re.compile(
    r"python|console|text|toml|\{code-block\} (python|text|toml)|"
    r"\{literalinclude\} \.\./examples/\w+\.(py|txt)|\{toctree\}|\{eval-rst\}"
)
"""The kinds of fences; another kind could be Python that no test runs."""


def form(text: str) -> list[str]:
    """Return the lines of an output without figures and column widths."""
    return [re.sub(r"-?\d[\d.]*", "#", " ".join(line.split())) for line in text.splitlines()]


def missing(name: str, output: str) -> list[str]:
    """Return the lines that an output with times should have and does not."""
    lines = form(output)
    if "nothing else runs" in output:  # a report on a busy machine says that alone
        return []
    return [one for one in MEASURED.get(name, ()) if one not in lines]


def run(script: Path, where: Path) -> str:
    """Return the output of a script; fail the test with its errors if it fails."""
    imports = "\n".join(re.findall(r"^ *(?:from|import) .*", script.read_text(), re.MULTILINE))
    kinds = [kind for kind in servers.IMPORTED if kind in imports]
    job = Script(
        path=str(script), folder=str(where), errors=("ResourceWarning",), is_torn_down=False
    )
    done = Scripts(kinds[-1] if kinds else "torch").run(job, deadline_s=360)
    if done.returncode:
        pytest.fail(f"{script.name} ended with {done.returncode}:\n{done.stderr}", pytrace=False)
    return done.stdout


def test_examples_import_no_private_module() -> None:
    """Users can write whatever they show."""
    private = re.compile(r"^ *(?:from|import) swpipe\S*\._", re.MULTILINE)
    scripts = (DOCS / "examples").rglob("*.py")
    assert [str(path) for path in scripts if private.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("name", TIMED)
def test_an_example_with_times_runs_on_a_virtual_clock(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends well, and prints what its page shows on any machine."""
    host = TimedHost()
    tell_time(monkeypatch, host)
    monkeypatch.setattr(time, "sleep", host.sleep)
    runpy.run_path(str(DOCS / "examples" / f"{name}.py"), run_name="__main__")
    assert host.now_ns > 0
    assert missing(name, capsys.readouterr().out) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [path for path in EXAMPLES if path.stem not in TIMED], ids=lambda path: path.stem
)
def test_an_example_runs_and_prints_what_its_page_shows(script: Path, tmp_path: Path) -> None:
    """Each example ends well; its output equals the .txt next to it, if there is one."""
    code = script.read_text(encoding="utf-8")
    ran = script
    if (less := quicker(script, code)) != code:
        ran = tmp_path / script.name
        ran.write_text(less, encoding="utf-8")
    printed = run(ran, tmp_path)
    shown = script.with_suffix(".txt")
    if shown.exists():
        assert printed == shown.read_text(encoding="utf-8")
    assert missing(script.stem, printed) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    """The blocks run in order, as a reader would paste them; "It prints:" is taken literally."""
    script = tmp_path / "page.py"
    pieces = [f"{block.code}\nprint({END!r})" for block in python_blocks(page)]
    script.write_text(quicker(page, "\n".join([QUICKLY, *pieces])), encoding="utf-8")
    for name in re.findall(r"^from (\w+) import", "\n".join(pieces), re.MULTILINE):
        if (beside := DOCS / "examples" / f"{name}.py").exists():
            shutil.copy(beside, tmp_path)
    whole = run(script, tmp_path)
    assert missing(page.name, whole) == []
    printed = whole.split(f"{END}\n")
    outputs = dict(zip(python_blocks(page), printed, strict=False))
    for block, shown in printed_by(page):
        if block in outputs and shown is not None and shown.before.endswith("prints:\n\n"):
            assert outputs[block] == shown.code, f"line {shown.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_shows_what_its_code_prints(page: Path) -> None:
    """The output comes before more code; varying output comes after "It printed:".

    Blocks are Python that the tests run, a fragment of it, commands, text, or directives.
    """
    assert [b.kind for b in blocks(page) if not KINDS.fullmatch(b.kind)] == []
    shown = [(block.line, after) for block, after in printed_by(page) if block.kind != "python"]
    assert [block.line for block, after in printed_by(page) if after is None] == []
    copied = [(line, after) for line, after in shown if after and not after.kind.endswith(".txt")]
    assert [line for line, after in copied if after.before.endswith("prints:\n\n")] == []


COMMANDS = [name for name in MEASURED if name.startswith("swpipe ")]
REPORT = "swpipe report my_loop:loop --rounds 2 -o report.html"


def copy_of_my_loop(folder: Path) -> None:
    """Write the reader's own loop, which stands in the guide, to a folder."""
    (folder / "my_loop.py").write_text((DOCS / "examples" / "my_loop.py").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != REPORT])
def test_a_command_prints_what_its_page_shows(command: str, tmp_path: Path) -> None:
    """The command runs on the reader's own loop."""
    copy_of_my_loop(tmp_path)
    script = tmp_path / "command.py"
    script.write_text(f"from swpipe.cli import main\n\nmain({command.split()[1:]!r})\n")
    assert missing(command, run(script, tmp_path)) == []


def test_a_report_prints_what_its_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is for the reader's own loop, on a virtual clock, since a report profiles many times."""
    copy_of_my_loop(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_loop", raising=False)  # another test's
    host = TimedHost()
    tell_time(monkeypatch, host)
    monkeypatch.setattr(time, "sleep", host.sleep)
    with pytest.raises(SystemExit) as ended:
        main(REPORT.split()[1:])
    assert ended.value.code in (0, None)
    # On this clock a step has no spread.
    printed = capsys.readouterr().out.replace("step: 14.0 ms", "step: 14.0 ± 0.0 ms")
    assert missing(REPORT, printed) == []
    assert (tmp_path / "report.html").exists()


def test_each_output_is_compared() -> None:
    """It is compared literally, with a file, or by line without its times; drawings are named."""
    shown = [
        block
        for page in PAGES
        for block in blocks(page)
        if (block.is_output or "\n" in block.code.rpartition("\n$ ")[2].strip())
        and block.kind in ("console", "text")
        and not block.before.endswith("prints:\n\n")
        and not block.code.startswith(DRAWN)
    ]
    told = {name: set(lines) for name, lines in MEASURED.items()}
    for block in shown:
        lines = set(form(block.code))
        found = [name for name, some in told.items() if some <= lines]
        assert found, f"line {block.line}: {block.code}"
        del told[found[0]]
    assert list(told) == ["timeline"]  # whose drawing comes first


def test_the_picture_of_the_readme_is_that_of_the_guide() -> None:
    """It has four batches, as a trace draws them."""
    picture = next(b.code for b in blocks(ROOT / "README.md") if b.code.startswith("io "))
    assert picture in (DOCS / "guide" / "profiler.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return all swpipe commands that a page shows."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"^\$ (?:torchrun .*? -m )?(swpipe .+)$", text, re.MULTILINE)
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_a_command_on_a_page_is_one(command: str) -> None:
    """Its options exist, and their values are of the right kind."""
    args = shlex.split(command, comments=True)[1:]
    part: Any = get_command(app)
    rest = [*args]
    context = part.make_context("swpipe", [*rest])
    while isinstance(part, TyperGroup):
        name, part, rest = part.resolve_command(context, rest)
        context = part.make_context(name, [*rest], parent=context)


@pytest.mark.parametrize(
    ("page", "before", "after", "imported"),
    [
        ("loops", "plain_loop", "overlapped_loop", "import swpipe"),
        ("schedules", "schedule_plain", "schedule_basic", "from swpipe.schedulable import "),
    ],
)
def test_the_lines_that_a_page_changes_are_few_and_marked(
    page: str, before: str, after: str, imported: str
) -> None:
    """They lead from the plain loop to the overlapped one; all changed lines are marked."""
    text = (DOCS / "guide" / f"{page}.md").read_text(encoding="utf-8")
    options = re.search(rf"{after}\.py\n(?:.*\n)*?:emphasize-lines: ([\d, ]+)\n", text)
    assert options
    marked = {int(number) for number in options[1].split(",")}
    plain, changed = (
        [line.strip() for line in (DOCS / "examples" / f"{name}.py").read_text().splitlines()]
        for name in (before, after)
    )
    new = [line for line in (Counter(changed[1:]) - Counter(plain[1:])).elements() if line]
    shown = changed[next(k for k, line in enumerate(changed) if line.startswith("loader =")) :]
    (own,) = [line for line in new if line.startswith(imported)]
    assert sorted(new) == sorted([own, *(shown[number - 1] for number in marked)])
    assert len(marked) + 1 == 7
    outputs = [(DOCS / "examples" / f"{name}.txt").read_text() for name in (before, after)]
    assert outputs[0] == outputs[1] or page == "loops"
