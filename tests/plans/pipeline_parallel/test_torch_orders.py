"""The orders of torch.distributed.pipelining, timed by the checker."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import get_args

import pytest

from swpipe.plans.pipeline_parallel import (
    Action,
    Communication,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    check_schedule,
    plan_v_schedule,
    torch_schedule,
)
from swpipe.plans.pipeline_parallel.torch_orders import _KINDS, TorchOrder, _StandInStage
from tests.plans.pipeline_parallel.zbv_figures import PUBLISHED
from tests.support.scripts import Script, Scripts


def test_bubbles_of_torch_zbv_are_the_known_ones() -> None:
    """Torch's fixed order has them under the costs of each configuration."""
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


@pytest.mark.parametrize("module", [None, ModuleType("torch.distributed.pipelining")])
def test_a_torch_without_an_order_is_told(
    module: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no such class or module; a plan works without its orders."""
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", module)
    with pytest.raises(ScheduleError, match="this torch has no .*ScheduleZBVZeroBubble: upgrade"):
        torch_schedule("zbv", 2, 4)
    costs = PipelineCosts(pair=1.5)
    plan = plan_v_schedule(2, 4, costs, effort=1e-3)
    assert check_schedule(plan.schedule, costs).makespan == plan.value


def test_placements() -> None:
    """They are one stage per rank, a loop, and two Vs."""
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
    """The last rank has all microbatches, too."""
    assert str(torch_schedule("1f1b", 2, 3)) == ("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")


def test_loading_the_room_loads_no_torch_pipelining(scripts: Scripts) -> None:
    """Torch's orders are loaded when one is asked for."""
    code = (
        "import sys, swpipe.plans.pipeline_parallel\n"
        "print([m for m in sys.modules if m.startswith('torch.distributed.pipelining')])"
    )
    assert scripts.run(Script(code)).stdout == "[]\n"


ONE_RANK = (
    "0UNSHARD,1UNSHARD,0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,1REDUCE_GRAD,1RESHARD,0B1,"
    "0REDUCE_GRAD,0RESHARD\n"
)


def test_torchs_own_file_is_read() -> None:
    """Its runtime writes communication and pairs; what is written can be read again."""
    schedule = PipelineSchedule.from_csv(ONE_RANK)
    assert schedule.to_csv() == ONE_RANK
    assert str(schedule.passes) == "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"
    assert str(schedule.passes.in_sequence) == "0F0,1F0,0F1,1B0,0B0,1F1,1B1,0B1"
    assert "(" not in schedule.in_sequence.to_csv()
    assert "1REDUCE_GRAD" in schedule.in_sequence.to_csv()
    text = "0F0,1F0,(1B0; 0F1)OVERLAP_F_B,0B0,1F1,1B1,0B1"
    assert PipelineSchedule.from_csv(text) == schedule.passes
    for cell, told in (
        ("(0F1;1B0)OVERLAP", "is no action"),
        ("0REDUCE", "is no action"),
        ("0UNSHARD0", "is no action"),
        ("0SEND_F0", "sends or receives, which the runtime places itself"),
        ("(0F1;0REDUCE_GRAD)OVERLAP_F_B", "is no action"),
        ("(0F1;0I0)OVERLAP_F_B", "is no pair"),
        ("(0F1;0F2)OVERLAP_F_B", "is no pair"),
    ):
        with pytest.raises(ScheduleError, match=f"line 1, cell 1: .* {told}"):
            PipelineSchedule.from_csv(f"{cell},0F0")


def torchs_text(order: TorchOrder, collectives: bool) -> str:
    """Return the file that torch's runtime writes of one of its orders, on 2 ranks."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = _KINDS[order]
    stages = [_StandInStage(s, kind.stages * 2, 2) for s in range(kind.stages)]
    make = getattr(schedules, kind.torch_class)
    if kind.stages == 1:
        rows = make(stages[0], 4)._get_pipeline_order()
    else:
        rows = dict(make(stages, 4).pipeline_order)
    if collectives and kind.stages > 1:
        rows = {rank: schedules._add_unshard_reshard(row) for rank, row in rows.items()}
        rows = {rank: schedules._add_reduce_grad(row, 4) for rank, row in rows.items()}
    return "".join(
        ",".join("" if cell is None else str(cell) for cell in rows[rank]) + "\n" for rank in (0, 1)
    )


BACKWARDS = {"looped_bfs": "2B3 on rank 0 comes before microbatch 0", "1f1b": "0F4 is missing"}
"""Torch's orders that are refused: gradients from behind; microbatches counted from 1."""


@pytest.mark.parametrize("order", get_args(TorchOrder))
def test_every_cell_of_torchs_files_is_kept(order: TorchOrder) -> None:
    """Others are refused by name, with collectives and without."""
    for collectives in (False, True):
        text = torchs_text(order, collectives)
        if order in BACKWARDS:
            with pytest.raises(ScheduleError, match=BACKWARDS[order]):
                PipelineSchedule.from_csv(text)
            renumbered = PipelineSchedule.from_csv(text, renumbered=True)
            assert renumbered.passes == torch_schedule(order, 2, 4)
            assert renumbered.to_csv().count(",") == sum(
                len([cell for cell in line.split(",") if cell]) - 1 for line in text.splitlines()
            )
        else:
            kept = "\n".join(
                ",".join(cell for cell in line.split(",") if cell) for line in text.splitlines()
            )
            assert str(PipelineSchedule.from_csv(text)) == kept


WRONG = [
    ("0F0,0UNSHARD,0B0,0RESHARD", "0F0 on rank 0 comes where its stage is sharded"),
    ("0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD", "is unsharded already"),
    ("0UNSHARD,0F0,0B0", "0RESHARD is missing on rank 0"),
    ("0F0,0REDUCE_GRAD,0B0", "0REDUCE_GRAD on rank 0: .* once, after the last of them"),
    ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "0REDUCE_GRAD on rank 0: .* once"),
    ("0F0,1F0,1B0,0B0,0REDUCE_GRAD", "1REDUCE_GRAD is missing on rank 0"),
]


@pytest.mark.parametrize(("text", "told"), WRONG)
def test_communication_that_cannot_run_is_refused(text: str, told: str) -> None:
    """The error names the entry."""
    with pytest.raises(ScheduleError, match=told):
        PipelineSchedule.from_csv(text)


def test_an_unknown_communication_is_refused() -> None:
    """The schedule was made in Python, so that no file was parsed."""
    row = (Action(0, "F", 0), Communication(0, "SEND_F"), Action(0, "B", 0))
    with pytest.raises(ScheduleError, match="0SEND_F on rank 0 is none of UNSHARD, RESHARD"):
        check_schedule(PipelineSchedule((row,), 1), PipelineCosts())


def test_torch_reads_what_is_written() -> None:
    """This includes pairs: its classes give the schedule again."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = torch_schedule("dualpipev", 3, 8)
    for row, line in zip(schedule.rows, schedule.to_csv().splitlines(), strict=True):
        cells = [schedules._Action.from_str(cell) for cell in line.split(",")]
        assert list(map(str, cells)) == list(map(str, row))
