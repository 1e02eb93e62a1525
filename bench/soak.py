"""Five thousand steps on two ranks with random interruptions: memory flat, no batch lost.

Iterators have 0 to 11 batches; some are exhausted, others replaced with batches in flight. At
random moments, the same on both ranks and with batches in flight, the model switches between
training and evaluation, or is detached, called directly, its state saved, and attached again.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.measure import Row, resident_mib, tolerated

RESIDENT_MIB = 8
"""The limit for the process: the tensors of 5,000 leaked iterations are about 50 MiB."""

OBJECTS = 2000
"""The limit for Python objects: one leaked in each iteration would be 5,000."""


@dataclass
class Soaked:
    """The result on one rank.

    Attributes:
        steps: Outputs that came back.
        pulled: Batches that were pulled.
        switches: Changes between training and evaluation.
        detached: How often the model was detached and called by hand.
        ends: How many iterators came to their end.
        left: How many were left with batches in flight, or not begun.
        resident_mib: By how much the process grew after a warm-up.
        objects: By how many Python objects it grew.
        finite: Whether every output was.
    """

    steps: int = 0
    pulled: int = 0
    switches: int = 0
    detached: int = 0
    ends: int = 0
    left: int = 0
    resident_mib: float = 0.0
    objects: int = 0
    finite: bool = True


class Held(NamedTuple):
    resident_mib: float
    objects: int


def soak(steps: int, warm_up: int, name: str = "jagged_split_sparse_dist") -> Soaked:
    """Run the steps, on each rank."""
    from bench.dlrm import CPU, TINY, batches, dense_optimizer, sharded_dlrm
    from swpipe.tasks.torchrec import PipelineFactory

    model = sharded_dlrm(TINY)
    stock = batches(TINY, 16)
    done, draws = Soaked(), random.Random(0)

    def some() -> Iterator[Any]:
        for batch in draws.choices(stock, k=draws.randrange(12)):
            done.pulled += 1
            yield batch

    with PipelineFactory.create(
        name, model=model, optimizer=dense_optimizer(model), device=CPU
    ) as pipeline:
        before: Held | None = None
        while done.steps < steps:
            _one_iterator(pipeline, some(), draws, done, stock[0])
            if before is None and done.steps >= warm_up:
                before = _held()
        model.train()
        _to_the_end(pipeline, iter(()), done)
    assert before is not None
    after = _held()
    done.resident_mib = after.resident_mib - before.resident_mib
    done.objects = after.objects - before.objects
    return done


def _one_iterator(
    pipeline: Any, data: Iterator[Any], draws: random.Random, done: Soaked, batch: Any
) -> None:
    """Take some steps on one iterator, or all, with interruptions."""
    until = draws.choice((None, None, draws.randrange(12)))
    if until is None:
        _to_the_end(pipeline, data, done, draws, batch)
        return
    done.left += 1
    for _ in range(until):
        _interrupt(pipeline, draws, done, batch)
        if not _step(pipeline, data, done):
            return
    _drain(pipeline, done)


def _to_the_end(
    pipeline: Any,
    data: Iterator[Any],
    done: Soaked,
    draws: random.Random | None = None,
    batch: Any = None,
) -> None:
    while _step(pipeline, data, done):
        if draws is not None:
            _interrupt(pipeline, draws, done, batch)
    done.ends += 1


def _step(pipeline: Any, data: Iterator[Any], done: Soaked) -> bool:
    try:
        loss, _logits, _labels = pipeline.progress(data)
    except StopIteration:
        return False
    done.steps += 1
    done.finite &= bool(loss.isfinite())
    return True


def _drain(pipeline: Any, done: Soaked) -> None:
    for loss, _logits, _labels in pipeline.drain():
        done.steps += 1
        done.finite &= bool(loss.isfinite())


def _interrupt(pipeline: Any, draws: random.Random, done: Soaked, batch: Any) -> None:
    """Sometimes switch the mode, sometimes detach the model."""
    import torch

    model = pipeline.tasks.model
    if draws.random() < 0.05:
        _drain(pipeline, done)
        model.train(not model.training)
        done.switches += 1
    if draws.random() < 0.05:
        pipeline.detach()
        with torch.no_grad():
            loss, _output = model(batch)
        done.finite &= bool(loss.isfinite())
        model.state_dict()
        if draws.random() < 0.5:
            pipeline.attach()  # or else the next step does
        done.detached += 1


def _held() -> Held:
    gc.collect()
    return Held(resident_mib(), len(gc.get_objects()))


def rows(steps: int = 5000, warm_up: int = 1000) -> list[Row]:
    """Growth over its limits, of the rank that grew more."""
    if find_spec("torchrec") is None:
        return [Row("soak on two ranks", "skipped: there is no torchrec")]
    from bench.contest import on_ranks

    found: list[Soaked] = on_ranks(soak, steps, warm_up)
    one = found[0]
    for of_rank in found:
        if of_rank.steps != of_rank.pulled or not of_rank.finite:
            raise ValueError(f"batches lost, or losses that are no numbers: {of_rank}")
    resident = max(of_rank.resident_mib for of_rank in found)
    objects = max(of_rank.objects for of_rank in found)
    return [
        Row(
            f"soak on two ranks: {one.steps:,} steps",
            f"{one.ends:,} iterators to their end, {one.left:,} left with batches in flight",
            f"{one.switches:,} switches of mode, {one.detached:,} times detached and called",
        ),
        tolerated(f"resident memory after {one.steps:,} steps", resident, RESIDENT_MIB, "MiB", 1),
        tolerated(f"Python objects after {one.steps:,} steps", objects, OBJECTS, ""),
    ]
