"""The life of a pipeline: failure, the next iterator, memory over thousands of iterations."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.device import AcceleratorDevice
from tests.device.accelerator.work import DEVICE, filled, run, spin, warm_up
from tests.support import unguarded

DEPTH = 4


def three_streams(fail_at: int | None = None) -> PipelinePlan:
    """Return a plan that copies from a thread, computes, and sums, on three streams."""

    def copy(ctx: IterContext) -> None:
        ctx.x = ctx.batch.to(DEVICE, non_blocking=True)

    def compute(ctx: IterContext) -> None:
        if ctx.iter_idx == fail_at:
            raise ValueError("as planned")
        ctx.y = ctx.x * 2.0
        ctx.x = ctx.y + 1.0

    def total(ctx: IterContext) -> None:
        ctx.total = ctx.y.sum()
        del ctx.y

    return PipelinePlan(
        {
            PipelineTask("copy", copy): TaskSchedule(0, "memcpy", "io"),
            PipelineTask("compute", compute): TaskSchedule(1),
            PipelineTask("total", total): TaskSchedule(2, "side"),
        },
        deps=[("compute", "copy"), ("total", "compute")],
        pipeline_depth=DEPTH,
    )


def pinned(elements: int) -> Tensor:
    """Return a batch of ones in pinned memory."""
    return torch.ones(elements).pin_memory()


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def held() -> tuple[int, int]:
    """Return the bytes that tensors have allocated, and those that the allocator has reserved."""
    torch.accelerator.synchronize()
    gc.collect()
    return torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()


class Counting(AcceleratorDevice):
    """A device that counts the events it makes."""

    made = 0

    def new_event(self, *, timing: bool = False) -> Any:
        self.made += 1
        return super().new_event(timing=timing)


def test_a_thousand_iterations_leave_memory_flat() -> None:
    """Device memory, host memory and the number of events are the same as after warm-up."""
    batch = pinned(2**16)
    warm_up()
    device = Counting(DEVICE)
    data = iter([batch] * 1300)
    with SWPipeline(three_streams(), device=device) as pipe:
        for _ in range(200):
            pipe.progress(data)
        allocated, reserved = held()
        resident, events = resident_mib(), device.made
        for _ in range(1000):
            pipe.progress(data)
        later_allocated, later_reserved = held()
        # The worker may be a few batches of 256 KiB further or less far than it was, and an
        # allocator may keep some of what was freed. A thousand kept batches would be 250 MiB.
        assert later_allocated - allocated < 16 * 2**20
        assert later_reserved - reserved < 32 * 2**20
        assert resident_mib() - resident < 64.0
        assert device.made == events
        pipe.drain()


def peak_blocks(iterations: int) -> float:
    """Return the largest number of blocks in use, including those that a stream still uses."""
    warm_up()
    torch.accelerator.empty_cache()
    block = filled(0.0).nbytes

    def work(ctx: IterContext) -> None:
        ctx.x = filled(1.0)
        spin(2.0)

    plan = PipelinePlan(
        {
            PipelineTask("work", work): TaskSchedule(0, "side"),
            PipelineTask("end", lambda ctx: None): TaskSchedule(2),
        },
        deps=[("end", "work")],
    )
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_stats()["active_bytes.all.current"]
    run(plan, range(iterations))
    return (torch.accelerator.memory_stats()["active_bytes.all.peak"] - before) / block


def test_memory_is_bounded_by_depth_and_run_ahead() -> None:
    """Few more blocks than those of these iterations are alive, however fast the host is."""
    assert peak_blocks(60) <= 6.1


def test_without_back_pressure_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that runs ahead piles up blocks that the device has not finished with."""
    unguarded.back_pressure(monkeypatch)
    assert peak_blocks(60) > 10


def test_a_failed_run_leaves_nothing_and_the_next_is_right() -> None:
    """The failure is raised unchanged; device memory is freed; the pipeline runs again."""
    batch = pinned(2**20)
    warm_up()
    before = held()[0]
    with SWPipeline(three_streams(fail_at=3), device=DEVICE) as pipe:
        with pytest.raises(ValueError, match="as planned") as caught:
            pipe.run([batch] * 8)
        assert any("'compute'" in note for note in caught.value.__notes__)
        del caught
        assert held()[0] < before + batch.nbytes
        totals = [ctx.total.item() for ctx in pipe.iterate([batch] * 5)]
    assert totals == [2.0 * 2**20] * 5
