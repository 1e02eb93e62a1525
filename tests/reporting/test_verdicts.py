"""The report's statements on loops with known truth, on a virtual clock."""

from __future__ import annotations

import os
from itertools import chain, cycle, islice, repeat
from typing import Any

import pytest

from swpipe import PipelinePlan, PipelineTask, SWPipeline, report
from tests.profiler.sleepers import Ahead, InTurn
from tests.reporting.known_loops import CASES, Case, plan_of, tasks_of
from tests.reporting.loops import Calls
from tests.support.virtual_clock import TimedHost

LOADERS: dict[str, Any] = {"ahead": Ahead, "in turn": InTurn, "calls": Calls}
_RUN = 480  # iterations: whole passes of all batches


@pytest.mark.parametrize("name", CASES)
def test_a_report_says_what_is_true(
    host: TimedHost, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Step, verdict, the first advice and its saving, and the ceiling are true."""
    case = CASES[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(case.cores)})
    kind, *about = case.loader or ("",)
    loader = LOADERS[kind](host, *about) if kind else None
    tasks, plan = tasks_of(host, case.tasks, case.locked), plan_of(case)
    found = report(tasks, range(case.batches), plan=plan, loader=loader, rounds=2)
    step_ms = 1e3 * found.profile.step.value_s
    assert step_ms == pytest.approx(case.step, rel=0.03)
    assert found.verdict.bound == case.bound
    assert found.next_step.startswith(case.first)
    assert "<pull>" not in str(found)
    if case.saves is not None:
        advice = found.changes[0].advice
        apart_ms = abs(1e3 * advice.saved_s - case.saves)
        assert apart_ms <= 1e3 * advice.saved.spread_s + 0.05 * case.saves
    if case.ceiling is not None:
        assert 1e3 * found.ceiling.saved_s == pytest.approx(case.ceiling, abs=0.03 * case.step)
    for one in found.changes:
        if one.advice.plan is not None:
            assert one.advice.saved_s <= found.ceiling.saved_s
            assert one.kept
            obtained_ms = step_ms - run_ms(host, case, tasks, one.advice.plan, loader)
            promised_ms = 1e3 * one.advice.saved_s
            error_ms = 1e3 * one.advice.saved.spread_s + 0.05 * case.step
            assert abs(obtained_ms - promised_ms) <= error_ms
            assert obtained_ms <= 1e3 * found.ceiling.saved_s + 0.03 * case.step
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.profile.baseline_s)


def run_ms(
    host: TimedHost, case: Case, tasks: list[PipelineTask], plan: PipelinePlan, loader: Any
) -> float:
    """Return the time of a step in a run under a plan, between two retirements."""
    with SWPipeline(plan, tasks, check_effects=False) as pipe:
        batches = cycle(range(case.batches))
        if loader is not None:
            batches = chain.from_iterable(repeat(loader))
        ends_s = [host.perf_counter() for _ in pipe.iterate(islice(batches, 2 * _RUN))]
    lead = _RUN // 4
    return 1e3 * (ends_s[lead + _RUN] - ends_s[lead]) / _RUN
