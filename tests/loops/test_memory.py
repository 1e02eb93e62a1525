"""The body gets what the loader made and functions returned; otherwise the loop is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe.errors import PlanError
from swpipe.loops.batch_memory import Buffer
from swpipe.pipeline import settle
from tests.support.sequencer import PATIENCE_S

BATCHES = 14


def windows() -> Iterator[Any]:
    """Yield half-overlapping windows of a ring, as for audio or sensors."""
    ring = torch.zeros(64)
    for i in range(BATCHES):
        ring[4 * i % 48 : 4 * i % 48 + 8] = i
        yield ring[4 * i % 48 : 4 * i % 48 + 8]


def shifting() -> Iterator[Any]:
    """Yield a sliding window that is refilled."""
    ring = np.zeros(64)
    for i in range(BATCHES):
        ring[i : i + 8] = i
        yield ring[i : i + 8]


def columns() -> Iterator[Any]:
    """Yield a view that is not contiguous."""
    rows = np.zeros((50, 50))
    for i in range(BATCHES):
        rows[:, ::2] = i
        yield rows[:, ::2]


def reversed_rows() -> Iterator[Any]:
    """Yield a view with negative steps."""
    rows = np.zeros((50, 50))
    for i in range(BATCHES):
        rows[:] = i
        yield rows[::-1]


def middle() -> Iterator[Any]:
    """Yield the middle of a large buffer whose padding stays unchanged."""
    padded = np.zeros(100_000, np.float32)
    for i in range(BATCHES):
        padded[40_000:60_000] = i
        yield torch.from_numpy(padded)


def given_back() -> Iterator[Any]:
    """Yield a batch, and write it when the body is done in a plain loop."""
    for i in range(BATCHES):
        buffer = np.full(4, float(i))
        yield buffer
        buffer[:] = 0


def filled_dict() -> Iterator[Any]:
    """Yield one dict, which is refilled."""
    batch = {}
    for i in range(BATCHES):
        batch["x"] = torch.full((4,), float(i))
        yield batch


def filled_list() -> Iterator[Any]:
    """Yield one list, which is refilled."""
    batch: list[Tensor] = []
    for i in range(BATCHES):
        batch[:] = [torch.full((4,), float(i))]
        yield batch


def filled_numbers() -> Iterator[Any]:
    """Yield one list of numbers, which is refilled."""
    batch: list[int] = []
    for i in range(BATCHES):
        batch[:] = [i, i]
        yield batch


def longer_list() -> Iterator[Any]:
    """Yield a dict with one list, which grows."""
    batch: dict[str, list[int]] = {"x": []}
    for _ in range(BATCHES):
        batch["x"].append(1)
        yield batch


def ring() -> Iterator[Tensor]:
    """Yield enough buffers, which only the loader writes."""
    buffers = [torch.empty(8) for _ in range(6)]
    for i in range(40):
        yield buffers[i % 6].fill_(i)


def doubled(batch: Tensor) -> Tensor:
    return batch * 2


def run(loop: Any, body: Callable[[int], Any] = lambda number: None) -> None:
    """Run a loop whose body begins when everything that may be pulled has been pulled."""
    for number, _ in enumerate(loop):
        settle(loop.pipe)
        body(number)


REUSED: list[Callable[[], Iterator[Any]]] = [
    *(windows, shifting, columns, reversed_rows, middle, given_back, filled_dict, filled_list),
    *(filled_numbers, longer_list),
]


@pytest.mark.parametrize("make", REUSED)
@pytest.mark.parametrize("functions", [(), (lambda batch: batch,)])
def test_memory_that_a_loader_writes_again_is_refused(
    make: Callable[[], Iterator[Any]], functions: tuple[Callable[[Any], Any], ...]
) -> None:
    """It may be written anywhere in the batch, which may be any view."""
    loop = swpipe.ahead(make(), *functions, draws=True, device="cpu")
    words = "memory of an earlier|not any more what the loader made|was modified in place"
    with pytest.raises((RuntimeError, PlanError), match=words):
        run(loop)


def test_a_ring_that_only_the_loader_writes_is_its_own() -> None:
    """This holds also if functions run ahead on its batches."""
    expected = [2.0 * 8 * i for i in range(40)]
    assert [float(one.sum()) for one in swpipe.ahead(ring(), doubled, device="cpu")] == expected
    loop = swpipe.ahead(ring(), device="cpu")
    assert [2 * float(one.sum()) for one in loop] == expected


def test_a_function_that_returns_its_list_again_is_refused() -> None:
    """It fills a list of numbers again for each batch."""
    kept: list[int] = []

    def filled(batch: int) -> list[int]:
        kept[:] = [batch]
        return kept

    with pytest.raises(PlanError, match="memory of an earlier"):
        run(swpipe.ahead(list(range(BATCHES)), filled, device="cpu"))


def test_a_function_that_returns_its_buffer_again_is_refused() -> None:
    """Writes of numpy fill it, which count as no modifications."""
    buffer = np.zeros(3, np.float32)

    def decode(number: int) -> Tensor:
        buffer[:] = number
        return torch.from_numpy(buffer)

    with pytest.raises(PlanError, match="'decode' ran ahead and left memory.*buffer that it fills"):
        for _ in swpipe.ahead(range(20), decode, device="cpu"):
            pass


def test_a_function_that_writes_what_it_has_returned_is_refused() -> None:
    """For example, it returns it to a pool."""
    before = [np.zeros(3)]

    def decode(number: int) -> Any:
        before[0][:] = -1
        before[0] = np.full(3, float(number))
        return before[0]

    loop = swpipe.ahead(range(20), decode, device="cpu")
    with pytest.raises(PlanError, match="or wrote what it had left"):
        run(loop)


def test_a_buffer_that_a_function_fills_while_the_body_has_it_is_refused() -> None:
    """It was right when the body began."""
    buffers = [np.zeros(3), np.zeros(3), np.zeros(3)]
    body, filled = threading.Event(), threading.Event()

    def decode(number: int) -> Any:
        if number == 3:
            assert body.wait(PATIENCE_S)
        buffers[number % 3][:] = number
        if number == 3:
            filled.set()
        return buffers[number % 3]

    batches = iter(swpipe.ahead(range(4), decode, prefetch=3, device="cpu"))
    assert next(batches).tolist() == [0.0] * 3
    body.set()
    assert filled.wait(PATIENCE_S)
    with pytest.raises(PlanError, match="left memory of an earlier batch for iteration 3"):
        list(batches)


@pytest.mark.parametrize(("by_a_function", "batch", "ring"), [(False, 5, 2), (True, 0, 3)])
def test_what_is_written_while_the_body_has_it_is_refused_though_the_body_has_gone_on(
    by_a_function: bool, batch: int, ring: int
) -> None:
    """The body of a batch ends before the pull, or the function, that has written its memory."""
    buffers = [np.zeros(3) for _ in range(ring)]
    writes = batch + ring
    body, written, gone_on = threading.Event(), threading.Event(), threading.Event()

    def fill(number: int) -> Any:
        if number == writes:
            assert body.wait(PATIENCE_S)
        buffer = buffers[number % ring]
        buffer[:] = number
        if number == writes:
            written.set()
            assert gone_on.wait(PATIENCE_S)
        return buffer

    if by_a_function:
        batches = iter(swpipe.ahead(range(writes + 1), fill, prefetch=3, device="cpu"))
    else:
        batches = iter(swpipe.ahead(map(fill, range(writes + 1)), device="cpu"))
    for _ in range(batch + 1):
        next(batches)
    body.set()
    assert written.wait(PATIENCE_S)
    next(batches)
    gone_on.set()
    with pytest.raises((PlanError, RuntimeError), match="memory of an earlier"):
        list(batches)


def test_a_tensor_that_the_loader_writes_and_the_body_reads_is_refused() -> None:
    """Torch's functions show it in the first bodies, which run alone."""
    mean = torch.zeros(2)

    def loader() -> Iterator[Tensor]:
        for number in range(12):
            mean.mul_(0.9).add_(number)
            yield torch.ones(2)

    loop = swpipe.ahead(loader(), device="cpu")
    with pytest.raises(RuntimeError, match=r"uses a tensor that the loader writes \(float32 \[2\]"):
        run(loop, lambda number: mean + 1)


