"""Measure all contenders on two ranks alternately, and the parts of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.contenders import CONTENDERS, Contender, streams_on_a_cpu
from bench.dlrm import CPU, Batch, Size, dense_optimizer, endless, everything, sharded_dlrm
from bench.emulated_link import EmulatedLink, Exchange, reduce_by_link
from bench.measure import sharpen_timers
from bench.towers import sharded_towers
from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe.plans.torchrec.sparse_dist import DENSE, DENSE_BACK, EMBED_BACK, PLANS
from swpipe.tasks.torchrec import SparseDistTasks, TrainStep

MODELS: Mapping[str, Callable[[Size], nn.Module]] = {
    "DLRM": sharded_dlrm,
    "towers": sharded_towers,
}
"""Models with all tables in one collection, and with one collection for each tower."""

WARM_UP = 4
"""Untimed steps at the beginning of each turn."""


@dataclass
class Contest:
    """The measurements of one rank.

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
    model: nn.Module
    data: Iterator[Batch]

    def ms(self, steps: int) -> float:
        """Return the time per step, in ms."""
        for _ in range(WARM_UP):
            self.pipeline.progress(self.data)
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            self.pipeline.progress(self.data)
        return (time.perf_counter() - begin_s) / steps * 1e3

    def close(self) -> None:
        """Close the pipeline if it is swpipe's, which has threads."""
        if self.contender.ours:
            self.pipeline.close()


class Anatomy:
    """The times of the parts of a step, run serially on a link without latency.

    A task's time excludes its waits for exchanges. ``DenseForward`` is split where it waits for
    embeddings for the last time, ``DenseBackward`` where it sends the last of their gradients, and
    ``EmbBackward`` where it waits for the last of them: what comes before the first, after the
    second and before the third does not depend on all exchanges.
    """

    def __init__(self, model: nn.Module, size: Size, link: EmulatedLink) -> None:
        tasks = SparseDistTasks(model, TrainStep([dense_optimizer(model)]), device=CPU)
        self._link = link
        self._data = endless(size)
        self._spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._pipe = SWPipeline(
            PLANS["serial"](), [self._timed(task) for task in tasks.tasks()], device=CPU
        )

    def parts_ms(self, steps: int) -> dict[str, float]:
        """Return the mean time of each part, in ms."""
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

    def close(self) -> None:
        """Close the pipeline and its threads."""
        self._pipe.close()

    def _timed(self, task: PipelineTask) -> PipelineTask:
        def fn(ctx: IterContext) -> None:
            begin_ns = time.perf_counter_ns()
            task.fn(ctx)
            self._spans[task.name].append((begin_ns, time.perf_counter_ns()))

        return PipelineTask(task.name, fn, task.io)


def _parted(
    task: str, span: tuple[int, int], exchanges: Sequence[Exchange]
) -> Iterator[tuple[str, int]]:
    """Yield the parts of one run of a task, each with its time in ns without waits."""
    begin_ns, end_ns = span
    waits = [e for e in exchanges if begin_ns <= e.wait_ns < end_ns]
    worked_ns = end_ns - begin_ns - sum(e.waited_ns for e in waits)
    if task == DENSE_BACK:
        sent_ns = (e.issued_ns for e in exchanges if e.name != "all_reduce")
        cut_ns = max(at_ns for at_ns in sent_ns if begin_ns <= at_ns < end_ns)
    elif task in (DENSE, EMBED_BACK):
        cut_ns = waits[-1].wait_ns
    else:
        yield task, worked_ns
        return
    first_ns = cut_ns - begin_ns - sum(e.waited_ns for e in waits if e.done_ns <= cut_ns)
    yield f"{task} (1)", first_ns
    yield f"{task} (2)", worked_ns - first_ns


def contest(
    model: str,
    latencies: Sequence[float],
    rounds: int,
    steps: int,
    size: Size,
    names: Sequence[str] | None = None,
) -> Contest:
    """Time all contenders alternately on each link, and compare the parameters they trained."""
    sharpen_timers()
    found = Contest()
    chosen = [c for c in CONTENDERS if names is None or c.name in names]
    with streams_on_a_cpu(), EmulatedLink() as link:
        for latency in latencies:
            link.latency_ms = latency
            runners = [runner(c, model, size, link) for c in chosen]
            anatomy = Anatomy(MODELS[model](size), size, link)
            ms = found.ms[latency] = {contender.name: [] for contender in chosen}
            parts = found.parts[latency] = []
            for turn in range(rounds):
                for one in runners if turn % 2 == 0 else reversed(runners):
                    ms[one.contender.name].append(one.ms(steps))
                parts.append(anatomy.parts_ms(steps))
            found.per_step = _per_step(runners[0], link)
            found.differ += _differ(runners)
            anatomy.close()
    return found


def _per_step(one: Runner, link: EmulatedLink) -> dict[str, float]:
    before = link.issued.copy()
    one.ms(steps := 4)
    issued = link.issued - before
    return {name: count / (steps + WARM_UP) for name, count in issued.items()}


def _differ(runners: Sequence[Runner]) -> list[str]:
    """Close all contenders; return the exact ones whose parameters differ from the first one's."""
    for one in runners[1:]:  # train on the batches that only the first one has seen
        one.ms(4)
    wanted = everything(runners[0].model)
    found = []
    for one in runners:
        state = everything(one.model)
        same = all(torch.equal(wanted[name], state[name]) for name in wanted)
        if not same and not one.contender.stale:
            found.append(one.contender.name)
        one.close()
    return found


def runner(contender: Contender, model: str, size: Size, link: EmulatedLink) -> Runner:
    """Return a new contender; on a slow link DDP's all-reduces use the link, too."""
    trained = MODELS[model](size)
    pipeline = contender.make(trained, dense_optimizer(trained))
    # A plan with a backward of its own for the tables all-reduces from Python, over the link.
    cut = contender.ours and pipeline.tasks.options.forward == "split"
    if link.latency_ms and not cut:
        reduce_by_link(trained)
    return Runner(contender, pipeline, trained, endless(size))


def on_ranks(fn: Callable[..., Any], *args: Any, deadline_s: float = 1800.0) -> list[Any]:
    """Call a function on two ranks; return the result of each."""
    from tests.support.ranks import Ranks

    with Ranks(2, deadline_s=deadline_s) as ranks:
        return ranks.run(fn, *args)
