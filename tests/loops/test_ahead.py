"""One line for a plain loop: batches are made while its body runs, and every bit is the same."""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import swpipe
from swpipe.loops import AheadLoop
from swpipe.loops.pull_watch import PullWatch
from tests.loops.ordinary_loops import Rows, batches
from tests.support.budget import examples
from tests.support.sequencer import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore:the loader draws from")


def states() -> list[Any]:
    """Of the default generators, as what they draw next."""
    return [torch.rand(1), random.random(), float(np.random.rand())]


def seed(number: int = 3) -> None:
    """All default generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------- the body runs on


@pytest.mark.parametrize(("prefetch", "functions"), [(2, ()), (5, (lambda batch: batch,))])
def test_so_many_batches_are_made_while_the_body_runs(
    prefetch: int, functions: tuple[Callable[[Any], Any], ...]
) -> None:
    """And no more, however long it takes."""
    pulled: list[int] = []

    def loader() -> Iterator[int]:
        for number in range(9):
            pulled.append(number)
            yield number

    with swpipe.ahead(loader(), *functions, prefetch=prefetch, device="cpu") as loop:
        for number, batch in enumerate(loop):
            assert batch == number
            loop.pipe.settle()
            assert len(pulled) == min(number + prefetch + 1, 9)


def test_functions_run_in_order_and_have_names() -> None:
    """Those of the functions; a second one of the same name has a number."""

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
    with swpipe.ahead(loader(), device="cpu") as loop:
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
    """Goes on from pass to pass."""

    def __init__(self) -> None:
        self.rows = itertools.count()

    def __iter__(self) -> Iterator[Tensor]:
        return map(torch.tensor, self.rows)


class Packer:
    """Hands out a row of the batch before with each."""

    left = torch.zeros(4)

    def __call__(self, rows: list[Tensor]) -> Tensor:
        packed = torch.stack([self.left, *rows[:-1]])
        self.left = rows[-1]
        return packed


class OwnLoader:
    """Of no class that is known."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers


def passes(loader: Iterable[Any], *, left_at: int = 3) -> list[Any]:
    """The batches of three passes, left early."""
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
    """Nobody can see whether it goes on where it stopped."""
    with swpipe.ahead(loader(), device="cpu") as loop:
        with pytest.warns(RuntimeWarning, match="were dropped.*give its iterator") as told:
            found = passes(loop)
        assert [one.filename for one in told] == [__file__]
    with pytest.raises(AssertionError):
        same(found, passes(loader()))  # or the warning would be needless


def test_the_iterator_of_a_stream_loses_nothing() -> None:
    """That is the mend."""
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
    """A data set with indices, workers, and a list."""
    with swpipe.ahead(loader(), device="cpu") as loop:
        same(passes(loop), passes(loader()))


@pytest.mark.filterwarnings("ignore:the last pass was left")
def test_a_loader_is_called_by_one_thread_at_a_time() -> None:
    """A new pass waits for the pull of the one that was left."""
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

    with swpipe.ahead(Shared(), device="cpu") as loop:
        for batch in loop:
            if batch == 1:
                assert pulling.wait(30)
                break
        threading.Timer(0.1, goes_on.set).start()
        assert list(loop) == [0, 1, 2, 3]


