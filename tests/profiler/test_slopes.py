"""Slopes of tasks of known cost, on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.profiler import Slopes, measure_slopes
from swpipe.profiler.slopes import LEAST_S, one_of_each_other_group
from tests.profiler.sleepers import overlapped, sleepers
from tests.support.virtual_clock import TimedHost


def measured(plan: PipelinePlan, tasks: list[PipelineTask], **changes: Any) -> Slopes:
    """All slopes."""
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        return measure_slopes(pipe, None, **changes)


def values(slopes: Slopes) -> dict[str, tuple[float, float]]:
    """Task to both slopes."""
    return {
        slope.task: (
            pytest.approx(slope.slower.value_s, abs=1e-9),
            pytest.approx(slope.faster.value_s, abs=1e-9),
        )
        for slope in slopes.slopes
    }


def test_what_sets_the_pace_counts_in_full_and_what_is_hidden_not_at_all(host: TimedHost) -> None:
    """Reading takes half as long as the training that hides it."""
    tasks = sleepers(host, read=4, train=8)
    slopes = measured(overlapped({"io": ["read"], "default": ["train"]}), tasks)
    assert values(slopes) == {"read": (0.0, 0.0), "train": (1.0, 1.0)}
    assert slopes["train"].delay_s == pytest.approx(0.2 * 8e-3)
    assert slopes["train"].costs_s(-0.5) == pytest.approx(-4e-3)
    assert slopes["read"].costs_s(0.2) == pytest.approx(0.0)
    assert slopes.step_s == pytest.approx(8e-3)


def test_two_that_are_equally_long_are_limits_for_each_other(host: TimedHost) -> None:
    """Slower costs in full, faster saves nothing: what no exposed time can say."""
    tasks = sleepers(host, read=8, train=8)
    slopes = measured(overlapped({"io": ["read"], "default": ["train"]}), tasks)
    assert values(slopes) == {"read": (1.0, 0.0), "train": (1.0, 0.0)}


def test_on_one_thread_every_task_counts(host: TimedHost) -> None:
    """There is nobody who could hide it."""
    tasks = sleepers(host, read=4, train=8)
    slopes = measured(overlapped({"default": ["read", "train"]}), tasks)
    assert values(slopes) == {"read": (1.0, 1.0), "train": (1.0, 1.0)}


def test_a_hidden_task_becomes_the_pace_once_it_is_slow_enough(host: TimedHost) -> None:
    """Of a delay of 4 ms, one is hidden."""
    tasks = sleepers(host, read=7, train=8)
    plan = overlapped({"io": ["read"], "default": ["train"]})
    slopes = measured(plan, tasks, share=4 / 7)
    assert slopes["read"].slower.value_s == pytest.approx(3 / 4)


def test_a_task_that_takes_nothing_is_delayed_by_the_least(host: TimedHost) -> None:
    """A sleep cannot be shorter."""
    tasks = sleepers(host, nothing=0, train=8)
    slopes = measured(overlapped({"default": ["nothing", "train"]}), tasks)
    assert slopes["nothing"].delay_s == pytest.approx(LEAST_S)
    assert slopes["nothing"].slower.value_s == pytest.approx(1.0)


def test_a_task_that_no_shortcut_can_take_has_slopes(host: TimedHost) -> None:
    """And training is restored afterwards."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def read(ctx: IterContext) -> None:
        host.sleep(2e-3)
        ctx.rows = iter([1.0])

    def step(ctx: IterContext) -> None:
        host.sleep(3e-3)
        (next(ctx.rows) * weight).sum().backward()
        optimizer.step()

    tasks = [PipelineTask(fn.__name__, fn) for fn in (read, step)]
    slopes = measured(overlapped({"io": ["read"], "default": ["step"]}), tasks)
    assert slopes["read"].slower.value_s == pytest.approx(0.0)
    assert torch.equal(weight, torch.ones(3))
    assert weight.grad is None


def test_the_table(host: TimedHost) -> None:
    """A row per task."""
    tasks = sleepers(host, read=4, train=8)
    text = str(measured(overlapped({"io": ["read"], "default": ["train"]}), tasks))
    assert text.startswith("8.000 ms per iteration\n")
    assert "1.00 ± 0.00" in text
    assert "-4.000" in text


def test_a_share_of_nothing_is_refused() -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match=r"share is 0: give a number greater than 0, as 0\.2"):
        measured(PipelinePlan.serial(["a"]), [PipelineTask("a", print)], share=0)


def test_one_task_of_each_other_group() -> None:
    """It stands for its thread."""
    plan = overlapped({"io": ["read", "decode"], "copies": ["copy"], "default": ["train"]})
    assert one_of_each_other_group(plan, "copy") == ("read", "train")
    assert one_of_each_other_group(overlapped({"default": ["a", "b"]}), "b") == ()
