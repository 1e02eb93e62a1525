r"""The simulation of a plan under a cost model: its timeline, its interval, and its limits.

The plan is compiled by ``swpipe.program``, as for a run, and the program is simulated with
its host waits, event waits, ``<admit>``, ``<retire>`` and back-pressure.

    thread  default   <admit> i+1  (1) forward i  backward i  step i (2) <retire> i
            io        read i+2 .. copy i+1 ^
                                   |       |
    stream  memcpy                 `-> ### copy i+1 ###-.
            caller's    ### forward i ### backward i ###`-> ### forward i+1 ###
                                                        (3)

Assumptions:

- A task takes its ``host_us`` on its thread. If the costs have tables, the times of the sampled
  iterations are used one after the other, and again from the first; otherwise every iteration takes
  the same time. The first ``gil_us`` of it need the interpreter lock, which is granted in the order
  of requests and is not taken away. (Python takes it away after 5 ms, so for longer parts the
  simulated waits are too long.)
- Then its ``device_us`` run on its stream, once the stream has reached them, their event waits (3)
  are done and their resources are free. Streams do not slow each other down.
- A named resource is held during the device work, or the host work if there is none. Device work
  gets streams and resources in the order in which it was launched: with a communicator, work that
  waits for its event delays work that was launched later on another stream. Host work is granted a
  resource in the order of requests; a task that needs two takes both at once.
- A thread continues as soon as its work is launched or, if the task ``blocks``, when the work is
  done. Queues to the device have room for all work that is launched. (CUDA blocks a thread that is
  about 1,024 launches ahead. If a task launches many more, ``blocks`` is nearer to the truth.)
- The plan's ``run_ahead`` limits how far the host gets ahead of the device.
- A host wait (1) ends at the producer's submission. A waiting thread wakes ``handover_us`` later.
  Nothing else costs time: not instructions, ``<admit>``, ``<retire>`` (2), reading the next batch,
  nor the caller's work between calls of ``progress()``. Model that work as a task.
- On a device without streams all work is host work: host and device times add up on the thread.
- Batches are on the host, and there is always another one until the last.

**The interval** is exact if ``exact`` is true. With tables it is the mean over the sampled
iterations in the steady state. Planners search by the mean costs (``interval_us``). Without
contention (see ``timed_graph``) it is the maximum cycle ratio of the program's timed graph. This is
more accurate than a simulation, since threads of nearly equal load take long to reach the steady
state. With contention, the run is simulated until it repeats exactly. If it does not repeat within
some hundred iterations, the interval is the mean of the second half, but not below the bounds of
the graph and the resources.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from swpipe.analysis.happens_before import HappensBefore
from swpipe.analysis.last_readers import ReleasePlaces
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel
from swpipe.core.drawing import stream_name
from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.core.resolved import resolve_plan
from swpipe.core.tables import table
from swpipe.errors import PlanError, Problem
from swpipe.planning.rank_simulation import rank_step
from swpipe.planning.ranks import Ranks, RankStep
from swpipe.planning.simulation.cycles import TICKS_PER_US
from swpipe.planning.simulation.event_simulator import EventSimulator, simulate_run
from swpipe.planning.simulation.interval import Interval, Limit, interval_of, limit_of
from swpipe.planning.simulation.timed_graph import TimedGraph, timed_graph
from swpipe.program import ADMIT, BEGIN, Program, compile_plan
from swpipe.trace.bytes_in_flight import PeakMemory, peak_memory
from swpipe.trace.perfetto import Arrow, arrows_of
from swpipe.trace.span import Span, in_order
from swpipe.trace.trace import Trace

MOST_STEPS = 4_000
"""The largest number of tasks x iterations in flight that is simulated."""

_MOST_ITERATIONS = 64

_TICKS_PER_NS = TICKS_PER_US // 1000
_KINDS = ("thread", "stream", "resource", "lock")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one thread, stream or resource in the steady state.

    Attributes:
        name: The name of the thread group, the stream or the resource.
        kind: Which of these it is; "lock" is the interpreter lock.
        busy_us: The busy time per iteration, in microseconds.
        idle: The fraction of the interval in which it is idle, from 0 to 1.
    """

    name: str
    kind: Literal["thread", "stream", "resource", "lock"]
    busy_us: float
    idle: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of simulating a plan.

    Attributes:
        plan: The simulated plan.
        ii_us: The interval in the steady state, in microseconds.
        exact: Whether ``ii_us`` is exact; if not, it is the mean of a run that did not repeat.
        limits: The reason for the interval: a resource that is always busy, or a cycle of tasks
            that wait for each other.
        latency_us: The time from the first iteration's admission until it is retired and its device
            work is finished.
        loads: Threads, then streams, then resources, then the interpreter lock.
        spans: The timeline of a run of ``iterations``, prologue and epilogue included.
        iterations: How many iterations ``spans`` has.
        arrows: The declared dependences of one iteration.
        memory: The peak memory of the iterations in flight; None if the costs have no memory.
        ranks: The step on many ranks; None if no ranks were given.
    """

    plan: PipelinePlan
    ii_us: float
    exact: bool
    limits: Limit
    latency_us: float
    loads: tuple[Load, ...]
    spans: tuple[Span, ...]
    iterations: int
    arrows: tuple[Arrow, ...]
    memory: PeakMemory | None = None
    ranks: RankStep | None = None

    @property
    def limit(self) -> str:
        """The text of ``limits``."""
        return self.limits.text

    def trace(self) -> Trace:
        """Return the timeline, which can be drawn and saved like a measured one."""
        return Trace(self.spans, arrows=self.arrows)

    def format(self) -> str:
        """Return the interval, a table of the loads, and what limits the interval."""
        rows = [
            (load.kind, load.name, f"{load.busy_us / 1e3:.3f}", f"{load.idle:.1%}")
            for load in self.loads
        ]
        about = "" if self.exact else "about "
        head = (
            f"simulated: {about}{in_ms(self.ii_us)} per iteration; the first takes "
            f"{in_ms(self.latency_us)}"
        )
        loads = table(("", "resource", "busy ms", "idle"), rows, left=(0, 1))
        more = [part.format() for part in (self.memory, self.ranks) if part is not None]
        return "\n".join([head, loads, f"limited by {self.limit}", *more])


def simulate(
    plan: PipelinePlan,
    costs: CostModel,
    *,
    streams: bool = True,
    iterations: int | None = None,
    ranks: Ranks | None = None,
) -> Simulation:
    """Simulate a plan under a cost model.

    Args:
        plan: The plan to simulate; it may name tasks without functions.
        costs: A cost for each of its tasks.
        streams: Whether the device has streams; False for a CPU.
        iterations: How many iterations ``spans`` has; by default a few more than the plan's depth.
            The interval does not depend on it.
        ranks: Ranks for which the step is simulated too; the same ranks give the same result.

    Raises:
        PlanError: The plan cannot run, a task has no cost, the plan is too large to simulate, or
            ``ranks`` does not fit the plan.
        ValueError: ``iterations`` is below 1.
    """
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations is {iterations}: simulate 1 or more")
    resolved = validate(plan)
    if costs.memory is not None:
        costs.memory.check(plan.schedule)
    if (steps := len(plan.schedule) * plan.depth) > MOST_STEPS:
        rule = f"at most {MOST_STEPS} are simulated: use fewer tasks or stages"
        raise PlanError([Problem(f"tasks x iterations in flight are {steps}, but {rule}")])
    program = compile_plan(resolved, streams=streams)
    # Two simulations: ``interval_of`` runs until the steady state, and ``simulate_run`` gives the
    # timeline that is shown, prologue and epilogue included.
    graph = timed_graph(program, costs, sampled=True)
    interval = interval_of(graph)
    shown = plan.depth + 4 if iterations is None else iterations
    # The spans come from a run of their own, since the interval may need many more iterations.
    run = simulate_run(graph, shown)
    return Simulation(
        plan=plan,
        ii_us=interval.ii_us,
        exact=interval.exact,
        limits=limit_of(graph, interval.ii_us),
        latency_us=_latency_us(run),
        loads=tuple(sorted(_loads(graph, interval), key=lambda load: _KINDS.index(load.kind))),
        spans=in_order(_spans(run)),
        iterations=shown,
        arrows=arrows_of(resolved),
        memory=_peak(program, costs),
        ranks=None if ranks is None else rank_step(program, costs, ranks),
    )


def peak_of(plan: PipelinePlan, costs: CostModel, *, streams: bool) -> PeakMemory | None:
    """Return a valid plan's peak memory; None if the costs do not have the tasks' memory."""
    return _peak(compile_plan(resolve_plan(plan), streams=streams), costs)


def _peak(program: Program, costs: CostModel) -> PeakMemory | None:
    """Return a program's peak memory, or None if the costs do not have the tasks' memory.

    The simulated run is long enough for threads to get as far ahead as they may. Each instruction
    takes at least one nanosecond, so that simultaneous instructions of several threads have the
    order of their waits. Where the waits leave the order open, memory is allocated before
    ``<retire>`` frees any.
    """
    if costs.memory is None:
        return None
    plan = program.resolved.plan
    graph = timed_graph(program, costs, least=_TICKS_PER_NS)
    # Bounded below, to reach the steady state, and above, since large plans have many nodes.
    least = 3 * graph.depth + 8
    most = MOST_STEPS // len(graph.nodes)
    run = simulate_run(graph, max(least, min(_MOST_ITERATIONS, most)))
    # Memory is counted from the task that allocates it to the place of its release.
    made_on = {name: stream_name(entry.stream) for name, entry in plan.schedule.items()}
    blocks = costs.memory.under(plan.keep)
    going = ReleasePlaces(HappensBefore(program))
    places = {users: going.after(users) for users in {block.users for block in blocks}}
    memory = replace(costs.memory, blocks=blocks)
    used = made_on if program.streams and plan.names_streams else None
    return peak_memory(_spans(run, events=True), memory, streams=used, places=places)


def _latency_us(run: EventSimulator) -> float:
    graph = run.graph
    # From the start of ``<admit>``, which may wait before it, to the end of ``<retire>`` on the
    # device.
    admit = next(k for k, node in enumerate(graph.nodes) if node.task == ADMIT)
    return (run.retired(0) - run.start[run.execution(admit, 0)]) / TICKS_PER_US


def _loads(graph: TimedGraph, interval: Interval) -> Iterable[Load]:
    for (kind, name), tasks in graph.load.items():
        busy_us = sum(tasks.values()) / TICKS_PER_US
        # If nothing takes time, the interval is 0 and everything idles.
        idle = max(0.0, 1 - busy_us / interval.ii_us) if interval.ii_us else 1.0
        yield Load(name, kind, busy_us, idle)


def _spans(run: EventSimulator, *, events: bool = False) -> Iterable[Span]:
    """Yield the spans of a run; with ``events``, also spans without duration on streams."""
    nodes = run.graph.nodes
    returns = run.graph.returns
    # ``<begin>`` and returns are nodes of the graph, but no work of their own.
    hidden = {k for k, node in enumerate(nodes) if node.task == BEGIN or k in returns.values()}
    for execution, start in enumerate(run.start):
        period, k = divmod(execution, len(nodes))
        node = nodes[k]
        iteration = period - node.stage
        if not 0 <= iteration < run.iterations or k in hidden:
            continue
        # The span of a task that blocks ends with the node of its return. Its wait is the time
        # since the node before it on its thread ended.
        wait = 0
        end = run.end[execution - k + returns.get(k, k)]
        row = node.row
        if row.kind == "thread":
            threads = run.graph.threads[row]
            row = threads[iteration % len(threads)]
            before = execution - k + node.previous - node.back * len(nodes)
            wait = start - run.end[before] if before >= 0 else start
        # An event without work, such as a wait, has no span.
        elif start == end and not events:
            continue
        begin_ns = start // _TICKS_PER_NS
        end_ns = end // _TICKS_PER_NS
        yield Span(node.task, iteration, row, begin_ns, end_ns, wait // _TICKS_PER_NS)
