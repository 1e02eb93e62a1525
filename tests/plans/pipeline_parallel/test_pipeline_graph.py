"""The published generator: its figures, its nodes, and what it refuses."""

from __future__ import annotations

import math
import re

import pytest

from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineGraph,
    PipelineSchedule,
    ScheduleError,
    activation_memory,
    check_schedule,
)
from tests.plans.pipeline_parallel.zbv_figures import MEMORY, PUBLISHED, Published


def graph(n: int, m: int, **changes: object) -> PipelineGraph:
    """Return a generator with equal costs."""
    values = dict(f_cost=1000, b_cost=1000, w_cost=1000, c_cost=1)  # noqa: C408
    memory = dict(zip(("f_mem", "b_mem", "w_mem"), MEMORY, strict=True))
    return PipelineGraph(n, m, **(values | memory | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: "-".join(map(str, row[:6])))
def test_published_figures_are_met_exactly(row: Published) -> None:
    """They are bubble and makespan of each configuration, timed by the independent checker."""
    report = check_schedule(PipelineSchedule.from_nodes(row.graph.get_v_schedule()), row.costs)
    assert (report.bubble, report.makespan) == (row.bubble, row.makespan)
    work = 2 * row.m * (row.f + row.b + row.w)
    assert row.graph.get_v_schedule(only_run_time=True) == work + row.bubble


@pytest.mark.parametrize("n", [1, 3, 4])
def test_every_number_of_microbatches_has_a_valid_schedule(n: int) -> None:
    """This holds from one microbatch on, also for fewer microbatches than stages."""
    costs = PipelineCosts(1000, 1200, 800, 50, *MEMORY)
    for m in range(1, 3 * n + 1):
        nodes = graph(n, m, b_cost=1200, w_cost=800, c_cost=50).get_v_schedule()
        schedule = PipelineSchedule.from_nodes(nodes)
        report = check_schedule(schedule, costs)
        assert (schedule.n_ranks, schedule.n_micro) == (n, m)
        passes = [node for row in nodes for node in row if node.type in ("F", "B", "W")]
        timed = [one for row in report.times for one in row]
        assert [n.completion_time for n in passes] == [one.end for one in timed]


def test_attempt_unpacks_as_in_the_seed() -> None:
    """It has raw chunks; ends by get_id; the second pass is never worse than the first."""
    one = graph(4, 8)
    schedule, end_time, max_bubble = one.try_v_schedule()
    assert schedule[0][0] == (0, 0, 0)
    assert len(end_time) == 6 * 4 * 8
    assert end_time[one.get_id(0, 0, 3, 0)] == 4003
    assert max(end_time) == max(
        end_time[one.get_id(*row[-1][:2], s, row[-1][2])] for s, row in enumerate(schedule)
    )
    assert max_bubble <= one.try_v_schedule(approved_bubble=[0] * 4).max_bubble


def test_the_schedule_is_printed_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The line has stages, microbatches, costs, passes that memory holds, and the bubble."""
    made = graph(4, 8)
    run_time = made.get_v_schedule(only_run_time=True)
    assert capsys.readouterr().out == ""
    made.get_v_schedule()
    first, costs, last = re.split(r", \[|\],", capsys.readouterr().out)
    assert first.split() == ["4", "8"]
    assert [float(cost) for cost in costs.split()] == [*made.costs, made.c_cost]
    held, share = last.split(" -> ")
    assert int(held) == 8
    assert float(share) == pytest.approx(made.best_attempt().max_bubble / run_time, abs=1e-4)


def test_chunk_of_backward_passes_is_the_physical_one() -> None:
    """A raw chunk counts in the order of the work; nodes have the chunk of the model."""
    rows = graph(2, 1).get_v_schedule()
    passes = [(n.type, n.chunk) for n in rows[0] if n.type in ("F", "B", "W")]
    assert passes == [("F", 0), ("F", 1), ("B", 1), ("W", 1), ("B", 0), ("W", 0)]


def test_nodes_have_communication_validation_and_rollback() -> None:
    """Each send has its receive; what is received before the sender's validation rolls back."""
    rows = graph(4, 8).get_v_schedule()
    counts = [[node.type for node in row] for row in rows]
    for row, types in enumerate(counts):
        assert types.count("POST_VALIDATION") == 1
        assert types.count("SEND_POST_VALIDATION") == (row > 0)
        assert types.count("RECV_POST_VALIDATION") == (row < 3)
        hops = 8 * ((row > 0) + (row < 3))
        for name in ("SEND_FORWARD", "RECV_FORWARD", "SEND_BACKWARD", "RECV_BACKWARD"):
            assert types.count(name) == hops
    rolled = [[node.minibatch for node in row if node.rollback] for row in rows]
    assert rolled[0] == []
    assert all(rolled[1:])
    assert rolled[3] == [0]


def test_too_little_memory_for_the_method_is_an_error_that_names_another() -> None:
    """The published code fails on an assertion below 2 * n * f."""
    with pytest.raises(ScheduleError, match="finds no schedule of 8 .* plan_v_schedule finds one"):
        graph(4, 8, max_mem=3 * MEMORY[0]).get_v_schedule()


def test_memory_of_activations() -> None:
    """F = 34 h + 5 a s, w = -32 h, b = -f - w."""
    assert activation_memory(4096, 32, 1024) == (303104, -172032, -131072)


def test_a_link_may_be_free() -> None:
    """With a latency of 0 the published method gives what the checker takes."""
    free = graph(4, 8, c_cost=0)
    schedule = PipelineSchedule.from_nodes(free.get_v_schedule())
    times = check_schedule(schedule, PipelineCosts(1000, 1000, 1000, 0, max_mem=math.inf))
    assert times.bubble == free.best_attempt().max_bubble
