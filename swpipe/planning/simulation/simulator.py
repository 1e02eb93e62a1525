r"""The timeline of a plan under a cost model, its interval, and what sets it.

The plan is compiled by ``swpipe._engine.program``, as for a run, and that program is played out:
its lanes,
host waits, event waits, ``<admit>``, ``<retire>`` and back-pressure.

    thread  default   <admit> i+1  (1) forward i  backward i  step i (2) <retire> i
            io        read i+2 .. copy i+1 ^
                                   |       |
    stream  memcpy                 `-> ### copy i+1 ###-.
            caller's    ### forward i ### backward i ###`-> ### forward i+1 ###
                                                        (3)

What is assumed:

- A task takes its ``host_us`` on its thread, every time the same. The first ``gil_us`` of it need
  the interpreter lock, which goes to threads in the order in which they are ready for it, and is
  not taken away (Python takes it away after 5 ms: a longer part makes others wait too long here).
- Then its ``device_us`` stand in its stream: they begin when the stream has come to them, their
  event waits (3) are done and their resources are free. A stream is in order; two streams run side
  by side at full speed.
- A named resource is held while the device work runs, or the host work where there is none. It goes
  to who was ready first; a task that needs two takes both at once.
- A host wait (1) is for the producer's submission. A thread that must wait wakes ``handover_us``
  after that. Passing an instruction costs nothing else, nor do ``<admit>``, ``<retire>`` (2), the
  reading of the next batch, and what the caller does between two calls of ``progress()``: what
  takes time there belongs into a task.
- On a device without streams all work is host work: host and device time add up on the thread.
- Batches come from the host, always one more, until the last.

**The interval** is exact where ``exact`` says so. Where nothing is contended (see ``timed_graph``)
it is the maximum cycle ratio of the program's timed graph: no simulation, however long, would tell
it as well, for lanes that differ by little take long to settle. Where something is, the run is
played until it repeats itself tick for tick; where it does not within some hundred iterations, the
interval is the mean of the later half, and not below what the graph and the resources allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from swpipe._engine.program import ADMIT, Program, compile_plan
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.planning.simulation.cycles import TICKS_PER_US
from swpipe.planning.simulation.interval import Interval, interval_of
from swpipe.planning.simulation.playout import Playout, play
from swpipe.planning.simulation.timed_graph import LOCK, TimedGraph, timed_graph
from swpipe.trace.perfetto import Arrow, arrows_of
from swpipe.trace.span import Row, Span, in_order
from swpipe.trace.trace import Trace

_TICKS_PER_NS = TICKS_PER_US // 1000
_KINDS = ("thread", "stream", "resource", "lock")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy one thread, stream or resource is in the steady state.

    Attributes:
        name: Of the thread group, the stream or the resource.
        kind: Which of these it is; "lock" is the interpreter's.
        busy_us: Per iteration, in microseconds.
        idle: The part of the interval in which it has nothing to do, from 0 to 1: its bubbles.
    """

    name: str
    kind: Literal["thread", "stream", "resource", "lock"]
    busy_us: float
    idle: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan does under a cost model.

    Attributes:
        plan: What was simulated.
        ii_us: From one iteration to the next in the steady state, in microseconds.
        exact: Whether ``ii_us`` is exact, or the mean over a run that never repeated itself.
        limit: What sets it, in words: what is busy all the time, or a cycle of tasks, each waiting
            for the one before it.
        latency_us: From the first iteration's admission until it is handed out and its device work
            is done.
        loads: Threads, then streams, then resources, then the interpreter lock.
        spans: Who runs when, in a run of ``iterations``, from fill to drain.
        iterations: How many iterations ``spans`` has.
        arrows: What the plan declares of one iteration.
    """

    plan: PipelinePlan
    ii_us: float
    exact: bool
    limit: str
    latency_us: float
    loads: tuple[Load, ...]
    spans: tuple[Span, ...]
    iterations: int
    arrows: tuple[Arrow, ...]

    def trace(self) -> Trace:
        """The timeline, to be drawn and saved like a measured one."""
        return Trace(self.spans, arrows=self.arrows)

    def format(self) -> str:
        """A head line, a row per thread, stream and resource, and what limits the interval."""
        from tabulate import tabulate

        rows = [
            (load.kind, load.name, f"{load.busy_us / 1e3:.3f}", f"{load.idle:.1%}")
            for load in self.loads
        ]
        about = "" if self.exact else "about "
        head = (
            f"simulated: {about}{self.ii_us / 1e3:.3f} ms per iteration; the first takes "
            f"{self.latency_us / 1e3:.3f} ms"
        )
        table = tabulate(
            rows,
            headers=("", "resource", "busy ms", "idle"),
            disable_numparse=True,
            colalign=("left", "left", "right", "right"),
        )
        return f"{head}\n{table}\nlimited by {self.limit}"


def simulate(
    plan: PipelinePlan, costs: CostModel, *, streams: bool = True, iterations: int | None = None
) -> Simulation:
    """Play a plan out under a cost model.

    Args:
        plan: What to simulate; names are enough, it needs no functions.
        costs: A cost for each of its tasks.
        streams: Whether the device has streams; False for a CPU.
        iterations: How many to show in ``spans``; None for a few more than the plan's depth. The
            interval does not depend on it.

    Raises:
        PlanError: The plan cannot run, or a task has no cost.
        ValueError: ``iterations`` is below 1.
    """
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations is {iterations}: simulate 1 or more")
    resolved = validate(plan)
    graph = timed_graph(compile_plan(resolved, streams=streams), costs, streams=streams)
    interval = interval_of(graph)
    shown = plan.depth + 4 if iterations is None else iterations
    playout = play(graph, shown)
    return Simulation(
        plan=plan,
        ii_us=interval.ii_us,
        exact=interval.exact,
        limit=interval.limit,
        latency_us=_latency_us(playout),
        loads=tuple(sorted(_loads(graph, interval), key=lambda load: _KINDS.index(load.kind))),
        spans=in_order(_spans(playout)),
        iterations=shown,
        arrows=arrows_of(resolved),
    )


def steady_interval(
    program: Program, costs: CostModel, *, streams: bool = True, enough_us: float = math.inf
) -> Interval:
    """The interval alone, for those who compare many plans: several times quicker.

    Args:
        program: Compiled with the same ``streams``.
        costs: A cost for each of its tasks.
        streams: As for ``simulate``.
        enough_us: An interval of this or more need not be exact: a lower bound of it will do.

    Raises:
        PlanError: A task has no cost.
    """
    return interval_of(timed_graph(program, costs, streams=streams), enough_us)


def _latency_us(playout: Playout) -> float:
    graph = playout.graph
    admit = next(k for k, node in enumerate(graph.nodes) if node.task == ADMIT)
    return (playout.retired(0) - playout.start[playout.turn(admit, 0)]) / TICKS_PER_US


def _loads(graph: TimedGraph, interval: Interval) -> Iterable[Load]:
    for key, load in graph.load.items():
        busy_us = load / TICKS_PER_US
        idle = max(0.0, 1 - busy_us / interval.ii_us) if interval.ii_us else 1.0
        if isinstance(key, Row):
            yield Load(key.name, key.kind, busy_us, idle)
        else:
            yield Load(key, "lock" if key == LOCK else "resource", busy_us, idle)


def _spans(playout: Playout) -> Iterable[Span]:
    nodes = playout.graph.nodes
    for turn, (start, end) in enumerate(zip(playout.start, playout.end, strict=True)):
        period, k = divmod(turn, len(nodes))
        node = nodes[k]
        iteration = period - node.stage
        if not 0 <= iteration < playout.iterations:
            continue
        wait = 0
        if node.row.kind == "thread":
            before = turn - k + node.previous - (len(nodes) if node.first else 0)
            wait = start - playout.end[before] if before >= 0 else start
        elif start == end:  # an event, and no work
            continue
        begin_ns, end_ns = start // _TICKS_PER_NS, end // _TICKS_PER_NS
        yield Span(node.task, iteration, node.row, begin_ns, end_ns, wait // _TICKS_PER_NS)
