"""Where parameters are gathered and gradients reduced: as seldom, and as late, as it pays."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from swpipe.plans.pipeline_parallel import (
    Action,
    Communication,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    check_schedule,
    place_collectives,
    torch_schedule,
)


def looped(n_ranks: int, n_micro: int, per_rank: int) -> PipelineSchedule:
    """Make a schedule of stages r, n + r, and so on, on rank r, microbatch by microbatch."""
    last = n_ranks * per_rank
    rows = tuple(
        tuple(
            Action(stage, op, micro)
            for micro in range(n_micro)
            for op in ("F", "B")
            for stage in range(rank, last, n_ranks)[:: 1 if op == "F" else -1]
        )
        for rank in range(n_ranks)
    )
    return PipelineSchedule(rows, n_micro)  # type: ignore[arg-type]


def costs(unshard: float, reduce: float) -> PipelineCosts:
    """Passes of 1 ms and a link that collectives take so long."""
    return PipelineCosts(1, 1, 1, hop=0, unshard=unshard, reduce=reduce, max_mem=math.inf)


def held(schedule: PipelineSchedule, rank: int) -> int:
    """Return the most stages that a rank has unsharded."""
    now = most = 0
    for entry in schedule.rows[rank]:
        if isinstance(entry, Communication):
            now += {"UNSHARD": 1, "RESHARD": -1}.get(entry.op, 0)
            most = max(most, now)
    return most


def counts(schedule: PipelineSchedule) -> Counter[str]:
    """Return how often each op of communication occurs."""
    return Counter(e.op for row in schedule.rows for e in row if isinstance(e, Communication))


def test_each_stage_is_gathered_once_where_there_is_room() -> None:
    """And freed at the end, and reduced once; the passes are as they were."""
    schedule = looped(2, 3, 4)
    placed = place_collectives(schedule, costs(5, 5))
    assert counts(placed) == {"UNSHARD": 8, "RESHARD": 8, "REDUCE_GRAD": 8}
    assert placed.passes == schedule


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_rank_holds_no_more_stages_than_there_is_room_for(room: int) -> None:
    """The stage that is needed last makes room: of four in turns, with room for 3, one by one."""
    placed = place_collectives(looped(2, 3, 4), costs(5, 5), max_unsharded=room)
    assert [held(placed, rank) for rank in (0, 1)] == [room, room]
    check_schedule(placed, costs(5, 5))


def test_the_stage_that_is_needed_last_makes_room() -> None:
    """Stages 0, 1, 2, 2, 1, 0 with room for two: 0 leaves for 2, and 1 or 2 for 0."""
    placed = place_collectives(looped(1, 1, 3), costs(1, 1), max_unsharded=2)
    first = [str(e) for e in placed.rows[0] if isinstance(e, Communication)][:4]
    assert first == ["0UNSHARD", "1UNSHARD", "0RESHARD", "2UNSHARD"]
    assert counts(placed)["UNSHARD"] == 4


def test_a_wait_for_parameters_and_reductions_is_timed() -> None:
    """A pass waits for its stage; the rank waits for a reduction; the link takes one at a time."""
    text = "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,0RESHARD,1RESHARD"
    report = check_schedule(PipelineSchedule.from_csv(text), costs(5, 3))
    times = {str(one.action): (one.start, one.end) for one in report.times[0]}
    assert times["0F0"] == (5, 6)
    assert times["1F0"] == (10, 11)
    assert times["1REDUCE_GRAD"] == (13, 16)
    assert times["0B0"] == (16, 18)
    assert report.makespan == 21


def test_a_reduction_makes_way_for_passes_that_others_wait_for() -> None:
    """It is never later than directly after the last gradients; here it is earlier."""
    rows = (
        (Action(0, "F", 0), Action(0, "B", 0)),
        (Action(1, "F", 0), Action(2, "F", 0), Action(2, "B", 0), Action(1, "B", 0)),
    )
    placed = place_collectives(PipelineSchedule(rows, 1), costs(1, 5))
    row = [str(entry) for entry in placed.rows[1]]
    assert row.index("2REDUCE_GRAD") > row.index("1B0")
    at_once = PipelineSchedule.from_csv(
        "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,2UNSHARD,1F0,2F0,2B0,2REDUCE_GRAD,1B0,1REDUCE_GRAD,1RESHARD,2RESHARD"
    )
    spans = [
        sum(r[-1].end for r in check_schedule(s, costs(1, 5)).times) for s in (placed, at_once)
    ]
    assert spans[0] < spans[1]


def test_no_room_for_a_pass_is_refused() -> None:
    """A pair runs two stages at once."""
    with pytest.raises(ScheduleError, match="max_unsharded is 1: rank 0 runs passes of 2 stages"):
        place_collectives(torch_schedule("dualpipev", 2, 4), costs(1, 1), max_unsharded=1)
