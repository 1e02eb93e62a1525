"""The period in which a task runs, by the formula of the seed's section 3.4, for each kind of wait.

For each kind: lag, slot offset, verdict and an observed run (the seed's appendix A.5).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from swpipe.analysis.happens_before import HappensBefore
from swpipe.core.resolved import resolve_plan
from swpipe.schedulable import (
    SchedulablePipeline,
    Schedule,
    ScheduleValidationError,
    Stage,
    ThreadedExecutor,
)
from swpipe.schedulable.schedule import edges_of
from tests.schedulable.work import Log, one_stage, pool, results
from tests.support.pairs import pairwise_cases

EXECUTORS = (None, "threaded", ThreadedExecutor("per_task"), ThreadedExecutor({"c": "other"}))


class Row(NamedTuple):
    """A case: lookaheads of producer and consumer, the kind of wait, and what follows.

    Attributes:
        back: Batches between the two.
        offset: The offset at which the seed's engine looks up the producer's event.
    """

    producer: int
    consumer: int
    back: int
    how: str
    lag: int
    offset: int

    def schedule(self, log: Log, stream: str) -> Schedule:
        entry = {"cross_iter_depends_on": ("x", -self.back)}.get(self.how, "x")
        x = log.task("x", lookahead=self.producer, stream=stream)
        c = log.task("c", lookahead=self.consumer, **{self.how: [entry]})
        return one_stage(c, x, streams=("default", "side"))  # the consumer is declared first


CROSS = "cross_iter_depends_on"
ACCEPTED = (
    Row(0, 0, 1, CROSS, 1, -1),  # in the seed the slot has rotated out; events are kept here
    Row(1, 1, 1, CROSS, 1, 0),
    Row(2, 2, 2, CROSS, 2, 0),
    Row(3, 2, 2, CROSS, 3, 0),
    Row(0, 1, 1, CROSS, 0, 0),
    # The rotations of section 3.6.
    Row(1, 0, 0, "depends_on", 1, 0),
    Row(1, 0, -1, "same_progress_sync", 0, 1),
    Row(2, 2, 1, CROSS, 1, 1),
)


@pytest.mark.parametrize("executor", EXECUTORS[:3])
@pytest.mark.parametrize(("batches", "most"), [(0, 2), (1, 3), (3, 0), (3, 3), (5, 2)])
def test_a_task_fires_by_the_formula(batches: int, most: int, executor: object) -> None:
    """At lookahead k in period i iff L - k <= i < M + L - k; M batches give M results."""
    log = Log()
    tasks = [log.task(f"k{k}", lookahead=k, writes=[f"s{k}"]) for k in range(most, -1, -1)]
    tasks.append(log.task("last", reads=["s0"], writes=["step_result"]))
    with SchedulablePipeline(one_stage(*tasks), pool(), executor=executor) as pipe:
        assert list(results(pipe, range(batches))) == list(range(batches))
        for k in range(most + 1):
            fired = [i for i in range(20) if most - k <= i < batches + most - k]
            assert log.periods(f"k{k}") == [(i, i - (most - k)) for i in fired]
        log.runs.clear()
        assert list(results(pipe, range(2))) == [0, 1]  # periods count from 0 again
        assert log.periods(f"k{most}") == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("row", "stream", "executor"), pairwise_cases(ACCEPTED, ("default", "side"), EXECUTORS)
)
def test_the_consumer_waits_as_many_periods_as_the_lag_says(
    row: Row, stream: str, executor: object
) -> None:
    """This holds on one stream and across two, and on any threads, device work included."""
    log = Log()
    schedule = row.schedule(log, stream)
    (edge,) = edges_of(schedule)
    assert (edge.lag, edge.consumer.lookahead - edge.distance) == (row.lag, row.offset)
    with SchedulablePipeline(schedule, pool("side"), executor=executor) as pipe:
        list(results(pipe, range(6)))
        order = HappensBefore.of(resolve_plan(pipe.plan), streams=True)
    assert order.keeps("x", "c", row.back)
    produced, consumed = ({batch: period for period, batch in log.periods(n)} for n in "xc")
    at = {(run.task, run.batch): place for place, run in enumerate(log.runs)}
    for batch, period in consumed.items():
        before = batch - row.back
        if before in produced:
            assert period - produced[before] == row.lag
            assert at["x", before] < at["c", batch]


def test_a_future_read_of_any_kind_is_refused() -> None:
    """The last row of appendix A.5 is refused, by a slot and by ``depends_on``."""
    log = Log()
    with pytest.raises(ScheduleValidationError) as refused:
        SchedulablePipeline(Row(0, 3, 1, CROSS, -2, 2).schedule(log, "side"), pool("side"))
    text = str(refused.value)
    assert "the schedule cannot run: one problem" in text
    assert "task 'c': cross_iter_depends_on has ('x', -1), which with lookahead 0" in text
    assert "a future read, since 'x' has not run yet for the batch 1 batch(es) before" in text
    assert "Give 'c' lookahead 1 or less, or 'x' lookahead 2 or more" in text
    x = log.task("x", writes=["s"])
    for fields in ({"depends_on": ["x"]}, {"reads": ["s"]}):
        with pytest.raises(
            ScheduleValidationError, match=f"{next(iter(fields))} has .* future read"
        ):
            SchedulablePipeline(one_stage(x, log.task("c", lookahead=1, **fields)), pool())


def test_a_read_waits_for_all_who_wrote_the_slot_for_its_batch() -> None:
    """If two tasks write it, those with the reader's lookahead or a larger one count."""
    log = Log()
    raw = log.task("raw", lookahead=2, writes=["x"])
    better = log.task("better", lookahead=1, writes=["x"])
    late = log.task("late", writes=["x"], reads=["y"])
    ahead = log.task("ahead", lookahead=1, reads=["x"], writes=["y"])
    found = {
        (e.consumer.name, e.producer.name) for e in edges_of(one_stage(late, ahead, better, raw))
    }
    assert found == {("ahead", "raw"), ("ahead", "better"), ("late", "ahead")}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ties_go_by_declaration_alone(executor: object) -> None:
    """Neither lookahead nor thread decides; a task that waits moves behind its producer."""
    log = Log()
    tasks = [
        log.task("c", stream="side", same_progress_sync=["b"]),
        log.task("a"),
        log.task("d", lookahead=1, stream="side"),
        log.task("b", lookahead=1),
    ]
    with SchedulablePipeline(
        one_stage(*tasks, streams=("default", "side")), pool("side"), executor=executor
    ) as pipe:
        list(results(pipe, range(3)))
        assert pipe.plan.order == ("a", "d", "b", "c")
    if executor is None:
        assert log.order(1) == ["a", "d", "b", "c"]


