"""Work before and behind a model, in one changed line: a whole evaluation beside its bound.

Tokens 15 ms, model 20 ms, labels 18 ms, 40 batches; the functions wait, and compute a little. The
bound is the model's time, with the first batch's tokens before it and the last one's labels behind.
Also with labels of 54 ms on three threads, and with a second function behind, of 18 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import swpipe
from bench.measure import Row, Spread

TOKENS_S, MODEL_S, LABELS_S = 0.015, 0.020, 0.018
BATCHES = 40
MOST = 1.05
"""Ours over the bound."""


def waits(seconds: float, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that takes so long."""

    def run(value: Any) -> Any:
        time.sleep(seconds)
        return function(value)

    return run


def rows(rounds: int = 5, batches: int = BATCHES, scale: float = 1) -> list[Row]:
    """A row for one function behind the model, one that is slow, and two."""
    net = torch.nn.Linear(64, 64).eval()
    tokens = waits(TOKENS_S * scale, lambda number: torch.full((8, 64), float(number)))
    model = waits(MODEL_S * scale, net)
    labels = waits(LABELS_S * scale, lambda scores: scores.sum(1).tolist())
    slow = waits(3 * LABELS_S * scale, lambda scores: scores.sum(1).tolist())
    rounded = waits(LABELS_S * scale, lambda sums: [round(each, 3) for each in sums])
    least = TOKENS_S + batches * MODEL_S
    cases = (
        ("one function behind", (labels,), {}, LABELS_S),
        ("one on three threads", (slow,), {slow: 3}, 3 * LABELS_S),
        ("two functions behind", (labels, rounded), {}, 2 * LABELS_S),
    )
    found = []
    for what, behind, workers, last in cases:
        bound = (least + last) * scale
        functions = (tokens, swpipe.on_caller(model), *behind)
        times = [seconds(batches, functions, workers) for _ in range(rounds + 1)][1:]
        ratio = Spread.of(each / bound for each in times)
        ours = f"{Spread.of(1e3 * each for each in times).text()} ms"
        found.append(Row(what, ours, f"the bound {1e3 * bound:.0f} ms", ratio, MOST))
    return found


@torch.no_grad()
def seconds(batches: int, functions: tuple[Any, ...], workers: dict[Any, int]) -> float:
    """The time of one pass."""
    begin = time.perf_counter()
    loop = swpipe.through(range(batches), *functions, workers=workers)
    assert len([*loop]) == batches
    return time.perf_counter() - begin
