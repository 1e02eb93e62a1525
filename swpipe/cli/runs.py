"""Runs of a job under different plans: alternating training, losses, times and comparison."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, zip_longest
from typing import Any

import torch

from swpipe._distributed.rank_checks import gather
from swpipe.cli.user_errors import TrainingFailedError, UserError
from swpipe.cli.user_inputs import Job
from swpipe.core.plan import PipelinePlan
from swpipe.core.progress import progress_bar
from swpipe.core.tables import table
from swpipe.trace import Trace

_UNTIMED = 10  # steps of each run before its turns
_TURN = 100  # steps under one plan before the next plan's turn
_TRACED = 12  # last steps, which are in the timeline


class JobRun:
    """The training of a job under one plan; ``pipe.close()`` ends it.

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

    def __init__(self, name: str, job: Job, plan: PipelinePlan, steps: int | None = None) -> None:
        self.name = name
        self.plan = plan
        self.steps = job.epoch_steps if steps is None else steps
        self.done = 0
        self.pipe = job.pipeline(plan)
        self.losses: list[float | torch.Tensor] = []
        self.turns_s: list[float] = []
        self._untimed_s: list[float] = []
        # Batches that are a list are trained on again and again, up to the number of steps.
        is_sequence = isinstance(job.batches, Sequence)
        self._batches: Iterator[Any] = cycle(job.batches) if is_sequence else iter(job.batches)

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train one turn: the next ``steps`` steps, or fewer if fewer batches are left.

        Args:
            steps: The number of steps in this turn.
            on_step: A function to call after each step.
            timed: Whether the turn counts for the speed.

        Raises:
            UserError: The job gave no batch, in this turn and in all turns before.
            TrainingFailedError: A loss of this turn is not finite; raised at the turn's end.
        """
        before = len(self.losses)
        begin = time.perf_counter()
        done = 0
        # The next turn continues with the same iterator.
        for ctx in self.pipe.iterate(islice(self._batches, steps)):
            done += 1
            self.done += 1
            loss = loss_of(ctx)
            if loss is not None:
                self.losses.append(loss)
            if on_step:
                on_step()
        # The device's work belongs to the turn's time.
        self.pipe.device.synchronize()
        seconds = time.perf_counter() - begin
        # Checked once per turn: looking at each loss would make the host wait for the device.
        for step, loss in enumerate(self.losses[before:], before):
            if not math.isfinite(loss):
                raise TrainingFailedError(
                    f"plan {self.name}: the loss became NaN or infinite at step {step} (the first "
                    "is 0): lower the learning rate, or look at that step's rows"
                )
        if done:
            # By the steps that were trained, which may be fewer than ``steps``.
            (self.turns_s if timed else self._untimed_s).append(seconds / done)
        # A turn after the last batch is empty, which is no error. A first turn must not be.
        elif steps and not (self.turns_s or self._untimed_s):
            raise UserError(
                f"plan {self.name}: the workload has no batch to train on; let its function return "
                "batches"
            )

    @property
    def steps_per_s(self) -> float:
        """The median number of steps per second over the timed turns, or over all if none is."""
        return 1 / statistics.median(self.turns_s or self._untimed_s)


def loss_of(ctx: Any) -> float | torch.Tensor | None:
    """Return the loss in a trained step's context, or None if there is none."""
    # Not ``hasattr(ctx, "loss")``: for an attribute that ``keep`` has dropped, a context raises
    # RuntimeError, which hasattr does not catch.
    there = "loss" in vars(ctx) or hasattr(type(ctx), "loss")
    loss = ctx.loss if there else None
    # Detached: a kept loss would keep the graph of its step. A tensor of several elements under
    # this name is not a loss.
    if isinstance(loss, torch.Tensor):
        return loss.detach() if loss.numel() == 1 else None
    return loss if isinstance(loss, float) else None


def train_in_turns(runs: Sequence[JobRun]) -> Trace:
    """Train runs of the same length, alternating between them; record the end of the last run.

    Turns are short, and the order of the runs is reversed from turn to turn, so that a machine
    whose speed drifts favours none of them. The time of a turn includes its prologue and epilogue.
    """
    steps = runs[0].steps
    traced = min(steps, _TRACED)
    with progress_bar("training", " steps", steps * len(runs)) as bar:
        for run in runs:
            run.advance(min(_UNTIMED, steps - traced), bar.update, timed=False)
        for turn, done in enumerate(range(_UNTIMED, steps - traced, _TURN)):
            for run in runs if turn % 2 == 0 else reversed(runs):
                run.advance(min(_TURN, steps - traced - done), bar.update)
        # The recorded steps are not timed: recording slows them down.
        for run in runs:
            with run.pipe.trace() as recorded:
                run.advance(traced, bar.update, timed=False)
    return recorded


def report_of(runs: Sequence[JobRun]) -> str:
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
    ends_of_ranks = [ends for ends in gather(own) if ends]
    means = [statistics.fmean(losses) for losses in zip(*ends_of_ranks, strict=True)]
    return " to ".join(f"{mean:.4f}" for mean in means) or "n/a"


def _speed(first: JobRun, other: JobRun) -> str:
    """Return the speed of a run relative to the first run, if the turns show a difference."""
    names = f"{other.name} over {first.name}"
    # Ratios of turns that follow each other: a machine that slows down affects both. A run whose
    # batches ended early has fewer turns.
    ratios = sorted(a / b for a, b in zip(first.turns_s, other.turns_s, strict=False))
    if len(ratios) < 2:
        return f"{names}: no difference was measured: one turn has no range; train for more steps"
    ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    ratio += " times as many steps per second"
    # If the other run is faster in some turns and slower in others, noise may be the reason.
    if ratios[0] <= 1 <= ratios[-1]:
        return f"{names}: no difference was measured: from turn to turn {ratio}"
    return f"{names}: {ratio}"


def _equality(first: JobRun, other: JobRun) -> str:
    """Return whether the losses of two runs are equal on all ranks, bit for bit."""
    names = f"{first.name} and {other.name}"
    # A rank sees only its own losses: they are compared there, and all ranks get the same result.
    ranks = gather((_first_difference(first.losses, other.losses), len(first.losses)))
    steps = [step for step, _ in ranks if step is not None]
    if steps:
        # Stale reads are named in the message, since they are the usual reason for a difference.
        shifts = (
            f"; {run.name} may read {state} {count} iteration{'s' * (count > 1)} {age}"
            for run in (first, other)
            for age, counts in (("old", run.plan.stale), ("early", run.plan.newer))
            for state, count in counts.items()
        )
        return f"{names}: NOT EQUAL: losses differ from step {min(steps)} on{''.join(shifts)}"
    count = max(count for _, count in ranks)
    return f"{names}: bit-equal: {count} losses" if count else f"{names}: no ctx.loss to compare"


def _first_difference(
    first: Sequence[float | torch.Tensor], other: Sequence[float | torch.Tensor]
) -> int | None:
    """Return the first step at which two runs' losses differ in a bit, or only one run has one."""
    for step, (mine, theirs) in enumerate(zip_longest(first, other)):
        if mine is None or theirs is None:
            return step
        if not torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)):
            return step
    return None
