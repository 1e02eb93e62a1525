"""The verdict names the cause of half of a step; the ceiling is below every plan's step."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from swpipe import PipelinePlan, ProfileResult, TaskSchedule
from swpipe.planning import simulate
from swpipe.profiler import Advice
from swpipe.profiler.figures import LoaderPace
from swpipe.profiler.spread import Estimate
from swpipe.reporting import PromisedChange, StepVerdict
from swpipe.reporting.account import START, Ceiling, StepAccount, account_of
from tests.profiler.results import changed, of_step
from tests.reporting.test_report import profile_of

NAMES = ("read", "exchange", "train")
PLAN = PipelinePlan(
    {
        "read": TaskSchedule(),
        "exchange": TaskSchedule(globally_ordered=True),
        "train": TaskSchedule(),
    },
    deps=[("exchange", "read"), ("train", "exchange")],
    cross_iter_deps=[("train", "train", 1)],
)


def account(profile: ProfileResult, *, streams: bool = False, cpu_s: float = 0.0) -> StepAccount:
    """Return the account of a plain loop with the times of the profile."""
    run = simulate(PLAN, profile.costs, streams=profile.on_streams, iterations=12)
    path = run.trace().critical_path()
    return account_of(profile, path, PLAN, streams=streams, cpu_s=cpu_s)


def verdict(
    *, read: float, exchange: float, train: float, blocked_s: dict[str, float] | None = None
) -> StepVerdict:
    """Return the verdict on tasks that take these seconds."""
    profile = profile_of({"read": read, "exchange": exchange, "train": train})
    profile = changed(profile, blocked_s=blocked_s or {})
    return account(profile).verdict


def test_waiting_for_ranks_is_not_input() -> None:
    """Time off the CPU in a collective is one thing, preparing its input another."""
    bound = verdict(read=0.1, exchange=0.6, train=0.3, blocked_s={"exchange": 0.55}).bound
    assert bound == "collective-bound"
    assert verdict(read=0.1, exchange=0.6, train=0.3).bound == "input-bound"


def test_where_no_one_thing_takes_half_the_step_is_balanced() -> None:
    """The sentence says what the loop does instead."""
    found = verdict(read=0.4, exchange=0.2, train=0.4, blocked_s={"exchange": 0.2})
    assert found.bound == "balanced"
    assert found.why == (
        "No single cause takes half of the step: input 40%, compute 40%, collective 20%."
    )


def test_a_device_that_waits_for_its_host_makes_a_loop_host_bound() -> None:
    """A thread's time is computation without streams, and delays the device otherwise."""
    profile = profile_of({"read": 0.1, "exchange": 0.1, "train": 0.8})
    on_device = changed(profile, device_s={"train": 0.1})
    assert account(profile).verdict.bound == "compute-bound"
    assert account(on_device).verdict.bound == "host-bound"


def test_the_ceiling_is_what_the_longest_chain_or_the_cores_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work that waits needs no core; a floor above the step, by noise, is no loss."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    profile = profile_of({"read": 0.3, "exchange": 0.3, "train": 0.4})

    def ceiling(profile: ProfileResult) -> tuple[float, str]:
        found = account(profile).ceiling
        return round(found.saved_s, 9), found.limit

    assert ceiling(profile) == (0.5, "2 cores for all tasks")
    with monkeypatch.context() as on_two_ranks:
        on_two_ranks.setenv("LOCAL_WORLD_SIZE", "2")
        assert ceiling(profile) == (0.0, "1 core for all tasks")
    waits = changed(profile, blocked_s={"read": 0.3, "exchange": 0.3, "train": 0.0})
    assert ceiling(waits) == (0.6, "one thread: train alone")
    assert ceiling(of_step(waits, 0.3))[0] == 0.0


def test_what_threads_of_libraries_compute_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that waits for them is off the CPU; two ranks were once promised 35%."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    profile = profile_of({"read": 0.3, "exchange": 0.3, "train": 0.4})
    waits = changed(profile, blocked_s={"read": 0.3, "exchange": 0.3, "train": 0.0})
    found = account(waits, cpu_s=0.9).ceiling
    assert (round(found.saved_s, 9), found.limit) == (0.1, "1 core for all tasks")


def test_a_loader_that_works_ahead_sets_the_floor() -> None:
    """No plan makes it faster; a loader that takes turns can get a thread."""
    profile = profile_of({"read": 0.3, "exchange": 0.3, "train": 0.4})
    waits = changed(profile, blocked_s=profile.host_s)
    for works_ahead, saved_s in ((True, 0.3), (False, 0.6)):
        pace = LoaderPace(0.7, 0.0, works_ahead, 0, False)
        found = account(replace(waits, loader=pace)).ceiling
        assert round(found.saved_s, 9) == saved_s
        assert (found.limit == "the loader, which makes a batch in 700 ms") == works_ahead


def test_the_start_of_a_pass_is_a_part_of_the_step() -> None:
    """The others are the remainder: together they are the step."""
    profile = profile_of({"read": 0.3, "exchange": 0.3, "train": 0.4})
    pace = LoaderPace(0.1, 0.25, True, 0, False)
    parts = account(replace(profile, loader=pace)).parts
    assert sum(part.seconds for part in parts) == pytest.approx(1.0)
    assert [part.seconds for part in parts if part.task == START] == pytest.approx([0.25])


@pytest.mark.parametrize(
    ("saved_s", "spread_s", "worth"),
    [(0.04, 0.03, True), (0.04, 0.05, False), (0.02, 0.0, False), (0.03, 0.0, True)],
)
def test_a_ceiling_is_worth_it_beyond_noise_and_a_few_percent(
    saved_s: float, spread_s: float, worth: bool
) -> None:
    """The figures are for a step of a second."""
    ceiling = Ceiling(Estimate(1.0, spread_s), 1 - saved_s)
    assert ceiling.is_worth_it == worth


def test_a_promise_is_kept_where_the_intervals_meet() -> None:
    """Nothing is printed if it was not tried."""
    advice = Advice("move", "read", Estimate(0.010, 0.002), "thread 'io'", "", PLAN)
    assert PromisedChange(advice).kept is None
    assert PromisedChange(advice, Estimate(0.007, 0.001)).kept
    assert PromisedChange(advice, Estimate(0.006, 0.001)).kept is False
