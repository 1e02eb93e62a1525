"""An iteration keeps the mode in which it was admitted: a call in another mode is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelinePlan, SWPipeline
from tests.support.plans_for_tests import piped, tasks


@contextmanager
def double_precision() -> Iterator[None]:
    """Use float64 as the default dtype, as a loop's body may."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("mode", "told", "call"),
    [
        (torch.no_grad, "gradients off", lambda pipe, data: pipe.progress(data)),
        (torch.inference_mode, "inference mode", lambda pipe, _: pipe.drain()),
        (double_precision, "default dtype torch.float64", lambda pipe, data: pipe.progress(data)),
    ],
)
def test_another_mode_is_refused_while_iterations_are_in_flight(
    mode: Callable[[], AbstractContextManager[Any]], told: str, call: Callable[..., object]
) -> None:
    """Four batches were to be trained on; in evaluation mode they would not be."""
    seen: list[tuple[int, bool]] = []

    def note(ctx: IterContext) -> None:
        seen.append((ctx.batch, torch.is_grad_enabled()))

    data = iter(range(6))
    with SWPipeline(piped(), tasks(forward=note)) as pipe:
        pipe.progress(data)
        refused = rf"iterations in flight \(2\).*{told}.*drain"
        with mode(), pytest.raises(RuntimeError, match=refused):
            call(pipe, data)
        assert [ctx.batch for ctx in pipe.drain()] == [1, 2]
        assert [ctx.batch for ctx in pipe.iterate(data)] == [3, 4, 5]
    assert seen == [(batch, True) for batch in range(6)]


def test_another_mode_is_refused_while_pushed_batches_are_in_flight() -> None:
    """``flush`` itself refuses: a later call could be in the first mode again."""
    with SWPipeline(piped(), tasks()) as pipe:
        pipe.push(0)
        with torch.no_grad(), pytest.raises(RuntimeError, match="gradients off"):
            pipe.flush()
        assert [ctx.batch for ctx in pipe.flush()] == [0]


def test_without_iterations_in_flight_the_mode_may_change() -> None:
    """A plan with one stage has none in flight between two calls."""
    made = tasks()
    with SWPipeline(PipelinePlan.serial(made), made) as pipe:
        data = iter(range(2))
        pipe.progress(data)
        with torch.no_grad():
            pipe.progress(data)


def test_what_the_user_adds_to_the_mode_is_kept_as_well() -> None:
    """An example is a module's own mode, which torch does not know."""
    model = nn.Linear(1, 1)
    data = iter(range(4))
    mode = lambda: "training" if model.training else "evaluation"  # noqa: E731
    with SWPipeline(piped(), tasks(), mode=mode) as pipe:
        pipe.progress(data)
        model.eval()
        with pytest.raises(RuntimeError, match=r"gradients on, training, .*gradients on, eval"):
            pipe.progress(data)
        model.train()
        assert len(pipe.drain()) == 2
        model.eval()
        assert len(list(pipe.iterate(data))) == 1
