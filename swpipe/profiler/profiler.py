"""``TaskProfiler``, which measures the exposed times of tasks and restores all state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe._values.stateful import given_state
from swpipe.core.keywords import suggests_keywords
from swpipe.core.plan import PULL
from swpipe.core.progress import progress_bar
from swpipe.core.task import PipelineTask, TaskRef
from swpipe.pipeline import SWPipeline, borrowed, check_idle
from swpipe.profiler.advice import LoopFacts, advise
from swpipe.profiler.exposures import BASE, Exposures
from swpipe.profiler.figures import busy_s
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import Passage, Pulls, WindowTimer
from swpipe.profiler.rank_times import RankTimes
from swpipe.profiler.result import ProfileResult, ProfileResults
from swpipe.profiler.rounds import LEAST_ROUNDS, Counts, Rounds, visits
from swpipe.profiler.sampling import MOST, Sample, visit_length
from swpipe.profiler.trial import trial_state

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


@suggests_keywords
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
        state: What to restore: one object or several, each a module, an optimizer, another object
            with ``state_dict`` and ``load_state_dict``, a generator, or a tensor that requires
            grad. None restores what tasks declare and what torch shows while they run: modules
            that are called, optimizers that step, memory that is written. A scheduler must be
            given.
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
        spread_s = None if target_spread_ms is None else target_spread_ms / 1e3
        if spread_s is not None and not spread_s > 0:
            raise ValueError(f"target_spread_ms is {target_spread_ms!r}: give a number above 0")
        batches = [*batches]
        sample = Sample.of(batches, len(batches))
        many = len(sample) > 1
        within_s = None if seconds is None else seconds * len(sample)
        counts = Counts(num_warmup, num_measure, num_rounds, within_s, spread_s)
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
        num_rounds: int = 5,
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
            num_rounds: Number of visits to each task.
            pipelined: See ``profile_many``.
            tasks: See ``profile_many``.
            verbose: See ``profile_many``.
            seconds: About how long the profile may take. Where steps are long, it has fewer rounds
                than ``num_rounds``, but at least two. None always measures ``num_rounds``.

        Raises:
            BaseException: The errors of ``profile_many``.
        """
        counts = Counts(num_warmup, num_measure, num_rounds)
        return self._measured(
            Sample.of(batches),
            *(counts, pipelined, tasks, verbose),
            labels=[LOOP],
            of_loop=True,
            within_s=seconds,
        )[0]

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
        within_s: float | None = None,
    ) -> list[ProfileResult]:
        """Return one result of all batches, then one per batch if ``labels`` has names for them.

        If ``of_loop``, the loop is run through once first, and visits get the length that it needs.
        """
        check_idle(self.pipe, "profiling")
        names, left_out = self._names(tasks)
        # All ranks have to run the same number of iterations, since they meet in collectives.
        if not is_alone():
            sample = Sample.of(sample, min(gather(len(sample))))
        saved = trial_state(self.pipe, sample[0], self._state, self._copy)
        pulls = Pulls.of(self._loader)
        kinds = [*([] if pulls is None else [PULL]), *names]
        total = counts.num_rounds * len(kinds) if counts.fixed else None
        timer = WindowTimer(
            *(
                self.pipe,
                sample,
                self._copy,
                counts.num_warmup,
                counts.num_measure,
                pipelined,
                pulls,
            )
        )
        passage = None
        section = len(sample)
        bar = progress_bar("profiling", " visits", total, shown=verbose)
        # Everything below runs inside the trial, so that state is restored also on failure or
        # Ctrl-C.
        with bar, saved.trial(), borrowed(self.pipe):
            if of_loop:
                passage, counts, section = self._passage(
                    timer, sample, counts, within_s, len(visits(kinds))
                )
                saved.restore_training()
            # The first round uses the section at the beginning; each later round uses another one.
            batches = sample.section(0, section)
            timer = replace(timer, batches=batches, measure=counts.num_measure)
            rounds = Rounds(
                timer, counts, saved.restore_training, lambda turn: sample.section(turn, section)
            )
            rounds.warm_up()
            # Device times come from the passage over the loop. Without a passage, on a device with
            # streams, a short one is run for them.
            on_streams = passage or Passage((), HostTimes(()), 1)
            if passage is None and self.pipe.device.has_streams:
                on_streams = timer.passage(timer.whole_cycles(timer.measure))
            rounds.measure(kinds, bar.update)
        result = partial(
            _result_of,
            rounds,
            put_back=tuple(map(str, saved.owners)),
            already_shortcut=left_out,
        )
        device_s = on_streams.device_s
        whole = result(rounds.exposures(passage=passage), device_s, batch=labels[0])
        if passage is not None:
            whole = replace(whole, seen=sample.seen(len(passage.steps_s)))
        # The advice needs costs of all tasks, also of tasks that were not to be measured.
        loop = LoopFacts(
            self.pipe.tasks,
            self.pipe.plan,
            whole.costs,
            self.pipe.device.has_streams,
            sum(map(whole.cpu_s, whole.host_s)),
            None if pulls is None else pulls.effects,
        )
        whole = replace(whole, advice=advise(whole, loop))
        return [
            whole,
            *(
                replace(result(rounds.exposures(place), of, batch=label), advice=whole.advice)
                for place, label in enumerate(labels[1:])
                for of in [on_streams.of_batch(place)]
            ),
        ]

    def _passage(
        self,
        timer: WindowTimer,
        sample: Sample,
        counts: Counts,
        within_s: float | None,
        places: int,
    ) -> tuple[Passage, Counts, int]:
        """Run through the loop and choose the visits.

        Returns:
            The passage, the counts with the visits' length and number, and the batches of a
            section.
        """
        pulls = timer.pulls
        timer.window()  # the first iterations allocate and compile
        if pulls is not None:
            pulls.measure()
        # A short passage estimates the step time, so that the passage that counts stays within
        # ``_PASSAGE_S``. Ranks agree on the slowest, or they would run different numbers of
        # iterations.
        timed_s = fmean(timer.passage(_FEW).steps_s)
        step_s = max(gather(timed_s)) if not is_alone() else timed_s
        most = max(_LEAST_SEEN, _fitting(_PASSAGE_S, step_s))
        length = 0 if pulls is None else pulls.length
        # If the start of a pass was measured separately, the passage stays within one pass.
        if pulls is not None and pulls.start_s:
            within = length - timer.num_unmeasured
            most = min(most, within) if within > 1 else most
            length = 0
        count = sample.iterations(most, length)
        if pulls is not None:
            count = pulls.in_turns(count)
        passage = replace(timer, batches=Sample.of(sample, count)).passage(
            count, length if 0 < length <= count else 0
        )
        # A visit may use half of what fits into ``_VISITS_S``. Its length is rounded up to whole
        # sections, so that each batch of the section comes equally often.
        step_s = fmean(passage.steps_s)
        fits = _fitting(_VISITS_S, LEAST_ROUNDS * places * step_s)
        wanted = visit_length(passage.steps_s, passage.times.each_s.values(), max(1, fits // 2))
        section = min(wanted, len(sample))
        length = -(-max(wanted, counts.num_measure) // section) * section
        num_rounds = counts.num_rounds
        # What remains after the passage is divided among rounds. The clocks of ranks differ, so
        # rank 0 decides.
        if within_s is not None:
            round_s = places * (max(counts.num_warmup, section) + length) * step_s
            fits = _fitting(max(0.0, within_s - len(passage.steps_s) * step_s), round_s)
            if not is_alone():
                fits = gather(fits)[0]
            num_rounds = min(num_rounds, max(LEAST_ROUNDS, fits))
        return passage, replace(counts, num_measure=length, num_rounds=num_rounds), section

    def _names(
        self, tasks: Iterable[TaskRef] | TaskRef | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tasks to measure and the tasks already shortcut, both in serial order."""
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


def _fitting(within_s: float, each_s: float) -> int:
    """Return how many periods of ``each_s`` fit into ``within_s``, at most ``MOST``."""
    # This form never divides by zero: a step may take no measurable time.
    return int(within_s / each_s) if within_s < MOST * each_s else MOST


def _result_of(
    rounds: Rounds, found: Exposures, device_s: Mapping[str, Mapping[int, float]], **about: Any
) -> ProfileResult:
    """Build a result from what was measured, without its advice."""
    timer = rounds.timer
    pulls = rounds.timer.pulls
    times = found.times[BASE]
    loop = found.loop
    # The passages avoid the starts of loader passes, so their share of a step is added here.
    start_s = 0.0 if pulls is None else pulls.start_s
    step = found.step._replace(value_s=found.step.value_s + start_s)
    # A replay costs time on the task's own thread and, through autograd, in the backward of other
    # tasks.
    replays_s = {
        kind: fmean(rounds.in_backward_s[kind]) + found.times[kind].host_s.get(kind, 0.0)
        for kind in rounds.saved_s
    }
    exposed = found.saved({kind: fmean(of) for kind, of in rounds.in_backward_s.items()})
    if PULL in exposed:  # visits lie within a pass; without calls there would be no starts
        pull = exposed[PULL]
        exposed[PULL] = pull._replace(value_s=pull.value_s + start_s)
    host_s = loop.times.host_s
    blocked_s = loop.times.blocked_s
    core_s = loop.times.core_s
    names = [name for name in host_s if name in exposed or name in rounds.failed]
    not_measured = {n: f"{type(error).__name__}: {error}" for n, error in rounds.failed.items()}
    result = ProfileResult(
        mode="pipelined" if timer.pipelined else "serial",
        baseline_s=step.value_s,
        baseline_median_s=median(timer.spans(loop.steps_s)),
        baseline_spread_s=step.spread_s,
        exposed_s={n: min(max(0.0, each.value_s), step.value_s) for n, each in exposed.items()},
        raw_s={name: each.value_s for name, each in exposed.items()},
        spread_s={name: each.spread_s for name, each in exposed.items()},
        replay_s=replays_s,
        in_others_s=found.in_others_s,
        host_s={name: host_s[name] for name in names},
        blocked_s={name: blocked_s[name] for name in names},
        device_s={name: fmean(device_s[name].values()) for name in names if name in device_s},
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
        steps_s=tuple(loop.steps_s),
        host_each_s=loop.times.each_s,
        device_each_s={name: tuple(each_s.values()) for name, each_s in device_s.items()},
        **about,
    )
    # Ranks exchange their own figures here; the exchange is a collective, so every rank must come
    # to it.
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
        in_others_s=found.in_others_s,
    )
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
    pipe = pipeline.pipe
    results = TaskProfiler(pipe).profile_many(batches, **options)
    if is_alone() or dist.get_rank() == 0:
        results.print_report()
    return results
