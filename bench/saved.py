"""The table as JSON lines, and the ratios that have moved since another revision."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure import Row, Spread, ratios

ROOT = Path(__file__).parents[1]
FILE = "bench.jsonl"  # in the current folder


def commit() -> str:
    """Return this checkout's commit, with "+" if files differ from it; "" without git."""
    found = _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")
    return found.decode().strip()


def save(rows: Iterable[Row]) -> None:
    """Append the rows to ``FILE``, each with the commit."""
    with Path(FILE).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"commit": commit(), **asdict(row)}) + "\n" for row in rows)


def load(path: Path) -> list[Row]:
    """Return the rows of a file, or none if it does not exist."""
    if not path.exists():
        return []
    return [_row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(data: dict[str, Any]) -> Row:
    ratio = data["ratio"]
    fields = {name: data[name] for name in ("what", "ours", "beside", "bar")}
    return Row(**fields, ratio=None if ratio is None else Spread(**ratio))


def since(revision: str, sections: Sequence[str], rounds: int) -> list[Row]:
    """Measure swpipe at a revision and as it is now, alternately, by this checkout's benchmarks.

    Args:
        revision: A commit of this checkout.
        sections: Their names; all if there are none.
        rounds: The number of processes that measure each of the two.

    Returns:
        A row for each ratio: now, before, and now over before.

    Raises:
        ValueError: ``revision`` names no commit of this checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        before, now = Path(folder, "before"), Path(folder, "now")
        before.mkdir()
        now.mkdir()
        packed = _git("archive", revision, "swpipe")
        if not packed:
            raise ValueError(f"{revision!r} names no revision of this checkout that has swpipe")
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(before, filter="data")
        (now / "swpipe").symlink_to(ROOT / "swpipe")
        for turn in range(rounds):
            for place in (before, now) if turn % 2 else (now, before):
                _measure(place, sections)
        return compare(load(before / FILE), load(now / FILE))


def compare(before: Iterable[Row], now: Iterable[Row]) -> list[Row]:
    """Return a row for each ratio that both have, marked "moved" if their spreads are disjoint."""
    old, new = _ratios(before), _ratios(now)
    return [_compared(what, old.get(what, []), found) for what, found in new.items()]


def _compared(what: str, old: Sequence[float], new: Sequence[float]) -> Row:
    now = Spread.of(new)
    if len(old) != len(new):
        return Row(what, now.text(3), f"before: {len(old)} of {len(new)} measured")
    was = Spread.of(old)
    moved = ", moved" if now.low > was.high or now.high < was.low else ""
    return Row(what, now.text(3), f"before {was.text(3)}{moved}", ratios(new, old))


def _ratios(rows: Iterable[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio is not None:
            found.setdefault(row.what, []).append(row.ratio.median)
    return found


def _measure(place: Path, sections: Sequence[str]) -> None:
    """Measure the swpipe in ``place``, in a new process."""
    path = os.pathsep.join([str(place), str(ROOT)])
    command = [sys.executable, "-P", "-m", "bench", *sections, "--save"]
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run(command, cwd=place, env=environment, stdout=subprocess.DEVNULL, check=False)


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=False).stdout
