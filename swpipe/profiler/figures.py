"""The figures of a profile, and the quantities derived from them.

    an iteration      baseline_s: the mean of steps_s, with its median and its interval
      a task costs    exposed_s = raw_s limited to (0, baseline_s): own_s, and in_others_s, which
                      is saved in other tasks
      a task takes    host_s = CPU time + blocked_s + core_s; device_s on its stream
        each time     host_each_s, device_each_s, parallel to steps_s: the tables of ``costs``

A figure of tasks is a map from the task's name. All times are seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan
from swpipe.core.task import ByTask
from swpipe.profiler.other_load import OtherLoad
from swpipe.profiler.rank_times import RankTimes, RankWait, rank_waits
from swpipe.profiler.spread import Estimate, ms, within

LIMITING = 0.9
"""A thread group that is busy for this fraction of an iteration may set its pace."""

MOST_WORKERS = 8
"""The maximum number of threads of one task."""

MIN_BLOCKED_S = 1e-4
MIN_BLOCKED_SHARE = 0.25

_BY_TASK = (
    "exposed_s", "raw_s", "spread_s", "replay_s", "in_others_s", "host_s", "blocked_s", "device_s",
    "core_s", "not_measured", "host_each_s", "device_each_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and the time that it is predicted to save.

    Attributes:
        change: What to change, in words.
        task: The task that is changed; "" for a plan that moves several.
        saved_s: How much shorter an iteration is predicted to be, in seconds.
        spread_s: Half-width of the interval of ``saved_s``.
        limit: What limits iterations after the change; "" if that is not predicted.
        not_moved: Why the task is not moved instead; "" if it is moved.
        plan: The plan to try; None if the change needs no other plan.
    """

    change: str
    task: str
    saved_s: float
    spread_s: float
    limit: str = ""
    not_moved: str = ""
    plan: PipelinePlan | None = None

    @property
    def text(self) -> str:
        """The change in one or two sentences."""
        then = f"; then limited by {self.limit}" if self.limit else ""
        why = f" Not moved: {self.not_moved}." if self.not_moved else ""
        return f"{self.change}: saves {ms(self.saved_s)}{within(self.spread_s, ms)} ms{then}.{why}"


