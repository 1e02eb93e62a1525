"""``TaskProfiler``: measures exposed times and restores all state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch.distributed as dist

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe._values.stateful import given_state
from swpipe.core.keywords import suggests_keywords
from swpipe.core.plan import PULL
from swpipe.core.progress import progress_bar
from swpipe.core.task import PipelineTask, TaskRef
from swpipe.pipeline import SWPipeline
from swpipe.profiler.advice import LoopFacts, advise
from swpipe.profiler.figures import busy_s, costs_of
from swpipe.profiler.measure import Pulls, WindowTimer
from swpipe.profiler.rank_times import RankTimes
from swpipe.profiler.result import ProfileResult, ProfileResults
from swpipe.profiler.rounds import BASE, Counts, Rounds
from swpipe.profiler.trial import trial_state


@suggests_keywords
class TaskProfiler:
    """Measures the exposed time of a pipeline's tasks.

    The exposed time of a task is how much shorter an iteration is when the task is shortcut: its
    outputs are replayed and its work is skipped. In one run of iterations, visits of a few
    iterations with and without shortcuts alternate, in an order that changes from round to round
    (``swpipe.profiler.rounds``, ``swpipe.profiler.spread``).

    State that profiling changed is restored afterwards, also on failure: models, optimizers,
    other objects with ``state_dict`` and ``load_state_dict``, tensors that plain objects hold, the
    random generators of torch, Python and numpy, and what tasks declare with ``capture`` and
    ``restore``. The results list these objects. State is also restored after each round, but for
    what tasks declare. For any other Python value, a profile is so many more iterations.

    Ctrl-C ends a profile early: what was measured is the result, once there are two rounds of it.

    Args:
        pipe: The pipeline; idle while a profile is taken. Under torch.distributed, take the same
            profiles on all ranks.
        state: What to restore: one object or several, each a module, an optimizer, another object
            with ``state_dict`` and ``load_state_dict``, a generator, or a tensor that requires
            grad. None for what tasks declare and what torch shows while they run: modules that are
            called, optimizers that step, memory that is written. A scheduler has to be given.

    Raises:
        TypeError: Something in ``state`` is none of these.
    """

    def __init__(self, pipe: SWPipeline[Any], *, state: Any = None) -> None:
        self.pipe = pipe
        self._state = state
        if state is not None:
            given_state(state)  # what cannot be restored is refused here

    def profile(
        self,
        batch: Any,
        num_warmup: int = 2,
        num_measure: int = 3,
        num_rounds: int = 4,
        pipelined: bool = False,
        tasks: Iterable[TaskRef] | TaskRef | None = None,
        verbose: bool = False,
        *,
        seconds: float | None = None,
        target_spread_ms: float | None = None,
        label: str = "batch 0",
        copy: Callable[[Any], Any] | None = None,
        loader: Iterable[Any] | Pulls | None = None,
    ) -> ProfileResult:
        """Profile on one batch. For arguments and errors see ``profile_many``."""
        return self.profile_many(
            *([batch], num_warmup, num_measure, num_rounds, pipelined, tasks, verbose),
            seconds=seconds,
            target_spread_ms=target_spread_ms,
            labels=[label],
            copy=copy,
            loader=loader,
        )[0]

    def profile_many(
        self,
        batches: Iterable[Any],
        num_warmup: int = 2,
        num_measure: int = 3,
        num_rounds: int = 4,
        pipelined: bool = False,
        tasks: Iterable[TaskRef] | TaskRef | None = None,
        verbose: bool = False,
        *,
        seconds: float | None = None,
        target_spread_ms: float | None = None,
        labels: Sequence[str] | None = None,
        copy: Callable[[Any], Any] | None = None,
        loader: Iterable[Any] | Pulls | None = None,
    ) -> ProfileResults:
        """Profile on several batches, each from the same state.

        Iteration numbers continue from the pipeline's next one, which is restored afterwards.

        Args:
            batches: At least one. Every iteration gets the batch itself.
            num_warmup: Iterations before each visit that are not timed. At least 1, in which the
                output of the shortcut task is cached; under the plan at least ``depth`` + 2.
            num_measure: Iterations timed in each visit, in the mean; under the plan at least
                ``depth``.
            num_rounds: Visits per task. More make the intervals narrower.
            pipelined: Measure the steady state under the plan, instead of serial iterations.
            tasks: Which tasks to measure; None for all.
            verbose: Show a progress bar.
            seconds: Measure for about so long on each batch, instead of ``num_rounds``. From the
                sixth round on, only the tasks with the widest intervals are measured further.
            target_spread_ms: Measure until every interval is within +/- so much, and at most
                ``seconds``, instead of ``num_rounds``.
            labels: A name for each batch; by default "batch 0", "batch 1" and so on.
            copy: Makes a batch that may be modified, for tasks that modify it in place. It is
                called for all iterations of a visit before the visit starts.
            loader: What training takes its batches from, such as a ``DataLoader``: measure what
                its calls cost as well, in a row ``"<pull>"``. It is called once per iteration, in
                which its batch is dropped, and begun again at its end; what it keeps in objects of
                its own is not restored. Ranks take the same number of batches.

        Returns:
            One result per batch.

        Raises:
            ValueError: A number is too small, a task unknown, or there are no batches or no tasks.
            RuntimeError: The pipeline is closed, or iterations are in flight.
            UnsavedStateError: A task may step a scheduler of which nothing is said, or runs a
                module of TorchScript.
            BaseException: Whatever a task raised, with a note of what was being measured. If it
                only does so while another task is shortcut, that one is not measured instead, and
                the result says why; but not on several ranks.
        """
        spread_s = None if target_spread_ms is None else target_spread_ms / 1e3
        if spread_s is not None and not spread_s > 0:
            raise ValueError(f"target_spread_ms is {target_spread_ms!r}: give a number above 0")
        counts = Counts(num_warmup, num_measure, num_rounds, seconds, spread_s)
        batches = list(batches)
        labels = _labels(len(batches), labels)
        self.pipe.check_idle("profiling")
        names, left_out = self._names(tasks)
        saved = trial_state(self.pipe, batches[0], self._state, copy)
        results = []
        kinds = [*([] if loader is None else [PULL]), *names]
        visits = len(batches) * num_rounds * len(kinds) if counts.fixed else None
        with progress_bar("profiling", " visits", visits, shown=verbose) as bar:
            for label, batch in zip(labels, batches, strict=True):
                timer = WindowTimer(
                    *(self.pipe, batch, copy, num_warmup, num_measure, pipelined),
                    pulls=Pulls.of(loader),
                )
                rounds = Rounds(timer, counts, saved.restore_training)
                with saved.trial(), self.pipe.borrow():
                    rounds.warm_up()
                    device_s = timer.device_times_s()
                    rounds.measure(kinds, bar.update)
                found = replace(
                    _result_of(rounds, device_s),
                    batch=label,
                    put_back=tuple(map(str, saved.owners)),
                    already_shortcut=left_out,
                )
                times = rounds.times[BASE]
                loop = LoopFacts(
                    self.pipe.tasks,
                    self.pipe.plan,
                    costs_of(times.host_s, device_s),
                    self.pipe.device.has_streams,
                    sum(times.cpu_s.values()),
                    None if timer.pulls is None else timer.pulls.effects,
                )
                results.append(replace(found, advice=advise(found, loop)))
        return ProfileResults(results)

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


def _labels(count: int, labels: Sequence[str] | None) -> list[str]:
    if count == 0:
        raise ValueError("batches is empty: give at least one batch to profile on")
    if labels is None:
        return [f"batch {index}" for index in range(count)]
    if len(labels) != count:
        raise ValueError(f"{len(labels)} labels for {count} batches: give one per batch, or none")
    return list(labels)


def _result_of(rounds: Rounds, device_s: Mapping[str, float]) -> ProfileResult:
    """From what was measured to a result, without its label and advice."""
    timer, times, step, exposed = rounds.timer, rounds.times[BASE], rounds.step, rounds.saved
    in_others_s = {
        name: {n: s for n, s in times.shorter_in(rounds.times[name]).items() if n != name}
        for name in exposed
    }
    pulls = timer.pulls
    if pulls is not None:
        times.put_first(PULL, rounds.pulls)
    host_s, blocked_s, core_s = times.host_s, times.blocked_s, times.core_s
    names = [name for name in host_s if name in exposed or name in rounds.failed]
    not_measured = {n: f"{type(error).__name__}: {error}" for n, error in rounds.failed.items()}
    result = ProfileResult(
        batch="",
        mode="pipelined" if timer.pipelined else "serial",
        baseline_s=step.value_s,
        baseline_median_s=median(rounds.spans_s),
        baseline_spread_s=step.spread_s,
        exposed_s={n: min(max(0.0, each.value_s), step.value_s) for n, each in exposed.items()},
        raw_s={name: each.value_s for name, each in exposed.items()},
        spread_s={name: each.spread_s for name, each in exposed.items()},
        replay_s=rounds.replays_s,
        in_others_s=in_others_s,
        host_s={name: host_s[name] for name in names},
        blocked_s={name: blocked_s[name] for name in names},
        device_s={name: device_s[name] for name in names if name in device_s},
        busy_s=busy_s(timer.pipe.plan, host_s) if timer.pipelined else {},
        advice=(),
        num_warmup=timer.warmup,
        num_measure=timer.measure,
        num_rounds=len(rounds.base_s),
        not_measured=not_measured,
        interrupted=rounds.interrupted,
        other_load=rounds.other_load,
        collectives=tuple(t for t, e in timer.pipe.plan.schedule.items() if e.globally_ordered),
        loader=None if pulls is None else pulls.pace,
        core_s={name: core_s[name] for name in names},
    )
    if is_alone():
        return result
    own = RankTimes(
        rank=dist.get_rank(),
        baseline_s=step.value_s,
        baseline_spread_s=step.spread_s,
        exposed_s={name: max(0.0, each.value_s) for name, each in exposed.items()},
        spread_s=dict(result.spread_s),
        host_s=host_s,
        error_s=times.error_s,
        in_others_s=in_others_s,
    )
    return replace(result, ranks=tuple(gather(own)))


def pipeline_breakdown(pipeline: Any, batches: Iterable[Any], **options: Any) -> ProfileResults:
    """Profile a pipeline's tasks on several batches, and print the report on rank 0.

    As the function of that name in recsys-examples.

    Args:
        pipeline: One with a ``pipe``; no batch may be in flight. On several
            ranks, call it on all.
        batches: On the host, as the data loader gives them; at least one.
        options: Of ``TaskProfiler.profile_many``.
    """
    pipe = pipeline.pipe
    results = TaskProfiler(pipe).profile_many(batches, **options)
    if is_alone() or dist.get_rank() == 0:
        results.print_report()
    return results
