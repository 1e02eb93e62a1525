"""The results of check_schedule, and the schedules that it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from swpipe.plans.pipeline_parallel import (
    Action,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    ScheduleReport,
    check_schedule,
)
from swpipe.trace import Trace

COSTS = PipelineCosts(forward=1, backward=2, weight=3, hop=0.5, f_mem=2, b_mem=-1, w_mem=-1)
V2 = "0F0,3F0,3I0,0I0,0W0,3W0\n1F0,2F0,2B0,1B0\n"
"""Two ranks, four stages in a V, one microbatch."""


def checked(text: str, costs: PipelineCosts = COSTS) -> ScheduleReport:
    """Return the report on a schedule that is given as CSV."""
    return check_schedule(PipelineSchedule.from_csv(text), costs)


def test_times_are_as_early_as_order_and_inputs_allow() -> None:
    """A hop costs its latency between ranks; the turn of the V and the loss are free."""
    report = checked(V2)
    times = {str(one.action): (one.start, one.end) for row in report.times for one in row}
    assert times["1F0"] == (1.5, 2.5)
    assert times["2F0"] == (2.5, 3.5)
    assert times["3F0"] == (4, 5)
    assert times["3I0"] == (5, 7)
    assert times["2B0"] == (7.5, 12.5)
    assert times["0I0"] == (18, 20)


def test_report_has_makespan_bubbles_and_peaks() -> None:
    """Idle time counts from a rank's first start to its last end."""
    report = checked(V2)
    assert (report.makespan, report.bubbles, report.bubble) == (26, (14, 4), 14)
    assert report.peak_memory == (4, 4)
    assert (report.schedule.n_ranks, report.schedule.n_stages) == (2, 4)
    assert report.schedule.placement == (0, 1, 1, 0)


def test_times_may_differ_by_stage() -> None:
    """A sequence has an entry per stage."""
    assert checked(V2, replace(COSTS, forward=(1, 1, 1, 5))).makespan == 30
    with pytest.raises(ScheduleError, match=r"forward has 2 numbers: .* each of 4 stages"):
        checked(V2, replace(COSTS, forward=(1, 1)))


def test_a_deadlock_says_who_waits_for_what() -> None:
    """Both ranks of the cycle are named, and no rank that only waits for them."""
    text = "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n2F0,2F1,2B0,2B1\n"
    assert checked(text.replace("1F1,1F0", "1F0,1F1")).makespan > 0
    crossed = text.replace("0F0,0F1,0B0,0B1", "0F0,0B0,0F1,0B1")
    with pytest.raises(ScheduleError) as caught:
        PipelineSchedule.from_csv(crossed)
    assert str(caught.value) == (
        "the schedule deadlocks: rank 0 waits at 0B0 for 1B0 of rank 1, "
        "rank 1 waits at 1F1 for 0F1 of rank 0"
    )
    assert caught.value.action == Action(0, "B", 0)


def test_memory_above_the_limit_is_refused() -> None:
    """Memory changes when an action is issued; by default there is room for one pass per stage."""
    text = "0F0,0F1,0B0,0B1"
    assert checked(text, replace(COSTS, max_mem=4)).peak_memory == (4,)
    assert checked(text, replace(COSTS, max_mem=math.inf)).peak_memory == (4,)
    assert checked("0F0,0B0,0F1,0B1").peak_memory == (2,)  # B frees what I and W do
    for limit in (None, 0, 3):
        with pytest.raises(ScheduleError, match="0F1 takes rank 0 to a memory of 4") as caught:
            checked(text, replace(COSTS, max_mem=limit))
        assert caught.value.action == Action(0, "F", 1)


def test_memory_may_differ_by_stage_and_be_computed_once_more() -> None:
    """I keeps for W what it has recomputed; a pass may need more while it runs."""
    bytes_of = {"f_mem": (100, 10, 10, 10), "b_mem": (0, 30, -10, 40), "w_mem": (-100, -40, 0, -50)}
    costs = replace(COSTS, **bytes_of)  # type: ignore[arg-type]
    assert checked(V2, costs).peak_memory == (150, 40)  # at 3I0; 2B0, and then the I of 1B0
    assert costs.limit(4) == 4 * 140
    working = replace(costs, work_mem=(0, 5, 300, 0))  # of stage 2, while its passes run
    assert checked(V2, working).peak_memory == (150, 320)
    assert checked(V2, replace(working, max_mem=320)).peak_memory == (150, 320)
    with pytest.raises(ScheduleError, match="2F0 takes rank 1 to a memory of 320, above .* = 319"):
        checked(V2, replace(working, max_mem=319))
    with pytest.raises(ScheduleError, match="3I0 takes rank 0 to a memory of 150, above .* = 149"):
        checked(V2, replace(costs, max_mem=149))
    for wrong, told in (
        ({"b_mem": (0, 31, -10, 40)}, r"f_mem \+ b_mem \+ w_mem is 1: give a sum of at most 0"),
        ({"b_mem": (-1, -1)}, "have different lengths"),
        ({"work_mem": -1}, "work_mem is -1: give 0 or a number above 0"),
    ):
        with pytest.raises(ScheduleError, match=told):
            replace(costs, **wrong)  # type: ignore[arg-type]


def test_csv_returns_the_same_schedule() -> None:
    """A schedule prints as CSV and is read back; empty cells are idle time."""
    schedule = PipelineSchedule.from_csv(V2)
    assert schedule.to_csv() == str(schedule) + "\n" == V2
    assert PipelineSchedule.from_csv(V2.replace("0I0", ", 0I0 ,") + "\n,\n") == schedule


def test_a_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    """A path is a file, a str is the text; other text is refused."""
    file = tmp_path / "v.csv"
    file.write_text(V2)
    assert PipelineSchedule.from_csv(file) == PipelineSchedule.from_csv(V2)
    file.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match=r"v\.csv is no CSV file: it is not UTF-8 text"):
        PipelineSchedule.from_csv(file)


def test_a_report_is_a_trace(tmp_path: Path) -> None:
    """It has one row per rank, with waits; it can be saved and read back."""
    trace = checked(V2, PipelineCosts(1, 2, 3, 0.5)).trace(unit_s=1e-3)
    assert [lane.row.name for lane in trace.lanes()] == ["rank 0", "rank 1"]
    spans = {span.task: span for span in trace.spans}
    first = spans["1F"]
    assert (first.start_ns, first.end_ns, first.wait_ns) == (1_500_000, 2_500_000, 0)
    assert spans["0I"].wait_ns == 11_000_000
    trace.save(tmp_path / "v.json")
    assert Trace.load(tmp_path / "v.json").spans == trace.spans
