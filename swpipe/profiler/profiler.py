"""``TaskProfiler``: measures exposed times and restores all state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from swpipe._state.discovery import Found, find_state, given_state
from swpipe._state.guard import TrainingGuard
from swpipe._state.snapshot import Snapshot
from swpipe.core.task import PipelineTask, TaskRef
from swpipe.pipeline import SWPipeline
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.result import ProfileResult, ProfileResults
from swpipe.profiler.rounds import BASELINE, Counts, Measured, measure
from swpipe.profiler.spread import iteration_time, time_saved, with_replay


class TaskProfiler:
    """Measures the exposed time of a pipeline's tasks.

    The exposed time of a task is how much shorter an iteration is when the task is shortcut: its
    outputs are replayed and its work is skipped. Windows with and without shortcuts alternate, in
    an order that changes from round to round.

    State that profiling changed is restored afterwards, also on failure: models, optimizers,
    other objects with ``state_dict`` and ``load_state_dict``, and the random generators of torch,
    Python and numpy. The results list these objects. State is also restored between the windows.

    Ctrl-C ends a profile early: what was measured is the result, once there is a round of it.

    Args:
        pipe: The pipeline; idle while a profile is taken. Under torch.distributed, take the same
            profiles on all ranks.
        state: What to restore: one object or several, each a module, an optimizer, another object
            with ``state_dict`` and ``load_state_dict``, a generator, or a tensor that requires
            grad. If None, the profiler searches what the tasks' functions can reach; objects in a
            C extension, or many attributes away, have to be given.

    Raises:
        TypeError: Something in ``state`` is none of these.
    """

    def __init__(self, pipe: SWPipeline, *, state: Any = None) -> None:
        self.pipe = pipe
        self._state = None if state is None else given_state(state)

    def profile(
        self,
        batch: Any,
        num_warmup: int = 3,
        num_measure: int = 10,
        num_rounds: int = 3,
        pipelined: bool = False,
        tasks: Iterable[TaskRef] | TaskRef | None = None,
        verbose: bool = False,
        *,
        label: str = "batch 0",
        copy: Callable[[Any], Any] | None = None,
    ) -> ProfileResult:
        """Profile on one batch. For arguments and errors see ``profile_many``."""
        counts = (num_warmup, num_measure, num_rounds)
        given = (*counts, pipelined, tasks, verbose)
        return self.profile_many([batch], *given, labels=[label], copy=copy)[0]

    def profile_many(
        self,
        batches: Iterable[Any],
        num_warmup: int = 3,
        num_measure: int = 10,
        num_rounds: int = 3,
        pipelined: bool = False,
        tasks: Iterable[TaskRef] | TaskRef | None = None,
        verbose: bool = False,
        *,
        labels: Sequence[str] | None = None,
        copy: Callable[[Any], Any] | None = None,
    ) -> ProfileResults:
        """Profile on several batches, each from the same state.

        Iteration numbers continue from the pipeline's next one, which is restored afterwards.

        Args:
            batches: At least one. Every iteration gets the batch itself.
            num_warmup: Iterations before each window that are not timed. At least 1, in which the
                output of the shortcut task is cached; under the plan at least ``depth``.
            num_measure: Iterations timed in each window.
            num_rounds: Windows per task. More make the error bars smaller and more reliable.
            pipelined: Measure the steady state under the plan, instead of serial iterations.
            tasks: Which tasks to measure; None for all.
            verbose: Show a progress bar.
            labels: A name for each batch; by default "batch 0", "batch 1" and so on.
            copy: Makes a batch that may be modified, for tasks that modify it in place. It is
                called for all iterations of a window before the window starts.

        Returns:
            One result per batch.

        Raises:
            ValueError: A number is too small, a task unknown, or there are no batches or no tasks.
            RuntimeError: The pipeline is closed, or iterations are in flight.
            UnsavedStateError: An optimizer is about to train something that the search for state
                has not found, and that could not be restored.
            BaseException: Whatever a task raised, with a note of what was being measured. If it
                only does so while another task is shortcut, that one is not measured instead, and
                the result says why; but not on several ranks.
        """
        counts = Counts(num_warmup, num_measure, num_rounds)
        batches = list(batches)
        labels = _labels(len(batches), labels)
        self.pipe.check_idle("profiling")
        names, left_out = self._names(tasks)
        owners = self.owners()
        snapshot = Snapshot(owners, self.pipe.device)
        results = []
        with _progress_bar(len(batches) * counts.windows(len(names)), show=verbose) as bar:
            for label, batch in zip(labels, batches, strict=True):
                timer = WindowTimer(self.pipe, batch, copy, num_warmup, num_measure, pipelined)
                try:
                    with self.pipe.borrow(), self._guard(snapshot):
                        measured = measure(timer, names, num_rounds, bar.update, snapshot.restore)
                finally:
                    snapshot.restore()
                results.append(_result(label, timer, counts, measured, owners, left_out))
        return ProfileResults(results)

    def _guard(self, snapshot: Snapshot) -> AbstractContextManager[object]:
        if self._state is not None:  # the user has said what may change
            return nullcontext()
        return TrainingGuard(self.pipe.tasks, snapshot)

    def owners(self) -> tuple[Found, ...]:
        """The objects whose state is restored."""
        return tuple(find_state(self.pipe.tasks)) if self._state is None else self._state

    def _names(
        self, tasks: Iterable[TaskRef] | TaskRef | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tasks to measure and those that are shortcut already, both in serial order."""
        if isinstance(tasks, str | PipelineTask):
            tasks = (tasks,)
        asked = None if tasks is None else set(self.pipe.task_names(*tasks))
        shortcut = self.pipe.shortcut_tasks
        in_order = [task.name for task in self.pipe.tasks]
        names = tuple(
            name for name in in_order if (name not in shortcut if asked is None else name in asked)
        )
        if both := [name for name in names if name in shortcut]:
            raise ValueError(
                f"task {both[0]!r} is shortcut, so it costs nothing that could be measured: "
                f"call disable_shortcut({both[0]!r}) first, or leave it out of tasks"
            )
        if not names:
            raise ValueError(
                "there is no task to measure: tasks is empty, or all are shortcut already"
            )
        return names, tuple(name for name in in_order if name in shortcut)


