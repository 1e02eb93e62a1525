"""Workloads register themselves: the commands work on them without knowing them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask
from swpipe.cli.app import format_outcome
from swpipe.cli.user_inputs import Opened
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks import workload as registry
from swpipe.tasks.workload import InputError, Job, Option, Workload, register
from swpipe.tuning import Candidate
from tests.cli.test_cli import refused, run


@dataclass(frozen=True)
class ToyConfig:
    """How large a batch is, and where."""

    size: int
    device: str


class ToyJob(Job):
    """Load a batch, add it to a sum."""

    def __init__(self, config: ToyConfig) -> None:
        self.config = config
        self.total = torch.zeros(config.size)
        self.closed = False

    def tasks(self) -> tuple[PipelineTask, ...]:
        """Two."""
        return PipelineTask("load", self.load, pure=True), PipelineTask("add", self.add)

    def load(self, ctx: IterContext) -> None:
        """A batch from a number."""
        ctx.x = torch.full((self.config.size,), float(ctx.batch))

    def add(self, ctx: IterContext) -> None:
        """The sum so far."""
        self.total.add_(ctx.x)

    def batches(self, steps: int | None = None, /) -> Iterator[int]:
        """The numbers from 0 to 19."""
        return islice(iter(range(20)), steps)

    def results(self) -> dict[str, str]:
        """The sums."""
        return {"sums": str(self.total.tolist())}

    def close(self) -> None:
        """Note it."""
        self.closed = True


def configure(options: Mapping[str, Any]) -> ToyConfig:
    """From ``--toy-size``."""
    if options["toy_size"] == 13:
        raise InputError("13 is not a size")
    return ToyConfig(options["toy_size"], options["device"] or "cpu")


PLANS = {"ahead": lambda: prefetch_plan(["load"], ["add"])}
TOY = Workload(
    "toy",
    {"serial": lambda: PipelinePlan.serial(["load", "add"]), **PLANS},
    "ahead",
    configure,
    ToyJob,
    options=(Option("toy_size", int, 2, "Numbers in a batch.", minimum=1),),
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy workload, registered for one test."""
    registry.workloads()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register(TOY)


@pytest.mark.usefixtures("toy")
def test_a_registered_workload_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """Under its own plans, with its own options; it reports what came out."""
    args = ("--workload", "toy", "--compare", "serial,ahead", "--steps", 4, "--toy-size", 3)
    assert run("train", *args) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"^serial +4 .*\[6.0, 6.0, 6.0\]\nahead +4 .*\[6.0, 6.0, 6.0\]\n", told, re.MULTILINE
    )


@pytest.mark.usefixtures("toy")
def test_a_registered_workload_is_checked_and_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    """Its plans are known by their names, its usual plan is the one that is profiled."""
    assert run("plan", "check", "ahead", "--workload", "toy") == 0
    assert run("plan", "show", "ahead") == 0
    capsys.readouterr()
    assert run("profile", "--workload", "toy", "--rounds", 2) == 0
    assert "\nload " in capsys.readouterr().out


@pytest.mark.usefixtures("toy")
def test_all_batches_of_a_short_pass_are_measured() -> None:
    """A sample of three batches would not show what comes every tenth time."""
    context: Any = SimpleNamespace(obj=None)
    with Opened(context, "toy", {"device": None}) as opened:
        assert [*opened.measured()] == [*range(20)]


@pytest.mark.usefixtures("toy")
def test_a_workloads_own_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """By their minimum, and by the workload."""
    assert run("train", "--workload", "toy", "--toy-size", 0) == 2
    assert "--toy-size" in capsys.readouterr().err
    told = refused(capsys, "train", "--workload", "toy", "--toy-size", 13)
    assert told == "swpipe: 13 is not a size"


@pytest.mark.usefixtures("toy")
def test_names_are_unique() -> None:
    """Of workloads."""
    with pytest.raises(ValueError, match="'toy' is registered already"):
        register(replace(TOY, usual_plan="serial"))
    register(replace(TOY, name="other"))


def test_the_outcome_of_a_plan_is_compared_with_prediction_and_trial() -> None:
    """By how much training took more or less time than either."""
    tuned: Any = SimpleNamespace(
        chosen=Candidate("planned", PLANS["ahead"](), 8e3, rounds_us=(10e3,))
    )
    trained: Any = SimpleNamespace(steps_per_s=80.0)
    assert format_outcome(tuned, trained) == (
        "auto: expected 8.000 ms per step (+56.2%), tried 10.000 ms per step (+25.0%), got 12.500"
    )
