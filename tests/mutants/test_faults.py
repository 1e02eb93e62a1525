"""The lists of planted faults name existing files, code and tests."""

from __future__ import annotations

from collections import Counter

from tests.mutants.faults import all_faults


def test_each_fault_can_be_planted() -> None:
    """Each entry edits a place that exists once, and names tests that exist."""
    problems = {fault.name: fault.problem() for fault in all_faults()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_no_two_faults_have_one_name() -> None:
    """A name selects one fault."""
    names = Counter(fault.name for fault in all_faults())
    assert [name for name, count in names.items() if count > 1] == []