def test_stages_run_one_after_the_other_in_each_period() -> None:
    """The tasks' threads do not matter; within a stage the order is free."""
    log = Log()
    first = Stage((log.task("a"), log.task("b", stream="side")))
    then = Stage((log.task("c", stream="side", lookahead=1), log.task("d")))
    schedule = Schedule((first, Stage(()), then), ("default", "side"))
    with SchedulablePipeline(schedule, pool("side"), executor=ThreadedExecutor("per_task")) as pipe:
        list(results(pipe, range(20)))
        order = HappensBefore.of(resolve_plan(pipe.plan), streams=False)
    for period in range(1, 20):
        assert {*log.order(period)[:2]} == {"a", "b"}
    assert order.host("a", "c", 1)
    assert order.host("b", "d", 0)


def test_what_one_stream_gets_is_submitted_in_order_from_whatever_thread() -> None:
    """On two streams and a thread per task, neighbours of one stream are ordered."""
    log = Log()
    names = ("a", "b", "c", "d")
    tasks = [log.task(n, stream="side" if n in "bd" else "default") for n in names]
    schedule = one_stage(*tasks, streams=("default", "side"))
    with SchedulablePipeline(schedule, pool("side"), executor=ThreadedExecutor("per_task")) as pipe:
        assert set(pipe.plan.same_period_deps) == {("c", "a"), ("d", "b")}
        assert pipe.plan.within_calls
    with SchedulablePipeline(schedule, pool("side"), executor="threaded") as pipe:
        assert pipe.plan.same_period_deps == ()


def test_it_is_the_barrier_that_orders_what_lies_outside_slots() -> None:
    """Without it nothing keeps ``zero_grad`` behind the step on the batch before."""
    log = Log()
    tasks = (
        log.task("forward", lookahead=1, stream="side", reads=["batch_cpu"], writes=["loss"]),
        log.task("zero_grad"),
        log.task("backward", reads=["loss"], depends_on=["zero_grad"]),
        log.task("step", depends_on=["backward"]),
    )
    schedule = one_stage(*tasks, streams=("default", "side"))
    with SchedulablePipeline(schedule, pool("side"), executor=ThreadedExecutor("per_task")) as pipe:
        plan = pipe.plan
    for barrier in (True, False):
        order = HappensBefore.of(resolve_plan(replace(plan, within_calls=barrier)), streams=False)
        assert order.host("step", "zero_grad", 1) == barrier
