"""Loaders that Accelerate prepared, in a plan of one's own: refused ahead, or with their flags.

A pipeline that pulled such a loader ahead accumulated over other iterations without a word: it
stepped at [3, 7] where the plain loop steps at [3, 7, 9], and in the second epoch at others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from tqdm import tqdm

import swpipe
from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.errors import PlanError
from swpipe.plans import prefetch_plan
from tests.loops.framework_loops import (
    EPOCHS,
    STEPS,
    OfAccelerate,
    declared,
    loaders,
    plainly,
    train,
)

UNPACK, SHOW = "unpack batch", "show end_of_dataloader"


def compared(make: Callable[[], Any], plan: Callable[[list[str]], PipelinePlan]) -> list[int]:
    """Run a loop plainly and under a plan, compare all numbers; where the plan's steps were."""
    torch.manual_seed(3)
    expected = plainly(make())
    torch.manual_seed(3)
    loop = make()
    loader = swpipe.loops.AccelerateLoader(loop.loader)
    tasks = loader.tasks(declared(loop.tasks))
    with SWPipeline(plan([task.name for task in tasks]), tasks, device="cpu") as pipe:
        contexts = swpipe.loops.ResumableLoop(pipe, loader)
        found = train(loop, (contexts for _ in range(EPOCHS)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not GradientState().in_dataloader
    steps: list[int] = loop.steps
    return steps


def prefetched(names: list[str], **options: Any) -> PipelinePlan:
    """The loader and the first task run ahead."""
    return prefetch_plan([UNPACK, "decode"], [SHOW, *names[3:]], **options)


def _configured(**options: Any) -> Callable[[], OfAccelerate]:
    return lambda: OfAccelerate(dataloader_config=DataLoaderConfiguration(**options))


def _accumulating(**options: Any) -> Callable[[], OfAccelerate]:
    plugin = GradientAccumulationPlugin(num_steps=4, **options)
    return lambda: OfAccelerate(gradient_accumulation_plugin=plugin)


class Skipping(OfAccelerate):
    """A pass that begins in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = self.accelerator.skip_first_batches(self.loader, 3)


KINDS: dict[str, tuple[Callable[[], OfAccelerate], list[int]]] = {
    "as it is": (OfAccelerate, STEPS),
    "a single batch": (lambda: OfAccelerate(rows=4), [0, 1]),
    "uneven batches": (_configured(even_batches=False), STEPS),
    "a stateful loader": (_configured(use_stateful_dataloader=True), STEPS),
    "over the end of an epoch": (_accumulating(sync_with_dataloader=False), [3, 7, 11, 15, 19]),
    "bfloat16": (lambda: OfAccelerate(mixed_precision="bf16"), STEPS),
    "skip_first_batches": (Skipping, [3, 6, 10, 13]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_prepared_loader_in_a_plan_of_ones_own(kind: str) -> None:
    """Losses, rates, flags, gathered rows, evaluations in mid-epoch by another prepared loader."""
    make, steps = KINDS[kind]
    assert compared(make, prefetched) == steps
    if kind == "as it is":
        assert compared(make, PipelinePlan.serial) == steps
        assert compared(make, lambda names: prefetched(names, depth=5)) == steps


# ------------------------------------------------------------------------------------- refused


def through_a_generator(loader: Any) -> Iterator[Any]:
    """As user code may wrap it."""
    yield from loader


WRAPS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda loader: loader,
    "its iterator": iter,
    "enumerated": enumerate,
    "a progress bar": lambda loader: tqdm(loader, disable=True),
    "a generator": through_a_generator,
    "chained": lambda loader: chain(loader, []),
}


def used(ctx: Any) -> None:
    """Any task."""


def made(depth: int = 2, pull_group: str | None = None) -> SWPipeline[Any]:
    """A pipeline that pulls ``depth`` - 1 batches ahead."""
    plan = PipelinePlan(
        schedule={"used": TaskSchedule(0)}, pipeline_depth=depth, pull_group=pull_group
    )
    return SWPipeline(plan, [swpipe.task(used)], device="cpu")


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_prepared_loader_that_is_pulled_ahead_is_refused(wrap: str) -> None:
    """Whatever wraps it; Accelerate forgets the pass, and other loaders are taken then."""
    loader = OfAccelerate().loader
    with made(2, "loader") as pipe:
        for call in (pipe.run, lambda given: pipe.fill_pipeline(iter(given))):
            with pytest.raises(RuntimeError, match=r"Accelerate prepared.*AccelerateLoader\("):
                call(WRAPS[wrap](loader))
            assert not GradientState().in_dataloader
        assert pipe.run(range(5)).iterations == 5


def test_an_iterator_that_has_begun_is_refused() -> None:
    """By its generator: it is known to Accelerate already. So is a batch that is pushed."""
    batches = iter(OfAccelerate().loader)
    batch = next(batches)
    for call in (lambda: pipe.progress(batches), lambda: pipe.push(batch)):
        with made() as pipe, pytest.raises(RuntimeError, match="Accelerate prepared"):
            call()


def test_the_adapter_is_iterated_over_by_a_loop() -> None:
    """Which lets Accelerate forget the pass; a loader that was not prepared needs no adapter."""
    loader = swpipe.loops.AccelerateLoader(OfAccelerate().loader)
    with made() as pipe, pytest.raises(RuntimeError, match="swpipe.loops.ResumableLoop"):
        pipe.run(loader)
    with pytest.raises(TypeError, match="a loader that Accelerator.prepare returned, not a Data"):
        swpipe.loops.AccelerateLoader(loaders()[0])


def test_tasks_that_ask_before_the_flags_are_shown_are_refused() -> None:
    """The plan is verified for it: a task of which nothing is declared may ask."""
    loop = OfAccelerate()
    tasks = swpipe.loops.AccelerateLoader(loop.loader).tasks(declared(loop.tasks))
    plan = prefetch_plan([UNPACK, "decode", "forward"], [SHOW, "backward", "step"])
    with pytest.raises(PlanError, match="'forward'.*Accelerate's GradientState"):
        SWPipeline(plan, tasks, device="cpu")
