"""Proofs of how good a plan is."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import pytest
from ortools.sat.python import cp_model

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits, lower_bounds, prove, recsys14
from tests.planning.instances import instance
from tests.support.sequencer import await_event


def test_a_plan_that_reaches_the_bound_is_proved_without_a_search() -> None:
    """The lower bound is proof enough."""
    proof = prove(recsys14.plan(), recsys14.costs(), limits=recsys14.limits())
    assert proof.optimal
    assert (proof.ii_us, proof.bound_us, proof.gap) == (108_380, 108_380, 0)


def test_an_optimum_above_the_lower_bound_is_proved() -> None:
    """A loop whose recurrence and whose threads can be kept, each alone, but not both."""
    given = instance(39, size=6)
    bound_us = lower_bounds(
        given.plan, given.costs, streams=False, threads=given.limits.threads
    ).ii_us
    proof = prove(
        given.plan, given.costs, limits=given.limits, streams=False, seconds=120, resolution_us=10
    )
    assert proof.optimal
    assert bound_us < proof.bound_us == 17_440
    assert proof.ii_us == 17_450


def test_an_uneven_share_of_work_is_proof_without_a_solver() -> None:
    """Three tasks of 3 ms on two threads: half of 9 ms each cannot be, 6 ms is the least."""
    names = ("a", "b", "c")
    plan = PipelinePlan({name: TaskSchedule() for name in names})
    costs = CostModel({name: TaskCost(host_us=3_000) for name in names})
    proof = prove(plan, costs, limits=Limits(threads=2), streams=False, resolution_us=10)
    assert (proof.ii_us, proof.bound_us) == (6_000, 6_000)


@pytest.mark.parametrize("number", range(12))
def test_no_plan_beats_what_is_proved(number: int) -> None:
    """The planner's interval is not below the bound of the proof."""
    given = instance(number, size=7)
    proof = prove(
        given.plan,
        given.costs,
        limits=given.limits,
        streams=given.streams,
        seconds=2,
        resolution_us=10,
    )
    assert proof.bound_us <= proof.ii_us <= proof.planned_us


def interrupt_the_main_thread() -> None:
    """As Ctrl-C does; and wait for it, where this is the main thread."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    if threading.current_thread() is threading.main_thread():
        threading.Event().wait(10)


def test_ctrl_c_is_still_heard_after_a_proof() -> None:
    """The solver's own handler once left SIGINT to kill the process."""
    given = instance(0, size=7)
    prove(given.plan, given.costs, limits=given.limits, streams=given.streams, seconds=2)
    with pytest.raises(KeyboardInterrupt):
        interrupt_the_main_thread()


def test_ctrl_c_ends_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the search, which is left undecided; and not when its time is over."""
    given = instance(3, size=40)  # takes many seconds to settle
    solve = cp_model.CpSolver.solve
    solving = threading.Event()
    answers = []

    def tell(solver: cp_model.CpSolver, *arguments: Any) -> Any:
        solving.set()
        answers.append(solve(solver, *arguments))
        return answers[-1]

    def interrupt() -> None:
        await_event(solving, "the solver")
        interrupt_the_main_thread()

    monkeypatch.setattr(cp_model.CpSolver, "solve", tell)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        prove(given.plan, given.costs, limits=given.limits, streams=given.streams, seconds=240)
    interrupter.join()
    assert answers == [cp_model.UNKNOWN]


def test_without_ortools_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(ImportError, match=r"pip install 'swpipe\[optimum\]'"):
        prove(recsys14.plan(), recsys14.costs())


@pytest.mark.parametrize(("seconds", "resolution_us"), [(0, 1), (1, 0), (float("nan"), 1)])
def test_times_that_are_none_are_refused(seconds: float, resolution_us: float) -> None:
    """A solver without time, or times in steps of nothing, prove nothing."""
    with pytest.raises(ValueError, match="both must be above 0"):
        prove(recsys14.plan(), recsys14.costs(), seconds=seconds, resolution_us=resolution_us)
