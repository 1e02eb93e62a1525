"""One changed line in a plain loop: batches are made while its body runs, with equal bits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import swpipe
from swpipe.loops import AheadLoop
from swpipe.pipeline import settle
from tests.loops.ordinary_loops import Rows, batches
from tests.support.sequencer import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:the loop, a task or its body, draws")


def same(found: Any, expected: Any) -> None:
    """Check that two values are equal bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------- the body runs on


@pytest.mark.parametrize(("prefetch", "functions"), [(2, ()), (5, (lambda batch: batch,))])
def test_so_many_batches_are_made_while_the_body_runs(
    prefetch: int, functions: tuple[Callable[[Any], Any], ...]
) -> None:
    """No more are made, however long the body takes."""
    pulled: list[int] = []

    def loader() -> Iterator[int]:
        for number in range(9):
            pulled.append(number)
            yield number

    with swpipe.ahead(loader(), *functions, prefetch=prefetch, draws=True, device="cpu") as loop:
        for number, batch in enumerate(loop):
            assert batch == number
            settle(loop.pipe)
            assert len(pulled) == min(number + prefetch + 1, 9)


def test_functions_run_in_order_and_have_names() -> None:
    """They have the functions' names; a second one of the same name has a number."""

    class Twice:
        def __call__(self, batch: int) -> int:
            return 2 * batch

    def add(batch: int) -> int:
        return batch + 1

    with swpipe.ahead(range(3), add, Twice(), lambda x: -x, add, device="cpu") as loop:
        assert list(loop) == [-1, -3, -5]
        assert loop.overlap.ahead == ("add", "Twice", "lambda", "add 2")
        assert str(loop.overlap) == "ahead: the loader, add, Twice, lambda, add 2"


def test_an_iterator_gives_a_batch_again_that_was_being_pulled_when_the_loop_was_left() -> None:
    """Each batch comes once, in order."""
    pulling, goes_on = threading.Event(), threading.Event()

    def loader() -> Iterator[int]:
        for number in range(8):
            if number == 4:
                pulling.set()
                assert goes_on.wait(30)
            yield number

    found = []
    with swpipe.ahead(loader(), draws=True, device="cpu") as loop:
        for batch in loop:
            found.append(batch)
            if batch == 2:
                assert pulling.wait(30)
                break
        assert loop.pipe.in_flight == 0
        threading.Timer(0.2, goes_on.set).start()
        found.extend(loop)
    assert found == [*range(8)]


class Stream(IterableDataset[Tensor]):
    """A dataset that continues from pass to pass."""

    def __init__(self) -> None:
        self.rows = itertools.count()

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, self.rows)


class Packer:
    """A collate function that moves a row of each batch to the next one."""

    left = torch.zeros(4)

    def __call__(self, rows: list[Tensor]) -> Tensor:
        packed = torch.stack([self.left, *rows[:-1]])
        self.left = rows[-1]
        return packed