def test_a_tensor_that_the_loader_reads_and_the_body_writes_is_refused() -> None:
    """A replay buffer is an example."""
    rows = torch.zeros(22, 4)

    def loader() -> Iterator[Tensor]:
        for number in range(12):
            yield rows[[number % 22, number % 7]]

    loop = swpipe.ahead(loader(), device="cpu")
    with pytest.raises(RuntimeError, match=r"a tensor that the loader reads \(float32 \[22"):
        run(loop, lambda number: rows[number].add_(1))


def test_a_loader_in_turn_and_the_body_may_use_one_tensor() -> None:
    """The loader draws; therefore nothing is ahead that could read another value."""

    def run(over: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(3)
        count = torch.zeros(1)

        def loader() -> Iterator[Tensor]:
            for _ in range(9):
                count.add_(1)
                yield count + torch.rand(1)

        return [(batch.item(), count.mul_(2).item()) for batch in over(loader())]

    assert run(swpipe.ahead) == run(iter)


def test_the_tensors_of_a_known_dataset_are_not_changed() -> None:
    """Their versions are compared at each pull."""
    rows = torch.zeros(22, 4)
    loop = swpipe.ahead(DataLoader(TensorDataset(rows)), device="cpu")
    with pytest.raises(RuntimeError, match="changed a tensor of the loader's dataset"):
        run(loop, lambda number: rows[number].add_(1))


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(4, 5, dtype=torch.bfloat16).t(),
        np.zeros((8, 5))[::-2],
        torch.zeros(3000),
        np.zeros(3000)[::7],
    ],
)
def test_a_write_anywhere_in_memory_is_seen(buffer: Any) -> None:
    """The first item, a fifth of all items, and the memory's address are compared."""
    half, fifth = len(buffer) // 2, max(1, len(buffer) // 5)
    for place in (0, slice(-fifth, None), slice(half, half + fifth)):
        before = Buffer.of(buffer)
        assert before.is_as(buffer)
        (buffer.data if isinstance(buffer, Tensor) else buffer)[place] = 3
        assert not before.is_as(buffer)
    assert before.end - before.begin >= buffer.itemsize
    empty = Buffer.of(buffer[:0])
    assert empty.begin == empty.end


