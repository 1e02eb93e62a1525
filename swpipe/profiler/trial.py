"""Trials: what is put back after one, and plans compared by running them on the same batches.

A cost model is accurate to some percent. If plans are closer than that, only running them shows
which one is fastest. The plans alternate, in an order that changes from round to round, so that a
drifting machine favours none.
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
from swpipe.pipeline import SWPipeline
from swpipe.profiler.measure import Pulls, WindowTimer
from swpipe.profiler.rounds import Counts


def trial_state(
    pipe: SWPipeline[Any], batch: Any, state: Any, copy: Callable[[Any], Any] | None = None
) -> LoopState:
    """What is put back after a trial of an idle pipeline's tasks.

    Args:
        pipe: The pipeline.
        batch: What its tasks run on, if the state is not given: they get copies.
        state: As given by the user; None for what is declared and shown.
        copy: Makes a copy of the batch; None to clone its tensors.

    Raises:
        BaseException: Whatever a task raised.
    """
    if state is None:
        with pipe.borrow():
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
    """Measure plans alternately, twice over the same batches, and restore all state afterwards.

    Args:
        tasks: The tasks that the plans schedule.
        plans: Name to plan.
        batches: At least one: those of the loop, in its order. Iterations get the batches
            themselves, one after the other and again.
        num_warmup: Iterations before each window that are not timed.
        num_measure: Iterations timed in each window, at least; whole passes over the batches.
        num_rounds: How often, in an order that turns around.
        device: As for ``SWPipeline``.
        context: As for ``SWPipeline``.
        state: What to restore, as for ``TaskProfiler``.
        copy: Makes a batch that may be modified, for tasks that modify it in place.
        loader: What training takes its batches from: call it in each iteration, as
            ``TaskProfiler`` does.

    Returns:
        Name to seconds per iteration in the steady state: the mean over all windows.

    Raises:
        ValueError: There are no plans or no batches, or a number is too small.
        PlanError: A plan cannot run with these tasks.
        BaseException: Whatever a task raised.
    """
    tasks = tuple(tasks)
    if not plans or not batches:
        raise ValueError("give at least one plan and one batch to try it on")
    Counts(num_warmup, num_measure)
    samples: dict[str, list[float]] = {name: [] for name in plans}
    pulls = Pulls.of(loader)
    if pulls is not None:
        pulls.measure()
    said: Any = {"device": device, "context": context, "check_effects": False}
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
                with saved.trial(), pipes[name].borrow():
                    samples[name] += timer.window()
    return {name: fmean(each) for name, each in samples.items()}
