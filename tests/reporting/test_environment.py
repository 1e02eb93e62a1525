"""Findings from the machine, the environment and torch's settings, without a loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import swpipe.reporting.environment
from swpipe import PipelinePlan, TaskSchedule
from swpipe.device import resolve
from swpipe.reporting import Finding
from swpipe.reporting.environment import environment_findings
from tests.reporting.examined import rules
from tests.support.bare import bare_environment

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the environment of this machine."""
    bare_environment(monkeypatch)


def findings() -> list[Finding]:
    """Return the findings on this machine without a plan."""
    return list(environment_findings(resolve("cpu"), None, 0))


def groups(count: int) -> PipelinePlan:
    return PipelinePlan({f"t{i}": TaskSchedule(thread_group=f"group {i}") for i in range(count)})


@contextmanager
def set_to(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


@pytest.mark.parametrize(
    ("cores", "threads", "plan", "workers", "places"),
    [
        (CORES, 1, None, 0, []),
        (CORES, CORES + 1, None, 0, ["torch's intra-op threads"]),
        (1, 1, None, 2, ["loader"]),
        (2, 1, groups(3), 0, ["plan"]),
        (2, 2, groups(1), 2, ["machine"]),  # none is too many alone
    ],
)
def test_too_many_threads(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    threads: int,
    plan: PipelinePlan | None,
    workers: int,
    places: list[str],
) -> None:
    """They are of torch, of the loader, of the plan, or of all of them together."""
    monkeypatch.setattr(swpipe.reporting.environment, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = list(environment_findings(resolve("cpu"), plan, workers))
    assert rules(found) == [("threads", place) for place in places]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of the machine starts the same threads."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(CORES + 1))
    assert [one.place for one in findings()] == ["torch's intra-op threads"]


def test_settings_that_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of torch, Python and OpenMP; those of CUDA do not concern a loop on the CPU."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        set_to(sys.getswitchinterval, sys.setswitchinterval, 0.1),
    ):
        found = findings()
    assert {one.rule for one in found} == {"blocking-setting"}
    assert [one.place for one in found] == [
        "OMP_WAIT_POLICY=ACTIVE",
        "anomaly detection",
        "switch interval of 0.1 s",
    ]
