"""Run CP-SAT, the solver of OR-Tools, in such a way that Ctrl-C is heard."""

from __future__ import annotations

from concurrent.futures import Future, wait
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


class Solved(NamedTuple):
    """A solver that has ended, and how."""

    solver: cp_model.CpSolver
    status: cp_model.CpSolverStatus


def require_ortools() -> None:
    """Raise ImportError, with what to install, where OR-Tools is not there."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401 - whether it is there
    except ImportError as error:
        raise ImportError(
            "to prove an optimum takes OR-Tools, which is not installed: "
            "pip install 'swpipe[optimum]'"
        ) from error


def solve(model: cp_model.CpModel, seconds: float, workers: int) -> Solved:
    """Solve a model within a time, on some threads."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    # Its own handler would leave SIGINT without one: Ctrl-C would kill the process ever after.
    solver.parameters.catch_sigint_signal = False
    return Solved(solver, _answer(solver, model))


def _answer(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Solve on a thread of its own, so that Ctrl-C is heard while the solver works."""
    answer: Future[cp_model.CpSolverStatus] = Future()

    def solve() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(solver.solve(model))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is asked for
                answer.set_exception(error)

    try:
        Thread(target=solve, name="solver").start()
        while not answer.done():  # in turns: a signal just before a sleep would not end that
            wait([answer], timeout=0.1)
        return answer.result()
    except BaseException:
        if not answer.cancel():
            while not answer.done():  # a search that has only just begun does not hear of its end
                solver.stop_search()
                wait([answer], timeout=0.01)
        raise
