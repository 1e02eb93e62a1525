"""``TaskProfiler``, which measures the exposed times of tasks and restores all state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, TypeVar

import torch.distributed as dist

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe._values.stateful import given_state
from swpipe.core.plan import PULL
from swpipe.core.progress import progress_bar
from swpipe.core.task import PipelineTask, TaskRef
from swpipe.pipeline import SWPipeline, check_idle
from swpipe.profiler.advice import advise
from swpipe.profiler.exposures import Exposures
from swpipe.profiler.figures import IterationTimes, Measurement, RankTimes, TaskFigures, busy_s
from swpipe.profiler.measure import Passage, Pulls, WindowTimer
from swpipe.profiler.result import ProfileResult, ProfileResults
from swpipe.profiler.rounds import LEAST_ROUNDS, MAX_ROUNDS, Counts, Rounds, visits
from swpipe.profiler.sampling import MOST, Sample, visit_length
from swpipe.profiler.trial import trial

N = TypeVar("N", int, float)

LOOP = "loop"
"""The label of the result that covers all batches."""

_PASSAGE_S = 6.0
_VISITS_S = 20.0
"""Upper limits in seconds: of a passage over the loop, and of two rounds of visits. Visits get
longer than requested where iterations differ, and the second limit bounds how much longer.
"""

# Iterations: of the passage that only estimates the step time, and the fewest of the passage that
# the results are taken from.
_FEW = 4
_LEAST_SEEN = 12


class TaskProfiler:
    """A profiler that measures the exposed time of a pipeline's tasks.

    The exposed time of a task is how much shorter an iteration is when the task is shortcut: its
    outputs are replayed and its work is skipped. In one run of iterations, visits of a few
    iterations with and without shortcuts alternate, in an order that changes from round to round
    (``swpipe.profiler.rounds``, ``swpipe.profiler.spread``).

    State that profiling changed is restored afterwards, also on failure: models, optimizers,
    other objects with ``state_dict`` and ``load_state_dict``, tensors that plain objects hold, the
    random generators of torch, Python and numpy, and what tasks declare with ``capture`` and
    ``restore``. The results list these objects. State is also restored after each round, except
    what tasks declare. Any other Python value is not restored: it changes as it would in the same
    number of training iterations.

    Ctrl-C ends a profile early. If at least two rounds were measured, they are the result.

    Args:
        pipe: The pipeline. It must be idle while a profile is taken. Under torch.distributed, take
            the same profiles on all ranks.
        state: The state to restore: one object or several, each a module, an optimizer, another
            object with ``state_dict`` and ``load_state_dict``, a generator, or a tensor that
            requires grad. None restores what tasks declare and what torch shows while they run:
            modules that are called, optimizers that step, memory that is written. A scheduler must
            be given.
        loader: The object that training takes its batches from, such as a ``DataLoader``. Its
            calls are then measured too, in a row ``"<pull>"``. The loader is called once per
            iteration, its batch is dropped, and it is restarted at its end. State that the loader
            keeps in objects of its own is not restored. All ranks take the same number of batches.
        copy: A function that returns a copy of a batch, for tasks that modify the batch in place.
            It is called for all iterations of a visit before the visit starts.

    Raises:
        TypeError: An object in ``state`` is none of these.
    """

    def __init__(
        self,
        pipe: SWPipeline[Any],
        *,
        state: Any = None,
        loader: Iterable[Any] | Pulls | None = None,
        copy: Callable[[Any], Any] | None = None,
    ) -> None:
        self.pipe = pipe
        self._state = state
        self._loader = loader
        self._copy = copy
        if state is not None:
            given_state(state)  # refuses objects that cannot be restored

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
    ) -> ProfileResult:
        """Profile on one batch. See ``profile_many`` for the arguments and errors."""
        return self.profile_many(
            *([batch], num_warmup, num_measure, num_rounds, pipelined, tasks, verbose),
            seconds=seconds,
            target_spread_ms=target_spread_ms,
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
    ) -> ProfileResults:
        """Profile on several batches, each from the same state.

        Iteration numbers continue from the pipeline's next one, which is restored afterwards.

        Args:
            batches: At least one. Every iteration gets the batch itself.
            num_warmup: Iterations before each visit that are not timed. At least 1, in which the
                output of the shortcut task is cached. Under the plan, at least ``depth`` + 2.
            num_measure: Mean number of iterations timed in each visit. Under the plan, at least
                ``depth``.
            num_rounds: Number of visits per task. More visits make the intervals narrower.
            pipelined: Measure the steady state under the plan, instead of serial iterations.
            tasks: The tasks to measure; None for all.
            verbose: Show a progress bar.
            seconds: Measure for about this time on each batch, instead of ``num_rounds``. From the
                sixth round on, only the tasks with the widest intervals are measured further.
            target_spread_ms: Measure until every interval is at most +/- this many milliseconds
                wide, and at most for ``seconds``, instead of ``num_rounds``.

        Returns:
            One result per batch, named "batch 0", "batch 1" and so on.

        Raises:
            ValueError: A number is too small, a task is unknown, or there are no batches or no
                tasks.
            RuntimeError: The pipeline is closed, or iterations are in flight.
            UnsavedStateError: A task may step a scheduler that is not in ``state``, or runs a
                module of TorchScript.
            BaseException: Any exception of a task, with a note that says what was being measured.
                If iterations fail only while one task is shortcut, that task is not measured, and
                the result says why. On several ranks, the profile fails instead.
        """
        batches = [*batches]
        sample = Sample.of(batches, len(batches))
        many = len(sample) > 1
        within_s = None if seconds is None else seconds * len(sample)
        counts = Counts(num_warmup, num_measure, num_rounds, within_s, target_spread_ms)
        names = [f"batch {index}" for index in range(len(sample))]
        measured = self._measured(
            sample, counts, pipelined, tasks, verbose, labels=[LOOP, *names] if many else names
        )
        return ProfileResults.of(measured[1:], measured[0]) if many else ProfileResults(measured)

    def profile_loop(
        self,
        batches: Iterable[Any],
        num_warmup: int = 2,
        num_measure: int = 3,
        num_rounds: int | None = 5,
        pipelined: bool = False,
        tasks: Iterable[TaskRef] | TaskRef | None = None,
        verbose: bool = False,
        *,
        seconds: float | None = None,
    ) -> ProfileResult:
        """Profile a loop: first its iterations in their order, then iterations with shortcuts.

        Args:
            batches: The batches of the loop, in order. A sample is taken if there are many.
            num_warmup: See ``profile_many``.
            num_measure: The fewest iterations timed in each visit. Visits are longer where
                iterations differ.
            num_rounds: Number of visits to each task; None for as many as fit into ``seconds``.
            pipelined: See ``profile_many``.
            tasks: See ``profile_many``.
            verbose: See ``profile_many``.
            seconds: About how long the profile may take. Where steps are long, it has fewer rounds
                than ``num_rounds``, but at least two. None always measures ``num_rounds``.

        Raises:
            BaseException: The errors of ``profile_many``.
        """
        most = MAX_ROUNDS if num_rounds is None else num_rounds
        counts = Counts(num_warmup, num_measure, most, seconds)
        sample = Sample.of(batches)
        (result,) = self._measured(
            sample, counts, pipelined, tasks, verbose, labels=[LOOP], of_loop=True
        )
        return result

    def _measured(
        self,
        sample: Sample,
        counts: Counts,
        pipelined: bool,
        tasks: Iterable[TaskRef] | TaskRef | None,
        verbose: bool,
        *,
        labels: Sequence[str],
        of_loop: bool = False,
    ) -> list[ProfileResult]:
        """Return one result of all batches, then one per batch if ``labels`` has names for them.

        If ``of_loop``, the loop is run through once first, and visits get the length that it needs.
        """
        check_idle(self.pipe, "profiling")
        names, left_out = self._names(tasks)
        # All ranks have to run the same number of iterations, since they meet in collectives.
        sample = Sample.of(sample, _agreed(min, len(sample)))
        pulls = Pulls.of(self._loader)
        kinds = [PULL, *names] if pulls.has_loader else [*names]
        lengths = (counts.num_warmup, counts.num_measure)
        timer = WindowTimer(self.pipe, sample, self._copy, *lengths, pipelined, pulls)
        passage = None
        section = len(sample)
        total = counts.num_rounds * len(kinds) if counts.fixed else None
        bar = progress_bar("profiling", " visits", total, shown=verbose)
        # Everything below runs inside the trial, so that state is restored also on failure or
        # Ctrl-C.
        with bar, trial(self.pipe, sample[0], self._state, self._copy) as saved:
            if of_loop:
                visited = len(visits(kinds))
                passage, counts, section = self._passage(timer, sample, counts, visited)
                saved.restore_training()
            # The first round uses the section at the beginning; each later round uses another one.
            timer = replace(timer, batches=sample.section(0, section), measure=counts.num_measure)
            rounds = Rounds(
                timer, counts, saved.restore_training, lambda turn: sample.section(turn, section)
            )
            rounds.warm_up()
            # Device times come from the passage over the loop. Without a passage, on a device with
            # streams, a short one is run for them.
            on_streams = passage
            if passage is None and self.pipe.device.has_streams:
                on_streams = timer.passage(timer.whole_cycles(timer.measure))
            rounds.measure(kinds, bar.update)
        measurement = Measurement(
            num_warmup=timer.warmup,
            num_measure=timer.measure,
            num_rounds=len(rounds.completed),
            coverage="" if passage is None else sample.coverage(len(passage.steps_s)),
            put_back=tuple(map(str, saved.owners)),
            already_shortcut=left_out,
            interrupted=rounds.interrupted,
            other_load=rounds.other_load,
        )
        results = []
        # The first label is of all batches, the others are of one batch each.
        for place, label in zip((None, *range(len(sample))), labels, strict=False):
            exposures = Exposures(rounds, place, passage, on_streams)
            results.append(_result_of(rounds, exposures, label, measurement))
        advice = advise(results[0], self.pipe, pulls.effects)
        return [replace(result, advice=advice) for result in results]

    def _passage(
        self, timer: WindowTimer, sample: Sample, counts: Counts, places: int
    ) -> tuple[Passage, Counts, int]:
        """Run through the loop and choose the visits, of which a round has ``places``.

        Returns:
            The passage, the counts with the visits' length and number, and the batches of a
            section.
        """
        pulls = timer.pulls
        timer.window()  # the first iterations allocate and compile
        pulls.measure()
        # A short passage estimates the step time, so that the passage that counts stays within
        # ``_PASSAGE_S``. Ranks agree on the slowest, or they would run different numbers of
        # iterations.
        step_s = _agreed(max, fmean(timer.passage(_FEW).steps_s))
        most_s = math.inf if counts.seconds is None else counts.seconds
        most = max(_LEAST_SEEN, _fitting(min(_PASSAGE_S, most_s / 2), step_s))
        length = pulls.length
        # If the start of a pass was measured separately, the passage stays within one pass.
        if pulls.start_s:
            within = length - timer.num_unmeasured
            most = min(most, within) if within > 1 else most
            length = 0
        count = _agreed(min, pulls.in_turns(sample.iterations(most, length)))
        passage = replace(timer, batches=Sample.of(sample, count)).passage(
            count, length if 0 < length <= count else 0
        )
        # A visit may use half of what fits into ``_VISITS_S``. Its length is rounded up to whole
        # sections, so that each batch of the section comes equally often.
        step_s = fmean(passage.steps_s)
        fits = _fitting(min(_VISITS_S, most_s), LEAST_ROUNDS * places * step_s)
        each_s = [thread.each_s for thread in passage.tasks.values()]
        wanted = _agreed(max, visit_length(passage.steps_s, each_s, max(1, fits // 2)))
        section = min(wanted, len(sample))
        length = -(-max(wanted, counts.num_measure) // section) * section
        num_rounds = counts.num_rounds
        # What remains after the passage is divided among rounds. The clocks of ranks differ, so
        # rank 0 decides.
        if counts.seconds is not None:
            round_s = places * (max(counts.num_warmup, section) + length) * step_s
            fits = _fitting(max(0.0, most_s - len(passage.steps_s) * step_s), round_s)
            num_rounds = min(num_rounds, max(LEAST_ROUNDS, gather(fits)[0]))
        return passage, Counts(counts.num_warmup, length, num_rounds), section

    def _names(
        self, tasks: Iterable[TaskRef] | TaskRef | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tasks to measure and the tasks already shortcut, both in serial order."""
        in_order = [task.name for task in self.pipe.tasks]
        left_out = tuple(name for name in in_order if name in self.pipe.shortcut_tasks)
        if tasks is None:
            wanted = {*in_order} - {*left_out}
        else:
            named = (tasks,) if isinstance(tasks, str | PipelineTask) else tasks
            wanted = {*self.pipe.task_names(*named)}
        names = tuple(name for name in in_order if name in wanted)
        if both := [name for name in names if name in left_out]:
            raise ValueError(
                f"task {both[0]!r} is shortcut, so it costs nothing that could be measured: "
                f"call disable_shortcut({both[0]!r}) first, or leave it out of tasks"
            )
        if not names:
            raise ValueError(
                "there is no task to measure: tasks is empty, or all are shortcut already"
            )
        return names, left_out


