"""Plans that hold no more than a limit: less run-ahead, fewer iterations in flight, fewer stages.

The plans that are fastest under each number of iterations in flight are looked at, the most first:
as they are, and with less ``run_ahead`` and depth. A plan of fewer iterations in flight is no
faster than one of more in which those are allowed, so the search ends where it has one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from swpipe.core.costs import CostModel
from swpipe.core.messages import in_bytes, in_ms, shown
from swpipe.core.plan import PipelinePlan
from swpipe.errors import PlanError, Problem
from swpipe.planning.limits import Limits
from swpipe.planning.simulation.interval import interval_us
from swpipe.planning.simulation.simulator import peak_of


@dataclass(frozen=True, slots=True)
class Fitting:
    """A plan that fits.

    Attributes:
        plan: The plan.
        ii_us: Its interval, in microseconds.
        why: What the limit costs, in words.
    """

    plan: PipelinePlan
    ii_us: float
    why: str


def fitting(
    free: PipelinePlan,
    find: Callable[[Limits], PipelinePlan],
    costs: CostModel,
    limits: Limits,
    max_bytes: int,
    *,
    streams: bool,
) -> Fitting:
    """The fastest plan found that holds ``max_bytes`` at most, by the simulator.

    Args:
        free: The fastest plan found, whatever it holds.
        find: The fastest plan under other limits.
        costs: With the tasks' memory.
        limits: What else to keep to.
        max_bytes: The limit.
        streams: Whether the device has streams.

    Raises:
        PlanError: No plan was found that fits; the message has the smallest peak.
    """
    best: tuple[float, PipelinePlan] | None = None
    free_us, least = interval_us(free, costs, streams=streams), 0
    for found in _candidates(free, find, limits):
        fastest_us = interval_us(found, costs, streams=streams)
        if best is not None and fastest_us >= best[0]:
            break
        for plan in _smaller(found, streams=streams):
            held = peak_of(plan, costs, streams=streams)
            size = 0 if held is None else held.bytes
            least = min(least or size, size)
            if size <= max_bytes:
                ii_us = interval_us(plan, costs, streams=streams)
                best = min(best or (ii_us, plan), (ii_us, plan), key=lambda one: one[0])
                if plan.run_ahead == found.run_ahead:
                    break  # else one of less depth that may run ahead can be faster
    if best is None:
        text = (
            f"no plan was found that holds max_bytes of {in_bytes(max_bytes)} at most; the "
            f"smallest peak found is {in_bytes(least)}, {least} bytes: allow that, or take smaller "
            "batches"
        )
        raise PlanError([Problem(text)])
    more_us = max(0.0, best[0] - free_us)
    why = (
        f"The limit of {in_bytes(max_bytes)} costs {in_ms(more_us)} per iteration: without it "
        f"{in_ms(free_us)}."
    )
    return Fitting(best[1], best[0], why)


def _smaller(plan: PipelinePlan, *, streams: bool) -> Iterator[PipelinePlan]:
    """The plan, then with less and less run-ahead, then with less depth, too."""
    for depth in range(plan.depth, plan.least_depth - 1, -1):
        shallow = replace(plan, pipeline_depth=depth)
        yield shallow
        if streams and plan.names_streams:
            for ahead in range((plan.launch_limit or 0) - 1, -1, -1):
                yield replace(shallow, run_ahead=ahead)


def _candidates(
    free: PipelinePlan, find: Callable[[Limits], PipelinePlan], limits: Limits
) -> Iterator[PipelinePlan]:
    yield free
    for in_flight in range(free.depth - 1, 0, -1):
        with suppress(PlanError):  # so few are not admitted
            yield find(Limits(in_flight, limits.threads, limits.frozen))
    with suppress(PlanError):
        yield find(Limits(1, 1, limits.frozen))


def check_limit(max_bytes: int, costs: CostModel | None = None) -> None:
    """Refuse a limit that is none, or to what is not known.

    Raises:
        PlanError: ``max_bytes`` is not an integer of 1 or more, or costs are given that lack the
            memory.
    """
    problems = []
    if type(max_bytes) is not int or max_bytes < 1:
        rule = "give a number of bytes, 1 or more"
        problems.append(Problem(f"max_bytes is {shown(max_bytes)}: {rule}"))
    if costs is not None and costs.memory is None:
        mend = "give CostModel(memory=measure_memory(tasks, batches))"
        problems.append(Problem(f"max_bytes needs what the tasks hold: {mend}"))
    if problems:
        raise PlanError(problems)
