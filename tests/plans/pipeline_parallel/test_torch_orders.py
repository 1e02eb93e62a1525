"""The orders of torch.distributed.pipelining, timed by the checker."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from swpipe.plans.pipeline_parallel import (
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    check_schedule,
    torch_schedule,
)
from swpipe.plans.pipeline_parallel.torch_orders import TorchOrder
from tests.plans.pipeline_parallel.zbv_figures import PUBLISHED
from tests.support.scripts import Script, Scripts


def test_bubbles_of_torch_zbv_are_the_known_ones() -> None:
    """Torch's fixed order under the costs of each configuration."""
    bubbles = [
        check_schedule(torch_schedule("zbv", row.n, row.m), row.costs).bubble for row in PUBLISHED
    ]
    assert bubbles == [row.torch_bubble for row in PUBLISHED]


@pytest.mark.parametrize("order", get_args(TorchOrder))
def test_torch_orders_are_valid(order: TorchOrder) -> None:
    """Every order that torch makes keeps the checker's rules."""
    for n, m in ((1, 2), (2, 6), (3, 18), (4, 8)):
        schedule = torch_schedule(order, n, m)
        check_schedule(schedule, PipelineCosts(max_mem=math.inf))
        assert schedule == PipelineSchedule.from_csv(schedule.to_csv(), n_ranks=n, n_micro=m)


def test_placements() -> None:
    """One stage per rank, a loop, and two Vs."""
    places = {order: torch_schedule(order, 2, 4).placement for order in get_args(TorchOrder)}
    assert places == {
        "1f1b": (0, 1),
        "interleaved": (0, 1, 0, 1),
        "zbv": (0, 1, 1, 0),
        "dualpipev": (0, 1, 1, 0),
        "gpipe": (0, 1),
        "looped_bfs": (0, 1, 0, 1),
        "interleaved_zb": (0, 1, 0, 1),
    }


def test_1f1b_is_the_textbook_order() -> None:
    """All microbatches are there on the last rank too."""
    assert str(torch_schedule("1f1b", 2, 3)) == ("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")


def test_loading_the_room_loads_no_torch_pipelining(scripts: Scripts) -> None:
    """Torch's orders are loaded when one is asked for."""
    code = (
        "import sys, swpipe.plans.pipeline_parallel\n"
        "print([m for m in sys.modules if m.startswith('torch.distributed.pipelining')])"
    )
    assert scripts.run(Script(code)).stdout == "[]\n"


def test_torchs_own_file_is_read() -> None:
    """As its runtime writes it, with communication and pairs; what is written is read again."""
    text = "0UNSHARD,0F0,1F0,(0F1;1B0)OVERLAP_F_B,0SEND_B3,0B0,1F1,1B1,0B1,1RECV_F0,0REDUCE_GRAD"
    schedule = PipelineSchedule.from_csv(text)
    assert str(schedule) == "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"
    assert PipelineSchedule.from_csv("0F0,1F0,(1B0; 0F1)OVERLAP_F_B,0B0,1F1,1B1,0B1") == schedule
    assert str(schedule.in_sequence) == "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1"
    for cell, told in (
        ("(0F1;1B0)OVERLAP", "is no action"),
        ("0REDUCE", "is no action"),
        ("(0F1;0REDUCE_GRAD)OVERLAP_F_B", "is no action"),
        ("(0F1;0I0)OVERLAP_F_B", "is no pair"),
        ("(0F1;0F2)OVERLAP_F_B", "is no pair"),
    ):
        with pytest.raises(ScheduleError, match=f"line 1, cell 1: .* {told}"):
            PipelineSchedule.from_csv(f"{cell},0F0")


def test_torch_reads_what_is_written() -> None:
    """Pairs as well: its classes give the schedule again."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = torch_schedule("dualpipev", 3, 8)
    for row, line in zip(schedule.rows, schedule.to_csv().splitlines(), strict=True):
        cells = [schedules._Action.from_str(cell) for cell in line.split(",")]
        assert list(map(str, cells)) == list(map(str, row))
