"""Checks, while a pipeline runs, of tasks against their declarations and of the plan's order.

    task T, iteration i      function returned
        operators  ──────>   memory: read, written         ┐   each place records its users; every
        context    ──────>   attributes: read, set         ├─> pair of which one writes is looked up
        generators ──────>   drawn from                    ┘   in ``HappensBefore``

Pure tasks must do only what ``pure=True`` allows (``swpipe.inference.purity``). In addition, two
tasks that touch the same place must be kept in serial order by the plan; otherwise an error is
raised, in whichever order the two have just run. A plan that is proved by its tasks' declarations
is assumed to keep that order.

Guarantees
    - Two tasks that touch the same place, one of them writing, raise unless every interleaving of
      the plan has them in serial order, or the plan allows the stale read. The result does not
      depend on timing: the order is checked for all pairs of iterations that can be in flight
      together.
    - Memory that one task makes, and a task uses on a later iteration, is a state, although the
      state may be in other memory each time. A user of the state comes as closely after its maker
      as in a serial run, however far apart the two were when the use was seen.
    - Operators and attributes are recorded on the thread that runs the task: what other tasks do to
      the same place at the same time is recorded separately.
    - With a share, the same holds for the iterations that are watched; all ranks watch the same
      iterations.

Assumptions
    - Anything that goes neither through torch's operators nor through the context is not seen:
      numpy, kernels launched directly, Python values, an optimizer's options, threads that a task
      starts.
    - Gradients that are set or cleared manually, not by autograd or an optimizer's ``zero_grad``,
      are seen only on the thread that began the run, while no other task can run. The same applies
      to a gradient that was cleared while something else still refers to it.
    - A task's use of what a later iteration made in place of its own value is seen only when it
      happens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from swpipe._state.loop import declared_owners
from swpipe._values.context_log import AttributeLog
from swpipe._values.generators import TORCH
from swpipe._values.storages import StorageId, Storages
from swpipe.analysis.validation import refusal
from swpipe.core.plan import is_host
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import Problem
from swpipe.inference.places import (
    READ_WRITE,
    WRITE,
    Access,
    ComparedPlaces,
    KeptOrders,
    Place,
    TaskRun,
    location_of,
)
from swpipe.inference.purity import PureRuns, PureUses, problem_of, use_recorder
from swpipe.inference.states import declared_tensors, items_in
from swpipe.inference.watched_gradients import Gradient, WatchedGradients
from swpipe.inference.watched_iterations import WatchedIterations


# Not contextlib.contextmanager: it sets the traceback of the exception that a task raises, and a
# task may raise one that does not allow this.
class _Watch:
    """A context manager that watches one run of a task.

    Attributes:
        runs: The runs of a pure task; None for other tasks.
        compared: Whether what the task touches is compared with other tasks, not only checked
            against ``pure=True``.
        gradients: Id of a parameter to its gradient, of those known when the task began.
        alone: Whether the task runs on the thread that began the run, and no other task runs.
    """

    alone = False
    gradients: Mapping[int, Gradient]

    def __init__(self, check: RunCheck, task: PipelineTask, ctx: Any) -> None:
        self.task = task
        self.ctx = ctx
        self.compared = ctx.iter_idx in check.every
        self.log = AttributeLog(ctx)
        self.operators = use_recorder(check.device)
        self.runs: PureRuns | None = None
        if task.pure:
            # The runs of a task on one worker follow each other, so they need no lock.
            worker = ctx.iter_idx % check.plan.schedule[task.name].workers
            self.runs = check.pure_runs.setdefault((task.name, worker), PureRuns(check.device))
        self._check = check

    def __enter__(self) -> None:
        if self.compared:
            # Notes the gradients that exist now; those that are gone when the task has ended were
            # cleared.
            self._check.begin(self)
            self.log.__enter__()
        if self.runs is not None:
            self.runs.modes.__enter__()
        self.operators.begin(self.ctx)
        self.operators.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        self.operators.__exit__()
        if self.runs is not None:
            self.runs.modes.__exit__()
        if self.compared:
            self.log.__exit__()
            # Also after a failure, so that later tasks do not count this one as running.
            self._check.end(self)
        if kind is None:
            self._check.check(self)


_NOTHING = nullcontext()


class RunCheck:
    """The check of the iterations of one run.

    Args:
        orders: The serial order that the plan keeps.
        device: The pipeline's device.
        every: The iterations in which all tasks are watched.
        pure: The iterations in which pure tasks are watched.
        first: The run's first iteration; no task runs yet.
    """

    def __init__(
        self,
        orders: KeptOrders,
        device: Device,
        every: WatchedIterations,
        pure: WatchedIterations,
        first: int,
    ) -> None:
        self.plan = orders.verified.plan
        self.device = device
        self._releases = orders.verified.releases
        self.every = every
        self._pure = pure
        self._first = first
        self._threads = len(self.plan.thread_groups) > 1
        tasks = orders.verified.tasks
        known = items_in(declared_owners(tasks)).tensors.values()
        self._gradients = WatchedGradients(t for t in known if t.requires_grad and t.is_leaf)
        self._places = ComparedPlaces(orders, self._gradients)
        self._pure_uses = PureUses()
        self._apart = ApartStates(tasks)
        self.pure_runs: dict[tuple[str, int], PureRuns] = {}
        # Guards the running watches, the gradients, the places and the pure tasks' uses, which the
        # threads of all thread groups share.
        self._lock = threading.Lock()
        self._caller = threading.get_ident()
        self._running: list[_Watch] = []

    def until(self, task: PipelineTask) -> int:
        """Return the first iteration from which on a task is no longer watched."""
        return max(self.every.until, self._pure.until) if task.pure else self.every.until

    def watching(self, task: PipelineTask, ctx: Any) -> AbstractContextManager[None]:
        """Return a block that watches a task which runs within it, on this thread.

        Raises:
            PlanError: The task did not keep its word, or the plan does not order what it touched.
        """
        number = ctx.iter_idx
        is_watched = number in self.every or (task.pure and number in self._pure)
        return _Watch(self, task, ctx) if is_watched else _NOTHING

    def begin(self, watch: _Watch) -> None:
        """Note that a task begins whose accesses are all compared."""
        with self._lock:
            watch.alone = self._runs_alone(watch)
            # Beside another task, no gradient may be read directly, which could crash torch: see
            # watched_gradients.
            for other in self._running:
                other.alone = False
            self._running.append(watch)
            if watch.alone:
                self._gradients.read()
            watch.gradients = self._gradients.present()

    def _runs_alone(self, watch: _Watch) -> bool:
        """Return whether a task runs on the thread that began the run, alone."""
        if threading.get_ident() != self._caller or self._running:
            return False
        number = watch.ctx.iter_idx
        depth = self.plan.depth
        # An unwatched task on another thread is not in _running. It can only run if its iteration
        # is in flight together with this one; all such iterations have to be watched.
        others = range(max(self._first, number - depth + 1), number + depth)
        return not self._threads or all(other in self.every for other in others)

    def end(self, watch: _Watch) -> None:
        """Note that a task has ended, whether or not it failed."""
        with self._lock:
            self._running.remove(watch)
            self._gradients.add(watch.operators.accumulated)
            if watch.alone:
                self._gradients.read()

    def check(self, watch: _Watch) -> None:
        """Check what a task did, which has ended."""
        if watch.runs is not None:
            self._check_pure(watch, watch.runs)
        if watch.compared:
            self._check_uses(watch)
            self._compare(watch)

    def _compare(self, watch: _Watch) -> None:
        """Compare what a task touched with what other tasks touched."""
        run = TaskRun(watch.ctx.iter_idx, watch.task.name)
        if watch.operators.accesses.on_device and is_host(self.plan.schedule[run.task].stream):
            text = (
                f"check_effects: task {run.task!r} used tensors of a device on iteration "
                f"{run.iteration}, but is declared to work on the host alone, so that nothing "
                "waits for its device work: leave out stream=HOST"
            )
            raise refusal(self.plan, [Problem(text, (run.task,))])
        with self._lock:
            touched = [*self._touched(run, watch), *self._used_gradients(watch)]
            memory = {place.number: how for place, how in touched if place.kind == "memory"}
            for problem in self._apart.broken(run, memory):
                raise refusal(self.plan, [problem])
            for place, access in touched:
                self._places.add(place, run, access, watch.ctx)
            self._places.forget(run)

    def _check_uses(self, watch: _Watch) -> None:
        """Raise an error if a task used a context value that may have been released.

        Values are released after the last task that declares a use of them.
        """
        releases = self._releases
        used = watch.log.reads | watch.log.deletes
        if releases and (unsaid := releases.unsaid_use(watch.task.name, watch.ctx, used)):
            raise refusal(self.plan, [unsaid])

    def _check_pure(self, watch: _Watch, runs: PureRuns) -> None:
        """Raise an error for each thing that a pure task did and ``pure=True`` rules out."""
        task = watch.task
        ctx = watch.ctx
        operators = watch.operators
        of_run = [*runs.faults(ctx, operators)]
        workers = self.plan.schedule[task.name].workers
        with self._lock:
            of_task = self._pure_uses.faults(task, ctx.iter_idx, operators, workers)
            for fault in (*of_task, *of_run):
                what = fault.name
                if fault.number:
                    place = Place("memory", fault.number, fault.name)
                    what = str(location_of(place, [task], ctx, self._gradients))
                raise refusal(self.plan, [problem_of(task, fault, what)])

    def _touched(self, run: TaskRun, watch: _Watch) -> Iterator[tuple[Place, Access]]:
        """Yield each place that a task touched, and how; gradients are left out."""
        log = watch.log
        operators = watch.operators
        for name in log.reads | log.sets | log.deletes:
            access = Access(name in log.reads, name in log.sets | log.deletes)
            yield self._places.place("attribute", run.iteration, name), access
        for number, generator in operators.draws.items():
            place = self._places.place("generator", number, str(generator or TORCH))
            place.reference = generator
            yield place, READ_WRITE
        accesses = operators.accesses
        storages = operators.storages
        reads = accesses.all_reads
        writes = accesses.all_writes
        for number in reads | writes:
            # Another task's memory may have been freed meanwhile: its number has not been used
            # again.
            if storages.alive(number) or ("memory", number, "") in self._places:
                place = self._places.place("memory", number)
                if place.reference is None:
                    place.reference = storages.reference(number)
                    place.name = storages.description(number)
                if number in accesses.created and place.maker is None:
                    place.maker = run
                yield place, Access(number in reads, number in writes)

    def _used_gradients(self, watch: _Watch) -> Iterator[tuple[Place, Access]]:
        """Yield each parameter whose gradient a task used or cleared.

        The gradient counts in whichever memory it lies.
        """
        operators = watch.operators
        gradients = self._gradients
        accesses = operators.accesses
        reads = accesses.all_reads
        writes = accesses.all_writes
        used = dict.fromkeys(operators.accumulated, READ_WRITE)
        for number, storage in gradients.memory(watch.gradients):
            how = Access(storage in reads, storage in writes)
            used[number] = used.get(number, Access()) | how
        # A gradient may also be gone because another task cleared it. Only zero_grad, or a task
        # that ran alone, shows who did.
        if operators.clears or watch.alone:
            for number in gradients.gone(watch.gradients):
                used[number] = used.get(number, Access()) | WRITE
        for number, access in used.items():
            if any(access):
                yield self._places.place("gradient", number), access


class ApartStates:
    """The memory of states whose declaration limits other tasks (``DeclaredIO.others``).

    Args:
        tasks: The tasks; none of them runs now.
    """

    def __init__(self, tasks: Sequence[PipelineTask]) -> None:
        self._named = {(task.name, io.state) for task in tasks for io in task.io}
        self._limits = [(task.name, io) for task in tasks for io in task.io if io.others != "rw"]
        limited = {io.state for _, io in self._limits}
        self._storages = Storages()  # keeps the numbers from being used again
        self._state_of = {
            number: str(io.state)
            for _, io, tensor in (declared_tensors(tasks) if limited else ())
            for number in self._storages.of(tensor)
            if io.state in limited
        }

    def broken(self, run: TaskRun, touched: Mapping[StorageId, Access]) -> Iterator[Problem]:
        """Yield why a task that does not declare a state may not touch it in this way."""
        for number in touched.keys() & self._state_of.keys():
            state = self._state_of[number]
            does = "writes" if touched[number].writes else "reads"
            for declaring, io in self._limits if (run.task, state) not in self._named else ():
                if io.state == state and does[0] not in io.others:
                    yield Problem(
                        f"task {run.task!r} {does} state {state!r} on iteration {run.iteration} "
                        f"without declaring it, but {declaring!r} declares that no such task does: "
                        f"others={io.others!r}. Declare it for {run.task!r}, "
                        f'io=[DeclaredIO(state="{state}", mode=...)], or leave others out',
                        (declaring, run.task),
                    )
