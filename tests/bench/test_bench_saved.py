"""The table of benchmarks is kept, and two revisions are compared by it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import saved
from bench.measure import Row, Spread

PLAIN = Row("what", "1 us", "queue 2 us", Spread(0.5, 0.4, 0.6), 0.8)


def ratio(what: str, *medians: float) -> list[Row]:
    """Return a row for each run of a benchmark."""
    return [Row(what, "", "", Spread(m, m, m)) for m in medians]


def test_rows_are_read_as_they_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with and without a ratio are read; a second table is appended."""
    monkeypatch.chdir(tmp_path)
    saved.save([PLAIN, Row("skipped", "why")])
    saved.save([PLAIN])
    assert saved.load(tmp_path / saved.FILE) == [PLAIN, Row("skipped", "why"), PLAIN]


def test_what_moved_beyond_its_spread_is_told() -> None:
    """Their quartiles do not overlap; changes within the spread, and new rows, are listed apart."""
    before = ratio("engine", 2.0, 2.1, 2.2) + ratio("noise", 1.0, 2.0, 3.0)
    now = ratio("engine", 1.0, 1.1, 1.2) + ratio("noise", 1.1, 2.1, 3.1) + ratio("new", 1.0, 1.1)
    engine, noise, new = saved.compare(before, now)
    assert engine.beside.endswith("moved")
    assert engine.ratio is not None
    assert engine.ratio.median == pytest.approx(1.1 / 2.1)
    assert not noise.beside.endswith("moved")
    assert (new.beside, new.ratio) == ("before: 0 of 2 measured", None)


def test_every_section_can_be_loaded() -> None:
    """Each is loaded by its name, and measured by a function ``rows``."""
    for name in bench.PARTS:
        assert callable(import_module(f"bench.{name}").rows)


def test_what_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error for a revision or a section lists the known names."""
    with pytest.raises(ValueError, match="'no-such-revision' names no revision"):
        saved.since("no-such-revision", ["dispatch"], 1)
    with pytest.raises(SystemExit) as refused:
        bench.main(["dispach"])
    assert refused.value.code == 2
    assert "no section is named dispach; there are dispatch, " in capsys.readouterr().err
