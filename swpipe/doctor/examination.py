"""Examines a machine, or a loop on it: its settings, a few serial iterations, and their times."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from swpipe._state.loop import LoopState
from swpipe._values.fingerprint import same_bits
from swpipe._values.stateful import PLAIN
from swpipe._values.walk import leaves_in, tensors_held
from swpipe.core.context import TypedContext
from swpipe.core.costs import CostModel
from swpipe.core.effects import declared_effects
from swpipe.core.loaders import unprepared
from swpipe.core.messages import counted, listed
from swpipe.core.plan import PULL, PipelinePlan, StreamSpec
from swpipe.core.task import PipelineTask, refs_in, task
from swpipe.device import Device, resolve
from swpipe.doctor.diagnosis import Diagnosis, Finding
from swpipe.doctor.environment import environment_findings
from swpipe.doctor.headroom import headroom_of
from swpipe.doctor.waits import TaskWatcher, WaitRecorder, sync_debug
from swpipe.pipeline import SWPipeline
from swpipe.profiler.costing import measure_costs
from swpipe.profiler.other_load import LoadSoFar, load_so_far
from swpipe.profiler.profiler import TaskProfiler
from swpipe.profiler.result import ProfileResult
from swpipe.profiler.sampling import Sample
from swpipe.profiler.spread import ms, within
from swpipe.profiler.trial import trial_state

_OWN = (Path(torch.__file__).parent, Path(__file__).parents[1])
"""Code of torch's, which breaks graphs on purpose, and of swpipe's, which watches the loop."""

_WARM_UP = 2  # iterations in which torch allocates and compiles
_WATCHED = 2
_SEEN = 20  # batches of a loader: what comes every tenth time is among them twice
_LOCKING = 3  # batches beside a thread that competes for the interpreter lock
_LOAD_S = 0.5  # the kernel counts in steps of 10 ms
_SHARE = 0.05
"""What takes less of a step is no finding."""

_MOST_WORKERS = 16
"""With more workers their first batches are not compared."""

_LOCKED = 0.6
"""A task holds the interpreter lock for most of its time, from here on."""


def diagnose(
    tasks: Iterable[PipelineTask | Callable[[Any], None]] | None = None,
    loader: Iterable[Any] = (),
    *,
    plan: PipelinePlan | None = None,
    device: Device | torch.device | str | None = None,
    context: type[TypedContext] | None = None,
    state: Any = None,
    copy: Callable[[Any], Any] | None = None,
    rounds: int = 4,
    profile: ProfileResult | None = None,
) -> Diagnosis:
    """Find what keeps work from overlapping, and how much overlap can gain at most.

    The tasks run serially for some tens of iterations, as in a profile, and all state is restored.
    Users' code is not read: a finding is what torch's dispatch and settings, the environment or a
    measurement show.

    Args:
        tasks: In the order of the plain loop; None to examine the machine and its settings only.
        loader: What training takes its batches from, as in ``for batch in loader``. It is called
            once per iteration; a list, a tuple or an iterator only for its first batches.
        plan: What the loop runs under, to examine its threads and streams; it is not run.
        device: As for ``SWPipeline``.
        context: As for ``SWPipeline``.
        state: What to restore, as for ``TaskProfiler``.
        copy: Makes a batch that may be modified, for tasks that modify it in place.
        rounds: Of the profile that is taken, 2 or more; more make its intervals narrower.
        profile: Of the same loop, if there is one: the findings are of its figures.

    Raises:
        ValueError: There is no batch, or ``rounds`` is too small.
        PlanError: There are no tasks, or two have the same name.
        BaseException: Whatever a task or the loader raised.
    """
    where = resolve(device)
    dataloader = unprepared(loader)
    workers = dataloader.num_workers if isinstance(dataloader, DataLoader) else 0
    load = load_so_far()
    found = list(environment_findings(where, plan, workers))
    if tasks is None:
        if load is not None:
            time.sleep(_LOAD_S)
        found = [*_busy_findings(load), *found]
        return Diagnosis(tuple(found), None, f"machine and settings, for device {where.name}")
    given = tuple(each if isinstance(each, PipelineTask) else task(each) for each in refs_in(tasks))
    least = max(_SEEN, min(workers, _MOST_WORKERS) + 1)
    batches = Sample.of(loader if isinstance(loader, Sequence) else islice(loader, least))
    called = None if isinstance(loader, Sequence | Iterator) else loader
    serial = PipelinePlan.serial(given)
    with SWPipeline(serial, given, device=where, context=context, check_effects=False) as pipe:
        saved = trial_state(pipe, batches[0], state, copy)
        recorder = _watch(pipe, saved, batches, copy)
        costs = measure_costs(pipe, batches.section(0, _LOCKING), 1, 3, state=state, copy=copy)
        if profile is None:
            profile = TaskProfiler(pipe, state=state).profile_loop(
                batches, 1, num_rounds=rounds, loader=called, copy=copy
            )
    found = [*_busy_findings(load), *found, *_per_iteration(recorder)]
    found += _priority_findings(plan, recorder.computing) if plan and where.has_streams else ()
    found += _graph_breaks()
    found += _loader_findings(profile)
    if isinstance(dataloader, DataLoader):
        found += _repeated_rows(dataloader, batches)
    found += _lock_findings(given, costs, profile.baseline_s)
    names = listed([each.name for each in given])
    return Diagnosis(
        tuple(found), headroom_of(given, profile, costs), f"{names}, on device {where.name}"
    )


def _watch(
    pipe: SWPipeline[Any],
    saved: LoopState,
    batches: Sequence[Any],
    copy: Callable[[Any], Any] | None,
) -> WaitRecorder:
    recorder = WaitRecorder(pipe.device)
    feed = cycle(batches) if copy is None else map(copy, cycle(batches))
    with saved.trial(), pipe.borrow():
        for turn in range(_WARM_UP + _WATCHED):
            watched = turn >= _WARM_UP
            with (
                pipe.observe(TaskWatcher(recorder)) if watched else nullcontext(),
                sync_debug(pipe.device, recorder.add_unseen) if watched else nullcontext(),
            ):
                pipe.run_one_serial_iter(next(feed))
    return recorder


def _busy_findings(load: LoadSoFar | None) -> Iterator[Finding]:
    """Of the time since then."""
    now = None if load is None else load.others()
    if now is not None and now.is_busy:
        yield Finding("busy-machine", "machine", now.text, "wait until it is idle")


def _per_iteration(recorder: WaitRecorder) -> Iterator[Finding]:
    for one, times in recorder.found.items():
        text = f"{one.text}; {times / _WATCHED:g} per iteration"
        yield Finding(one.rule, one.place, text, one.mend)


def _priority_findings(plan: PipelinePlan, computing: set[str]) -> Iterator[Finding]:
    streams = {entry.stream for name, entry in plan.schedule.items() if name in computing}
    named = sorted(stream for stream in streams if isinstance(stream, str))
    specs = [plan.streams.get(name, StreamSpec()) for name in named]
    if len(streams) > 1 and named and not any(spec.priority for spec in specs):
        text = (
            f"kernels of {listed(named)} have the priority of all others: where those of the "
            "model fill the device, they wait until one ends"
        )
        mend = f"PipelinePlan(streams={{{named[0]!r}: StreamSpec(priority=-1)}})"
        yield Finding("stream-priority", "plan", text, mend)


def _graph_breaks() -> Iterator[Finding]:
    """Of all functions that torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return
    broken = {
        (one.co_filename, one.co_firstlineno)
        for one in dynamo.get_compilation_metrics()
        if str(one.co_name).startswith("torch_dynamo_resume_in_")
        and not any(map(Path(one.co_filename).is_relative_to, _OWN))
    }
    reasons = [
        str(reason).partition("\n")[0]
        for kind in ("unimplemented", "graph_break")
        for reason in dynamo.counters.get(kind, ())
    ]
    for file, line in sorted(broken):
        text = "torch.compile breaks the graph here: the host runs Python between the two parts"
        mend = "torch.compile(fullgraph=True) says why; " + ("; ".join(reasons) or "no reason told")
        yield Finding("graph-break", f"{file}:{line}", text, mend)


