"""The examination of a loop: what keeps it from overlapping, found by running it serially.

Users' code is not read. A finding is based on torch's dispatch and settings, the environment, or a
measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle

from torch.utils.data import DataLoader

from swpipe.core.costs import CostModel
from swpipe.core.effects import Declared
from swpipe.core.loaders import unprepared
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.task import PipelineTask
from swpipe.device import resolve
from swpipe.profiler import ProfileResult, measure_costs
from swpipe.profiler.trial import trial
from swpipe.reporting.environment import environment_findings
from swpipe.reporting.finding import Finding
from swpipe.reporting.waits import WaitRecorder, sync_debug
from swpipe.tuning.autotuning import Loop

_WARM_UP = 2  # iterations in which torch allocates and compiles
_WATCHED = 2
_LOCKING = 3  # batches with a thread that competes for the interpreter lock
_SHARE = 0.05
"""The smallest fraction of a step that makes a finding."""

_LOCKED = 0.6
"""The fraction of its time from which on a task counts as holding the interpreter lock."""


def examine(loop: Loop, plan: PipelinePlan | None, profile: ProfileResult) -> tuple[Finding, ...]:
    """Find what keeps a loop from overlapping; its tasks run serially for some iterations.

    Args:
        loop: The loop; its state is restored.
        plan: The plan that the loop runs under, whose threads and streams are counted. The plan
            is not run.
        profile: A profile of the same loop, for the findings about the loader.

    Raises:
        BaseException: Any exception of a task or of the loader.
    """
    loader = unprepared(loop.loader)
    workers = loader.num_workers if isinstance(loader, DataLoader) else 0
    with loop.opened(PipelinePlan.serial(loop.tasks)) as pipe:
        recorder = WaitRecorder(pipe.device)
        feed = cycle(loop.batches)
        with trial(pipe, loop.batches[0], loop.state):
            # Warm-up iterations wait for allocations and compilation, which are no findings.
            for _ in range(_WARM_UP):
                pipe.run_one_serial_iter(next(feed))
            for _ in range(_WATCHED):
                with (
                    # The dispatch mode sees operators; torch's sync debug mode sees waits inside of
                    # them.
                    pipe.observe(recorder),
                    sync_debug(pipe.device, recorder.add_unseen),
                ):
                    pipe.run_one_serial_iter(next(feed))
        batches = loop.batches.section(0, _LOCKING)
        costs = measure_costs(pipe, batches, 1, 3, state=loop.state)
    return tuple(
        chain(
            environment_findings(resolve(loop.device), plan, workers),
            # The recorder counts over all watched iterations.
            (
                replace(finding, text=f"{finding.text}; {times / _WATCHED:g} per iteration")
                for finding, times in recorder.findings.items()
            ),
            _loader_findings(profile),
            _lock_findings(loop.tasks, costs, profile.baseline_s),
        )
    )


def _loader_findings(profile: ProfileResult) -> Iterator[Finding]:
    """Yield a finding about batches that are made between two steps.

    The advice of the profile is about a loader that works ahead, and about the start of a pass.
    """
    pace = profile.pace
    saved = profile.exposed(PULL)
    if saved is None or pace.works_ahead or not saved.is_clear:
        return
    waits = replace(saved, value_s=saved.value_s - pace.start_s)
    if waits.value_s >= _SHARE * profile.baseline_s:
        takes = f"{waits.exact} ms of a step"
        how = "mostly blocked" if PULL in profile.blocking else "on the CPU"
        text = f"batches are made in this process, between two steps: {takes}, {how}"
        fix = (
            "DataLoader(num_workers=1), or overlap(loader, tasks, pull_ahead=True) if the "
            "loader uses nothing that the loop changes"
        )
        yield Finding("loader-in-process", "loader", text, fix)


def _lock_findings(
    tasks: Sequence[PipelineTask], costs: CostModel, step_s: float
) -> Iterator[Finding]:
    """Yield findings about tasks that hold the interpreter lock but could run in another process.

    These tasks leave nothing behind but their results.
    """
    # Builds of Python without the lock have ``sys._is_gil_enabled`` (3.13); older versions always
    # lock.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return
    for name, effects in Declared.by(tasks).effects.items():
        cost = costs.tasks[name]
        # A task that writes persistent state cannot move to another process.
        keeps_state = effects.undeclared or any(place.persistent for place in effects.writes)
        if keeps_state or cost.host_us < _SHARE * step_s * 1e6:
            continue
        if cost.gil_us >= _LOCKED * cost.host_us:
            text = (
                f"holds the interpreter lock for {cost.gil_us / 1e3:.3f} of "
                f"{cost.host_us / 1e3:.3f} ms: on a thread of its own it stops the Python of others"
            )
            fix = (
                "let the loader's worker processes do it, or functions that release the lock "
                "(torch, numpy, pyarrow)"
            )
            yield Finding("interpreter-lock", f"task {name!r}", text, fix)
