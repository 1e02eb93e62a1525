"""Prefetchers in the style of public ones, each of them correct or with one planted fault.

They are written for these tests; each names the style that it follows. A fault removes, moves or
misdirects one wait, or one ``record_stream``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import swpipe
from swpipe import PipelinePlan, TaskSchedule
from swpipe.testing import Loop
from tests.device.accelerator.work import DEVICE

Prefetcher: TypeAlias = Callable[[str], Any]

FAULTS: dict[str, tuple[Prefetcher, tuple[str, ...]]] = {}
"""The prefetcher and its faults, by name."""

SIZE, BATCHES = 64, 12


def with_faults(*faults: str) -> Callable[[Prefetcher], Prefetcher]:
    def add(prefetcher: Prefetcher) -> Prefetcher:
        FAULTS[prefetcher.__name__] = (prefetcher, faults)
        return prefetcher

    return add


def batches() -> Iterator[Tensor]:
    return (torch.full((SIZE,), float(number)).pin_memory() for number in range(BATCHES))


def streams() -> tuple[torch.Stream, torch.Stream]:
    """Return the current stream and a new one."""
    return torch.accelerator.current_stream(), torch.Stream(device=DEVICE)


def train(weight: Tensor, batch: Tensor) -> Tensor:
    loss = (weight * batch).sum()
    weight.sub_(0.01)
    return loss


def steps(
    model: nn.Module, side: torch.Stream, *, waits: bool, begin: Callable[[], object] = int
) -> Iterator[Tensor]:
    """Yield the losses of training steps; the optimizer may wait for ``side``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        begin()
        loss = model(batch.to(DEVICE, non_blocking=True)).sum()
        loss.backward()
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@with_faults("no wait", "waits for itself", "no record_stream")
def apex_data_prefetcher(fault: str) -> Iterator[Tensor]:
    """Iterate by a ``next()`` that waits, returns, and preloads the next batch on a stream."""
    main, side = streams()
    weight, source = torch.ones(SIZE, device=DEVICE), batches()
    mean = torch.zeros(SIZE, device=DEVICE)
    side.wait_stream(main)

    def preload() -> Tensor | None:
        batch = next(source, None)
        if batch is None:
            return None
        with side:
            return batch.to(DEVICE, non_blocking=True).sub_(mean)

    ahead = preload()
    while ahead is not None:
        if fault == "waits for itself":
            side.wait_stream(side)
        elif fault != "no wait":
            main.wait_stream(side)
        batch = ahead
        if fault != "no record_stream":
            batch.record_stream(main)
        ahead = preload()
        yield train(weight, batch)
        del batch


@with_faults("waits before the copy", "the scale changes")
def timm_loader(fault: str) -> Iterator[Tensor]:
    """Normalize batch i + 1 before batch i is yielded."""
    main, side = streams()
    weight, scale = torch.ones(SIZE, device=DEVICE), torch.ones(1, device=DEVICE)
    ready: Tensor | None = None
    for batch in batches():
        if fault == "waits before the copy":
            main.wait_stream(side)
        if fault != "the scale changes":
            side.wait_stream(main)
        with side:
            coming = batch.to(DEVICE, non_blocking=True).mul_(scale)
        if ready is not None:
            yield train(weight, ready)
        if fault != "waits before the copy":
            main.wait_stream(side)
        scale.mul_(0.5)
        ready = coming


@with_faults("dist does not wait", "forward does not wait", "the ids are not recorded")
def torchrec_sparse_dist(fault: str) -> Iterator[Tensor]:
    """Use three streams: copy batch i + 2, redistribute batch i + 1, train on batch i."""
    main, memcpy = streams()
    dist = torch.Stream(device=DEVICE)
    weight, source = torch.ones(SIZE, device=DEVICE), batches()

    def copy() -> Tensor | None:
        batch = next(source, None)
        with memcpy:
            return None if batch is None else batch.to(DEVICE, non_blocking=True)

    def redistribute(batch: Tensor | None) -> Tensor | None:
        if batch is None:
            return None
        if fault != "dist does not wait":
            dist.wait_stream(memcpy)
        with dist:
            ids = batch.flip(0)
            batch.record_stream(dist)
            return ids

    first = redistribute(copy())
    second = copy()
    while first is not None:
        if fault != "forward does not wait":
            main.wait_stream(dist)
        if fault != "the ids are not recorded":
            first.record_stream(main)
        loss = train(weight, first)
        del first
        first = redistribute(second)
        second = copy()
        yield loss


@with_faults("event before the copy", "event on another stream")
def lightning_events(fault: str) -> Iterator[Tensor]:
    """Keep two batches ahead, each with an event for which the consumer waits."""
    main, side = streams()
    weight, flight = torch.ones(SIZE, device=DEVICE), list[tuple[Tensor, torch.Event]]()

    def take() -> Tensor:
        batch, event = flight.pop(0)
        event.wait(main)
        batch.record_stream(main)
        return train(weight, batch)

    for batch in batches():
        event = torch.Event(device=DEVICE)
        with side:
            if fault == "event before the copy":
                event.record(side)
            moved = batch.to(DEVICE, non_blocking=True)
            if fault == "":
                event.record(side)
        if fault == "event on another stream":
            event.record(main)
        flight.append((moved, event))
        if len(flight) > 2:
            yield take()
    while flight:
        yield take()


@with_faults("the step is not waited for")
def static_buffer(fault: str) -> Iterator[Tensor]:
    """Copy into one buffer on the device, as a captured graph requires."""
    main, side = streams()
    weight, buffer = torch.ones(SIZE, device=DEVICE), torch.empty(SIZE, device=DEVICE)
    for batch in batches():
        if not fault:
            side.wait_stream(main)
        with side:
            buffer.copy_(batch, non_blocking=True)
        main.wait_stream(side)
        yield train(weight, buffer)


