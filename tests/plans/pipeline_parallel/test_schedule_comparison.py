"""compare_schedules, and the trace of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    check_schedule,
    compare_schedules,
    torch_schedule,
)
from swpipe.trace import Trace

COSTS = PipelineCosts(20, 30, 15, 1)


def test_all_six_schedules_are_compared() -> None:
    """The figures are the checker's; 1F1B has stages of two parts."""
    compared = compare_schedules(4, 8, COSTS, effort=1e-3)
    zbv = check_schedule(torch_schedule("zbv", 4, 8), COSTS)
    whole = check_schedule(torch_schedule("1f1b", 4, 8), PipelineCosts(40, 60, 30, 1, 4, -2, -2))
    records = {record["schedule"]: record for record in compared.records()}
    assert list(records) == [
        "1F1B", "interleaved 1F1B", "ZBV (torch)", "DualPipe-V (torch)", "V (published)",
        "V (planned)",
    ]  # fmt: skip
    assert records["ZBV (torch)"]["makespan"] == zbv.makespan
    assert records["1F1B"]["bubble"] == whole.bubble
    assert records["1F1B"]["peak_memory"] == 16
    assert records["V (planned)"]["makespan"] <= records["V (published)"]["makespan"]
    assert [name for name, one in records.items() if one["note"]] == [
        "interleaved 1F1B",
        "DualPipe-V (torch)",
    ]
    assert compared["DualPipe-V (torch)"].note == "more memory than max_mem"
    assert str(compared).splitlines()[0].split() == [
        "schedule", "makespan", "bubble", "peak", "memory", "note",
    ]  # fmt: skip


def test_a_schedule_that_there_is_not_says_why() -> None:
    """Torch's orders have least numbers of microbatches, the published method needs memory."""
    costs = PipelineCosts(20, 30, 15, 1, max_mem=4)
    compared = compare_schedules(4, 3, costs, effort=1e-3)
    assert "at least 4 microbatches" in compared["1F1B"].note
    assert compared["V (published)"].report is None
    assert compared["V (published)"].note == "it finds no schedule in this memory"
    assert compared["V (planned)"].report is not None


def test_costs_by_rank_and_by_part_reach_all_schedules() -> None:
    """A part that does nothing in I, as stage 0 on torch's runtime, is a stage's half in 1F1B."""
    by_part = PipelineCosts((20,) * 4, (1e-9, 30, 30, 30), (45, 15, 15, 15), 1)
    compared = compare_schedules(2, 4, by_part, effort=1e-3)
    even = compare_schedules(2, 4, COSTS, effort=1e-3)
    first, second = (c["1F1B"].report for c in (compared, even))
    assert first is not None
    assert second is not None
    assert first.makespan == pytest.approx(second.makespan)
    by_rank = compare_schedules(2, 4, PipelineCosts((20, 20), 30, (15, 15), 1), effort=1e-3)
    assert by_rank["1F1B"] == even["1F1B"]


def test_a_report_is_a_trace(tmp_path: Path) -> None:
    """One row per rank, with waits and arrows; it is saved and read back."""
    schedule = PipelineSchedule.from_csv("0F0,3F0,3I0,0I0,0W0,3W0\n1F0,2F0,2B0,1B0\n")
    trace = check_schedule(schedule, PipelineCosts(1, 2, 3, 0.5)).trace(unit_s=1e-3)
    assert [lane.row.name for lane in trace.lanes()] == ["rank 0", "rank 1"]
    spans = {span.task: span for span in trace.spans}
    first = spans["1F"]
    assert (first.start_ns, first.end_ns, first.wait_ns) == (1_500_000, 2_500_000, 0)
    assert spans["0I"].wait_ns == 11_000_000
    assert {(a.producer, a.consumer) for a in trace.arrows} == {
        ("0F", "1F"), ("1F", "2F"), ("2F", "3F"), ("3F", "3I"),
        ("3I", "2B"), ("2F", "2B"), ("2B", "1B"), ("1F", "1B"), ("1B", "0I"), ("0F", "0I"),
    }  # fmt: skip
    trace.save(tmp_path / "v.json")
    assert Trace.load(tmp_path / "v.json").spans == trace.spans
