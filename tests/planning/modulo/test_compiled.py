"""Compiled or not, the planner's inner loops do the same; what is kept of them is never stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swpipe.cli.plan_work import tell_first_time
from swpipe.planning.modulo import compiled
from swpipe.planning.modulo.compiled import kept_in

WALKS = """
import random

from swpipe.planning.modulo.beginnings import beginning
from swpipe.planning.modulo.period import Period
from swpipe.planning.modulo.sharing import least_load
from swpipe.planning.modulo.walk import Walk
from tests.planning.instances import instance
from tests.planning.modulo.graphs import Listener, graph_of

LOOPS = [*((number, 14, 5) for number in (3, 10, 39, 54, 58, 131, 644)), (1, 40, 3), (2, 40, 8)]
for number, size, depth in LOOPS:
    given, listener = instance(number, size), Listener()
    graph = graph_of(given)
    period = Period(graph, given.limits.threads, depth)
    walk = Walk(period, random.Random(number), rehearses=True)
    start = beginning(graph, depth, given.limits.threads)
    start = walk.dealt(start, 1e9, 1e9) or start
    walk.go(start, 80, listener, lanes_change=True)
    walk.stroll(start, 40, 1.0, 10**6, deals=False)
    walk.stroll(None, 40, 1.0, 10**6, deals=True)
    print(walk.top)
    print(listener.heard, [us.hex() for us in map(float, listener.promised_us)], walk.turns)
    print(least_load(graph, 3))
"""


def said(script: str, **environment: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=360,
        check=True,
    )
    return done.stdout


def test_compiled_or_not_walks_lead_the_same_way() -> None:
    """Every plan and every interval on the way, to the last bit; rehearsals and bounds too."""
    pytest.importorskip("numba")
    as_it_stands = said(WALKS, NUMBA_DISABLE_JIT="1")
    assert len(as_it_stands) > 10_000
    assert said(WALKS, NUMBA_DISABLE_JIT="0") == as_it_stands


def test_numba_is_imported_by_who_plans_alone() -> None:
    """It takes half a second, which those who only want a ready-made plan need not wait for."""
    script = "import sys, swpipe.plans, swpipe.cli; print('numba' in sys.modules)"
    assert said(script) == "False\n"


def test_what_was_compiled_is_not_used_for_other_sources(tmp_path: Path) -> None:
    """A function that is compiled into others in another file changed: they have to be made anew.

    Numba looks at the file of the outer function alone. It was found when a walk went on using the
    last rehearsal but one, and wrote beyond the arrays of the new one.
    """
    inner = tmp_path / "inner.py"
    inner.write_text("limit = 1\n")
    (tmp_path / "outer.py").write_text("from inner import limit\n")
    before = kept_in(tmp_path)
    kept_in.cache_clear()
    assert kept_in(tmp_path) == before
    inner.write_text("limit = 2\n")
    kept_in.cache_clear()
    assert kept_in(tmp_path) != before
    assert before.parent == tmp_path / "__pycache__"


def test_the_command_line_says_why_the_first_plan_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is compiled yet, and only there."""
    pytest.importorskip("numba")
    monkeypatch.setattr(compiled, "COMPILED", True)
    monkeypatch.setattr(compiled, "kept_in", lambda home: tmp_path / "kept")
    tell_first_time()
    assert "compiling" in capsys.readouterr().err
    (tmp_path / "kept").mkdir()
    tell_first_time()
    assert not capsys.readouterr().err
