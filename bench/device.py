"""Loops on a device with launch costs: swpipe compared with a plain loop and a manual prefetcher.

The loops are eight shapes of host work, device work and copies (``device_shapes``), and the
published costs of a recommender's step under HSTU's plan. The device is CUDA, or otherwise the test
backend. A process cannot unload the test backend, so this section is among the last.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

import swpipe
from bench import recsys14
from bench.device_shapes import (
    Shape,
    copy_ms,
    launch_ms,
    shapes,
)
from bench.measure import Row, Spread, compared, interleaved, off_by
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.device import copy_task
from swpipe.planning import auto_plan
from swpipe.planning.simulation.interval import interval_us
from swpipe.plans import prefetch_plan
from swpipe.plans.torchrec.hstu_schedule import hstu_plan, hstu_schedule
from swpipe.profiler import measure_costs
from tests import backend
from tests.support.device_work import device, spin

Loop: TypeAlias = Callable[[Shape, Tensor], Generator[Any]]
"""A generator that trains one step for each ``next``; the tensor adds up the batches."""

WATCHED = 20
"""Steps of a loop before its first turn; its first 16 are watched."""

LONG, SHORT = (12, 8), (2, 3)
"""Steps in each of its turns, before the clock starts and on it. Where batches are prepared ahead,
the first use up what was prepared between the turns; where not, turns are shorter and more."""


# ------------------------------------------------------------------------- hand-written loops


def plain(shape: Shape, total: Tensor) -> Generator[None]:
    """Run a plain loop: copy, exchange, train."""
    for batch in shape.batches:
        shape.train(shape.exchange(batch.to(device(), non_blocking=True)), total)
        yield


def prefetcher(shape: Shape, total: Tensor, *, pin: bool = False) -> Generator[None]:
    """Copy and exchange the next batch on a side stream while the current batch is trained on."""
    side, batches = torch.Stream(device=device()), iter(shape.batches)

    def ahead() -> Tensor | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with side:
            batch = batch.pin_memory() if pin else batch
            return shape.exchange(batch.to(device(), non_blocking=True))

    coming = ahead()
    while coming is not None:
        here = torch.accelerator.current_stream()
        here.wait_stream(side)
        now = coming
        now.record_stream(here)
        coming = ahead()
        shape.train(now, total)
        yield


# -------------------------------------------------------------------------------- swpipe's


def tasks_of(shape: Shape, total: Tensor) -> list[PipelineTask]:
    """Return the tasks after the copy: an exchange if the shape has one, and the training."""

    def exchange(ctx: IterContext) -> None:
        ctx.batch = shape.exchange(ctx.batch)

    def train(ctx: IterContext) -> None:
        shape.train(ctx.batch, total)

    train_task = PipelineTask("train", train)
    if not shape.exchange_ms:
        return [train_task]
    return [PipelineTask("exchange", exchange, pure=True, reads=["batch"]), train_task]


def serial(shape: Shape, total: Tensor) -> Generator[Any]:
    """Run the plain loop's order under a serial plan."""

    def copy(ctx: IterContext) -> None:
        ctx.batch = ctx.batch.to(device(), non_blocking=True)

    tasks = [PipelineTask("copy", copy), *tasks_of(shape, total)]
    return _running(PipelinePlan.serial(tasks), tasks, shape)


def overlapped(shape: Shape, total: Tensor) -> Generator[Any]:
    """Run the loop with ``swpipe.overlap``."""
    with swpipe.overlap(shape.batches, tasks_of(shape, total), device=str(device())) as loop:
        yield from loop


def prefetched(shape: Shape, total: Tensor) -> Generator[Any]:
    """Run ``prefetch_plan`` with ``device=``."""
    *feed, train = tasks_of(shape, total)
    plan = prefetch_plan(feed, [train], device=str(device()))
    return _running(plan, plan.tasks, shape)


def planned(shape: Shape, total: Tensor) -> Generator[Any]:
    """Run the plan that ``auto_plan`` makes from measured costs."""
    tasks = [copy_task(str(device())), *tasks_of(shape, total)]
    side = {"copy": "copy", "exchange": "ahead"}
    names = [task.name for task in tasks]
    base = PipelinePlan(
        {task: TaskSchedule(stream=side.get(task.name)) for task in tasks},
        deps=list(zip(names[1:], names, strict=False)),
        order=names,
    )
    with SWPipeline(base, tasks, device=str(device()), check_effects=False) as pipe:
        costs = measure_costs(pipe, shape.batches[:4])
    return _running(auto_plan(base, costs, streams=True).plan, tasks, shape)


def _running(plan: PipelinePlan, tasks: Iterable[PipelineTask], shape: Shape) -> Generator[Any]:
    with SWPipeline(plan, tasks, device=str(device()), check_effects=False) as pipe:
        for ctx in pipe.iterate(shape.batches):
            yield ctx
            del ctx


# ------------------------------------------------------------------------------ measuring


def steps_ms(loop: Iterator[object], lead_in: int, timed: int) -> float:
    """Return the device time per step in the steady state, from the end of one step to another."""
    begin, end = (torch.Event(device=device(), enable_timing=True) for _ in range(2))
    for steps, event in ((lead_in, begin), (timed, end)):
        for _ in range(steps):
            next(loop)
        event.record()
    end.synchronize()
    torch.accelerator.synchronize()
    return begin.elapsed_time(end) / timed


