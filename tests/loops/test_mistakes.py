"""Wrong arguments of loops are refused at the call, with the value and the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import swpipe
from swpipe.errors import PlanError
from swpipe.loops import EvenData, StopRequest, pad_with
from swpipe.plans import prefetch_plan
from tests.loops.ordinary_loops import Training

AHEAD: Any = swpipe.ahead
OVERLAP: Any = swpipe.overlap
STOP: Any = StopRequest
EVEN: Any = EvenData
PREFETCH: Any = prefetch_plan
TASKS = Training().functions()


def train(ctx: Any) -> None:
    """Do nothing."""


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: AHEAD([1], 3), TypeError, "functions from a batch to a batch, and 3"),
    (lambda: AHEAD([1], prefetch=0), ValueError, "prefetch is 0: give 1 or more"),
    (
        lambda: AHEAD([1], torch.neg, prefetch=1),
        ValueError,
        "give 2 or more with functions",
    ),
    (lambda: AHEAD(3), TypeError, "the loader is 3: give an iterable"),
    (lambda: AHEAD([1]).nothing, AttributeError, "nothing"),
    (lambda: AHEAD([1], abs, workers=0), ValueError, "number of threads for the functions, 1 or m"),
    (lambda: AHEAD([1], abs, workers=True), ValueError, "number of threads for the functions"),
    (lambda: AHEAD([1], workers=2), ValueError, r"DataLoader\(num_workers=\)"),
    (lambda: PREFETCH(["read"], ["train"], workers=0), ValueError, "give 1 thread or more"),
    (lambda: OVERLAP(None, TASKS), TypeError, "the loader is None: give an iterable of batch"),
    (lambda: OVERLAP([1], [lambda ctx: None]), TypeError, "has no name for a task"),
    (lambda: OVERLAP([1], [3]), TypeError, "a task is a function of the context, not 3"),
    (lambda: OVERLAP([1], TASKS[0]), TypeError, "give the tasks.* in a list"),
    (lambda: OVERLAP([1], []), PlanError, "there are no tasks"),
    (lambda: OVERLAP([1], [train, train]), PlanError, "^this cannot run: 2 problems\n(?!.*plan)"),
    (lambda: OVERLAP([1], TASKS, pull_ahead=1), TypeError, "pull_ahead is 1: give True, False"),
    (lambda: OVERLAP([1], TASKS, depth=3), TypeError, "'depth'"),
    (lambda: OVERLAP([1], TASKS, device="cuda"), ValueError, "'cuda' is not on this machine"),
    (lambda: OVERLAP([1], TASKS, device="gpu"), ValueError, "'gpu' is unknown to torch: give"),
    (
        lambda: OVERLAP([1], TASKS, start_iteration=-1),
        ValueError,
        "start_iteration is -1: give the number of the first iteration, an integer from 0",
    ),
    (lambda: STOP(["TERM"]), ValueError, "signals has 'TERM'.*such as 'SIGTERM'"),
    (lambda: STOP("SIGKILL"), ValueError, "signals has 'SIGKILL'.*can handle"),
    (lambda: STOP(after_s=0), ValueError, "after_s is 0: give seconds, above 0"),
    (lambda: STOP(after_s=True), ValueError, "after_s is True"),
    (lambda: STOP().watch([], every=0), ValueError, "every is 0: give an integer from 1"),
    (lambda: EVEN("wait"), ValueError, "ends is 'wait': give 'stop', 'pad' or 'error'"),
    (lambda: EVEN("pad"), ValueError, "pad is not given: give a pad with ends='pad'"),
    (lambda: EVEN(pad=pad_with(1)), ValueError, "ends is 'stop' and pad is given"),
    (lambda: EVEN(ahead=-1), ValueError, "ahead is -1"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes_are_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    """They are refused at the call."""
    with pytest.raises(error, match=f"(?s){words}"):
        call()