def _agreed(choose: Callable[[list[N]], N], own: N) -> N:
    """Return one of the values of all ranks, which have to run the same iterations."""
    return choose(gather(own))


def _fitting(within_s: float, each_s: float) -> int:
    """Return how many periods of ``each_s`` fit into ``within_s``, at most ``MOST``."""
    # This form never divides by zero: a step may take no measurable time.
    return int(within_s / each_s) if within_s < MOST * each_s else MOST


def _result_of(
    rounds: Rounds, exposures: Exposures, label: str, measurement: Measurement
) -> ProfileResult:
    """Build a result from what was measured, without its advice."""
    timer = rounds.timer
    plan = timer.pipe.plan
    pulls = timer.pulls
    loop = exposures.loop
    # The passages avoid the starts of loader passes, so their share of a step is added here.
    start_s = pulls.start_s
    step = replace(exposures.step, value_s=exposures.step.value_s + start_s)
    saved = exposures.saved()
    if PULL in saved:  # visits lie within a pass; without calls there would be no starts
        saved[PULL] = replace(saved[PULL], value_s=saved[PULL].value_s + start_s)
    failed = {name: f"{type(error).__name__}: {error}" for name, error in rounds.failed.items()}
    tasks = {
        name: TaskFigures(
            thread,
            exposures.device_s.get(name, ()),
            exposed=saved.get(name),
            replay_s=exposures.replays_s.get(name, 0.0),
            in_others_s=exposures.in_others_s.get(name, {}),
            not_measured=failed.get(name, ""),
        )
        for name, thread in loop.tasks.items()
    }
    result = ProfileResult(
        batch=label,
        mode="pipelined" if timer.pipelined else "serial",
        measurement=measurement,
        iteration=IterationTimes(step, median(loop.steps_s), tuple(loop.steps_s)),
        tasks=tasks,
        collectives=tuple(n for n, entry in plan.schedule.items() if entry.globally_ordered),
        loader=pulls.pace,
        busy_s=busy_s(plan, loop.tasks) if timer.pipelined else {},
    )
    # Ranks exchange their own figures here; the exchange is a collective, so every rank must come
    # to it.
    if is_alone():
        return result
    own = RankTimes(rank=dist.get_rank(), iteration=result.iteration, tasks=tasks)
    return replace(result, ranks=tuple(gather(own)))


def pipeline_breakdown(pipeline: Any, batches: Iterable[Any], **options: Any) -> ProfileResults:
    """Profile a pipeline's tasks on several batches, and print the report on rank 0.

    It corresponds to the function of the same name in recsys-examples.

    Args:
        pipeline: An object with an attribute ``pipe``; no batch may be in flight. On several
            ranks, call this on all of them.
        batches: At least one batch on the host, as the data loader returns it.
        options: Keyword arguments of ``TaskProfiler.profile_many``.
    """
    results = TaskProfiler(pipeline.pipe).profile_many(batches, **options)
    if is_alone() or dist.get_rank() == 0:
        results.print_report()
    return results