def _loader_findings(profile: ProfileResult) -> Iterator[Finding]:
    pace, saved, step_s = profile.loader, profile.exposed(PULL), profile.baseline_s
    if pace is None or saved is None:
        return
    least_s, waits_s = _SHARE * step_s, saved.value_s - pace.start_s
    if pace.start_s >= least_s:
        text = f"each pass begins slowly: {ms(pace.start_s)} ms of each step of the pass"
        mend = "less to do in the loader's __iter__ and for its first batch"
        if pace.starts_workers:
            text += f", in which the loader starts its {counted(pace.workers, 'worker')}"
            mend = "DataLoader(persistent_workers=True)"
        yield Finding("slow-pass-start", "loader", text, mend)
    if not saved.is_clear or waits_s < least_s:
        return
    takes = f"{ms(waits_s)}{within(saved.spread_s, ms)} ms of a step"
    if pace.works_ahead:
        who = f"the loader's {counted(pace.workers, 'worker')}" if pace.workers else "the loader"
        text = f"the loop waits for {who}, {takes}: a batch takes {ms(pace.rate_s)} ms"
        mend = "less work for each batch"
        if pace.workers:
            more = pace.workers_for(max(step_s - saved.value_s, least_s))
            mend = f"{more} workers, or {mend}; prefetch_factor if batches are uneven"
        yield Finding("slow-loader", "loader", text, mend)
        return
    how = "mostly blocked" if PULL in profile.blocking else "on the CPU"
    text = f"batches are made in this process, between two steps: {takes}, {how}"
    mend = "DataLoader(num_workers=1), or overlap(loader, tasks, pull_ahead=True) if it may"
    yield Finding("loader-in-process", "loader", text, mend)


