"""What an engine without a guard does out of order shows in spans, by a device's times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.core.plan import PULL
from swpipe.trace import Trace
from tests.device.virtual import VirtualDevice, VirtualEvent, VirtualStream, guards
from tests.device.virtual.guards import GUARDS
from tests.device.virtual.machine import VirtualMachine
from tests.support.exploring import ExploringHost
from tests.support.span_order import early, overlaps
from tests.support.strategies import Case, TaskSpec, Workload, random_case

SEEDS_TO_TRY = 120


class TimedEvent(VirtualEvent):
    """An event that notes when the device came to it."""

    at_ms = 0.0

    def record(self, stream: VirtualStream) -> None:
        with self._device.lock:
            self._mark = self._device.queues.submit(stream, self._note)
            self._device.queues.stir()

    def _note(self) -> None:
        self.at_ms = time.perf_counter() * 1e3

    def query(self) -> bool:
        return self._mark is not None and self._mark.done

    def synchronize(self) -> None:
        with self._device.lock:
            assert self._mark is not None
            self._device.queues.force(self._mark)

    def elapsed_time(self, end_event: TimedEvent) -> float:
        return end_event.at_ms - self.at_ms


class TimedDevice(VirtualDevice):
    """A virtual device whose events tell the time."""

    def new_event(self, *, timing: bool = False) -> VirtualEvent:
        return TimedEvent(self) if timing else VirtualEvent(self)


def recorded(case: Case, runs: int = 1) -> tuple[Trace, list[str]]:
    """The case under its plan: spans of threads and streams; the period's order."""
    host = ExploringHost(case.seed)
    device = TimedDevice(case.seed, host)
    machine = VirtualMachine(device, case, host.pause)
    with SWPipeline(
        case.plan, machine.tasks(), device=device, host=device.host, stall_timeout_s=None
    ) as pipe:
        with pipe.trace() as trace:
            batches = iter(case.batches)
            for _ in range(runs):
                for _ctx in pipe.iterate(islice(batches, len(case.batches) // runs)):
                    pass  # and not run(), which waits for the device in the end
        return trace, list(pipe._driver.engine.program.tasks)


def out_of_turn(trace: Trace, order: list[str], plan: PipelinePlan) -> Iterator[str]:
    """Globally ordered tasks that were called before the one whose turn comes before."""
    calls = Trace(span for span in trace.spans if span.row.kind == "thread")
    turns = [name for name in order if plan.schedule[name].globally_ordered]
    stage = {name: plan.schedule[name].stage for name in turns}
    after = [(b, a, stage[a] - stage[b]) for a, b in pairwise(turns)]
    if turns:
        after.append((turns[0], turns[-1], 1 + stage[turns[-1]] - stage[turns[0]]))
    yield from complaints(calls, after)


def ahead_of_the_device(trace: Trace, order: list[str], plan: PipelinePlan) -> Iterator[str]:
    """Batches that were pulled when the device was further behind than it may be."""
    if plan.launch_limit is not None:
        far = plan.depth + plan.launch_limit
        yield from complaints(trace, [(PULL, name, far) for name in order])


def complaints(trace: Trace, after: list[tuple[str, str, int]]) -> Iterator[str]:
    for consumer, producer, distance in after:
        yield from early(trace, consumer, producer, distance)


ORDERS = {
    "turns of globally ordered tasks": (out_of_turn, 1),
    "back-pressure": (ahead_of_the_device, 1),
    "back-pressure from one run to the next": (ahead_of_the_device, 2),
}
"""The guards without which calls or work are out of order: what looks at it, in how many runs."""


def test_spans_are_in_order() -> None:
    """Random plans on late streams: turns are kept, and the host is not too far ahead."""
    for seed in range(20):
        case = random_case(seed)
        for look, runs in ORDERS.values():
            assert list(look(*recorded(case, runs), case.plan)) == []


@pytest.mark.parametrize("name", ORDERS)
def test_a_missing_guard_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two spans in the wrong order."""
    remove(name, monkeypatch)
    look, runs = ORDERS[name]
    for seed in range(SEEDS_TO_TRY):
        case = random_case(seed)
        if any(look(*recorded(case, runs), case.plan)):
            return
    pytest.fail("no span was out of order")


def remove(name: str, patch: pytest.MonkeyPatch) -> None:
    next(guard for guard in GUARDS if guard.name == name).remove(patch)


# ---------------------------------------------------------------------- together, and apart


def exchanges(seed: int, *, beside: bool) -> Trace:
    """Two tasks on two threads, one iteration apart: collectives, or free of each other."""
    tasks = (TaskSpec("ids", reads=("batch",), sets=("x",)), TaskSpec("rows", reads=("x",)))
    plan = PipelinePlan(
        {
            "ids": TaskSchedule(0, thread_group="a", globally_ordered=not beside),
            "rows": TaskSchedule(1, thread_group="b", globally_ordered=not beside),
        },
        deps=[("rows", "ids")],
    )
    trace, _ = recorded(Case(Workload(tasks, {}), plan, (1, 2, 3, 4), frozenset(), seed))
    return Trace((s for s in trace.spans if s.row.kind == "thread"), arrows=trace.arrows)


def test_a_missing_guard_lets_tasks_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectives are in flight from one process."""
    found = [overlaps(exchanges(seed, beside=False), "ids", "rows") for seed in range(20)]
    assert not any(found)
    remove("turns of globally ordered tasks", monkeypatch)
    assert any(overlaps(exchanges(seed, beside=False), "ids", "rows") for seed in range(20))


def test_a_wait_too_many_keeps_tasks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer waits for the iteration after its own."""

    def beside(seed: int) -> bool:
        return overlaps(exchanges(seed, beside=True), "ids", "rows")

    seed = next(seed for seed in range(SEEDS_TO_TRY) if beside(seed))
    guards.add_wait("rows", "ids", monkeypatch)
    assert not any(map(beside, range(seed, seed + 20)))