def in_turn_ms(loops: Sequence[Loop], shape: Shape, rounds: int) -> list[list[float]]:
    """Return the times per step of loops that alternate every few steps, so drift affects all."""
    steps = LONG if shape.gains else SHORT
    rounds *= sum(LONG) // sum(steps)
    least = WATCHED + rounds * sum(steps)
    shape = replace(shape, batches=[*shape.batches] * (least // len(shape.batches) + 3))
    totals = [torch.zeros(1, device=device()) for _ in loops]
    started = [loop(shape, total) for loop, total in zip(loops, totals, strict=True)]
    with ExitStack() as ends:
        for each in started:
            ends.callback(each.close)
            for _ in range(WATCHED):
                next(each)
        times = interleaved(
            rounds,
            *(partial(steps_ms, each, *steps) for each in started),
            partial(copy_ms, shape),
            partial(launch_ms, shape),
        )
        for each in started:  # some have trained ahead
            deque(each, maxlen=0)
        torch.accelerator.synchronize()
    if len(sums := {total.item() for total in totals}) > 1:
        raise AssertionError(f"{shape.what}: the loops' sums differ: {sorted(sums)}")
    return times


def shape_rows(shape: Shape, rounds: int) -> list[Row]:
    """Return the rows of one shape: swpipe's plans compared with the manual loops."""
    by_hand: list[Loop] = [plain, prefetcher]
    by_hand += [partial(prefetcher, pin=True)] if shape.pageable else []
    ours: list[Loop] = [serial, overlapped, prefetched, planned]
    with shape.on_device():
        times = in_turn_ms([*by_hand, *ours], shape, rounds)
    hands, (series, one_line, ready, auto), (copies, launches) = (
        times[: len(by_hand)],
        times[len(by_hand) : -2],
        times[-2:],
    )
    best_hand = min(hands, key=median)
    best = min((series, one_line, ready, auto), key=median)
    bounds = [shape.bound_ms(*each) for each in zip(copies, launches, strict=True)]
    limit = 1.00 if shape.gains else 1.01
    return [
        compared(f"{shape.what}: serial plan", series, hands[0], "ms", "plain loop", 1.01),
        compared(f"{shape.what}: overlap", one_line, best_hand, "ms", "best by hand", limit),
        compared(f"{shape.what}: prefetch_plan", ready, best_hand, "ms", "best by hand"),
        compared(f"{shape.what}: auto_plan", auto, best_hand, "ms", "best by hand"),
        compared(f"{shape.what}: best plan", best, bounds, "ms", "lower bound", 1.03),
    ]


# ----------------------------------------------------------------- the published costs of a step


class Collectives:
    """A communicator, whose collectives run in launch order."""

    def __init__(self) -> None:
        self._lock, self._last = threading.Lock(), torch.Event(device=device())
        self._last.record()

    def run(self, ms: float) -> None:
        """Launch a collective on the current stream."""
        with self._lock:
            here, after = torch.accelerator.current_stream(), torch.Event(device=device())
            self._last.wait(here)
            spin(ms)
            after.record(here)
            self._last = after


HSTU_BAR_MS = 111.0
HSTU_SCALE = 0.5
"""The published step takes 126 ms."""


def hstu_tasks() -> list[PipelineTask]:
    """Return HSTU's tasks as device work."""
    users: dict[str, Collectives] = {}
    costs = recsys14.hstu_costs().tasks

    def task(name: str) -> PipelineTask:
        ms = HSTU_SCALE * costs[name].device_us / 1e3
        used = [users.setdefault(what, Collectives()) for what in costs[name].resources]
        work = used[0].run if used else spin
        return PipelineTask(name, lambda ctx: work(ms))

    return [task(name) for name in costs]


def hstu_ms(plan: PipelinePlan | None, skipped: int = 6, timed: int = 16) -> float:
    """Return the time per step under a plan, or serially (None), in ms at full scale."""
    tasks, seconds = hstu_tasks(), 0.0
    under = plan or PipelinePlan.serial(tasks)
    with SWPipeline(under, tasks, device=str(device()), check_effects=False) as pipe:
        for number, _ in enumerate(pipe.iterate(range(skipped + timed + 6)), start=1):
            if number in (skipped, skipped + timed):
                torch.accelerator.synchronize()
                seconds = time.perf_counter() - seconds
    return seconds / timed * 1e3 / HSTU_SCALE


def hstu_rows(rounds: int) -> list[Row]:
    """Compare HSTU's default plan with a serial run and with its predicted interval."""
    plan = hstu_plan(hstu_schedule(prefetch=True, prefetch_depth=1, shuffled=True), None)
    in_turn, ours = interleaved(rounds, partial(hstu_ms, None), partial(hstu_ms, plan))
    predicted = [interval_us(plan, recsys14.hstu_costs(), streams=True) / 1e3] * rounds
    spread = off_by(predicted, ours)
    return [
        compared("HSTU's costs, default plan", ours, in_turn, "ms", "one by one"),
        compared("  of which it may take", ours, [HSTU_BAR_MS] * rounds, "ms", "", 1.0),
        Row(
            "  predicted",
            f"{predicted[0]:.2f} ms",
            f"measured {Spread.of(ours).text()} ms",
            spread,
            1.03,
        ),
    ]


def rows(rounds: int = 3) -> list[Row]:
    """Return the rows of all shapes and of the published costs."""
    if device().type == "cpu":
        return [Row("loops on a device", f"skipped: {backend.why_not()}")]
    found = [row for shape in shapes() for row in shape_rows(shape, rounds)]
    return [*found, *hstu_rows(rounds)]