def _result(
    label: str,
    timer: WindowTimer,
    counts: Counts,
    measured: Measured,
    owners: Sequence[Found],
    left_out: tuple[str, ...],
) -> ProfileResult:
    columns = dict(measured.columns)
    baseline = columns.pop(BASELINE)
    step = iteration_time(baseline)
    times = measured.times[BASELINE]
    host_s = times.host_s
    names = [name for name in host_s if name in columns or name in measured.failed]
    replay_s = {name: measured.times[name].host_s[name] for name in columns}
    alone = not (timer.pipelined or timer.pipe.device.has_streams)
    saved = {
        name: with_replay(estimate, host_s[name], replay_s[name], alone=alone)
        for name, estimate in time_saved(baseline, columns).items()
    }
    shorter = {name: times.shorter_in(measured.times[name]) for name in columns}
    return ProfileResult(
        batch=label,
        mode="pipelined" if timer.pipelined else "serial",
        baseline_s=step.value_s,
        baseline_median_s=baseline.median_s,
        baseline_spread_s=step.spread_s,
        exposed_s={name: max(0.0, estimate.value_s) for name, estimate in saved.items()},
        raw_s={name: estimate.value_s for name, estimate in saved.items()},
        spread_s={name: estimate.spread_s for name, estimate in saved.items()},
        replay_s=replay_s,
        in_others_s={
            name: {other: s for other, s in shorter[name].items() if other != name}
            for name in columns
        },
        host_s={name: host_s[name] for name in names},
        blocked_s={name: times.blocked_s[name] for name in names},
        busy_s=_busy_s(timer, host_s) if timer.pipelined else {},
        not_measured={
            name: f"{type(error).__name__}: {error}" for name, error in measured.failed.items()
        },
        interrupted=measured.interrupted,
        **{**asdict(counts), "num_rounds": len(baseline.windows)},
        put_back=tuple(map(str, owners)),
        already_shortcut=left_out,
    )


def _busy_s(timer: WindowTimer, host_s: dict[str, float]) -> dict[str, float]:
    busy_s: dict[str, float] = defaultdict(float)
    for name, schedule in timer.pipe.plan.schedule.items():
        busy_s[schedule.thread_group] += host_s[name]
    return dict(busy_s)


def _labels(count: int, labels: Sequence[str] | None) -> list[str]:
    if count == 0:
        raise ValueError("batches is empty: give at least one batch to profile on")
    if labels is None:
        return [f"batch {index}" for index in range(count)]
    if len(labels) != count:
        raise ValueError(f"{len(labels)} labels for {count} batches: give one per batch, or none")
    return list(labels)


def _progress_bar(total: int, *, show: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="profiling", unit="window", disable=not show)
