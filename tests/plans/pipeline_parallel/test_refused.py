"""Calls of schedules, costs, planners and torch's orders that are refused, with the words."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from swpipe.plans.pipeline_parallel import (
    Action,
    PipelineCosts,
    PipelineSchedule,
    ScheduleError,
    activation_memory,
    check_schedule,
    plan_v_schedule,
    torch_schedule,
)
from tests.plans.pipeline_parallel.test_pipeline_graph import graph

FILES: list[tuple[Any, str]] = [
    ("", "no action"),
        ("0F0x", r"line 1, cell 1: '0F0x' is no action"),
        ("0F0,0X0", r"line 1, cell 2: '0X0' is no action"),
        ('0F0,"0B0', "no CSV"),
        ("0F0,0F0,0B0", "0F0 is on rank 0 twice"),
        ("0F0,0I0,0I0,0W0", "0I0 is on rank 0 twice"),
        ("0F0,0B0,0I0,0W0", "0B0 and 0I0 are on rank 0"),
        ("0F0,0F1,0B0,0B1,0W1", "0B1 and 0W1 are on rank 0"),
        ("0F0,0I0", "0W0 is missing on rank 0"),
        ("0F0,0B0,0F2,0B2", "0F1 is missing on rank 0"),
        ("0F0,0B0,2F0,2B0", "stage 1 has no action"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has no action"),
        ("0F0,0B0\n0F1,0B1", "0F1 is on rank 1, but stage 0 has actions on rank 0"),
        ("0B0,0F0", "0B0 on rank 0 comes before 0F0"),
        ("0F0,0W0,0I0", "0W0 on rank 0 comes before 0I0"),
        ("0F0,0F1,0I0,0I1,0W1,0W0", "0W1 on rank 0 comes before microbatch 0 of its stage"),
        ("0F0,0F1,0I0,0B1,0W0", "0B1 on rank 0 comes before microbatch 0 of its stage"),
    ("0F0,(0F1;0B1)OVERLAP_F_B,0B0", "a pair is an F and a B, of different microbatches"),
        ("(0F0;1B1)OVERLAP_F_B,1F0,0F1,1F1,1B0,0B0,0B1", "1B1 on rank 0 comes before 1F1"),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n(1F1;1B0)OVERLAP_F_B,1F0,1B1",
            "1B0 on rank 1 comes before",
        ),
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1", "the schedule deadlocks: "),
]  # fmt: skip

COSTS: list[tuple[str, Any]] = [
    ("forward", 0),
    ("weight", (1, 0)),
    ("forward", ()),
    ("forward", True),
    ("hop", -1),
    ("f_mem", 0),
    ("b_mem", 1),
    ("w_mem", math.inf),
    ("max_mem", "much"),
]

GRAPHS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n_stage is 0"),
    ({"m": 1.5}, "n_micro is 1.5"),
    ({"f_cost": 0}, "f_cost is 0"),
    ({"w_cost": (1, 1)}, r"w_cost is \(1, 1\): give one number above 0"),
    ({"c_cost": -1}, "c_cost is -1"),
    ({"f_mem": 0}, "f_mem is 0"),
    ({"w_mem": 0}, r"f_mem \+ b_mem \+ w_mem is 131072"),
]

PLANS: list[tuple[dict[str, Any], str]] = [
    ({"n_stage": 0}, "n_stage is 0"),
    ({"objective": "time"}, "objective is 'time': give makespan, period or bubble"),
    ({"effort": 0}, "effort is 0"),
    (
        {"costs": PipelineCosts(f_mem=2, max_mem=3.9)},
        r"3F0 takes rank 0 to a memory of 4, above max_mem = 3\.9: .* raise it",
    ),
    ({"costs": PipelineCosts(forward=(1, 1, 1))}, "forward has 3 numbers: .* each of 4 stages"),
]

ORDERS: list[tuple[Any, int, int, str]] = [
    ("1f1b", 4, 3, "at least 4 microbatches, and n_micro is 3"),
    ("interleaved", 2, 5, "multiple of the number of rounds"),
    ("zb", 2, 4, "order is 'zb': give one of 1f1b, interleaved"),
    ("zbv", 0, 4, "n_ranks is 0"),
]

ACTIONS: tuple[Any, ...] = ((0, "X", 0), (0, "F", -1), ("0", "F", 0), (0, "F", True))

V2 = "0F0,3F0,3I0,0I0,0W0,3W0\n1F0,2F0,2B0,1B0\n"


def by_hand(action: Any) -> None:
    check_schedule(PipelineSchedule([[action, (0, "B", 0)]], 1), PipelineCosts())  # type: ignore[arg-type]


def planned(**changes: Any) -> None:
    plan_v_schedule(**{"n_stage": 2, "n_micro": 2, "costs": PipelineCosts(), **changes})


REFUSED: list[tuple[Callable[[], Any], str]] = [
    *((partial(PipelineSchedule.from_csv, text), told) for text, told in FILES),
    (partial(PipelineSchedule.from_csv, V2, n_ranks=4), "ranks is 2 in the schedule, 4 in the job"),
    (partial(PipelineSchedule.from_csv, V2, n_micro=8), "microbatches is 1 in .*, 8 in the job"),
    *((partial(by_hand, action), "rank 0 has") for action in ACTIONS),
    (partial(by_hand, Action(0, "F", 1)), "0F1 on rank 0 is microbatch 1, .* n_micro is 1"),
    (lambda: PipelineSchedule((), 0), "n_micro is 0"),
    *((partial(PipelineCosts, **{field: value}), field) for field, value in COSTS),
    *((partial(graph, **{"n": 2, "m": 2, **sizes}), told) for sizes, told in GRAPHS),
    (lambda: graph(4, 8).try_v_schedule(approved_bubble=[0] * 3), "approved_bubble has 3 numbers"),
    (lambda: activation_memory(4096, 32, 0), "seq_length is 0"),
    *((partial(planned, **changes), told) for changes, told in PLANS),
    *((partial(torch_schedule, order, n, m), told) for order, n, m, told in ORDERS),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], words: str) -> None:
    """The error is one line with the cell, the action or the field, and the rule."""
    with pytest.raises(ScheduleError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