def _repeated_rows(loader: DataLoader[Any], batches: Sequence[Any]) -> Iterator[Finding]:
    """Workers that all read a whole dataset: their first batches, which come in turn, are alike."""
    workers = loader.num_workers
    if workers < 2 or not isinstance(loader.dataset, IterableDataset) or len(batches) <= workers:
        return
    first, *others, next_of_first = batches[: workers + 1]
    if all(_alike(first, one) for one in others) and not _alike(first, next_of_first):
        text = (
            f"each of its {workers} workers gives the same rows: an epoch has each {workers} times"
        )
        mend = (
            "let __iter__ of the dataset give every num_workers-th row, by "
            "torch.utils.data.get_worker_info(); or num_workers=1"
        )
        yield Finding("repeated-rows", "loader", text, mend)


def _alike(batch: Any, other: Any) -> bool:
    ours, theirs = ([*tensors_held(one)] for one in (batch, other))
    values, others = ([v for v in leaves_in(one) if isinstance(v, PLAIN)] for one in (batch, other))
    return values == others and len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def _lock_findings(
    tasks: Sequence[PipelineTask], costs: CostModel, step_s: float
) -> Iterator[Finding]:
    """Of tasks that another process could do: nothing outlives them but what they return."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return
    for name, effects in declared_effects(tasks).items():
        cost = costs.tasks[name]
        keeps_state = effects.undeclared or any(place.persistent for place in effects.writes)
        if keeps_state or cost.host_us < _SHARE * step_s * 1e6:
            continue
        if cost.gil_us >= _LOCKED * cost.host_us:
            text = (
                f"holds the interpreter lock for {cost.gil_us / 1e3:.3f} of "
                f"{cost.host_us / 1e3:.3f} ms: on a thread of its own it stops the Python of others"
            )
            mend = (
                "let the loader's worker processes do it, or functions that release the lock "
                "(torch, numpy, pyarrow)"
            )
            yield Finding("interpreter-lock", f"task {name!r}", text, mend)
