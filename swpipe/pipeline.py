"""What the user holds: tasks and a plan, run together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, Self, TypedDict

import torch

from swpipe._engine.driver import Driver, checked_start
from swpipe._engine.iterations import Engine, make_streams
from swpipe._engine.observers import Observer, Observers
from swpipe._engine.program import compile_plan
from swpipe._engine.randomness import TaskSeeds
from swpipe._engine.serial import SerialLane
from swpipe._engine.torch_state import checked_mode
from swpipe._engine.waiting import Host
from swpipe._engine.watchdog import checked_timeout
from swpipe.accelerate_check import PreparedCheck
from swpipe.analysis.verification import verify_for_run
from swpipe.core.context import C, context_class
from swpipe.core.drawing import format_grid, format_stages
from swpipe.core.effects import EffectTable
from swpipe.core.keywords import suggests_keywords
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device, resolve
from swpipe.shortcut import Shortcuts
from swpipe.shortcut.control import ShortcutControl

if TYPE_CHECKING:
    from swpipe.run_report import RunReport
    from swpipe.trace import Trace


class PipelineOptions(TypedDict, total=False):
    """The keywords of ``SWPipeline`` that whoever makes one passes on, beside ``device``."""

    seed: int | None
    start_iteration: int
    stall_timeout_s: float | None
    record_all_events: bool
    check_ranks: bool
    check_data: bool | None
    mode: Callable[[], object]
    check_effects: bool | float | None
    effects: EffectTable | None
    keep: Sequence[str] | None
    run_ahead: int | None
    host: Host | None


@suggests_keywords
class SWPipeline(ShortcutControl[C]):
    """Runs tasks under a plan.

    Use it as a context manager, or call ``close``. One thread at a time may call it.

    Args:
        plan: How to overlap.
        tasks: What to compute; may be omitted where the keys of the plan's schedule are tasks.
            Their order is that of a serial run, as far as the dependences allow.
        device: Where device work goes: None for the machine's accelerator, or else the CPU.
        context: The class of contexts, a subclass of ``TypedContext``, called with ``(batch,
            iter_idx)``; None for ``IterContext``.
        seed: What the seeds of tasks with ``random=True`` derive from; None for
            ``torch.initial_seed()``.
        start_iteration: The number of the first iteration, as if it were loaded from a state.
        stall_timeout_s: Seconds without progress after which ``progress`` raises ``StallError``;
            None to wait for ever. Must be longer than the longest task, and than the longest random
            task of any pipeline in the process: they take turns to draw.
        record_all_events: Record the device event of every task, needed or not, for debugging.
        check_ranks: With torch.distributed initialised, compare plans across ranks at the first
            fill, and shortcuts whenever some are enabled or disabled.
        check_data: Whether ranks agree on each pass's end before any of them drains, and on errors
            of their iterators. None: with ``check_ranks``, if globally ordered tasks are in more
            than one stage, since the collectives of a rank that drains would not match.
        mode: Returns what must stay the same while iterations are in flight, besides torch's
            gradient and inference modes; compared with ``==``: ``lambda: model.training``.
        check_effects: Watch tasks: PlanError where a pure one breaks its word, or one touches what
            the plan does not keep in serial order. None: in the first 16 iterations, unless what
            tasks declare proves the plan, and pure tasks in 2% of the others. True, or
            a share such as 0.02 of the iterations after the first 16: all tasks. False: nothing.
            Compiled functions are not watched, nor are serial runs and profiles. An operator that
            is watched takes about 20 us longer.
        effects: What each task touches, as recorded: the plan is verified for it.
        keep: As ``PipelinePlan.keep``, in its place; None: as the plan says. What tasks use is what
            they say by ``reads``, or what ``effects`` have.
        run_ahead: As ``PipelinePlan.run_ahead``, in its place; None: as the plan says.
        host: Where threads come from; for tests.

    Raises:
        PlanError: The plan cannot run, or tasks could access a state that they declare in another
            order than serially; lists everything that is wrong with it.
        TypeError: ``context`` cannot be used; the message says why.
        ValueError: The device is not on this machine, or an argument's value cannot be used.

    Warns:
        RuntimeWarning: ``run_ahead`` on a device without streams.
    """

    _asks_of_body = True

    def __init__(
        self,
        plan: PipelinePlan,
        tasks: Iterable[PipelineTask] | None = None,
        *,
        device: Device | torch.device | str | int | None = None,
        context: type[C] | None = None,
        seed: int | None = None,
        start_iteration: int = 0,
        stall_timeout_s: float | None = 600.0,
        record_all_events: bool = False,
        check_ranks: bool = True,
        check_data: bool | None = None,
        mode: Callable[[], object] = str,
        check_effects: bool | float | None = None,
        effects: EffectTable | None = None,
        keep: Sequence[str] | None = None,
        run_ahead: int | None = None,
        host: Host | None = None,
    ) -> None:
        self.device = resolve(device)
        self.context = context_class(context)
        verified = verify_for_run(
            plan,
            tasks,
            effects,
            device=self.device.name,
            streams=self.device.has_streams,
            keep=keep,
            run_ahead=run_ahead,
            record_all=record_all_events,
        )
        self._verified = verified
        self._alike = check_ranks
        self.plan = verified.plan
        self.tasks = verified.tasks
        self._serial, self._observers = SerialLane(self.tasks), Observers(self.device)
        self._stall_timeout_s = checked_timeout(stall_timeout_s)
        engine = Engine(
            program=verified.program,
            tasks={task.name: task for task in self.tasks},
            device=self.device,
            streams=make_streams(self.plan, self.device),
            host=host or Host(),
            shortcuts=Shortcuts(self.device),
            seeds=TaskSeeds(seed, self.device),
            context=self.context,
            observers=self._observers,
            mode=checked_mode(mode),
            pull_check=PreparedCheck if verified.program.depth > 1 else None,
            releases=verified.releases,
        )
        entries = self.plan.schedule.values()
        streams = self.device.has_streams
        lanes = {(entry.thread_group, streams and entry.stream) for entry in entries}
        overlaps = verified.program.depth > 1 or len(lanes) > 1
        if check_effects is not False and (check_effects is not None or overlaps):
            from swpipe.inference.chosen_check import checked

            engine = checked(engine, verified, check_effects)
        timeout_s = self._stall_timeout_s
        frame = sys._getframe(2)
        at = frame.f_code.co_filename, frame.f_lineno
        if check_data is None:
            ordered = {entry.stage for entry in entries if entry.globally_ordered}
            check_data = check_ranks and len(ordered) > 1
        self._driver = Driver[C](
            engine,
            self.plan,
            timeout_s,
            check_ranks=check_ranks,
            check_data=check_data,
            made_at=at,
        )
        self._driver.next_iteration = checked_start(start_iteration)

    def __repr__(self) -> str:
        names = [task.name for task in self.tasks]
        most = [*names[:8], f"and {len(names) - 8} more"] if len(names) > 9 else names
        groups = ", ".join(self.plan.thread_groups)
        state = "closed" if self.closed else f"{self.in_flight} of {self.plan.depth} in flight"
        return (
            f"<{type(self).__name__} of {', '.join(most)}>\n"
            f"  on {self.device.name}; threads: {groups}; {state}, next is {self.next_iteration}"
        )

    def _repr_html_(self) -> str:
        """Which batch each task works on, period by period, for a notebook."""
        shown = f"{self!r}\n\n{self.format_schedule(self.plan.depth + 3)}"
        return f"<pre>{escape(shown)}</pre>"

    def in_flight_of_others(self, iterator: Iterator[Any]) -> int:
        """How many of those in flight have been pulled from another iterator."""
        run = self._driver.run
        return 0 if run is None or run.admission.iterator is iterator else run.in_flight

    @property
    def in_flight(self) -> int:
        """How many iterations have been pulled and not been handed out."""
        return self._driver.in_flight

    @property
    def next_iteration(self) -> int:
        """The number of the next iteration, where none is in flight."""
        return self._driver.next_iteration

    def state_dict(self, *, check: bool = True) -> dict[str, int]:
        """What to save beside models and optimizers, so that a later run can go on from here.

        Args:
            check: Refuse if iterations in flight, or dropped by a failure or ``close``, may have
                changed what is saved; False if you know that they have not.

        Returns:
            ``next_iteration``, after the last one that was handed out; ``in_flight``, the batches
            pulled beyond it, to be pulled again; ``seed``, of tasks with ``random=True``.

        Raises:
            RuntimeError: The state would not lead back to the same numbers, or a call is under way.
        """
        from swpipe.inference.early_changes import refuse_early_changes

        state = self._driver.state_dict(check)
        if check and self.in_flight:
            refuse_early_changes(self.in_flight, self.plan, self.tasks)
        return state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on with a saved number and seed; ``swpipe.loops.ResumableLoop`` sets back a loader.

        Raises:
            RuntimeError: Iterations are in flight.
            ValueError: ``state`` is not what ``state_dict`` returns.
        """
        with self._driver:
            self._driver.refuse_in_flight("loading a state")
            self._driver.load_state_dict(state)

    def fill_pipeline(self, iterator: Iterable[Any]) -> None:
        """Run the prologue: pull ``depth - 1`` batches, or as many as there are.

        Optional: otherwise the first ``progress`` does it. It raises what ``progress`` raises. Of
        a loader, such as a list, ``progress()`` goes on with the iterator that is made here.
        """
        given = iterator if isinstance(iterator, Iterator) else iter(iterator)
        self._driver.fill(given)

    def progress(self, iterator: Iterator[Any] | None = None) -> C:
        """Run one period: admit a batch, run every task once, hand out the oldest iteration.

        Args:
            iterator: Where the batches come from; the same one until it is drained. None: the one
                that the iterations in flight are from.

        Returns:
            The context of the oldest iteration. The caller's stream waits for all of its device
            work.

        Raises:
            StopIteration: All batches of the iterator have been handed out.
            PlanError: A task touches a state ahead of the caller's work between two calls, which
                may touch it, too; ``run()`` has none.
            RuntimeError: The pipeline is closed, or in use by another thread, or iterations of
                another iterator, or of another mode (gradients, inference), are in flight.
            StallError: Nothing moved for ``stall_timeout_s``.
            UnevenDataError: As StopIteration, where only some ranks' data has ended.
            Exception: Whatever the iterator raised, when the iterations before have been handed
                out. Nothing is dropped, and the next call goes on with the iterator. On several
                ranks with ``check_data``, all raise at that step, as ``RankDataError`` where the
                data of another rank failed.
            BaseException: Whatever a task raised first, with a note of where. What was in flight is
                dropped, and the pipeline can be filled again. An iteration that was complete when
                another failed is handed out first; the next call raises.
        """
        if self._asks_of_body:
            self._refuse_beside_body()
        if iterator is None:
            iterator = self._driver.current_iterator()
        return self._driver.progress(iterator)

    def _refuse_beside_body(self) -> None:
        """Refuse a plan that is none for a loop with a body; asked once."""
        if self._asks_of_body:
            self._verified.refuse_beside_body()
            self._asks_of_body = False

    def push(self, batch: Any) -> C | None:
        """Admit one batch and run one period: ``progress`` for callers without an iterator.

        Returns:
            The context of the oldest iteration; None from the first ``depth - 1`` calls, which fill
            the pipeline.

        Raises:
            BaseException: As for ``progress``. The batch of a call that raises is dropped.
        """
        self._refuse_beside_body()
        return self._driver.push(batch)

    def flush(self) -> Iterator[C]:
        """Finish the pushed batches: iterate over the contexts, oldest first.

        What you do with a context comes before the tasks of the next one, as with ``progress``.
        Iterate to the end before you push again; ``drain`` finishes the rest.

        Raises:
            RuntimeError: Iterations of an iterator are in flight.
            BaseException: As for ``progress``.

        Warns:
            RuntimeWarning: The pipeline is closed before the iterator's end.
        """
        return self._driver.flush()

    def drain(self) -> list[C]:
        """Stop admitting; finish what is in flight, and hand it out, oldest first.

        The iterator keeps its other batches. What you do with a context comes after the tasks of
        all others here.

        Raises:
            BaseException: As for ``progress``. Contexts that were complete before are not lost: the
                next call hands them out.
        """
        return self._driver.drain()

    def drop(self) -> int:
        """Stop and forget all iterations in flight; returns how many they were.

        What their tasks have already changed outside the context stays changed.
        ``next_iteration`` goes on after the last iteration handed out, or the one that failed.
        """
        return self._driver.drop()

    def settle(self) -> None:
        """Wait until the loader is not called any more, before the next call for an iteration.

        For a plan with a ``pull_group``, which calls it between two calls, too. The batches of all
        iterations that were begun have been pulled then, or the data has ended.
        """
        with self._driver:
            if self._driver.run is not None:
                self._driver.run.settle()

    def agree(self) -> None:
        """Compare the plan across ranks, as the first ``progress`` does; once."""
        self._driver.agree()

    def iterate(self, loader: Iterable[Any]) -> Iterator[C]:
        """Yield the context of every iteration over ``loader``, in order.

        Raises:
            BaseException: As for ``progress``.
        """
        self._refuse_beside_body()
        return self._contexts(iter(loader), loader)

    def _contexts(self, iterator: Iterator[Any], loader: Iterable[Any]) -> Iterator[C]:
        length = len(loader) if iterator is not loader and isinstance(loader, Sized) else None
        while True:
            try:
                ctx = self._driver.progress(iterator, length)
            except StopIteration:
                return
            yield ctx
            del ctx  # this frame must not keep what the user drops

    def run(self, loader: Iterable[Any], *, verbose: bool = False) -> RunReport:
        """Run all of ``loader`` under the plan, with a progress bar where ``verbose``."""
        from swpipe.run_report import run_to_end

        contexts = self._contexts(iter(loader), loader)
        return run_to_end(contexts, self.device, loader, "pipelined" if verbose else None)

    def run_one_serial_iter(self, batch: Any, iter_idx: int | None = None) -> C:
        """Run every task on one batch, one by one, on this thread and the caller's stream.

        Seeds of tasks with ``random=True`` depend on the iteration's number, ``iter_idx``, from 0.
        If it is None, the number is ``next_iteration``, which then increases.
        """
        driver = self._driver
        with driver:
            if driver.run is not None:
                driver.refuse_in_flight("running serially")
            number = driver.next_iteration if iter_idx is None else iter_idx
            driver.begin_serial(number)
            ctx = self.context(batch, number)
            del batch  # which a plan with keep may let go
            ctx = self._serial.run(driver.engine, ctx)
            driver.lost = ""
            if iter_idx is None:
                driver.next_iteration += 1
            return ctx

    def run_serial(self, loader: Iterable[Any], *, verbose: bool = False) -> RunReport:
        """Run all of ``loader`` serially; gives the same numbers as ``run``."""
        from swpipe.run_report import run_to_end

        contexts = map(self.run_one_serial_iter, loader)
        return run_to_end(contexts, self.device, loader, "serial" if verbose else None)

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """Call ``observer`` around every task that runs within the block; several may observe."""
        return self._observers.adding(observer)

    def trace(self, last: int | None = None) -> AbstractContextManager[Trace]:
        """Record when each task runs, and where, within the block.

        With ``last``, 1 or more, only so many iterations are kept, in bounded memory.
        """
        from swpipe.trace.recorder import traced

        return traced(self._driver.engine, self._verified.resolved, last, self.observe)

    def check_idle(self, purpose: str) -> None:
        """Raise RuntimeError if the pipeline is closed, or iterations are in flight."""
        with self._driver:
            self._driver.refuse_in_flight(purpose)

    @contextmanager
    def borrow(self) -> Iterator[None]:
        """Use an idle pipeline for measurements; afterwards it is as it was, also on failure.

        Within the block no task is watched, and shortcut tasks are cached anew; the caches from
        before stay untouched. ``next_iteration`` is restored.
        """
        self.check_idle("borrowing it")
        shortcuts = Shortcuts(self.device)
        shortcuts.enable_like(self._driver.engine.shortcuts)
        # measurements have none
        asks = self._asks_of_body
        self._asks_of_body = False
        try:
            with self._driver.borrowed(shortcuts, self.context):
                yield
        finally:
            self._asks_of_body = asks

    def format_schedule(self, periods: int) -> str:
        """The iteration that each task works on in each of the first ``periods`` periods."""
        return format_grid(self.plan, self._verified.resolved.period_order, periods)

    def print_schedule(self, periods: int = 8) -> None:
        """Print ``format_schedule``."""
        sys.stdout.write(self.format_schedule(periods) + "\n")

    def format_stage_analysis(self) -> str:
        """Each stage's tasks, where they run and what they wait for."""
        return format_stages(self._verified.resolved)

    def print_stage_analysis(self) -> None:
        """Print ``format_stage_analysis``."""
        sys.stdout.write(self.format_stage_analysis() + "\n")

    def format_program(self, *, streams: bool | None = None) -> str:
        """What each thread group does in a period, and what it waits for; a line per group.

        If ``streams`` is None, the program is that for the pipeline's own device.
        """
        from swpipe._engine.program_text import format_program

        streams = self.device.has_streams if streams is None else streams
        return format_program(compile_plan(self._verified.resolved, streams=streams))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._driver.access.closed

    def close(self) -> None:
        """Stop the threads and drop what is in flight. The pipeline cannot be used any more.

        Safe in a signal handler and in a task. A call that is under way, on any thread, does the
        work when it returns, and raises RuntimeError.

        Warns:
            RuntimeWarning: A task on a worker thread has not returned; its thread ends when it
                does.
        """
        self._driver.close()

    if not TYPE_CHECKING:  # for which every name would be there

        def __getattr__(self, name: str) -> Any:
            from swpipe.names_elsewhere import where_it_is

            raise AttributeError(where_it_is(name), name=name, obj=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
