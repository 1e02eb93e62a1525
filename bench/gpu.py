"""Copies, computation and a second stream on CUDA, and in a manual loop; then ``bench.device``.

    memcpy      copy i + 1  (host to device)
    caller's    compute i   (matrix products)
    offload     offload i - 1  (device to host)

Each uses its own part of the machine, but all use the device's memory. Therefore their total time
is compared with that of a hand-written loop with streams and events. The loops of ``bench.device``
come first, in one table. ``python -m bench.gpu``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.measure import Row, Spread, interleaved, report
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

BAR = 1.02
DEPTH = 4
DEVICE = torch.device("cuda")
SIDE = 4096
"""The rows of a square matrix; in bfloat16 it takes 32 MiB."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount of work in an iteration."""

    copy_mib: int
    products: int
    offload_mib: int


class Work:
    """The tasks copy, compute and offload at given sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        elements = max(sizes.copy_mib * MIB // 2, SIDE * SIDE)
        self.host = torch.zeros(elements, dtype=torch.bfloat16).pin_memory()
        self.host[: SIDE * SIDE].normal_()
        self.weight = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=DEVICE)
        # Each iteration under way has one; the stream's order keeps the next one off it.
        back = self.host[: sizes.offload_mib * MIB // 2]
        self.back = [torch.empty_like(back).pin_memory() for _ in range(DEPTH)]

    def copy(self, ctx: IterContext) -> None:
        ctx.x = self.host.to(DEVICE, non_blocking=True)

    def compute(self, ctx: IterContext) -> None:
        matrix = ctx.x[: SIDE * SIDE].view(SIDE, SIDE)
        for _ in range(self.sizes.products):
            ctx.y = matrix @ self.weight

    def offload(self, ctx: IterContext) -> None:
        back = self.back[ctx.iter_idx % DEPTH]
        back.copy_(ctx.x[: back.numel()], non_blocking=True)

    def tasks(self) -> list[PipelineTask]:
        return [PipelineTask(fn.__name__, fn) for fn in (self.copy, self.compute, self.offload)]


def plan(group: str) -> PipelinePlan:
    """Return a plan on three streams; ``group`` is the thread group that launches the copy."""
    return PipelinePlan(
        {
            "copy": TaskSchedule(0, "memcpy", group),
            "compute": TaskSchedule(1),
            "offload": TaskSchedule(2, "offload"),
        },
        deps=[("compute", "copy"), ("offload", "compute")],
        pipeline_depth=DEPTH,
    )


def elapsed_ms(work: Callable[[], object]) -> float:
    """Return the time of ``work`` on the current stream of an idle device, in ms."""
    begin, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def alone_ms(fn: Callable[[IterContext], None], work: Work, repeats: int) -> float:
    """Return the device time of one task while nothing else runs, in ms."""
    ctx = IterContext(None, 0)
    work.copy(ctx)

    def several() -> None:
        for _ in range(repeats):
            fn(ctx)

    return elapsed_ms(several) / repeats


def interval_ms(pipe: SWPipeline, periods: int) -> float:
    """Return the device time from one iteration's end to the next in the steady state, in ms."""
    data: Iterator[None] = itertools.repeat(None, periods + 3 * DEPTH)

    def steady() -> None:
        for _ in range(periods):
            pipe.progress(data)

    for _ in range(2 * DEPTH):
        pipe.progress(data)
    begin, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    begin.record()
    steady()
    end.record()
    pipe.drain()
    end.synchronize()
    return begin.elapsed_time(end) / periods


def by_hand_ms(work: Work, periods: int) -> float:
    """Return the same interval of a manual loop on three streams, in ms."""
    memcpy, offload = torch.cuda.Stream(), torch.cuda.Stream()
    here = torch.cuda.current_stream()

    def steady(count: int) -> None:
        for i in range(count):
            ctx = IterContext(None, i)
            with torch.cuda.stream(memcpy):
                work.copy(ctx)
            here.wait_stream(memcpy)
            ctx.x.record_stream(here)
            work.compute(ctx)
            offload.wait_stream(here)
            with torch.cuda.stream(offload):
                ctx.x.record_stream(offload)
                work.offload(ctx)
            if i >= DEPTH:
                ends[i % DEPTH].synchronize()  # not more than so many iterations ahead
            ends[i % DEPTH].record(here)

    ends = [torch.cuda.Event() for _ in range(DEPTH)]
    steady(2 * DEPTH)
    torch.cuda.synchronize()
    return elapsed_ms(lambda: (steady(periods), here.wait_stream(offload))) / periods


def sized(copy_ms: float, compute_ms: float, offload_ms: float) -> Sizes:
    """Return the sizes at which the tasks take about these times on this machine."""
    probe = Work(Sizes(128, 8, 128))
    for fn in (probe.copy, probe.compute, probe.offload) * 3:  # also lets the clock rise
        alone_ms(fn, probe, 20)

    def scaled(fn: Callable[[IterContext], None], size: int, target_ms: float) -> int:
        return max(1, round(size * target_ms / alone_ms(fn, probe, 20)))

    return Sizes(
        scaled(probe.copy, 128, copy_ms),
        scaled(probe.compute, 8, compute_ms),
        scaled(probe.offload, 128, offload_ms),
    )


def interval_row(
    what: str, sizes: Sizes, group: str, bar: float | None, rounds: int, periods: int
) -> Row:
    """Compare one plan's interval with that of a manual loop; show the times of its tasks alone."""
    work = Work(sizes)
    with SWPipeline(plan(group), work.tasks(), device=DEVICE) as pipe:
        interval_ms(pipe, 5)
        *alone, by_hand, ours = interleaved(
            rounds,
            *(partial(alone_ms, task.fn, work, 10) for task in work.tasks()),
            partial(by_hand_ms, work, periods),
            lambda: interval_ms(pipe, periods),
        )
    copy, compute, offload = (Spread.of(times).median for times in alone)
    return Row(
        what=what,
        ours=f"{Spread.of(ours).text()} ms",
        beside=f"by hand {Spread.of(by_hand).text()} ms; alone: copy {copy:.2f}, "
        f"compute {compute:.2f}, offload {offload:.2f} ms",
        ratio=Spread.of(a / b for a, b in zip(ours, by_hand, strict=True)),
        bar=bar,
    )


def rows(rounds: int = 7, periods: int = 40) -> list[Row]:
    """Return rows in which compute takes longest, launched by one thread or two, and the copy."""
    compute_bound, copy_bound = sized(7.0, 10.0, 6.0), sized(10.0, 6.0, 1.0)
    return [
        interval_row("compute busiest, one thread", compute_bound, "default", BAR, rounds, periods),
        interval_row("compute busiest, copy thread", compute_bound, "io", BAR, rounds, periods),
        interval_row("copy busiest, one thread", copy_bound, "default", BAR, rounds, periods),
    ]


def main() -> int:
    if not torch.accelerator.is_available() or not torch.cuda.is_available():
        print("bench.gpu: skipped: torch finds no CUDA device on this machine")
        return 0
    from bench import device  # which loads the test backend where there is no CUDA

    print(f"on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return report([*device.rows(), *rows(rounds=3)])


if __name__ == "__main__":
    sys.exit(main())
