"""The duration of an evaluation with work before and after its model, over its lower bound.

Tokens take 15 ms, the model 20 ms, labels 18 ms, and there are 40 batches. The functions sleep and
compute a little. The bound is the time of the model, plus the tokens of the first batch and the
labels of the last one. Two more rows: labels of 54 ms on three threads, and a second function of 18
ms after the labels.
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
"""The most that our time may be over the bound."""


def waits(seconds: float, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that sleeps for ``seconds`` and then calls ``function``."""

    def run(value: Any) -> Any:
        time.sleep(seconds)
        return function(value)

    return run


def rows(rounds: int = 5, batches: int = BATCHES, scale: float = 1) -> list[Row]:
    """Return three rows: one function after the model, a slow one on threads, and two functions."""
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
    """Return the time of one pass."""
    begin = time.perf_counter()
    loop = swpipe.through(range(batches), *functions, workers=workers)
    assert len([*loop]) == batches
    return time.perf_counter() - begin
