"""Runs of a job under different plans: alternating training, losses, times and comparison."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import torch

from swpipe.core.plan import PipelinePlan
from swpipe.core.tables import table
from swpipe.pipeline import SWPipeline
from swpipe.tasks.workload import InputError, TrainingFailedError


class TrainingDivergedError(TrainingFailedError):
    """The error of a loss that is NaN or infinite.

    Attributes:
        step: The first step with such a loss, from 0.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss became NaN or infinite at step {step} (the first is 0): "
            "lower the learning rate, or look at that step's rows"
        )
        self.step = step


class JobRun:
    """The training of a job under one plan.

    Use it as a context manager, or call ``close``.

    Args:
        name: The name of the plan.
        job: The job.
        plan: The plan of the job's tasks.
        steps: The number of steps to train; None for one epoch.

    Attributes:
        steps: The number of steps to train.
        done: The number of steps that have been trained.
        pipe: The pipeline that runs the job.
        losses: The losses on this rank, of all steps so far that have a loss.
        turns_s: The time per step in seconds, for each timed turn.
    """

    def __init__(
        self,
        name: str,
        job: Any,
        plan: PipelinePlan,
        steps: int | None = None,
    ) -> None:
        self.name = name
        self.job = job
        self.plan = plan
        self.steps: int = job.epoch_steps if steps is None else steps
        self.done = 0
        self.pipe = SWPipeline(plan, job.tasks(), device=job.device, context=job.context)
        self.losses: list[float | torch.Tensor] = []
        self.turns_s: list[float] = []
        self._untimed_s: list[float] = []
        self._batches = job.batches(steps)

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train one turn: the next ``steps`` steps, or fewer if fewer batches are left.

        Args:
            steps: The number of steps in this turn.
            on_step: A function to call after each step.
            timed: Whether the turn counts for the speed.

        Raises:
            InputError: The job gave no batch, in this turn and in all turns before.
            TrainingDivergedError: A loss of this turn is not finite; raised at the turn's end.
        """
        before = len(self.losses)
        begin = time.perf_counter()
        done = 0
        # The next turn continues with the same iterator.
        for ctx in self.pipe.iterate(islice(self._batches, steps)):
            done += 1
            self.done += 1
            loss = self.job.retired(ctx)
            if loss is not None:
                self.losses.append(loss)
            if on_step:
                on_step()
        # The device's work belongs to the turn's time.
        self.pipe.device.synchronize()
        seconds = max(time.perf_counter() - begin, 1e-9)  # a clock may stand still
        # Checked once per turn: looking at each loss would make the host wait for the device.
        for step, loss in enumerate(self.losses[before:], before):
            if not math.isfinite(loss):
                raise TrainingDivergedError(step)
        if done:
            # By the steps that were trained, which may be fewer than ``steps``.
            (self.turns_s if timed else self._untimed_s).append(seconds / done)
        # A turn after the last batch is empty, which is no error. A first turn must not be.
        elif steps and not (self.turns_s or self._untimed_s):
            raise InputError(f"plan {self.name}: the workload gives no batch; return some")

    @property
    def steps_per_s(self) -> float:
        """The median number of steps per second over the timed turns, or over all if none is."""
        return 1 / statistics.median(self.turns_s or self._untimed_s)

    def close(self) -> None:
        """Close the pipeline and the job."""
        self.pipe.close()
        self.job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def alternate(
    runs: Sequence[JobRun],
    steps: int,
    *,
    chunk: int = 50,
    warm_up: int = 10,
    on_step: Callable[[], object] | None = None,
) -> None:
    """Advance several runs by ``steps`` each, alternating between them.

    Turns are short, and the order of the runs is reversed from round to round, so that a machine
    that slows down affects all runs alike. The time of a turn includes its prologue and epilogue.

    Args:
        runs: The runs, usually of the same job under different plans.
        steps: The number of steps for each run.
        chunk: The number of steps in a turn.
        warm_up: The number of steps in the first turn, which is not timed.
        on_step: A function to call after each step of each run.
    """
    for run in runs:
        run.advance(min(warm_up, steps), on_step, timed=False)
    for turn, done in enumerate(range(warm_up, steps, chunk)):
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.advance(min(chunk, steps - done), on_step)


class Comparison(NamedTuple):
    """The differences between two runs of the same configuration under different plans.

    Attributes:
        first_loss: The first step whose losses differ in any bit, from 0; None if all are equal.
        parameters: The names of the parameters that differ in any bit.
        losses: The number of compared losses.
        of: The number of compared parameters.
    """

    first_loss: int | None
    parameters: list[str]
    losses: int
    of: int

    @property
    def equal(self) -> bool:
        """Whether all losses and all parameters are equal, bit for bit."""
        return self.first_loss is None and not self.parameters


def compare(a: JobRun, b: JobRun) -> Comparison:
    """Compare the losses and parameters of two runs bit for bit.

    This is a collective.

    Raises:
        ValueError: The runs have different numbers of losses.
    """
    # Losses are compared step by step, so the runs have to be equally long.
    if len(a.losses) != len(b.losses):
        raise ValueError(
            f"{a.name} ran {len(a.losses)} steps and {b.name} {len(b.losses)}: run both alike first"
        )
    pairs = zip(a.losses, b.losses, strict=True)
    same = [torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs]
    ours = _parameters(a)
    theirs = _parameters(b)
    wrong = [name for name, mine in ours.items() if not torch.equal(mine, theirs[name])]
    # A rank sees only its own losses and parameters: they are combined over all ranks, and all
    # ranks get the same result.
    differences = a.job.over_ranks((same, wrong, [*ours]))
    return Comparison(
        min((losses.index(False) for losses, _, _ in differences if False in losses), default=None),
        sorted({name for _, names, _ in differences for name in names}),
        max(len(losses) for losses, _, _ in differences),
        len({name for _, _, names in differences for name in names}),
    )


def _parameters(run: JobRun) -> dict[str, torch.Tensor]:
    return {name: p for module in run.job.modules for name, p in module.named_parameters()}


def report(runs: Sequence[JobRun]) -> str:
    """Return a table with a line per run, and the comparison of each other run with the first.

    This is a collective.
    """
    rows = [(run.name, run.done, f"{run.steps_per_s:.4g}", _range(run), _ends(run)) for run in runs]
    first, *others = runs
    return "\n".join(
        [
            table(("plan", "steps", "steps/s", "range", "loss"), rows),
            *(line for other in others for line in (_speed(first, other), _equality(first, other))),
        ]
    )


def _range(run: JobRun) -> str:
    times_s = run.turns_s
    return f"{1 / max(times_s):.4g} to {1 / min(times_s):.4g}" if len(times_s) > 1 else "n/a"


def _ends(run: JobRun) -> str:
    """Return the first and the last loss in words, each as the mean over the ranks that have it."""
    # A run of one step has one loss, which is not repeated as the last one.
    own = [float(loss) for loss in (*run.losses[:1], *run.losses[1:][-1:])]
    ends_of_ranks = [ends for ends in run.job.over_ranks(own) if ends]
    return " to ".join(
        f"{statistics.fmean(each):.4f}" for each in zip(*ends_of_ranks, strict=True)
    ) or ("n/a")


def _speed(first: JobRun, other: JobRun) -> str:
    """Return the speed of a run relative to the first run, if the turns show a difference."""
    names = f"{other.name} over {first.name}"
    # Ratios of turns that follow each other: a machine that slows down affects both.
    ratios = sorted(a / b for a, b in zip(first.turns_s, other.turns_s, strict=True))
    if len(ratios) < 2:
        return f"{names}: no difference was measured: one turn has no range; train for more steps"
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    ratio += " times as many steps per second"
    # If the other run is faster in some turns and slower in others, noise may be the reason.
    if ratios[0] <= 1 <= ratios[-1]:
        return f"{names}: no difference was measured: from turn to turn {ratio}"
    return f"{names}: {ratio}"


def _equality(first: JobRun, other: JobRun) -> str:
    names = f"{first.name} and {other.name}"
    comparison = compare(first, other)
    if not comparison.losses:
        return f"{names}: no ctx.loss to compare"
    if comparison.equal:
        what = f" and {comparison.of} parameters" if comparison.of else ""
        return f"{names}: bit-equal: {comparison.losses} losses{what}"
    # Stale reads are named in the message, since they are the usual reason for a difference.
    losses = (
        f"all {comparison.losses} losses are equal"
        if comparison.first_loss is None
        else f"losses differ from step {comparison.first_loss} on"
    )
    return "; ".join(
        [
            f"{names}: NOT EQUAL: {losses}",
            f"{len(comparison.parameters)} parameters differ",
            *(
                f"{run.name} may read {state} {count} iteration{'s' * (count > 1)} {age}"
                for run in (first, other)
                for age, shifts in (("old", run.plan.stale), ("early", run.plan.newer))
                for state, count in shifts.items()
            ),
        ]
    )
