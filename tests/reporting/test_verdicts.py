"""What a report says of loops whose truth is known, on a virtual clock."""

from __future__ import annotations

import os

import pytest

from swpipe import report
from tests.profiler.sleepers import Ahead, InTurn
from tests.reporting.known_loops import CASES, plan_of, tasks_of
from tests.support.virtual_clock import TimedHost

LOADERS = {"ahead": Ahead, "in turn": InTurn}


@pytest.mark.parametrize("name", CASES)
def test_a_report_says_what_is_true(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The step within its interval; the verdict; the first advice, and what it saves."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    case = CASES[name]
    loader = None if case.loader is None else LOADERS[case.loader[0]](host, *case.loader[1:])
    found = report(
        tasks_of(host, case.tasks), range(8), plan=plan_of(case), loader=loader, rounds=2
    )
    step = found.profile.step
    assert abs(1e3 * step.value_s - case.step) <= 1e3 * step.spread_s + 0.02 * case.step
    assert found.verdict.bound == case.bound
    assert found.next_step.startswith(case.first)
    assert "<pull>" not in str(found)
    if case.saves is not None:
        advice = found.changes[0].advice
        assert abs(1e3 * advice.saved_s - case.saves) <= 1e3 * advice.spread_s + 0.05 * case.saves
    for one in found.changes:
        if one.advice.plan:
            assert one.advice.saved_s <= found.ceiling.saved_s
            assert one.kept
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.profile.baseline_s)
