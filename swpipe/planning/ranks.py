"""Many ranks that meet in collectives: their differing times, and the step that results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swpipe.core.costs import CostModel
from swpipe.core.messages import in_ms, listed, shown
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.task import ByTask
from swpipe.errors import PlanError, Problem

MOST_RANKS = 65_536
"""The largest number of ranks that is simulated."""

_MOST_JITTER = 10.0
_MOST_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a job, and how their times differ from the costs.

    Tasks that are globally ordered meet those of other ranks, and so do tasks that hold one of
    ``links``: a task that meets ends on all ranks when it has ended on the slowest rank.

    Attributes:
        number: The number of ranks; 1 to 65,536.
        jitter: The standard deviation of a rank's times from one iteration to the next, as a
            fraction of their mean: 0.05 is 5%. In one iteration all of a rank's tasks are faster or
            slower by the same factor, which is lognormal.
        slow: For a task, or ``"<pull>"``, a pair (share, factor): in this share of a rank's
            iterations the task takes ``factor`` times as long.
        links: Names of resources in ``TaskCost.resources`` that join the ranks, such as a
            communicator whose tasks are not globally ordered.

    Raises:
        PlanError: The number is below 1, the jitter below 0, a share not from 0 to 1, or a factor
            below 1.
    """

    number: int
    jitter: float = 0.0
    slow: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    links: Sequence[str] = ()

    def __post_init__(self) -> None:
        problems = [*self._faults()]
        if problems:
            raise PlanError(problems)
        # The dataclass is frozen; the fields are replaced by copies that the caller cannot change.
        object.__setattr__(self, "slow", ByTask(self.slow))
        object.__setattr__(self, "links", tuple(self.links))

    def _faults(self) -> Iterable[Problem]:
        if type(self.number) is not int or not 1 <= self.number <= MOST_RANKS:
            yield Problem(
                f"the number of ranks is {shown(self.number)}: give an integer from 1 to "
                f"{MOST_RANKS:,}"
            )
        if not _is_within(self.jitter, 0, _MOST_JITTER):
            rule = f"give a part of the mean from 0 to {_MOST_JITTER:g}, such as 0.05 for 5%"
            yield Problem(f"jitter is {shown(self.jitter)}: {rule}")
        # Values come from the user, so nothing is assumed of their types.
        slow: object = self.slow
        # A wrong type is reported as a problem beside the others, instead of failing in the loop
        # below.
        if not isinstance(slow, Mapping):
            yield Problem(f'slow is {shown(slow)}: write {{"read": (share, factor)}}')
        else:
            for task, how in slow.items():
                pair = how if isinstance(how, tuple | list) and len(how) == 2 else (None, None)
                if not (_is_within(pair[0], 0, 1) and _is_within(pair[1], 1, _MOST_FACTOR)):
                    yield Problem(
                        f"slow iterations of {shown(task)} are {shown(how)}: give (share, factor), "
                        "a share of the iterations from 0 to 1 and a factor of 1 or more"
                    )
        if isinstance(self.links, str) or not all(isinstance(name, str) for name in self.links):
            yield Problem(
                f'links is {shown(self.links)}: give names of resources, such as ["nccl"]'
            )

    def meeting(self, plan: PipelinePlan, costs: CostModel) -> list[str]:
        """Return the tasks of a plan that meet those of other ranks.

        Raises:
            PlanError: ``slow`` has a task that the plan does not have, or ``links`` has a resource
                that no cost has; or the ranks' times differ and no task meets other ranks.
        """
        problems = [
            Problem(
                f"slow names {shown(name)}, which is no task of the plan (it has: "
                f'{listed(plan.schedule)}): correct the name, or write "{PULL}" for the loader'
            )
            for name in self.slow
            if name not in plan.schedule and name != PULL
        ]
        # Resources come from the costs, since a plan does not name any.
        held = {name: set(cost.resources) for name, cost in costs.of(plan.schedule).items()}
        known = set().union(*held.values())
        problems += [
            Problem(
                f"links names {shown(link)}, a resource that no cost has (they have: "
                f"{listed(sorted(known))}): correct the name, or leave it out"
            )
            for link in self.links
            if link not in known
        ]
        ordered = {name for name, entry in plan.schedule.items() if entry.globally_ordered}
        # In the order of the schedule, so that the result does not depend on the order of a set.
        meeting_tasks = [name for name in held if name in ordered or held[name] & {*self.links}]
        # Ranks that never meet do not wait for each other: to simulate them would be a mistake.
        if not meeting_tasks and (self.jitter or self.slow):
            problems.append(
                Problem(
                    "the ranks' times differ, and no task meets those of other ranks: set "
                    "globally_ordered=True for the tasks that communicate, or name their resource "
                    "in links"
                )
            )
        if problems:
            raise PlanError(problems)
        return meeting_tasks


@dataclass(frozen=True, slots=True)
class RankStep:
    """The step of a plan on many ranks, in microseconds per iteration.

    Attributes:
        ranks: The ranks.
        step_us: The mean step, which is the sum of the three parts.
        work_us: The step of a single rank whose times never differ.
        input_us: The additional time of a single rank with jitter and slow iterations.
        slowest_us: The additional time of waiting for the slowest rank.
        floor_us: A lower bound on the step of every plan for these tasks on these ranks.
    """

    ranks: Ranks
    step_us: float
    work_us: float
    input_us: float
    slowest_us: float
    floor_us: float

    @property
    def gap(self) -> float:
        """The relative distance of the step from the floor; 0.01 is 1%."""
        return max(0.0, self.step_us / self.floor_us - 1) if self.floor_us else 0.0

    def format(self) -> str:
        """Return a sentence with the step, its parts and the floor."""
        return (
            f"On {self.ranks.number:,} ranks an iteration takes {in_ms(self.step_us)}: "
            f"{in_ms(self.work_us)} as one rank, {in_ms(self.input_us)} waiting for input, "
            f"{in_ms(self.slowest_us)} waiting for the slowest rank. No plan is below "
            f"{in_ms(self.floor_us)}; this one is {self.gap:.1%} above."
        )


def _is_within(value: object, least: float, most: float) -> bool:
    # A bool is an int to Python, but not a number that a user means.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # The comparison is False for nan.
    return least <= value <= most
