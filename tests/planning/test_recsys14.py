"""The published fourteen tasks: their known figures, and the planner's results for them."""

from __future__ import annotations

import pytest

from bench import recsys14
from swpipe.planning import Limits
from swpipe.planning.modulo.auto import auto_plan
from swpipe.planning.simulation.simulator import simulate

BOUND_US = 108_380
"""The total time of the tasks on the caller's stream."""


def test_the_plan_reaches_the_bound_with_little_in_flight() -> None:
    """The bound is the caller's stream; tasks that train stay in the last stage, on its thread."""
    choice = auto_plan(recsys14.plan(), recsys14.costs(), limits=recsys14.limits())
    assert choice.ii_us == choice.bounds.ii_us == BOUND_US
    assert "forward" in choice.bounds.limiting
    assert (choice.in_flight, choice.threads) <= (3, 2)
    assert simulate(choice.plan, recsys14.costs()).ii_us == choice.ii_us
    for name in recsys14.FROZEN:
        entry, last = choice.plan.schedule[name], choice.plan.max_stage
        assert (entry.stage, entry.thread_group, entry.stream) == (last, "default", None)


def test_without_streams_a_second_thread_helps() -> None:
    """One thread takes 125,680 us; a second one takes over what can overlap."""
    choice = auto_plan(recsys14.plan(), recsys14.costs(), limits=recsys14.limits(), streams=False)
    assert choice.threads == 2
    assert choice.ii_us < BOUND_US
    assert any(sentence.startswith("Thread 2 earns") for sentence in choice.why)
    alone = auto_plan(recsys14.plan(), recsys14.costs(), limits=Limits(groups=1), streams=False)
    assert alone.ii_us == pytest.approx(125_680)