@dataclass(frozen=True, slots=True)
class LoaderPace:
    """The pace of a loader in the long run, without the batches that it has ready; in seconds.

    Attributes:
        rate_s: Seconds per batch if the loader is called without pause.
        start_s: The start of a pass, divided by the steps of a pass; 0 if their number is unknown.
        works_ahead: Whether the loader makes batches while it is not called.
        workers: The number of worker processes of a DataLoader; 0 if none.
        starts_workers: Whether the worker processes are started in each pass.
    """

    rate_s: float
    start_s: float
    works_ahead: bool
    workers: int = 0
    starts_workers: bool = False

    def workers_for(self, step_s: float) -> int:
        """Return how many workers make one batch in every ``step_s`` seconds."""
        return max(1, math.ceil((self.workers or 1) * self.rate_s / step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The fields of ``ProfileResult``, whose docstring defines each of them."""

    # What was measured, and the advice that follows.
    batch: str
    mode: Literal["serial", "pipelined"]
    advice: tuple[Advice, ...]
    # Figures of the iteration.
    baseline_s: float
    baseline_median_s: float
    baseline_spread_s: float
    steps_s: tuple[float, ...] = ()
    # Figures of each task: what it costs an iteration.
    exposed_s: Mapping[str, float]
    raw_s: Mapping[str, float]
    spread_s: Mapping[str, float]
    replay_s: Mapping[str, float]
    in_others_s: Mapping[str, Mapping[str, float]]
    not_measured: Mapping[str, str] = field(default_factory=dict)
    # Figures of each task: what it takes, in the mean and in each of ``steps_s``.
    host_s: Mapping[str, float]
    blocked_s: Mapping[str, float]
    core_s: Mapping[str, float] = field(default_factory=dict)
    device_s: Mapping[str, float]
    host_each_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    device_each_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # Figures of threads, the loader, and ranks.
    busy_s: Mapping[str, float]
    loader: LoaderPace | None = None
    ranks: tuple[RankTimes, ...] = ()
    collectives: tuple[str, ...] = ()
    # How the measurement was made.
    num_warmup: int
    num_measure: int
    num_rounds: int
    seen: str = ""
    put_back: tuple[str, ...] = ()
    already_shortcut: tuple[str, ...] = ()
    interrupted: bool = False
    other_load: OtherLoad | None = None

    def __post_init__(self) -> None:
        for name in _BY_TASK:
            object.__setattr__(self, name, ByTask(getattr(self, name)))

    @property
    def tasks(self) -> tuple[str, ...]:
        """The measured tasks, in serial order."""
        return tuple(self.exposed_s)

    @property
    def step(self) -> Estimate:
        """The time of an iteration, with its interval."""
        return Estimate(self.baseline_s, self.baseline_spread_s)

    def exposed(self, name: str) -> Estimate | None:
        """Return the exposed time of a task as it was measured; None if it was not."""
        return Estimate(self.raw_s[name], self.spread_s[name]) if name in self.raw_s else None

    def cpu_s(self, name: str) -> float:
        """Return how long a task's thread is on the CPU."""
        return self.host_s[name] - self.blocked_s.get(name, 0.0) - self.core_s.get(name, 0.0)

    def workers(self, name: str) -> int:
        """Return how many threads a task may have: one per free core, more if it waits."""
        waits = self.cpu_s(name) < MIN_BLOCKED_SHARE * self.host_s[name]
        # One core stays with the caller's thread, and ranks on the same machine share the cores.
        spare = cores() // ranks_on_machine() - 1
        return MOST_WORKERS if waits else max(1, min(MOST_WORKERS, spare))

    @property
    def own_s(self) -> Mapping[str, float]:
        """Task to the part of ``exposed_s`` that it takes itself, on its thread and its stream.

        The rest is time that other tasks save without it (``in_others_s``), or work that runs
        faster.
        """
        return {
            name: min(exposed_s, self.host_s[name] + self.device_s.get(name, 0.0))
            for name, exposed_s in self.exposed_s.items()
        }

    @property
    def limited_by_loader(self) -> bool:
        """Whether the loader works ahead, and is slower than the rest of an iteration."""
        pace = self.loader
        saved = self.exposed(PULL)
        if pace is None or saved is None or not (pace.works_ahead and saved.is_clear):
            return False
        # The loader sets the pace if making a batch takes nearly the whole step, without the start
        # of a pass, and no less than the step takes if batches cost nothing.
        rest_s = self.baseline_s - saved.value_s
        return pace.rate_s >= max(LIMITING * (self.baseline_s - pace.start_s), rest_s)

    @property
    def rank_waits(self) -> tuple[RankWait, ...]:
        """Which ranks wait for another rank, and how long; the longest wait comes first."""
        return rank_waits(self.ranks, self.collectives)

    @property
    def blocking(self) -> tuple[str, ...]:
        """Tasks that block the host: off the CPU for 25% of their time and at least 0.1 ms.

        The tasks that block longest come first.
        """
        found = [
            name
            for name, blocked_s in self.blocked_s.items()
            if blocked_s >= max(MIN_BLOCKED_S, MIN_BLOCKED_SHARE * self.host_s[name])
        ]
        return tuple(sorted(found, key=lambda name: -self.blocked_s[name]))

    @property
    def limiting(self) -> tuple[str, ...]:
        """Thread groups that are busy for 90% of an iteration, the busiest first.

        If there are several, changing one of them alone does not make iterations much shorter: the
        tasks of each have little exposed time, however long they take.
        """
        return limiting(self.busy_s, self.baseline_s)

    @property
    def costs(self) -> CostModel:
        """The costs of all tasks, including those not measured, for a planner or the simulator."""
        names = self.host_each_s or self.host_s
        return CostModel({name: self._cost(name) for name in names})

    def _cost(self, name: str) -> TaskCost:
        """Return the mean cost and, if each iteration was timed, the table of all iterations."""
        host_s = self.host_each_s.get(name, ())
        device_s = self.device_each_s.get(name, ())
        count = len(self.steps_s)
        return TaskCost(
            # A task that was not to be measured has no mean in ``host_s``, but was timed in each
            # iteration.
            1e6 * (self.host_s[name] if name in self.host_s else fmean(host_s)),
            device_us=1e6 * (fmean(device_s) if device_s else self.device_s.get(name, 0.0)),
            host_each_us=table_us(host_s, count),
            device_each_us=table_us(device_s, count),
        )


def table_us(each_s: Sequence[float], count: int) -> tuple[float, ...]:
    """Return the times in microseconds if there is one per iteration; else an empty tuple."""
    # A task that did not run in each iteration has no table that is parallel to the steps.
    return tuple(1e6 * s for s in each_s) if len(each_s) == count > 1 else ()


def busy_s(plan: PipelinePlan, host_s: Mapping[str, float]) -> dict[str, float]:
    """Return for each thread group how many seconds per iteration each of its threads is busy."""
    busy: dict[str, float] = defaultdict(float)
    if PULL in host_s:
        busy[plan.pull_group or DEFAULT_GROUP] += host_s[PULL]
    for name, schedule in plan.schedule.items():
        busy[schedule.thread_group] += host_s[name] / schedule.workers
    return dict(busy)


def limiting(busy: Mapping[str, float], step_s: float) -> tuple[str, ...]:
    """Return the thread groups that may set the pace, the busiest first."""
    found = [group for group, seconds in busy.items() if seconds >= LIMITING * step_s]
    return tuple(sorted(found, key=lambda group: -busy[group]))
