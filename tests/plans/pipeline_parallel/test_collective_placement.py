"""The places where parameters are gathered and freed, and gradients reduced, and their times."""

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
    """Return costs with passes of 1 ms, and a link with collectives of this length."""
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
    """It is freed at the end, and reduced once; the passes do not change."""
    schedule = looped(2, 3, 4)
    placed = place_collectives(schedule)
    assert counts(placed) == {"UNSHARD": 8, "RESHARD": 8, "REDUCE_GRAD": 8}
    assert placed.passes == schedule


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_rank_holds_no_more_stages_than_there_is_room_for(room: int) -> None:
    """The stage that is needed last makes room, for example among four with room for 3."""
    placed = place_collectives(looped(2, 3, 4), max_unsharded=room)
    assert [held(placed, rank) for rank in (0, 1)] == [room, room]
    check_schedule(placed, costs(5, 5))


def test_the_stage_that_is_needed_last_makes_room() -> None:
    """Stages 0, 1, 2, 2, 1, 0 have room for two: 0 leaves for 2, and 1 or 2 for 0."""
    placed = place_collectives(looped(1, 1, 3), max_unsharded=2)
    first = [str(e) for e in placed.rows[0] if isinstance(e, Communication)][:4]
    assert first == ["0UNSHARD", "1UNSHARD", "0RESHARD", "2UNSHARD"]
    assert counts(placed)["UNSHARD"] == 4


def test_collectives_take_the_link_one_by_one_while_passes_run() -> None:
    """A pass waits for its stage; only the end of the step waits for a reduction."""
    text = "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,0RESHARD,1RESHARD"
    report = check_schedule(PipelineSchedule.from_csv(text), costs(5, 3))
    times = {str(one.action): (one.start, one.end) for one in report.times[0]}
    assert times["1UNSHARD"] == (5, 10)
    assert times["0F0"] == (5, 6)
    assert times["1F0"] == (10, 11)
    assert times["1REDUCE_GRAD"] == (13, 16)
    assert times["0B0"] == (13, 15)
    assert times["0REDUCE_GRAD"] == (16, 19)
    assert report.makespan == report.period == 19
    assert report.bubbles == (19 - 6,)


def test_a_rank_reduces_one_stage_at_a_time() -> None:
    """A slow reduction delays no pass of the rank, but the next reduction and its successors."""
    text = "0F0,1F0,2F0,2B0,2REDUCE_GRAD,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD"
    report = check_schedule(PipelineSchedule.from_csv(text), costs(5, 5))
    times = {str(one.action): (one.start, one.end) for one in report.times[0]}
    assert times["2REDUCE_GRAD"] == (5, 10)
    assert times["1B0"] == (5, 7)
    assert times["1REDUCE_GRAD"] == (10, 15)
    assert times["0B0"] == (10, 12)
    assert times["0REDUCE_GRAD"] == (15, 20)


def test_a_stage_is_reduced_after_its_last_weight_gradients() -> None:
    """It is reduced at once, and before it is freed."""
    placed = place_collectives(looped(2, 3, 4), max_unsharded=3)
    for row in placed.rows:
        for at, entry in enumerate(row):
            if isinstance(entry, Communication) and entry.op == "REDUCE_GRAD":
                assert row[at - 1] == Action(entry.stage, "B", 2)
                assert Communication(entry.stage, "RESHARD") in row[at:]


def test_no_room_for_a_pass_is_refused() -> None:
    """A pair runs two stages at once."""
    with pytest.raises(ScheduleError, match="max_unsharded is 1: rank 0 runs passes of 2 stages"):
        place_collectives(torch_schedule("dualpipev", 2, 4), max_unsharded=1)
