"""Any plan or cost file is read, or refused with a short message."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swpipe import PipelinePlan
from swpipe.analysis.validation import validate
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.drawing import format_stages
from swpipe.program import compile_plan
from swpipe.program.program_text import format_program
from tests.support.budget import examples
from tests.support.hostile import NAMES, check_message, edited, mostly, table
from tests.support.plans_for_tests import piped

QUICK = 15

NAME = mostly(st.sampled_from(["a", "b", "c", "d e", "f.g"]))
KEY = st.integers(0, 29).flatmap(
    lambda n: NAMES if n == 7 else st.sampled_from(["a", "b", "c", "d e"])
)
ENTRY = table(
    stage=mostly(st.integers(0, 3)),
    stream=NAME,
    thread_group=NAME,
    globally_ordered=mostly(st.booleans()),
)
PAIR = st.lists(NAME, min_size=2, max_size=2)
FAR = PAIR | st.builds(lambda pair, d: [*pair, d], PAIR, mostly(st.integers(1, 1000)))
PLANS = table(
    schedule=st.dictionaries(KEY, mostly(ENTRY), min_size=1, max_size=4),
    deps=mostly(st.lists(mostly(PAIR), max_size=2)),
    cross_iter_deps=mostly(st.lists(mostly(FAR), max_size=2)),
    same_period_deps=mostly(st.lists(mostly(PAIR), max_size=1)),
    order=mostly(st.lists(NAME, max_size=2, unique_by=str)),
    streams=mostly(st.dictionaries(KEY, mostly(table(priority=mostly(st.just(-1)))), max_size=1)),
    pipeline_depth=mostly(st.integers(4, 6) | st.just(1000)),
    stale=mostly(st.dictionaries(KEY, mostly(st.integers(1, 4)), max_size=2)),
    newer=mostly(st.dictionaries(KEY, mostly(st.integers(1, 4)), max_size=2)),
)
COST = table(
    host_us=mostly(st.floats(0, 1e12)),
    gil_us=mostly(st.just(0)),
    device_us=mostly(st.floats(0, 1e12)),
    resources=mostly(st.lists(NAME, max_size=2)),
)
COSTS = mostly(
    table(
        handover_us=mostly(st.just(20)),
        tasks=mostly(st.dictionaries(KEY, mostly(COST), max_size=3)),
    )
)
MODEL = CostModel({"a": TaskCost(host_us=30, gil_us=10, resources=("h2d",))}, handover_us=20)


def read_plan(text: str, *, toml: bool) -> None:
    """Read, validate and compile a plan; any error is of a type that the readers name."""
    try:
        plan = PipelinePlan.from_toml(text) if toml else PipelinePlan.from_json(text)
        resolved = validate(plan)
    except (ValueError, RecursionError) as error:  # PlanError, and those of the parsers
        check_message(error)
        return
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert PipelinePlan.from_toml(plan.to_toml()) == plan
    assert plan.digest() == PipelinePlan.from_json(plan.to_json()).digest()
    assert format_program(compile_plan(resolved, streams=True)).replace("\n", "").isprintable()
    assert format_stages(resolved).replace("\n", "").isprintable()


def read_costs(text: str) -> None:
    """Read a cost model, and check that sums of its times are finite."""
    try:
        model = CostModel.from_json(text)
    except (ValueError, RecursionError) as error:  # PlanError, and those of the parser
        check_message(error)
        return
    assert math.isfinite(1e4 * sum(cost.total_us for cost in model.tasks.values()))
    assert CostModel.from_json(model.to_json()) == model


@examples("files", QUICK)
@given(data=mostly(PLANS))
def test_a_plan_of_any_values_is_read_or_refused(data: Any) -> None:
    """The values are strange names, numbers and tables at every place of a plan."""
    read_plan(json.dumps(data), toml=False)


@examples("files", QUICK)
@given(text=edited(piped(3).to_toml()))
def test_a_plan_of_any_toml_is_read_or_refused(text: str) -> None:
    """A part of a good file is replaced."""
    read_plan(text, toml=True)


@examples("files", QUICK)
@given(text=edited(piped(3).to_json()))
def test_a_plan_of_any_json_is_read_or_refused(text: str) -> None:
    """A part of a good file is replaced."""
    read_plan(text, toml=False)


@examples("files", QUICK)
@given(text=COSTS.map(json.dumps) | edited(MODEL.to_json()))
def test_costs_of_any_values_are_read_or_refused(text: str) -> None:
    """The values are strange names and numbers, or a part of a good file is replaced."""
    read_costs(text)