def test_other_memory_of_the_same_tensor_is_a_change() -> None:
    """The previous memory is not read."""
    tensor = torch.ones(3000)
    before = Buffer.of(tensor)
    tensor.data = torch.ones(6000)
    assert not before.is_as(tensor)
    assert before.is_as(torch.ones(3000))


# -------------------------------------------------------------------- functions on several threads


class Counter:
    """A function that counts the batches that it has seen."""

    seen = 0

    def __call__(self, batch: float) -> float:
        self.seen += 1
        return batch + self.seen


class Mean:
    """A function that keeps a mean."""

    mean = 0.0

    def __call__(self, batch: float) -> float:
        self.mean += 0.1 * (batch - self.mean)
        return batch - self.mean


class Noise:
    """A function that keeps a generator of numpy."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(3)

    def __call__(self, batch: float) -> float:
        return batch + float(self.draws.random())


class Scratch:
    """A function that uses one buffer in all calls, on several threads at once."""

    def __init__(self) -> None:
        self.buffer = np.zeros(1)
        self.meet = threading.Barrier(4)
        self.calls = 0

    def __call__(self, batch: float) -> float:
        self.buffer[:] = batch
        self.calls += 1
        if self.calls <= 4:
            self.meet.wait(PATIENCE_S)
        return float(self.buffer[0])


@pytest.mark.parametrize("kind", [Counter, Mean, Noise, Scratch])
def test_a_function_that_keeps_something_is_refused_on_several_threads(
    kind: Callable[[], Callable[[float], float]],
) -> None:
    """The first batches pass through it twice."""
    with pytest.raises(PlanError, match="left something else of iteration .* on the same batch"):
        list(swpipe.ahead([*map(float, range(1, 20))], kind(), workers=4, device="cpu"))


@pytest.mark.parametrize("kind", [Counter, Mean, Noise])
def test_it_is_taken_on_one_thread(kind: Callable[[], Callable[[float], float]]) -> None:
    """It runs in order."""
    rows = [*map(float, range(20))]
    assert list(swpipe.ahead(rows, kind(), device="cpu")) == [*map(kind(), rows)]


def test_fewer_batches_than_four_go_through_it_twice_too() -> None:
    """They do so at the end of the pass."""
    with pytest.raises(PlanError, match="left something else of iteration 0"):
        list(swpipe.ahead([1.0, 2.0], Counter(), workers=2, device="cpu"))


@pytest.mark.parametrize("workers", [2, 4])
def test_only_the_first_four_batches_go_through_a_function_twice(workers: int) -> None:
    """The other batches cost one call each, in every pass."""
    calls = itertools.count()

    def counted(batch: int) -> int:
        next(calls)
        return batch

    loop = swpipe.ahead(range(40), counted, workers=workers, device="cpu")
    assert [*loop, *loop] == [*range(40), *range(40)]
    assert next(calls) == 2 * 40 + 4


def test_an_honest_function_is_taken_on_several_threads() -> None:
    """The body may also write into its results."""
    rows = [*torch.arange(40.0).reshape(20, 2)]
    found = []
    for batch in swpipe.ahead(rows, doubled, workers=4, device="cpu"):
        found.append(batch.tolist())
        batch.zero_()
    assert found == [(2 * row).tolist() for row in rows]


def test_a_function_with_a_torch_generator_of_its_own_is_taken_on_one_thread() -> None:
    """A pass that is left restores it to the last batch that the body had."""
    rows = [torch.zeros(4)] * 20
    drawn = [threading.Semaphore(0)]  # of each pass, how often its function has drawn

    def noise(draws: torch.Generator) -> Callable[[Tensor], Tensor]:
        def add(x: Tensor) -> Tensor:
            noisy = x + torch.rand(x.shape, generator=draws)
            drawn[-1].release()
            return noisy

        return add

    def run(draws: torch.Generator, loop: Any) -> list[Any]:
        found = []
        for _ in range(2):
            drawn.append(threading.Semaphore(0))
            for number, batch in enumerate(loop):
                found.append(batch.tolist())
                assert drawn[-1].acquire(timeout=PATIENCE_S)
                if number == 6:
                    # The pass that is left has drawn ahead by then.
                    assert draws is plain or drawn[-1].acquire(timeout=PATIENCE_S)
                    break
        return [*found, torch.rand(1, generator=draws).item()]

    mine, plain = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    add = noise(plain)
    expected = run(plain, Mapped(add, rows))
    assert run(mine, swpipe.ahead(rows, noise(mine), device="cpu")) == expected


def test_a_state_is_refused_whose_function_draws_from_a_generator_of_its_own() -> None:
    """No state contains that generator: a resumed loop would draw other numbers."""
    draws = torch.Generator().manual_seed(3)

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=draws)

    loop = swpipe.ahead([torch.zeros(4)] * 9, noisy, device="cpu")
    assert loop.state_dict()
    for number, _ in enumerate(loop):
        if number == 4:
            with pytest.raises(RuntimeError, match="'noisy': draws from a torch.Generator of its"):
                loop.state_dict()
            assert loop.state_dict(check=False)
    with pytest.raises(RuntimeError, match="save the generator between two passes yourself"):
        loop.state_dict()


class Mapped:
    """A loader that applies a function to rows."""

    def __init__(self, function: Callable[[Any], Any], rows: list[Any]) -> None:
        self.function, self.rows = function, rows

    def __iter__(self) -> Iterator[Any]:
        return map(self.function, self.rows)


def test_the_batch_that_the_body_has_is_compared_too() -> None:
    """A pull writes it while the body uses it."""
    ring = np.zeros(6)
    places = [ring[:4], np.zeros(4), ring[2:], np.zeros(4)]
    body = threading.Event()

    def loader() -> Iterator[Any]:
        for number in range(4):
            if number == 2:
                assert body.wait(PATIENCE_S)
            places[number][:] = number
            yield places[number]

    loop = swpipe.ahead(loader(), draws=True, prefetch=2, device="cpu")
    batches = iter(loop)
    assert next(batches).tolist() == [0.0] * 4
    body.set()
    settle(loop.pipe)
    with pytest.raises(RuntimeError, match="in the memory of an earlier one.*still in use"):
        list(batches)
