"""The two-rank DLRM on each rank: time all contenders in turn, and the tasks of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.plans.sparse_dist import DENSE, DENSE_BACK, PLANS
from swpipe.tasks.sparse_dist import SparseDistTasks, TrainStep
from tests.bench.contenders import CONTENDERS, Contender
from tests.bench.dlrm import CPU, Batch, Size, dense_optimizer, endless, everything, sharded_dlrm
from tests.bench.emulated_link import EmulatedLink, Exchange
from tests.bench.measure import sharpen_timers

WARM_UP = 4
"""Untimed steps at the beginning of each turn."""


@dataclass
class Contest:
    """What was measured on one rank.

    Attributes:
        ms: Link latency in ms, then contender, to ms per step, one figure per round.
        parts: Link latency in ms to the parts of a step (see ``Anatomy``), one dict per round.
        differ: Contenders that should give TorchRec base's numbers and do not.
        per_step: Collectives per step that the link has seen, by function.
    """

    ms: dict[float, dict[str, list[float]]] = field(default_factory=dict)
    parts: dict[float, list[dict[str, float]]] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)
    per_step: dict[str, float] = field(default_factory=dict)


@dataclass
class Runner:
    """One contender with a model of its own."""

    contender: Contender
    pipeline: Any
    model: torch.nn.Module
    data: Iterator[Batch]

    def ms(self, steps: int) -> float:
        """Per step."""
        for _ in range(WARM_UP):
            self.pipeline.progress(self.data)
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.pipeline.progress(self.data)
        return (time.perf_counter() - begin_s) / steps * 1e3


class Anatomy:
    """The times of the parts of a step, run serially on a link without latency.

    A task's time excludes its waits for exchanges. ``DenseForward`` is split where it waits for
    embeddings, ``DenseBackward`` where it sends their gradients: what comes before the first and
    after the second does not depend on an exchange.
    """

    def __init__(self, size: Size, link: EmulatedLink) -> None:
        model = sharded_dlrm(size)
        tasks = SparseDistTasks(model, TrainStep([dense_optimizer(model)]), device=CPU)
        self._link = link
        self._data = endless(size)
        self._spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._pipe = SWPipeline(
            PLANS["serial"](), [self._timed(task) for task in tasks.tasks()], device=CPU
        )

    def parts_ms(self, steps: int) -> dict[str, float]:
        """The mean time of each part, in ms."""
        latency_ms, self._link.latency_ms = self._link.latency_ms, 0.0
        for _ in range(WARM_UP):
            self._pipe.progress(self._data)
        self._spans.clear()
        self._link.exchanges.clear()
        self._link.recording = True
        for _ in range(steps):
            self._pipe.progress(self._data)
        self._link.recording = False
        self._link.latency_ms = latency_ms
        total_ns: dict[str, int] = defaultdict(int)
        for task, spans in self._spans.items():
            for span in spans:
                for part, worked_ns in _parted(task, span, self._link.exchanges):
                    total_ns[part] += worked_ns
        return {part: ns / steps / 1e6 for part, ns in total_ns.items()}

    def _timed(self, task: PipelineTask) -> PipelineTask:
        def fn(ctx: IterContext) -> None:
            begin_ns = time.perf_counter_ns()
            task.fn(ctx)
            self._spans[task.name].append((begin_ns, time.perf_counter_ns()))

        return PipelineTask(task.name, fn, task.io)


def _parted(
    task: str, span: tuple[int, int], exchanges: Sequence[Exchange]
) -> Iterator[tuple[str, int]]:
    """The parts of one run of a task, each with its time without waits."""
    begin_ns, end_ns = span
    within = [e for e in exchanges if begin_ns <= e.wait_ns < end_ns]
    worked_ns = end_ns - begin_ns - sum(e.waited_ns for e in within)
    if task == DENSE and within:
        cut_ns = within[0].wait_ns
    elif task == DENSE_BACK:
        cut_ns = next(e.issued_ns for e in exchanges if begin_ns <= e.issued_ns < end_ns)
    else:
        yield task, worked_ns
        return
    yield f"{task} (1)", cut_ns - begin_ns
    yield f"{task} (2)", worked_ns - (cut_ns - begin_ns)


def contest(
    latencies: Sequence[float],
    rounds: int,
    steps: int,
    size: Size,
    names: Sequence[str] | None = None,
) -> Contest:
    """Time all contenders in turn on each link, then compare the parameters they trained."""
    sharpen_timers()
    found = Contest()
    with EmulatedLink() as link:
        runners = [_runner(c, size) for c in CONTENDERS if names is None or c.name in names]
        anatomy = Anatomy(size, link)
        for latency in latencies:
            link.latency_ms = latency
            ms = found.ms[latency] = {runner.contender.name: [] for runner in runners}
            parts = found.parts[latency] = []
            for turn in range(rounds):
                for runner in runners if turn % 2 == 0 else reversed(runners):
                    ms[runner.contender.name].append(runner.ms(steps))
                parts.append(anatomy.parts_ms(steps))
        found.per_step = _per_step(runners[0], link)
        _catch_up(runners)
        wanted = everything(runners[0].model)
        for runner in runners[1:]:
            state = everything(runner.model)
            same = all(torch.equal(wanted[name], state[name]) for name in wanted)
            if not same and runner.contender.kind != "stale":
                found.differ.append(runner.contender.name)
    return found


def _per_step(runner: Runner, link: EmulatedLink) -> dict[str, float]:
    before = link.issued.copy()
    runner.ms(steps := 4)
    issued = link.issued - before
    return {name: count / (steps + WARM_UP) for name, count in issued.items()}


def _catch_up(runners: Sequence[Runner]) -> None:
    """Train the others on the batches that only the first one has seen."""
    for runner in runners[1:]:
        runner.ms(4)


def _runner(contender: Contender, size: Size) -> Runner:
    model = sharded_dlrm(size)
    pipeline = contender.make(model, dense_optimizer(model))
    return Runner(contender, pipeline, model, endless(size))


def on_ranks(fn: Callable[..., Any], *args: Any, deadline_s: float = 1800.0) -> list[Any]:
    """Call a function on two ranks; return the result of each."""
    from tests.support.ranks import Ranks

    with Ranks(2, deadline_s=deadline_s) as ranks:
        return ranks.run(fn, *args)
