"""Loaders whose iterators have a state are resumed in mid-pass, by any protocol."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

import swpipe
from swpipe.loops import StatefulLoader

BATCHES = 24


class Numbers:
    """An iterator with ``get_state`` and ``set_state``, which shuffles by its state."""

    def __init__(self) -> None:
        self.place = 0
        self.draws = random.Random(4)

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> float:
        if self.place == BATCHES:
            raise StopIteration
        self.place += 1
        return self.place + self.draws.random()

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "draws": self.draws.getstate()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        version, numbers, gauss = state["draws"]
        self.draws.setstate((version, tuple(numbers), gauss))


class Dataset:
    """A dataset that makes such iterators, and counts the batches pulled from them."""

    pulled = 0

    def __iter__(self) -> Iterator[float]:
        dataset = self

        class Counted(Numbers):
            def __next__(self) -> float:
                batch = super().__next__()
                dataset.pulled += 1
                return batch

        return Counted()


class Counting:
    """An iterator without methods for its state."""

    def __init__(self, first: int = 0) -> None:
        self.place = first

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> float:
        if self.place == BATCHES:
            raise StopIteration
        self.place += 1
        return 3.0 * self.place


def place_of(iterator: Counting) -> int:
    return iterator.place


def go_on(iterator: Counting, place: int) -> Counting:
    return Counting(place)


class CountingDataset:
    def __iter__(self) -> Counting:
        return Counting()


LOADERS: dict[str, tuple[Callable[[], Any], list[float]]] = {
    "an iterator": (lambda: StatefulLoader(Numbers()), [*Numbers()]),
    "what makes it": (lambda: StatefulLoader(Dataset()), [*Dataset()]),
    "two functions": (
        lambda: StatefulLoader(CountingDataset(), get_state=place_of, set_state=go_on),
        [*Counting()],
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("stop", [1, 5, 11, BATCHES])
def test_a_pass_goes_on_where_its_state_was_saved(kind: str, stop: int) -> None:
    """It does so in the middle and at its end, over a loader that runs ahead."""
    make, batches = LOADERS[kind]
    with swpipe.ahead(make(), draws=False, device="cpu") as loop:
        found = [*islice(loop, stop - 1)] if stop > 1 else []
        assert found == batches[: stop - 1]
    loop, found = swpipe.ahead(make(), draws=False, device="cpu"), []
    for batch in loop:
        found.append(batch)
        if len(found) == stop:
            state = copy.deepcopy(loop.state_dict())
            break
    resumed = swpipe.ahead(make(), draws=False, device="cpu")
    resumed.load_state_dict(state)
    assert [*found, *resumed] == batches


def test_few_batches_are_pulled_again() -> None:
    """The state leads there, not to the beginning of the pass."""
    loop = swpipe.ahead(StatefulLoader(Dataset()), draws=False, device="cpu")
    for batch in loop:
        if int(batch) == 18:
            state = loop.state_dict()
            break
    dataset = Dataset()
    resumed = swpipe.ahead(StatefulLoader(dataset), draws=False, device="cpu")
    resumed.load_state_dict(state)
    assert [*map(int, resumed)] == [*range(19, BATCHES + 1)]
    assert dataset.pulled < BATCHES - 18 + 13


def test_a_state_between_two_passes_leads_to_a_whole_one() -> None:
    """The iterator of the last pass is at its end."""
    loop = swpipe.ahead(StatefulLoader(Dataset()), draws=False, device="cpu")
    batches = [*loop]
    assert [*loop] == batches
    resumed = swpipe.ahead(StatefulLoader(Dataset()), draws=False, device="cpu")
    resumed.load_state_dict(loop.state_dict())
    assert [*resumed] == batches == LOADERS["what makes it"][1]


def test_a_new_pass_over_an_iterator_that_was_left_is_refused() -> None:
    """Batches that were pulled ahead are lost; after its end a pass is empty."""
    loop = swpipe.ahead(StatefulLoader(Numbers()), draws=False, device="cpu")
    assert [len([*loop]), len([*loop])] == [BATCHES, 0]
    loop = swpipe.ahead(StatefulLoader(Numbers()), draws=False, device="cpu")
    for _ in loop:
        break
    with pytest.raises(RuntimeError, match="last pass over an iterator .Numbers. was left"):
        iter(loop)


def test_attributes_of_the_loader_can_be_read() -> None:
    """Private ones cannot."""
    assert len(StatefulLoader([1, 2])) == 2
    assert StatefulLoader([1, 2]).index(2) == 1
    with pytest.raises(AttributeError, match="_nothing"):
        StatefulLoader([])._nothing  # noqa: B018


def test_a_loader_that_tells_no_state_is_refused_with_the_word_to_type() -> None:
    """The iterators of grain's loaders have a state, and the loaders have none."""
    loop = swpipe.ahead(Dataset(), draws=False, device="cpu")
    for _ in loop:
        with pytest.raises(RuntimeError, match="put a swpipe.loops.StatefulLoader around it"):
            loop.state_dict()
