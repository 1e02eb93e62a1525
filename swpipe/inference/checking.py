"""Checks, while a pipeline runs, that tasks keep their word and the plan orders what they touch.

    task T, iteration i      function returned
        operators  ──────>   memory: read, written         ┐   each place keeps who touched it,
        context    ──────>   attributes: read, set         ├─> and each pair of which one writes
        generators ──────>   drawn from                    ┘   is asked of ``HappensBefore``

Two things are checked. Tasks that are pure must keep their word (``swpipe.inference.purity``). And
whatever touches the same place as another task must be kept in serial order with it by the plan, or
is refused, in whichever order the two have just run; a plan that is proved by what its tasks
declare is taken to do that.

Guarantees
    - Two tasks that touch the same place, one of them writing, raise unless every interleaving of
      the plan has them in serial order, or the plan allows the staleness. It does not depend on
      timing: the order is asked of all pairs of iterations that can be in flight together, which
      are kept if the distances 0 and 1 are (``swpipe.inference.kept_orders``).
    - Memory that a task makes, and a task uses on a later iteration, is a state, although it may be
      in other memory each time. Whoever uses it comes after the one that makes it as closely as in
      a serial run, however far apart they were when it was seen.
    - What tasks do to the same place at the same time is told apart: operators and attributes are
      seen on the thread that runs the task, and not found by comparing a before with an after.

    - With a share, the same holds for iterations that are watched: the first ones, and then windows
      of ``depth`` + 1 iterations in a row, at places that depend on nothing but their number. So
      ranks watch the same ones, and what comes every so many iterations is met in the end.

Assumptions
    - What neither goes through torch's operators nor through the context is not seen: numpy,
      kernels launched directly, Python values, an optimizer's options, threads that a task starts.
    - Gradients that are set or cleared by hand, not by autograd or an optimizer's ``zero_grad``,
      are seen where no other task can run at the same time, on the thread that began the run. So
      is it seen that a gradient was cleared which something else still refers to.
    - That a task uses what a later iteration has made in place of its own is seen when it happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from swpipe._state.generators import TORCH
from swpipe._state.owners import declared_owners
from swpipe.analysis.validation import refusal
from swpipe.analysis.verification import VerifiedPlan
from swpipe.core.context import TypedContext
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.accesses import READ_WRITE, WRITE, Access
from swpipe.inference.apart_states import ApartStates
from swpipe.inference.compared_places import ComparedPlaces
from swpipe.inference.kept_orders import KeptOrders
from swpipe.inference.purity import PureRecorder, PureRuns, PureUses, told
from swpipe.inference.recorded_context import AttributeLog, recorded_class, set_log
from swpipe.inference.state_items import items_in
from swpipe.inference.watched_gradients import Gradient, WatchedGradients
from swpipe.inference.watched_iterations import Watched
from swpipe.inference.watched_places import TaskRun, WatchedPlace, locations_of


class EffectCheck:
    """What the runs of one pipeline are checked for; call it for each run.

    Args:
        verified: The pipeline's plan and its tasks.
        device: Its device.
        every: The iterations in which all tasks are watched.
        pure: Those in which pure tasks are.
        context: The class of its contexts.
        recorder: Makes the recorder that watches a task.

    Attributes:
        depth: How many iterations may be in flight.
        orders: What the plan keeps of the serial order.
        threads: Some tasks run on threads of their own.
    """

    def __init__(
        self,
        verified: VerifiedPlan,
        device: Device,
        every: Watched,
        pure: Watched,
        context: type[TypedContext],
        recorder: Callable[[], PureRecorder],
    ) -> None:
        self.tasks, self.device, self.plan = verified.tasks, device, verified.plan
        self.releases = verified.releases
        self.every, self.pure = every, pure
        self.recorder = recorder
        self.depth = verified.program.depth
        self.threads = len(self.plan.thread_groups) > 1
        self.context = context
        self._recorded = recorded_class(context)
        self.orders = KeptOrders(verified)

    def __call__(self, first: int) -> RunCheck | None:
        """A check of the run that begins with this iteration; None if none of it is watched."""
        if first >= max(self.every.until, self.pure.until):
            return None
        known = items_in(declared_owners(self.tasks)).tensors.values()  # now: no task runs yet
        gradients = WatchedGradients(one for one in known if one.requires_grad and one.is_leaf)
        return RunCheck(self, gradients, first)

    def make_context(self, batch: Any, iteration: int) -> TypedContext:
        """The context of an iteration, of a class that records if all tasks are watched."""
        if iteration < self.every.until and iteration in self.every:
            return self._recorded(batch, iteration)
        return self.context(batch, iteration)


# Not contextlib.contextmanager, which sets the traceback of what the task raised: it may refuse.
class _WordWatch:
    """Watches whether a pure task keeps its word."""

    def __init__(self, check: RunCheck, task: PipelineTask, ctx: Any) -> None:
        self.check, self.task, self.ctx = check, task, ctx
        self.operators = check.new_recorder()
        self.runs = check.pure_runs.get(task.name)

    def __enter__(self) -> None:
        if self.runs is not None:
            self.runs.modes.__enter__()
        self.operators.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        self.operators.__exit__(kind, *failure)
        if self.runs is not None:
            self.runs.modes.__exit__(kind, *failure)
            if kind is None:
                self.check.check_word(self, self.runs)


class _Watch(_WordWatch):
    """Watches also what a task touches, to be compared with others.

    Attributes:
        log: What it does to the context.
        gradients: Id of a parameter to its gradient, of those known when it began.
        alone: It runs on the thread that began the run, and no other task has run beside it.
    """

    alone = False
    gradients: Mapping[int, Gradient]

    def __enter__(self) -> None:
        self.log = AttributeLog()
        self.check.begin(self)
        set_log(self.ctx, self.log)
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        set_log(self.ctx, None)
        self.check.end(self)
        super().__exit__(kind, *failure)
        if kind is None:
            self.check.check_uses(self)
            self.check.compare(self)


_NOTHING = nullcontext()


class RunCheck:
    """Checks the iterations of one run.

    Args:
        check: What is checked.
        gradients: Those that are compared, if all tasks are watched.
        first: The run's first iteration.
    """

    def __init__(self, check: EffectCheck, gradients: WatchedGradients, first: int) -> None:
        self._check = check
        self._gradients = gradients
        self._first = first
        self.new_recorder = check.recorder
        self._lock = threading.Lock()
        self._places = ComparedPlaces(check.orders, check.plan, check.tasks, gradients)
        self._all_until, self._pure_until = check.every.until, check.pure.until
        self._pure, self._apart = PureUses(), ApartStates(check.tasks)
        self.pure_runs = {task.name: PureRuns(check.device) for task in check.tasks if task.pure}
        self._caller = threading.get_ident()
        self._running: list[_Watch] = []
        self._left: dict[int, int] = {}  # iteration to how many of its tasks have not ended

    def until(self, task: PipelineTask) -> int:
        """The first iteration from which on a task is not watched any more."""
        return max(self._all_until, self._pure_until) if task.pure else self._all_until

    def watching(self, task: PipelineTask, ctx: Any) -> AbstractContextManager[None]:
        """Watch a task that runs within the block, on this thread.

        Raises:
            PlanError: The task did not keep its word, or the plan does not order what it touched.
        """
        number = ctx.iter_idx
        if number < self._all_until and number in self._check.every:
            return _Watch(self, task, ctx)
        if task.pure and number < self._pure_until and number in self._check.pure:
            return _WordWatch(self, task, ctx)
        return _NOTHING

    def begin(self, watch: _Watch) -> None:
        """A task begins of which everything is compared."""
        with self._lock:
            watch.alone = self._runs_alone(watch)
            for other in self._running:
                other.alone = False
            self._running.append(watch)
            if watch.alone:
                self._gradients.read()
            watch.gradients = self._gradients.present()

    def _runs_alone(self, watch: _Watch) -> bool:
        """Whether a task runs on the thread that began the run, and none beside it."""
        check, number = self._check, watch.ctx.iter_idx
        if threading.get_ident() != self._caller or self._running:
            return False
        others = range(max(self._first, number - check.depth + 1), number + check.depth)
        return not check.threads or all(
            one < self._all_until and one in check.every for one in others
        )

    def end(self, watch: _Watch) -> None:
        """It has ended, whether or not it failed."""
        ctx = watch.ctx
        with self._lock:
            self._running.remove(watch)
            self._gradients.add(watch.operators.accumulated)
            if watch.alone:
                self._gradients.read()
            left = self._left.pop(ctx.iter_idx, len(self._check.tasks)) - 1
            if left:
                self._left[ctx.iter_idx] = left
            else:  # of the user's class again
                ctx.__class__ = self._check.context

    def compare(self, watch: _Watch) -> None:
        """Compare what it touched with what others did."""
        run = TaskRun(watch.ctx.iter_idx, watch.task.name)
        with self._lock:
            touched = [*self._touched(run, watch), *self._used_gradients(watch)]
            memory = {place.number: how for place, how in touched if place.kind == "memory"}
            for problem in self._apart.broken(run.task, run.iteration, memory):
                raise refusal(self._check.plan, [problem])
            for place, access in touched:
                self._places.add(place, run, access, watch.ctx)
            self._places.forget(run)

    def check_uses(self, watch: _Watch) -> None:
        """Refuse that a task used what may have gone, since nobody had said that it does."""
        releases, used = self._check.releases, watch.log.reads | watch.log.deletes
        if releases and (unsaid := releases.unsaid_use(watch.task.name, watch.ctx, used)):
            raise refusal(self._check.plan, [unsaid])

    def check_word(self, watch: _WordWatch, runs: PureRuns) -> None:
        """Refuse what a pure task did against its word."""
        task, ctx, operators = watch.task, watch.ctx, watch.operators
        found = [*runs.faults(ctx, operators)]
        with self._lock:
            for fault in (*self._pure.faults(task, ctx.iter_idx, operators), *found):
                what = fault.name
                if fault.number:
                    place = WatchedPlace("memory", fault.number, fault.name)
                    what = str(locations_of(place, [task], ctx, self._gradients)[0])
                raise refusal(self._check.plan, [told(task, fault, what)])

    def _touched(self, run: TaskRun, watch: _Watch) -> Iterator[tuple[WatchedPlace, Access]]:
        """Each place that a task touched, and how; gradients left aside."""
        log, operators = watch.log, watch.operators
        for name in log.reads | log.sets | log.deletes:
            access = Access(name in log.reads, name in log.sets | log.deletes)
            yield self._places.place("attribute", run.iteration, name), access
        for number, generator in operators.draws.items():
            place = self._places.place("generator", number, str(generator or TORCH))
            place.reference = generator
            yield place, READ_WRITE
        accesses, storages = operators.accesses, operators.storages
        reads, writes = accesses.all_reads, accesses.writes | accesses.created
        for number in reads | writes:
            # What others had may have gone meanwhile: its number has not been used again.
            if storages.alive(number) or ("memory", number, "") in self._places:
                place = self._places.place("memory", number)
                if place.reference is None:
                    place.reference = storages.reference(number)
                    place.name = storages.description(number)
                if number in accesses.created and place.maker is None:
                    place.maker = run
                yield place, Access(number in reads, number in writes)

    def _used_gradients(self, watch: _Watch) -> Iterator[tuple[WatchedPlace, Access]]:
        """Each parameter whose gradient a task used, whichever memory that is in, or cleared."""
        operators, gradients = watch.operators, self._gradients
        accesses = operators.accesses
        reads, writes = accesses.all_reads, accesses.writes | accesses.created
        found = dict.fromkeys(operators.accumulated.keys() & gradients.parameters, READ_WRITE)
        for number, storage in gradients.memory(watch.gradients):
            how = Access(storage in reads, storage in writes)
            found[number] = found.get(number, Access()) | how
        if operators.clears or watch.alone:
            for number in gradients.gone(watch.gradients):
                found[number] = found.get(number, Access()) | WRITE
        for number, access in found.items():
            if any(access):
                yield self._places.place("gradient", number), access