class OwnLoader:
    """A loader of a class that swpipe does not know."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers


def passes(loader: Iterable[Any], *, left_at: int = 3) -> list[Any]:
    """Return the batches of three passes, each left early."""
    return [batch for _ in range(3) for batch in itertools.islice(loader, left_at)]


KEEP_ROWS: list[Callable[[], Iterable[Any]]] = [
    lambda: DataLoader(Stream(), batch_size=2),
    lambda: DataLoader(Rows(), batch_size=2, collate_fn=Packer()),
    OwnLoader,
]


@pytest.mark.parametrize("loader", KEEP_ROWS)
def test_what_a_stream_loses_where_a_pass_is_left_is_told_once(
    loader: Callable[[], Iterable[Any]],
) -> None:
    """Nobody can know whether the stream continues where it stopped."""
    with swpipe.ahead(loader(), device="cpu") as loop:
        with pytest.warns(RuntimeWarning, match="were dropped.*give its iterator") as told:
            found = passes(loop)
        assert [one.filename for one in told] == [__file__]
    with pytest.raises(AssertionError):
        same(found, passes(loader()))  # or the warning would be needless


def test_the_iterator_of_a_stream_loses_nothing() -> None:
    """An iterator is the fix for a stream."""
    with swpipe.ahead(iter(DataLoader(Stream(), batch_size=2)), device="cpu") as loop:
        same(passes(loop), passes(DataLoader(Stream(), batch_size=2)))


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Rows(), batch_size=2),
        lambda: DataLoader(Stream(), batch_size=2, num_workers=1),
        lambda: [torch.ones(1), torch.zeros(1)] * 3,
    ],
)
def test_what_begins_anew_is_left_without_a_word(loader: Callable[[], Iterable[Any]]) -> None:
    """These are a dataset with indices, workers, and a list."""
    with swpipe.ahead(loader(), device="cpu") as loop:
        same(passes(loop), passes(loader()))


@pytest.mark.filterwarnings("ignore:the last pass was left")
def test_a_loader_is_called_by_one_thread_at_a_time() -> None:
    """A new pass waits for the pull of the pass that was left."""
    inside: list[int] = []
    pulling, goes_on = threading.Event(), threading.Event()

    class Shared:
        def __iter__(self) -> Iterator[int]:
            for number in range(4):
                inside.append(number)
                assert len(inside) == 1
                if number == 2 and not goes_on.is_set():
                    pulling.set()
                    goes_on.wait(30)
                inside.pop()
                yield number

    with swpipe.ahead(Shared(), draws=True, device="cpu") as loop:
        for batch in loop:
            if batch == 1:
                assert pulling.wait(30)
                break
        threading.Timer(0.1, goes_on.set).start()
        assert list(loop) == [0, 1, 2, 3]


# --------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("where", ["the loader", "a function"])
def test_an_error_comes_when_the_batches_before_it_were_given(where: str) -> None:
    """It is raised unchanged, with a note of its place."""

    def loader() -> Iterator[int]:
        for number in range(6):
            if number == 3 and where == "the loader":
                raise OSError("planted")
            yield number

    def decode(batch: int) -> int:
        if batch == 3:
            raise OSError("planted")
        return batch

    found: list[int] = []
    with pytest.raises(OSError, match="planted") as caught:
        found.extend(swpipe.ahead(loader(), decode, device="cpu"))
    assert any("the pull of batch 3" in one or "'decode'" in one for one in caught.value.__notes__)
    assert found == [0, 1, 2]


# ----------------------------------------------------------------------------- what it looks like


def test_it_has_what_the_loader_has() -> None:
    """It can be read, called and set; own attributes stay. It is no loader for another loop."""
    rows = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=4, drop_last=True)
    loop = swpipe.ahead(rows, device="cpu")
    assert isinstance(loop, DataLoader)
    assert (len(loop), loop.batch_size, loop.drop_last, loop.num_workers) == (2, 4, True, 0)
    assert loop.dataset is rows.dataset
    assert loop.sampler is rows.sampler
    with pytest.raises(TypeError, match="is a loop itself: give all tasks or functions to one"):
        swpipe.ahead(loop, device="cpu")

    class Epochs(list[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    given = Epochs([1, 2])
    other = swpipe.ahead(given, device="cpu")
    assert type(other) is AheadLoop
    other.set_epoch(5)
    assert given.epoch == other.epoch == 5
    other.epoch, other.counted, other.note = 6, True, 3
    assert given.epoch == 6
    assert not hasattr(given, "counted")
    assert not hasattr(given, "note")


def test_accelerate_prepares_the_loader_and_not_what_is_ahead_of_it() -> None:
    """Otherwise it would silently become a plain loader."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    loader = batches()
    with pytest.raises(TypeError, match="give it the loader, and what it returns to ahead"):
        accelerator.prepare(swpipe.ahead(loader, torch.neg, device="cpu"))
    loop = swpipe.ahead(accelerator.prepare(loader), torch.neg, device="cpu")
    assert accelerator.prepare(loop) is loop
    same(list(loop), [-one for one in loader])


# ----------------------------------------------------------------------------- what is not apart


def test_what_the_loader_itself_changes_is_none() -> None:
    """A counter of the loader is an example."""
    seen = torch.zeros(2)

    def loader() -> Iterator[Tensor]:
        for _ in range(20):
            seen.add_(1)
            seen[0] += 1
            yield seen.clone()

    found, loop = [], swpipe.ahead(loader(), device="cpu")
    for batch in loop:
        settle(loop.pipe)  # later batches have been made
        found.append(batch.tolist())
    assert found == [[2.0 * n, 1.0 * n] for n in range(1, 21)]


def test_functions_run_on_as_many_batches_at_once_as_there_are_workers() -> None:
    """Each waits for the others; batches come in order, and a failure in its place."""
    together = threading.Barrier(3)
    seen: set[int] = set()

    def read(number: int) -> int:
        if number < 6 and number not in seen:  # the first batches go through it twice
            seen.add(number)
            together.wait(PATIENCE_S)
        if number >= 7:
            raise ValueError(f"number {number}")
        return -number

    found = list[int]()
    loop = swpipe.ahead(range(12), read, workers=3)
    assert loop.pipe.plan.depth == 5
    with pytest.raises(ValueError, match="number 7"):
        found.extend(loop)
    assert found == [-number for number in range(7)]


def test_a_loop_may_be_the_loader_of_another() -> None:
    """Endless data is such a generator; a watched pull of the outer loop pulls from the inner."""

    def cycle(loop: Iterable[int]) -> Iterator[int]:
        while True:
            yield from loop

    data = cycle(swpipe.ahead([1, 2, 3], device="cpu"))
    with swpipe.ahead(data, device="cpu") as loop:
        assert list(itertools.islice(loop, 12)) == [1, 2, 3] * 4