# --------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("where", ["the loader", "a function"])
def test_an_error_comes_when_the_batches_before_it_were_given(where: str) -> None:
    """As itself, with a note of where."""

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
    """To read, to call, and to set; its own attributes are its own. It is no loader for another."""
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
    """It would make a plain loader of it, and say nothing."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    loader = batches()
    with pytest.raises(TypeError, match="give it the loader, and what it returns to ahead"):
        accelerator.prepare(swpipe.ahead(loader, torch.neg, device="cpu"))
    loop = swpipe.ahead(accelerator.prepare(loader), torch.neg, device="cpu")
    assert accelerator.prepare(loop) is loop
    same(list(loop), [-one for one in loader])


# --------------------------------------------------------------------------------------- draws


class Views:
    """Noise of kinds, of which some operators take no generator."""

    @staticmethod
    def rand() -> Tensor:
        return torch.rand(2)

    @staticmethod
    def integers() -> Tensor:
        return torch.randint(0, 9, (2,)) + torch.randperm(2) + torch.ones(2).random_(5)

    @staticmethod
    def like() -> Tensor:
        return torch.randn_like(torch.ones(2)) + torch.bernoulli(torch.full((2,), 0.5))

    @staticmethod
    def dropout() -> Tensor:
        return functional.dropout(torch.ones(2)) + functional.rrelu(-torch.ones(2), training=True)

    @staticmethod
    def mixed() -> Tensor:
        return torch.rand(2) + torch.native_dropout(torch.ones(2), 0.5, True)[0] + torch.rand(2)

    @staticmethod
    def python() -> Tensor:
        return torch.tensor([random.random(), 0.0])

    @staticmethod
    def numpy() -> Tensor:
        return torch.tensor([0.0, float(np.random.rand())])


TORCHS = ("rand", "integers", "like", "dropout", "mixed")


@dataclass(frozen=True)
class Program:
    """A loop that draws.

    Attributes:
        size: How many batches the loader has.
        loader: What each pull draws.
        body: What each body draws.
        leaves: After so many batches each pass is left.
        again: Whether the loader is an iterator.
        delays: Seed of the delays.
    """

    size: int
    loader: tuple[tuple[str, ...], ...]
    body: tuple[tuple[str, ...], ...]
    leaves: int
    again: bool
    delays: int

    def run(self, over: Callable[[Any], Iterable[Any]]) -> list[Any]:
        """What it makes, in some passes."""
        delays = random.Random(self.delays)
        pauses = [[delays.choice((0, 0, 1e-4, 1e-3)) for _ in range(self.size)] for _ in range(2)]

        class Loader:
            def __iter__(loader) -> Iterator[Tensor]:  # noqa: N805
                for number in range(self.size):
                    time.sleep(pauses[0][number])
                    noise = [getattr(Views, name)() for name in self.loader[number]]
                    yield sum(noise, torch.full((2,), float(number)))

        seed()
        loader = over(iter(Loader()) if self.again else Loader())
        found: list[Any] = []
        for _ in range(3):
            for number, batch in enumerate(loader):
                time.sleep(pauses[1][number])
                found.append(batch.clone())
                found.extend(getattr(Views, name)() for name in self.body[number])
                found.append(torch.get_rng_state())
                if number + 1 == self.leaves:
                    break
        return [*found, *states()]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Loaders that draw by Python's or numpy's generators do so in the second pull, too."""
    size = draw(st.integers(1, 12))
    loaders = draw(st.sets(st.sampled_from((*TORCHS, "python", "numpy")), max_size=3))
    bodies = draw(st.sets(st.sampled_from((*TORCHS, "python", "numpy")), max_size=2))
    rare = draw(st.sampled_from((1.0, 0.5, 0.2)))
    chances = random.Random(draw(st.integers(0, 999)))

    def some(names: set[str], *, always: bool) -> tuple[str, ...]:
        for_sure = ("python", "numpy") if always else ()
        return tuple(n for n in sorted(names) if n in for_sure or chances.random() < rare)

    return Program(
        size,
        tuple(some(loaders, always=number == 1) for number in range(size)),
        tuple(some(bodies, always=False) for number in range(size)),
        draw(st.integers(1, size)),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@pytest.mark.filterwarnings("ignore:the last pass was left")
@examples("loops", 25)
@given(programs())
def test_what_is_drawn_is_what_a_plain_loop_draws(program: Program) -> None:
    """By the loader, the body or both, whatever the timing, wherever the passes are left.

    Or it is the error of two that draw, where the body began late.
    """
    expected = program.run(lambda loader: loader)
    try:
        with warnings.catch_warnings(record=True) as told:
            found = program.run(partial(swpipe.ahead, device="cpu"))
        if any("the pass was left, and the loader has drawn" in str(one.message) for one in told):
            return
    except RuntimeError as error:
        assert "both draw from" in str(error)  # noqa: PT017
        loader = {name for names in program.loader for name in names}
        body = {name for names in program.body for name in names}
        assert loader
        assert body
        return
    same(found, expected)


def test_a_loader_that_draws_beside_a_body_that_does_not_is_ahead_after_four_pulls() -> None:
    """The body runs while the loader draws, and finds the state of a plain loop."""
    meet = threading.Barrier(2, timeout=30)

    def loader() -> Iterator[Tensor]:
        for number in range(10):
            noise = torch.rand(2)
            if number >= 6:
                meet.wait()
            yield noise

    seed()
    plain = [torch.rand(2) for _ in range(10)]
    seed()
    for number, batch in enumerate(swpipe.ahead(loader(), device="cpu")):
        same(batch, plain[number])
        after = torch.get_rng_state()
        if number >= 5 and number < 9:
            meet.wait()
        assert torch.equal(torch.get_rng_state(), after)
    seed()
    assert len([torch.rand(2) for _ in range(10)]) == 10
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kind", ["rand", "mixed"])
def test_a_pull_that_goes_on_out_of_turn_leaves_the_generator_as_it_was(kind: str) -> None:
    """Whoever lets it go on, as ``settle`` does, may look at the state, and save it."""

    def loader() -> Iterator[Tensor]:
        for _ in range(8):
            yield getattr(Views, kind)()

    def run(over: Callable[[Any], Iterable[Any]]) -> list[Any]:
        seed()
        found: list[Any] = []
        loop = over(loader())
        for batch in loop:
            if isinstance(loop, AheadLoop):
                loop.pipe.settle()
            found += [batch, torch.get_rng_state()]
        return [*found, *states()]

    same(run(partial(swpipe.ahead, device="cpu")), run(lambda rows: rows))


def test_a_pull_that_is_cut_short_has_drawn_nothing() -> None:
    """From the generator that its sampler was given, before it waited at a draw from torch's."""
    waiting = threading.Event()

    class Noisy(Rows):
        asked = 0

        def __getitem__(self, index: int) -> Tensor:
            self.asked += 1
            if self.asked > 8 * 32:
                waiting.set()
            return super().__getitem__(index) + torch.rand(4)

    def run(over: Callable[[Any], Iterable[Any]], *, waits: bool) -> Tensor:
        seed()
        draws = torch.Generator().manual_seed(3)
        rows = Noisy()
        sampler = RandomSampler(rows, replacement=True, num_samples=320, generator=draws)
        for number, _ in enumerate(over(batches(rows, batch_size=32, sampler=sampler))):
            torch.rand(1)
            if number == 7:
                assert not waits or waiting.wait(30)
                break
        return torch.cat([draws.get_state(), torch.get_rng_state()])

    expected = run(lambda rows: rows, waits=False)
    same(run(partial(swpipe.ahead, device="cpu"), waits=True), expected)


def test_a_random_task_finds_its_own_seed_after_draws_ahead() -> None:
    """The state that the loader left is set beneath it."""

    def loader() -> Iterator[Tensor]:
        for _ in range(12):
            yield torch.rand(2)

    def noise(ctx: Any) -> None:
        ctx.x = ctx.batch + torch.rand(2)

    def run(*, pull_ahead: bool) -> list[Any]:
        seed()
        found = []
        tasks = [swpipe.PipelineTask("noise", noise, random=True)]
        with swpipe.overlap(loader(), tasks, pull_ahead=pull_ahead, seed=1, device="cpu") as loop:
            for ctx in loop:
                if pull_ahead and ctx.iter_idx > 6:
                    loop.pipe.settle()
                found += [ctx.x, torch.get_rng_state()]
        return found

    same(run(pull_ahead=True), run(pull_ahead=False))


def test_a_counted_loop_asks_for_an_end_that_draws() -> None:
    """As a for does, after the last body."""

    class Draws:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            torch.rand(1)

    def run(over: Callable[[Any], Any]) -> list[Any]:
        seed()
        loop = over(Draws())
        if isinstance(loop, AheadLoop):
            loop.counted = True
            contexts = iter(loop)
            for _ in range(3):
                next(contexts)
                torch.rand(1)
            contexts.close()  # type: ignore[attr-defined]
        else:
            for _ in loop:
                torch.rand(1)
        return states()

    same(run(partial(swpipe.ahead, device="cpu")), run(lambda rows: rows))


def test_what_is_known_of_a_loader_is_kept_with_it() -> None:
    """The second loop over it draws ahead from the second pull on."""
    meet, again = threading.Barrier(2, timeout=30), False

    class Noisy:
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(6):
                noise = torch.rand(1)
                if again and number >= 2:  # the second is pulled in turn
                    meet.wait()
                yield noise

    loader = Noisy()
    assert len(list(swpipe.ahead(loader, device="cpu"))) == 6
    again = True
    for number, _ in enumerate(swpipe.ahead(loader, device="cpu")):
        if 1 <= number < 5:
            meet.wait()


def test_a_loader_whose_pulls_wait_is_told_once() -> None:
    """With what to do."""

    def loader() -> Iterator[Tensor]:
        for _ in range(12):
            yield torch.rand(1)

    loop = swpipe.ahead(loader(), device="cpu")
    known = loop._pulled.draws.known

    def body(number: int) -> None:
        torch.rand(1)
        end = time.monotonic() + 30
        while 1 <= number < 11 and known.waits < number and time.monotonic() < end:
            time.sleep(1e-3)

    with pytest.warns(RuntimeWarning, match="so does, or may.*wait until the loop asks") as told:
        assert len([body(number) for number, _ in enumerate(loop)]) == 12  # type: ignore[func-returns-value]
    assert len(told) == 1
    assert told[0].filename == __file__


# ----------------------------------------------------------------------------- what is not apart


def test_what_the_loader_itself_changes_is_none() -> None:
    """A counter of its own."""
    seen = torch.zeros(2)

    def loader() -> Iterator[Tensor]:
        for _ in range(20):
            seen.add_(1)
            seen[0] += 1
            yield seen.clone()

    found, loop = [], swpipe.ahead(loader(), device="cpu")
    for batch in loop:
        loop.pipe.settle()  # later batches have been made
        found.append(batch.tolist())
    assert found == [[2.0 * n, 1.0 * n] for n in range(1, 21)]


def test_a_write_of_the_loader_that_is_not_counted_yet_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop comes to a batch when the pull of the next one is about to note what it wrote."""
    inside, goes_on, armed = threading.Event(), threading.Event(), threading.Event()
    called = PullWatch._called

    def slowly(watch: Any, func: Any, args: Any, kwargs: Any) -> Any:
        result = called(watch, func, args, kwargs)
        if armed.is_set() and getattr(func, "__name__", "") == "normal_":
            inside.set()
            assert goes_on.wait(30)
        return result

    def loader() -> Iterator[Tensor]:
        for number in range(12):
            if number == 9:
                armed.set()
            (noise if number == 9 else torch.zeros(2)).normal_()
            yield noise.clone()

    noise = torch.zeros(2)
    monkeypatch.setattr(PullWatch, "_called", slowly)
    found = []
    for number, batch in enumerate(swpipe.ahead(loader(), device="cpu")):
        found.append(batch)
        if number == 7:
            assert inside.wait(30)  # in the pull of the 9th
        if number == 8:
            goes_on.set()
    assert len(found) == 12


def test_functions_run_on_as_many_batches_at_once_as_there_are_workers() -> None:
    """Each waits for the others; batches come in order, and a failure in its turn."""
    together = threading.Barrier(3)

    def read(number: int) -> int:
        if number < 6:
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
