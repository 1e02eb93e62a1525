"""The time per batch of a loop whose loader is pulled ahead: by swpipe and by other libraries.

Each way but the plain loop keeps up to two batches ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice, product
from statistics import median
from typing import Any

import torch

import swpipe
from bench.data_bound import AHEAD, absent
from bench.loader import pulled_by_hand
from bench.measure import Row, compared, interleaved

WORK_S = 0.005
WARM_UP = 25  # the first 16 pulls are watched

MOST = 1.02
"""The most that our time may be over the best other's with a thread. Equal ways differ by this."""


def by_swpipe(loader: Iterable[Any]) -> Iterator[Any]:
    """Pull the loader ahead with ``swpipe.ahead``."""
    return iter(swpipe.ahead(loader, prefetch=AHEAD))


def by_torchdata(loader: Iterable[Any]) -> Iterator[Any]:
    """Pull the loader ahead with a ``Prefetcher`` of torchdata, which has a thread."""
    from torchdata.nodes import IterableWrapper, Loader, Prefetcher

    yield from Loader(Prefetcher(IterableWrapper(loader), prefetch_factor=AHEAD))


def by_spdl(loader: Iterable[Any]) -> Iterator[Any]:
    """Pull the loader ahead with spdl: a source, and a sink with room for ``AHEAD`` batches."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder().add_source(loader).add_sink(AHEAD)
    pipeline = builder.build(num_threads=1, use_thread_output_queue=True)
    with pipeline.auto_stop():
        yield from pipeline


Way = Callable[[Iterable[Any]], Iterator[Any]]

WAYS: dict[str, Way] = {
    "plain loop": iter,
    "thread and queue": partial(pulled_by_hand, most=AHEAD),
    "torchdata.nodes": by_torchdata,
    "spdl": by_spdl,
}


def works() -> dict[str, Callable[[], object]]:
    """Return the kinds of work that a loader or a body does per batch."""
    x, calls, seconds = torch.rand(256, 256), 20, 0.0
    for _ in range(2):  # the first time is longer
        begin = time.perf_counter()
        for _ in range(calls):
            x @ x
        seconds = time.perf_counter() - begin
    calls = round(calls * WORK_S / seconds)

    def compute() -> None:
        for _ in range(calls):
            x @ x  # without the interpreter lock

    return {"free": bool, "sleeping": partial(time.sleep, WORK_S), "computing": compute}


def ms_per_batch(
    way: Way, load: Callable[[], object], body: Callable[[], object], batches: int
) -> float:
    """Return the time per batch in the steady state, in ms."""

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(WARM_UP + batches + AHEAD):
            load()
            yield torch.empty(4)

    with closing(way(loader())) as handed_out:
        for _ in islice(handed_out, WARM_UP):
            body()
        begin = time.perf_counter()
        for _ in islice(handed_out, batches):
            body()
        seconds = time.perf_counter() - begin
        for _ in handed_out:  # torchdata's thread ends with its data only
            pass
    return seconds / batches * 1e3


def rows(rounds: int = 5, batches: int = 40, free: int = 4000) -> list[Row]:
    """Return a row per loader, body and other library; the fastest one with a thread has a bar."""
    there = {name: way for name, way in WAYS.items() if not absent(name)}
    found, do = [], works()
    for load, body in product(do, do):
        many = free if load == body == "free" else batches
        ours, *others = interleaved(
            rounds,
            *(
                partial(ms_per_batch, way, do[load], do[body], many)
                for way in (by_swpipe, *there.values())
            ),
        )
        times = dict(zip(there, others, strict=True))
        best = min(times.keys() - {"plain loop"}, key=lambda name: median(times[name]))
        for name, theirs in times.items():
            what, bar = f"{load} loader, {body} body, beside {name}", MOST if name == best else None
            found.append(compared(what, ours, theirs, "ms", name, bar, digits=3))
    return found
