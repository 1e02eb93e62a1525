"""The published fourteen tasks: what is known of them, and what the planner makes of them."""

from __future__ import annotations

import pytest

from bench import recsys14
from swpipe.analysis.validation import validate
from swpipe.planning import Limits
from swpipe.planning.modulo.auto import auto_plan
from swpipe.planning.simulation.bounds import lower_bounds
from swpipe.planning.simulation.simulator import simulate

BOUND_US = 108_380
"""What the tasks of the caller's stream take together."""


def test_the_callers_stream_is_the_bottleneck() -> None:
    """No plan is faster than the tasks on the caller's stream, one after the other."""
    bounds = lower_bounds(recsys14.plan(), recsys14.costs(), threads=4)
    assert bounds.ii_us == BOUND_US
    assert "forward" in bounds.limiting


def test_the_plan_reaches_the_bound_with_little_in_flight() -> None:
    """The interval equals the lower bound, with no more than 3 in flight and 2 threads."""
    choice = auto_plan(recsys14.plan(), recsys14.costs(), limits=recsys14.limits())
    assert choice.ii_us == pytest.approx(BOUND_US, rel=1e-12)
    assert choice.in_flight <= 3
    assert choice.threads <= 2
    validate(choice.plan)
    assert simulate(choice.plan, recsys14.costs()).ii_us == choice.ii_us


def test_frozen_tasks_stay_where_they_are() -> None:
    """Tasks that train are in the last stage, on the caller's thread and stream."""
    plan = auto_plan(recsys14.plan(), recsys14.costs(), limits=recsys14.limits()).plan
    for name in recsys14.FROZEN:
        entry = plan.schedule[name]
        assert (entry.stage, entry.thread_group, entry.stream) == (plan.max_stage, "default", None)


def test_without_streams_a_second_thread_helps() -> None:
    """One thread takes 125,680 us; a second one takes over what can run in parallel."""
    choice = auto_plan(recsys14.plan(), recsys14.costs(), limits=recsys14.limits(), streams=False)
    assert choice.threads == 2
    assert choice.ii_us < BOUND_US
    assert any(sentence.startswith("Thread 2 earns") for sentence in choice.why)
    alone = auto_plan(recsys14.plan(), recsys14.costs(), limits=Limits(threads=1), streams=False)
    assert alone.ii_us == pytest.approx(125_680)
