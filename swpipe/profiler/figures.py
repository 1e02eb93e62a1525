"""The figures of a profile, and the quantities derived from them.

    ProfileResult
      iteration          mean with its interval, median, each iteration
      tasks              name to TaskFigures:
        exposed            what the task costs an iteration: ``own_s``, and ``in_others_s``, which
                           is saved in other tasks
        thread             what it takes on its thread: CPU time + ``blocked_s`` + ``core_s``
        device_each_s      what it takes on its stream
      loader, busy_s     the loader's pace; thread groups
      ranks              the iteration and the tasks of each rank
      measurement        how all of this was measured
      advice             what to change

Tables of each iteration are parallel to ``iteration.each_s``. All times are seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from swpipe._distributed.shared_cores import cores, ranks_on_machine
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import DEFAULT_GROUP, PULL, PipelinePlan
from swpipe.core.task import ByTask
from swpipe.profiler.host import ThreadTimes
from swpipe.profiler.other_load import OtherLoad, disturbance
from swpipe.profiler.spread import Estimate

LIMITING = 0.9
"""A thread group that is busy for this fraction of an iteration may set its pace."""

MOST_WORKERS = 8
"""The maximum number of threads of one task."""

# A task that blocks the host waits for at least this long, and for this part of its time: every
# thread is preempted now and then.
MIN_BLOCKED_S = 1e-4
MIN_BLOCKED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Advice:
    """A change, and the time that it is predicted to save.

    Attributes:
        change: The change, in words.
        task: The task that is changed; "" for a plan that moves several.
        saved: How much shorter an iteration is predicted to be, in seconds, with its interval.
        limit: The limit of iterations after the change; "" if that is not predicted.
        not_moved: Why the task is not moved instead; "" if it is moved.
        plan: The plan to try; None if the change needs no other plan.
    """

    change: str
    task: str
    saved: Estimate
    limit: str = ""
    not_moved: str = ""
    plan: PipelinePlan | None = None

    @property
    def saved_s(self) -> float:
        """How much shorter an iteration is predicted to be, in seconds."""
        return self.saved.value_s

    @property
    def text(self) -> str:
        """The change in one or two sentences."""
        then = f"; then limited by {self.limit}" if self.limit else ""
        why = f" Not moved: {self.not_moved}." if self.not_moved else ""
        return f"{self.change}: saves {self.saved.exact} ms{then}.{why}"

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data; a plan with stream objects is left out."""
        # ``asdict`` would copy a plan field by field, but plans have a format of their own.
        data = asdict(replace(self, plan=None))
        with suppress(TypeError):  # stream objects cannot be saved
            data["plan"] = self.plan and self.plan.to_dict()
        return data


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


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """The times of an iteration in which all tasks run.

    Attributes:
        mean: The mean wall time, with its interval. The share of the start of a loader's pass is
            part of it.
        median_s: The median. If it is much shorter, a few slow iterations take the time.
        each_s: The time of each iteration, in order.
    """

    mean: Estimate
    median_s: float
    each_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """The figures of a task: what it takes, and what it costs an iteration.

    Attributes:
        thread: The times on its thread.
        device_each_s: How long the work that it queued takes on its stream, in each iteration;
            empty without streams.
        exposed: The wall time that would be saved if the task cost nothing, as measured; None if it
            was not measured. Noise may put it below 0 or above the time of an iteration.
        replay_s: The time of the replay of its outputs, which was added to ``exposed``.
        in_others_s: The tasks that take less time on their threads while this one is shortcut, and
            how much less: a forward that is replayed leaves less to the backward.
        not_measured: The reason why ``exposed`` could not be measured; "" if there is none.
    """

    thread: ThreadTimes
    device_each_s: tuple[float, ...] = ()
    exposed: Estimate | None = None
    replay_s: float = 0.0
    in_others_s: Mapping[str, float] = field(default_factory=dict)
    not_measured: str = ""

    @property
    def device_s(self) -> float | None:
        """The mean time on its stream; None without streams."""
        return fmean(self.device_each_s) if self.device_each_s else None

    @property
    def blocks(self) -> bool:
        """Whether it blocks the host: off the CPU for 25% of its time and at least 0.1 ms."""
        least_s = max(MIN_BLOCKED_S, MIN_BLOCKED_SHARE * self.thread.host_s)
        return self.thread.blocked_s >= least_s

    @property
    def most_workers(self) -> int:
        """How many threads it may have: one per free core, more if it waits."""
        # One core stays with the caller's thread, and ranks on the same machine share the cores.
        spare = cores() // ranks_on_machine() - 1
        waits = self.thread.cpu_s < MIN_BLOCKED_SHARE * self.thread.host_s
        return MOST_WORKERS if waits else max(1, min(MOST_WORKERS, spare))

    def cost(self, iterations: int) -> TaskCost:
        """Return the mean cost, with the table of all iterations if each of them was timed."""
        return TaskCost(
            1e6 * self.thread.host_s,
            # The model has no unknown device time: a task without work on streams takes none there.
            device_us=1e6 * (self.device_s or 0.0),
            host_each_us=table_us(self.thread.each_s, iterations),
            device_each_us=table_us(self.device_each_s, iterations),
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoopTimes:
    """The times of a loop, as one rank measured them.

    Attributes:
        iteration: The times of an iteration.
        tasks: Task to its figures, in serial order; those that were not to be measured included.
    """

    iteration: IterationTimes
    tasks: Mapping[str, TaskFigures]

    def __post_init__(self) -> None:
        # A frozen dataclass allows this assignment only through ``object``.
        object.__setattr__(self, "tasks", ByTask(self.tasks))

    @property
    def step(self) -> Estimate:
        """The mean time of an iteration, with its interval."""
        return self.iteration.mean

    @property
    def baseline_s(self) -> float:
        """The mean time of an iteration, in seconds."""
        return self.iteration.mean.value_s

    @property
    def host_s(self) -> Mapping[str, float]:
        """Task to how long it occupies its thread."""
        return ByTask({name: task.thread.host_s for name, task in self.tasks.items()})

    @property
    def on_streams(self) -> bool:
        """Whether the times of work on streams are known."""
        # On a device with streams, some task may still have no work on any of them.
        return any(task.device_each_s for task in self.tasks.values())

    @property
    def costs(self) -> CostModel:
        """The costs of all tasks, for a planner or the simulator."""
        count = len(self.iteration.each_s)
        return CostModel({name: task.cost(count) for name, task in self.tasks.items()})

    def exposed(self, name: str) -> Estimate | None:
        """Return the exposed time of a task as it was measured; None if it was not."""
        return self.tasks[name].exposed if name in self.tasks else None

    @property
    def exposures(self) -> Mapping[str, Estimate]:
        """Task to its exposed time, limited to the range from 0 to ``baseline_s``."""
        # Noise may put a measured time outside of this range, where it would mean nothing.
        return {
            name: replace(raw, value_s=min(max(0.0, raw.value_s), self.baseline_s))
            for name, task in self.tasks.items()
            if (raw := task.exposed) is not None
        }

    @property
    def exposed_s(self) -> Mapping[str, float]:
        """Task to its exposed time in seconds, limited to the range from 0 to ``baseline_s``."""
        return ByTask({name: exposed.value_s for name, exposed in self.exposures.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes(LoopTimes):
    """The times of one rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How a profile was measured.

    Attributes:
        num_warmup: Iterations before each visit that were not timed.
        num_measure: Mean number of iterations timed in each visit.
        num_rounds: Number of visits behind each figure; fewer for some tasks if the profile was
            limited by seconds or by the spread.
        coverage: How much of the loop was run, in words; "" if it was not sampled.
        put_back: The objects whose state was saved before profiling and restored after it, each
            with the place where it was found, and its type.
        already_shortcut: Tasks that were shortcut when profiling started. They stayed shortcut
            and were not measured.
        interrupted: Whether Ctrl-C came before all rounds were measured; ``num_rounds`` is the
            number of rounds that were.
        other_load: The load of other processes on the machine; None if the machine does not
            report it.
    """

    num_warmup: int
    num_measure: int
    num_rounds: int
    coverage: str = ""
    put_back: tuple[str, ...] = ()
    already_shortcut: tuple[str, ...] = ()
    interrupted: bool = False
    other_load: OtherLoad | None = None

    @property
    def uncovered(self) -> str:
        """``coverage`` if a part of the loop was not run; else ""."""
        return "" if self.coverage.startswith("All") else self.coverage

    @property
    def disturbance(self) -> str:
        """The clause about other processes, if they used much of the machine; else ""."""
        return disturbance(self.other_load)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Figures(LoopTimes):
    """The fields of ``ProfileResult``, whose docstring defines each of them."""

    batch: str
    mode: Literal["serial", "pipelined"]
    measurement: Measurement
    advice: tuple[Advice, ...] = ()
    busy_s: Mapping[str, float] = field(default_factory=dict)
    loader: LoaderPace | None = None
    ranks: tuple[RankTimes, ...] = ()
    collectives: tuple[str, ...] = ()

    @property
    def measured(self) -> Mapping[str, TaskFigures]:
        """The tasks that were to be measured, in serial order, with their figures."""
        return {
            name: task
            for name, task in self.tasks.items()
            if task.exposed is not None or task.not_measured
        }

    @property
    def own_s(self) -> Mapping[str, float]:
        """Task to the part of ``exposed_s`` that it takes itself, on its thread and its stream.

        The rest is time that other tasks save without it (``in_others_s``), or work that runs
        faster.
        """
        # Work on a stream begins while the task is on its thread, so the sum is an upper limit.
        return {
            name: min(exposed_s, task.thread.host_s + (task.device_s or 0.0))
            for name, exposed_s in self.exposed_s.items()
            for task in [self.tasks[name]]
        }

    @property
    def pace(self) -> LoaderPace:
        """The pace of the loader; without a loader, batches take no time."""
        return self.loader or LoaderPace(0.0, 0.0, works_ahead=False)

    @property
    def limited_by_loader(self) -> bool:
        """Whether the loader works ahead, and is slower than the rest of an iteration."""
        pace = self.pace
        saved = self.exposed(PULL)
        if saved is None or not (pace.works_ahead and saved.is_clear):
            return False
        # The loader sets the pace if making a batch takes nearly the whole step, without the start
        # of a pass, and no less than the step takes if batches cost nothing.
        rest_s = self.baseline_s - saved.value_s
        return pace.rate_s >= max(LIMITING * (self.baseline_s - pace.start_s), rest_s)

    @property
    def blocking(self) -> tuple[str, ...]:
        """The tasks that block the host, the ones that block longest first."""
        blocked_s = {n: task.thread.blocked_s for n, task in self.measured.items() if task.blocks}
        return tuple(sorted(blocked_s, key=lambda name: -blocked_s[name]))

    @property
    def limiting(self) -> tuple[str, ...]:
        """Thread groups that are busy for 90% of an iteration, the busiest first.

        If there are several, changing one of them alone does not make iterations much shorter: the
        tasks of each have little exposed time, however long they take.
        """
        busiest = sorted(self.busy_s, key=lambda group: -self.busy_s[group])
        return tuple(g for g in busiest if self.busy_s[g] >= LIMITING * self.baseline_s)


def table_us(each_s: Sequence[float], count: int) -> tuple[float, ...]:
    """Return the times in microseconds if there is one per iteration; else an empty tuple."""
    # A task that did not run in each iteration has no table that is parallel to the steps.
    return tuple(1e6 * s for s in each_s) if len(each_s) == count > 1 else ()


def busy_s(plan: PipelinePlan, tasks: Mapping[str, ThreadTimes]) -> dict[str, float]:
    """Return for each thread group how many seconds per iteration each of its threads is busy."""
    busy: dict[str, float] = defaultdict(float)
    # Without a group of its own, the caller's thread pulls the batches.
    if PULL in tasks:
        busy[plan.pull_group or DEFAULT_GROUP] += tasks[PULL].host_s
    for name, schedule in plan.schedule.items():
        # Workers take turns, so each of them is busy for its share of an iteration.
        busy[schedule.thread_group] += tasks[name].host_s / schedule.workers
    return dict(busy)
