"""The examination of a loop: what keeps it from overlapping, found by running it serially.

Users' code is not read. A finding is based on torch's dispatch and settings, the environment, or a
measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from swpipe._values.fingerprint import same_bits
from swpipe._values.stateful import PLAIN
from swpipe._values.walk import leaves_in, tensors_held
from swpipe.core.costs import CostModel
from swpipe.core.effects import Declared
from swpipe.core.loaders import unprepared
from swpipe.core.messages import listed
from swpipe.core.plan import PULL, PipelinePlan, StreamSpec, streams_of
from swpipe.core.task import PipelineTask
from swpipe.device import resolve
from swpipe.profiler import ProfileResult, measure_costs
from swpipe.profiler.trial import trial
from swpipe.reporting.environment import environment_findings
from swpipe.reporting.finding import Finding
from swpipe.reporting.waits import WaitRecorder, sync_debug
from swpipe.tuning.autotuning import Loop

_OWN = (Path(torch.__file__).parent, Path(__file__).parents[1])
"""Directories whose code causes no findings: torch breaks graphs on purpose, and swpipe watches
the loop.
"""

_WARM_UP = 2  # iterations in which torch allocates and compiles
_WATCHED = 2
_LOCKING = 3  # batches beside a thread that competes for the interpreter lock
_SHARE = 0.05
"""The smallest fraction of a step that makes a finding."""

_MOST_WORKERS = 16
"""The most workers whose first batches are compared."""

_LOCKED = 0.6
"""The fraction of its time from which on a task counts as holding the interpreter lock."""


def examine(loop: Loop, plan: PipelinePlan | None, profile: ProfileResult) -> tuple[Finding, ...]:
    """Find what keeps a loop from overlapping; its tasks run serially for some iterations.

    Args:
        loop: The loop; its state is restored.
        plan: The plan that the loop runs under, whose threads and streams are examined. The plan
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
            _priority_findings(plan, recorder.computing) if plan and loop.has_streams else (),
            _graph_breaks(),
            _loader_findings(profile),
            _repeated_rows(loader, workers),
            _lock_findings(loop.tasks, costs, profile.baseline_s),
        )
    )


def _priority_findings(plan: PipelinePlan, computing: set[str]) -> Iterator[Finding]:
    entries = [entry for name, entry in plan.schedule.items() if name in computing]
    streams = {entry.stream for entry in entries}
    named = sorted(stream for stream in streams_of(entries) if isinstance(stream, str))
    specs = [plan.streams.get(name, StreamSpec()) for name in named]
    # Without a priority, a long kernel of the model delays the kernels of a side stream.
    if len(streams) > 1 and named and not any(spec.priority for spec in specs):
        text = (
            f"kernels of {listed(named)} have the priority of all others: where those of the "
            "model fill the device, they wait until one ends"
        )
        fix = f"PipelinePlan(streams={{{named[0]!r}: StreamSpec(priority=-1)}})"
        yield Finding("stream-priority", "plan", text, fix)


def _graph_breaks() -> Iterator[Finding]:
    """Yield findings about all functions that torch has compiled in this process."""
    # Only if torch.compile was used is the module loaded: importing it here would be slow.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return
    broken = {
        (metrics.co_filename, metrics.co_firstlineno)
        for metrics in dynamo.get_compilation_metrics()
        # torch 2.13 gives the function after a break this prefix; it has the position of the
        # original function. ``get_compilation_metrics`` and ``counters`` are private to
        # ``torch._dynamo.utils``.
        if str(metrics.co_name).startswith("torch_dynamo_resume_in_")
        and not any(map(Path(metrics.co_filename).is_relative_to, _OWN))
    }
    reasons = [
        str(reason).partition("\n")[0]
        for kind in ("unimplemented", "graph_break")
        for reason in dynamo.counters.get(kind, ())
    ]
    for file, line in sorted(broken):
        text = "torch.compile breaks the graph here: the host runs Python between the two parts"
        fix = "torch.compile(fullgraph=True) says why; " + ("; ".join(reasons) or "no reason given")
        yield Finding("graph-break", f"{file}:{line}", text, fix)


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
        fix = "DataLoader(num_workers=1), or overlap(loader, tasks, pull_ahead=True) if it may"
        yield Finding("loader-in-process", "loader", text, fix)


def _repeated_rows(loader: Any, workers: int) -> Iterator[Finding]:
    """Find workers that all read the whole dataset, by comparing their first batches.

    The workers' first batches come in rotation. They are all alike, and unlike the second batch
    of the first worker.
    """
    if not 1 < workers <= _MOST_WORKERS or not isinstance(loader.dataset, IterableDataset):
        return
    first, *others = islice(loader, workers + 1)
    if len(others) < workers:
        return
    # If the next batch of the same worker is alike too, all batches are, and nothing follows.
    next_of_first = others.pop()
    if all(_alike(first, other) for other in others) and not _alike(first, next_of_first):
        text = (
            f"each of its {workers} workers gives the same rows: an epoch has each {workers} times"
        )
        fix = (
            "let __iter__ of the dataset give every num_workers-th row, by "
            "torch.utils.data.get_worker_info(); or num_workers=1"
        )
        yield Finding("repeated-rows", "loader", text, fix)


def _alike(batch: Any, other: Any) -> bool:
    """Return whether two batches have the same tensors, bit by bit, and the same plain values."""
    both = (batch, other)
    values, others = ([v for v in leaves_in(each) if isinstance(v, PLAIN)] for each in both)
    tensors = [[*tensors_held(each)] for each in both]
    same_number = len(tensors[0]) == len(tensors[1])
    return values == others and same_number and all(map(same_bits, *tensors))


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
