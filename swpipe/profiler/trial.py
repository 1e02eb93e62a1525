"""Trials: the state that is restored after one, and plans compared by running them.

A cost model is accurate to some percent. If plans are closer than that, only running them shows
which one is fastest. The plans alternate, in an order that is reversed from round to round, so that
a machine whose speed drifts favours none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch

from swpipe._state.loop import LoopState
from swpipe.core.context import TypedContext
from swpipe.core.plan import PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.inference.operators import copied
from swpipe.inference.shown_state import shown_state
from swpipe.pipeline import SWPipeline, borrowed
from swpipe.profiler.measure import Pulls, WindowTimer
from swpipe.profiler.rounds import Counts


def trial_state(
    pipe: SWPipeline[Any], batch: Any, state: Any, copy: Callable[[Any], Any] | None = None
) -> LoopState:
    """Return the state to restore after a trial of an idle pipeline's tasks.

    Args:
        pipe: The pipeline.
        batch: If ``state`` is None, the tasks run on copies of this batch to find the state.
        state: The objects given by the user; None for the declared and detected ones.
        copy: Returns a copy of the batch; None to clone its tensors.

    Raises:
        BaseException: Any exception of a task.
    """
    if state is None:
        # A borrowed pipeline gets its iteration number back, and its shortcuts stay untouched.
        with borrowed(pipe):
            run = pipe.run_one_serial_iter
            state = shown_state(pipe.tasks, run, batch, pipe.device, copy or copied)
    return LoopState(pipe.tasks, state, pipe.device)


def try_plans(
    tasks: Iterable[PipelineTask],
    plans: Mapping[str, PipelinePlan],
    batches: Sequence[Any],
    num_warmup: int = 3,
    num_measure: int = 10,
    *,
    num_rounds: int = 2,
    device: Device | torch.device | str | None = None,
    context: type[TypedContext] | None = None,
    state: Any = None,
    copy: Callable[[Any], Any] | None = None,
    loader: Iterable[Any] | Pulls | None = None,
) -> dict[str, float]:
    """Measure plans alternately on the same batches, and restore all state afterwards.

    Args:
        tasks: The tasks that the plans schedule.
        plans: Name to plan.
        batches: At least one: the batches of the loop, in order. Iterations get the batches
            themselves, cyclically.
        num_warmup: Iterations before each window that are not timed.
        num_measure: The fewest iterations timed in each window; whole passes over the batches.
        num_rounds: How often each plan is measured, in an order that is reversed each time.
        device: See ``SWPipeline``.
        context: See ``SWPipeline``.
        state: What to restore; see ``TaskProfiler``.
        copy: A function that returns a copy of a batch, for tasks that modify it in place.
        loader: The object that training takes its batches from. It is called in each iteration,
            as in ``TaskProfiler``.

    Returns:
        Name to seconds per iteration in the steady state: the mean over all windows.

    Raises:
        ValueError: There are no plans or no batches, or a number is too small.
        PlanError: A plan cannot run with these tasks.
        BaseException: Any exception of a task.
    """
    tasks = tuple(tasks)
    if not plans or not batches:
        raise ValueError("give at least one plan and one batch to try it on")
    # This only validates the numbers, before pipelines are built.
    Counts(num_warmup, num_measure)
    samples: dict[str, list[float]] = {name: [] for name in plans}
    pulls = Pulls.of(loader)
    if pulls is not None:
        pulls.measure()
    said: Any = {"device": device, "context": context, "check_effects": False}
    # All pipelines stay open during the trial, so that no window includes the start of threads. The
    # state is the same for all plans, since they run the same tasks.
    with ExitStack() as stack:
        pipes = {n: stack.enter_context(SWPipeline(p, tasks, **said)) for n, p in plans.items()}
        saved = trial_state(next(iter(pipes.values())), batches[0], state, copy)
        for turn in range(num_rounds):
            for name in pipes if turn % 2 else reversed(pipes):
                timer = WindowTimer(
                    *(pipes[name], batches, copy, num_warmup, num_measure),
                    pipelined=True,
                    pulls=pulls,
                )
                # Each window starts from the saved state, or later plans would train on what
                # earlier ones left.
                with saved.trial(), borrowed(pipes[name]):
                    samples[name] += timer.window()
    return {name: fmean(each) for name, each in samples.items()}
