"""Workloads register themselves: the commands work on them without knowing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.cli.app import format_outcome
from swpipe.plans.prefetch import prefetch_plan
from swpipe.tasks import workload as registry
from swpipe.tasks.workload import InputError, Option, Training, Workload, register
from swpipe.tuning import Candidate
from tests.cli.test_cli import refused, run


@dataclass(frozen=True)
class ToyConfig:
    """How large a batch is, and where."""

    size: int
    device: str


class ToyJob:
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

    def batches(self, steps: int | None = None) -> Iterator[int]:
        """The numbers from 0 to 19."""
        return islice(iter(range(20)), steps)

    def over_ranks(self, value: Any) -> list[Any]:
        """One rank."""
        return [value]

    def close(self) -> None:
        """Note it."""
        self.closed = True


class ToyRun:
    """A toy job in training."""

    def __init__(self, name: str, config: ToyConfig, plan: PipelinePlan, steps: int | None) -> None:
        self.name, self.steps = name, steps or 20
        self.job = ToyJob(config)
        self.pipe = SWPipeline(plan, self.job.tasks(), device=config.device)
        self._batches = self.job.batches(self.steps)
        self.steps_per_s = 1.0

    def advance(
        self, steps: int, on_step: Callable[[], object] | None = None, *, timed: bool = True
    ) -> None:
        """Train on the next steps."""
        for _ in self.pipe.iterate(islice(self._batches, steps)):
            if on_step:
                on_step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.pipe.close()


def configure(options: Mapping[str, Any]) -> ToyConfig:
    """From ``--toy-size``."""
    if options["toy_size"] == 13:
        raise InputError("13 is not a size")
    return ToyConfig(options["toy_size"], options["device"] or "cpu")


def report(runs: Sequence[ToyRun]) -> str:
    """The sums."""
    return "\n".join(f"{run.name}: {run.job.total.tolist()}" for run in runs)


PLANS = {"ahead": lambda: prefetch_plan(["load"], ["add"])}
TOY = Workload(
    "toy",
    {"serial": lambda: PipelinePlan.serial(["load", "add"]), **PLANS},
    "ahead",
    configure,
    ToyJob,
    options=(Option("toy_size", int, 2, "Numbers in a batch.", minimum=1),),
    training=Training(ToyRun, report),
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
    assert capsys.readouterr().out == "serial: [6.0, 6.0, 6.0]\nahead: [6.0, 6.0, 6.0]\n"


@pytest.mark.usefixtures("toy")
def test_a_registered_workload_is_planned_and_profiled(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its tasks are in the plan that is written, its usual plan is the one that is profiled."""
    plan = tmp_path / "plan.toml"
    assert run("plan", "infer", "--workload", "toy", "--output", plan) == 0
    assert PipelinePlan.load(plan).deps == (("add", "load"),)
    assert run("plan", "check", "ahead", "--workload", "toy") == 0
    assert run("plan", "show", "ahead") == 0
    capsys.readouterr()
    assert run("profile", "--workload", "toy", "--rounds", 2) == 0
    assert "\nload " in capsys.readouterr().out


@pytest.mark.usefixtures("toy")
def test_a_workloads_own_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """By their minimum, and by the workload."""
    assert run("train", "--workload", "toy", "--toy-size", 0) == 2
    assert "--toy-size" in capsys.readouterr().err
    told = refused(capsys, "train", "--workload", "toy", "--toy-size", 13)
    assert told == "swpipe: 13 is not a size"


@pytest.mark.usefixtures("toy")
def test_a_workload_that_cannot_be_trained_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what can be done about it."""
    monkeypatch.setitem(registry._registered, "toy", replace(TOY, training=None))
    told = refused(capsys, "train", "--workload", "toy")
    assert "workload toy: train cannot train it; use profile or plan" in told


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
