"""Proofs of how good a plan is."""

from __future__ import annotations

import math
import signal
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from ortools.sat.python import cp_model

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import Limits, auto_plan, lower_bounds, prove, recsys14
from swpipe.planning.modulo.schedule_graph import schedule_graph
from swpipe.planning.proof.constraint_model import ConstraintModel
from tests.planning.instances import held_back, instance
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
    given = held_back(instance(number, size=7), number)
    proof = prove(
        given.plan,
        given.costs,
        limits=given.limits,
        streams=given.streams,
        seconds=2,
        resolution_us=10,
    )
    assert proof.bound_us <= proof.ii_us <= proof.planned_us


@pytest.mark.parametrize("number", range(24))
def test_no_interval_is_refuted_that_a_plan_has(number: int) -> None:
    """The solver finds a schedule where the planner found one, whatever holds the host back."""
    given = held_back(instance(number, size=6, tight=number % 3 == 0), number)
    limits, streams = given.limits, given.streams
    found = auto_plan(given.plan, given.costs, limits=limits, streams=streams, effort=0.1)
    graph = schedule_graph(given.plan, given.costs, limits, streams=streams)
    period = math.ceil(found.ii_us / 10)
    model = ConstraintModel(graph, period, limits.threads, limits.in_flight, unit_us=10)
    possible, _ = model.solve(seconds=60, workers=1)
    assert possible


def is_possible(plan: PipelinePlan, costs: CostModel, period_us: int) -> bool | None:
    """Whether one iteration in flight and one thread can have this interval."""
    graph = schedule_graph(plan, costs, Limits(1, 1), streams=True)
    return ConstraintModel(graph, period_us, 1, 1, unit_us=1).solve(seconds=60, workers=1)[0]


@pytest.mark.parametrize(("run_ahead", "least_us"), [(0, 1_800), (1, 900), (2, 600)])
def test_how_far_the_host_may_be_ahead_is_modelled(run_ahead: int, least_us: int) -> None:
    """Three streams overlap as far as iterations are launched, with one in flight."""
    names = ["copy", "dist", "work"]
    schedule = {name: TaskSchedule(stream=name) for name in names}
    deps = [("dist", "copy"), ("work", "dist")]
    plan = PipelinePlan(schedule, deps=deps, run_ahead=run_ahead)
    costs = CostModel({name: TaskCost(device_us=600) for name in names})
    assert is_possible(plan, costs, least_us)
    assert is_possible(plan, costs, least_us - 1) is False


def test_a_task_that_blocks_is_modelled() -> None:
    """Its thread is busy until its device work is done, which begins when it is launched."""
    plan = PipelinePlan({"work": TaskSchedule()}, run_ahead=0)
    costs = CostModel({"work": TaskCost(100, device_us=500, blocks=True)})
    assert is_possible(plan, costs, 600)
    assert is_possible(replace(plan, run_ahead=None), costs, 599) is False


def test_what_orders_functions_alone_orders_no_device_work() -> None:
    """Two streams that the host gives work in turn run beside each other."""
    schedule = {"a": TaskSchedule(stream="a"), "b": TaskSchedule()}
    plan = PipelinePlan(schedule, deps=[("b", "a")], cross_iter_deps=[("a", "b")])
    costs = CostModel({name: TaskCost(10, device_us=500) for name in schedule})
    apart = replace(plan, host_only=[("b", "a"), ("a", "b")])
    for found, ii_us in ((plan, 1_000), (apart, 500)):
        assert lower_bounds(found, costs).ii_us == ii_us
        assert auto_plan(found, costs).ii_us == ii_us
        assert is_possible(found, costs, ii_us)
        assert is_possible(found, costs, ii_us - 1) is False


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
