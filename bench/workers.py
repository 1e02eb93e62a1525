"""A function that is too slow for one thread, on several threads: a read, and decoding.

reading   a remote read of 40 ms before a body of 10 ms, on 1 to 8 threads: compared with the
          lower bound, max(40 / workers, 10)
decoding  zlib or PNG to an array, which release the interpreter lock, before a body that only
          waits, on as many threads as cores (4 at most): compared with torchdata's ParallelMapper
          and spdl with as many threads, and a DataLoader with as many processes
"""

from __future__ import annotations

import io
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import swpipe
from bench.data_bound import absent
from bench.measure import Row, Spread, compared, interleaved

READ_S, BODY_S = 0.040, 0.010
WAITING_MOST = 1.05
"""The most that our time may be over the least."""

DECODING_MOST = 1 / 0.95
"""The most that our time may be over the best other's."""

WARM_UP = 20  # the first 16 iterations are watched
SIDE = 512

Decode = Callable[[bytes], Any]
Way = Callable[[list[bytes], Decode, int], Iterator[Any]]


def inflate(data: bytes) -> Any:
    """Decompress an image with zlib."""
    return torch.from_numpy(np.frombuffer(zlib.decompress(data), dtype=np.uint8).copy())


def from_png(data: bytes) -> Any:
    """Decode a PNG image."""
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


def files() -> dict[str, tuple[Decode, list[bytes]]]:
    """Return the decoding function and some files of each kind."""
    made = np.random.default_rng(0).integers(50, size=(8, SIDE, SIDE, 3), dtype=np.uint8)
    found: dict[str, tuple[Decode, list[bytes]]] = {
        "zlib": (inflate, [zlib.compress(image.tobytes(), 1) for image in made])
    }
    if not absent("PIL"):
        from PIL import Image

        def png(image: Any) -> bytes:
            into = io.BytesIO()
            Image.fromarray(image).save(into, "png", compress_level=1)
            return into.getvalue()

        found["PNG"] = from_png, [*map(png, made)]
    return found


def by_swpipe(data: Iterable[Any], decode: Callable[[Any], Any], workers: int) -> Iterator[Any]:
    """Decode with ``swpipe.ahead``."""
    return iter(swpipe.ahead(data, decode, workers=workers))


def by_torchdata(data: Iterable[Any], decode: Decode, workers: int) -> Iterator[Any]:
    """Decode with torchdata's ``ParallelMapper`` by threads, in order."""
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    yield from Loader(
        ParallelMapper(IterableWrapper(data), decode, workers, in_order=True, method="thread")
    )


def by_spdl(data: Iterable[Any], decode: Decode, workers: int) -> Iterator[Any]:
    """Decode with spdl: a stage with ``workers`` threads, in order."""
    from spdl.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder().add_source(data)
    builder = builder.pipe(decode, concurrency=workers, output_order="input").add_sink(2)
    pipeline = builder.build(num_threads=workers, use_thread_output_queue=True)
    with pipeline.auto_stop():
        yield from pipeline


class Decoded(Dataset[Any]):
    """A dataset that decodes a file when it is indexed."""

    def __init__(self, data: list[bytes], decode: Decode) -> None:
        self.data, self.decode = data, decode

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.data[index])


def by_dataloader(data: list[bytes], decode: Decode, workers: int) -> Iterator[Any]:
    """Decode in the worker processes of a ``DataLoader``."""
    loader: Any = DataLoader(Decoded(data, decode), batch_size=None, num_workers=workers)
    yield from loader


OTHERS: dict[str, Way] = {
    "torchdata.nodes": by_torchdata,
    "spdl": by_spdl,
    "torch.utils.data.DataLoader": by_dataloader,
}


def ms_per_batch(batches: Iterator[Any], count: int, body: Callable[[], object]) -> float:
    """Return the time per batch in the steady state, in ms."""
    with closing(batches) as handed_out:  # type: ignore[type-var]  # all are generators
        for _ in islice(handed_out, WARM_UP):
            body()
        begin = time.perf_counter()
        for _ in islice(handed_out, count):
            body()
        seconds = time.perf_counter() - begin
        for _ in handed_out:
            pass
    return seconds / count * 1e3


def waiting(workers: int, count: int, read_s: float, body_s: float) -> float:
    """Return the ms per batch if the function and the body wait."""

    def read(number: int) -> int:
        time.sleep(read_s)
        return number

    data = range(WARM_UP + count + workers)
    return ms_per_batch(by_swpipe(data, read, workers), count, partial(time.sleep, body_s))


def decoding(way: Way, decode: Decode, some: list[bytes], workers: int, count: int) -> float:
    """Return the ms per batch if the function computes."""
    data = [some[n % len(some)] for n in range(WARM_UP + count + workers)]
    return ms_per_batch(way(data, decode, workers), count, bool)


def rows(rounds: int = 5, batches: int = 80, read_s: float = READ_S) -> list[Row]:
    """Return a row per number of waiting threads, and per kind of file and other library."""
    found, body_s = [], read_s * BODY_S / READ_S
    for workers in range(1, 9):
        least = max(read_s / workers, body_s) * 1e3
        ours = [waiting(workers, batches, read_s, body_s) for _ in range(rounds)]
        ratio = Spread.of(each / least for each in ours)
        what = f"reading {read_s * 1e3:g} ms before {body_s * 1e3:g} ms, {workers} workers"
        told = f"{Spread.of(ours).text()} ms"
        found.append(Row(what, told, f"the least {least:.2f} ms", ratio, WAITING_MOST))
    workers = min(4, os.cpu_count() or 1)
    there = {name: way for name, way in OTHERS.items() if not absent(name)}
    for kind, (decode, some) in files().items():
        measures = [
            partial(decoding, way, decode, some, workers, 4 * batches)
            for way in (by_swpipe, *there.values())
        ]
        mine, *others = interleaved(rounds, *measures)
        times = dict(zip(there, others, strict=True))
        best = min(times, key=lambda name: median(times[name]))
        for name, theirs in times.items():
            what, bar = f"{kind}, {workers} workers, beside {name}", DECODING_MOST
            found.append(compared(what, mine, theirs, "ms", name, bar if name == best else None))
    return found