@with_faults("the halves are not waited for")
def two_halves(fault: str) -> Iterator[Tensor]:
    """Alternate two halves of one allocation; a copy waits for the step on its own half only."""
    main, side = streams()
    weight, buffer = torch.ones(SIZE, device=DEVICE), torch.empty(2, SIZE, device=DEVICE)
    done = [torch.Event(device=DEVICE) for _ in range(2)]
    for number, batch in enumerate(batches()):
        half = number % 2
        if not fault:
            done[half].wait(side)
        with side:
            buffer[half].copy_(batch, non_blocking=True)
        main.wait_stream(side)
        loss = train(weight, buffer[half])
        done[half].record(main)
        yield loss


@with_faults("the host does not wait")
def pinned_ring(fault: str) -> Iterator[Tensor]:
    """Fill two pinned buffers alternately on the host."""
    main, side = streams()
    weight = torch.ones(SIZE, device=DEVICE)
    ring = [torch.empty(SIZE).pin_memory() for _ in range(2)]
    copied = [torch.Event(device=DEVICE) for _ in ring]
    for number, batch in enumerate(batches()):
        slot = number % 2
        if not fault and number > 1:
            copied[slot].synchronize()
        ring[slot].copy_(batch)
        with side:
            moved = ring[slot].to(DEVICE, non_blocking=True)
            copied[slot].record(side)
        main.wait_stream(side)
        moved.record_stream(main)
        yield train(weight, moved)


@with_faults("read too early")
def torchtitan_metrics(fault: str) -> Iterator[float]:
    """Copy losses to the host without blocking, and read them one step later."""
    weight = torch.ones(SIZE, device=DEVICE)
    last: tuple[Tensor, torch.Event] | None = None
    for batch in batches():
        loss = train(weight, batch.to(DEVICE, non_blocking=True))
        host, event = loss.to("cpu", non_blocking=True), torch.Event(device=DEVICE)
        event.record()
        if last is not None:
            if not fault:
                last[1].synchronize()
            yield last[0].item()
        last = host, event


@with_faults("the optimizer does not wait")
def torchtitan_staging(fault: str) -> Iterator[Tensor]:
    """Stage parameters to pinned memory on a separate stream during backward."""
    main, side = streams()
    model = nn.Linear(SIZE, 1).to(DEVICE)
    staged = [torch.empty_like(p, device="cpu").pin_memory() for p in model.parameters()]

    def stage() -> None:
        side.wait_stream(main)
        with side, torch.no_grad():
            for host, parameter in zip(staged, model.parameters(), strict=True):
                host.copy_(parameter, non_blocking=True)

    return steps(model, side, waits=not fault, begin=stage)


@with_faults("the step does not wait")
def gradient_hooks(fault: str) -> Iterator[Tensor]:
    """Reduce each gradient in place by a hook, on a separate stream, during backward."""
    _, side = streams()
    model = nn.Sequential(nn.Linear(SIZE, 8), nn.Linear(8, 1)).to(DEVICE)

    def reduce(parameter: Tensor) -> None:
        side.wait_stream(torch.accelerator.current_stream())
        with side, torch.no_grad():
            assert parameter.grad is not None
            parameter.grad.div_(2)
            parameter.grad.record_stream(side)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return steps(model, side, waits=not fault)


@with_faults("no event in the queue")
def thread_and_queue(fault: str) -> Iterator[Tensor]:
    """Copy on a thread, which passes batch and event through a queue."""
    main, side = streams()
    weight = torch.ones(SIZE, device=DEVICE)
    full: queue.Queue[tuple[Tensor, torch.Event] | None] = queue.Queue(2)

    def work() -> None:
        for batch in batches():
            event = torch.Event(device=DEVICE)
            with side:
                moved = batch.to(DEVICE, non_blocking=True)
                event.record(side)
            full.put((moved, event))
        full.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    while (item := full.get()) is not None:
        batch, event = item
        if not fault:
            event.wait(main)
        batch.record_stream(main)
        yield train(weight, batch)
    thread.join()


@with_faults("no dependence on the step before")
def swpipe_plan(fault: str) -> Loop:
    """Run a plan whose task, wrongly declared pure, writes a buffer of its own."""
    weight, buffer = torch.ones(SIZE, device=DEVICE), torch.empty(SIZE, device=DEVICE)

    @swpipe.task(pure=True)
    def copy(ctx: Any) -> None:
        buffer.copy_(ctx.batch, non_blocking=True)
        ctx.x = buffer.mul(1)

    @swpipe.task(pure=True)
    def step(ctx: Any) -> None:
        ctx.loss = (weight * buffer).sum() + ctx.x.sum()

    before = [] if fault else [(copy, step)]
    plan = PipelinePlan(
        schedule={copy: TaskSchedule(stage=0, stream="memcpy"), step: TaskSchedule(stage=1)},
        deps=[(step, copy)],
        cross_iter_deps=[(copy, step, 2)] if fault else [],
        same_period_deps=before,
    )
    return Loop(batches(), [copy, step], plan=plan)


@with_faults()
def swpipe_overlap(fault: str) -> Iterator[Tensor]:
    """Copy batches ahead from pinned buffers that are reused."""
    weight = torch.ones(SIZE, device=DEVICE)
    pageable = [torch.full((SIZE,), float(number)) for number in range(BATCHES)]
    for batch in swpipe.ahead(pageable, device=DEVICE):
        yield train(weight, batch)
