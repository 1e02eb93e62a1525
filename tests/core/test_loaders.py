"""Which loaders are known to be apart from the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from swpipe.core.loaders import are_same, generators_in_pass, is_apart, read_in_pass
from swpipe.loops import EvenData, pad_with

ROWS: Dataset[Any] = TensorDataset(torch.arange(12.0))


class Stream(IterableDataset[Tensor]):
    """A dataset of rows without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(12.0))


class OwnSampler(Sampler[int]):
    """A sampler of a user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class OwnLoader(DataLoader[Any]):
    """A subclass of a loader, which may override anything."""


class OwnList(list[Any]):
    """A subclass of a list, which may override anything."""


def loader(**options: Any) -> DataLoader[Any]:
    """Return a loader with a worker."""
    return DataLoader(ROWS, **({"num_workers": 1} | options))


def generator() -> torch.Generator:
    """Return a generator, as a user gives one."""
    return torch.Generator().manual_seed(0)


APART: dict[str, Callable[[], object]] = {
    "list": lambda: [1],
    "tuple": lambda: (1,),
    "range": lambda: range(3),
    "workers": loader,
    "shuffled": lambda: loader(shuffle=True),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([0.5] * 12, 12)),
    "distributed": lambda: loader(sampler=DistributedSampler(ROWS, 2, 0)),
    "weighted by a generator, which draws once": lambda: loader(
        sampler=WeightedRandomSampler([0.5] * 12, 12, generator=generator())
    ),
    "stream": lambda: DataLoader(Stream(), num_workers=1),
    "made even over ranks": lambda: EvenData("stop").loader((1,)),
}

NOT_APART: dict[str, Callable[[], object]] = {
    "a generator": lambda: iter([1]),
    "no workers": lambda: loader(num_workers=0),
    "a subclass": lambda: OwnLoader(ROWS, num_workers=1),
    "a list of its own": OwnList,
    "a sampler of its own": lambda: loader(sampler=OwnSampler()),
    "one within torch's": lambda: loader(batch_sampler=BatchSampler(OwnSampler(), 2, False)),
    "a list within torch's": lambda: loader(batch_sampler=BatchSampler([1, 2], 2, False)),
    "a subset in a list": lambda: loader(sampler=SubsetRandomSampler([1, 2])),
    "torchdata's, which is asked its state": lambda: StatefulDataLoader(ROWS, num_workers=1),
    "a sampler's generator": lambda: loader(shuffle=True, generator=generator()),
    "a list made even over ranks": lambda: EvenData("stop").loader([1]),
    "a generator made even over ranks": lambda: EvenData("stop").loader(OwnList()),
    "a loader that pads": lambda: EvenData("pad", pad=pad_with(0)).loader((1,)),
}


@pytest.mark.parametrize("name", [*APART, *NOT_APART])
def test_what_is_known_to_be_apart(name: str) -> None:
    """These are sequences, and torch's loaders with workers and torch's samplers.

    Nothing else is: it may run code in this process, or draw during the pass from its arguments.
    """
    assert is_apart({**APART, **NOT_APART}[name]()) == (name in APART)


def test_a_given_generator_can_be_watched() -> None:
    """Its draws are reported, and a loader whose generators are watched is apart."""
    given = generator()
    one = loader(sampler=RandomSampler(range(12), generator=given))
    assert generators_in_pass(one) == [given]
    assert is_apart(one, draws_watched=True)
    assert not is_apart(one)


def changed(what: object, attribute: str, value: object) -> Callable[[], None]:
    """Return a function that sets an attribute, as code in the body of a loop may."""
    return lambda: setattr(what, attribute, value)


def test_what_samplers_read_in_mid_pass_is_compared() -> None:
    """Replaced indices, sizes and samplers are seen; what a pass reads once is not compared."""
    indices, replaced = SubsetRandomSampler((0, 1, 2)), RandomSampler(range(12))
    batches = BatchSampler(indices, 2, drop_last=False)
    pulled = loader(batch_sampler=batches)
    seen = [
        changed(indices, "indices", (2, 1, 0)),
        changed(batches, "batch_size", 3),
        changed(batches, "drop_last", True),
        changed(batches, "sampler", replaced),
        changed(replaced, "replacement", True),
        changed(replaced, "data_source", range(11)),
    ]
    for change in seen:
        before = read_in_pass(pulled)
        assert are_same(before, read_in_pass(pulled))
        change()
        assert not are_same(before, read_in_pass(pulled))
    before = read_in_pass(pulled)
    changed(pulled, "timeout", 1)()
    assert are_same(before, read_in_pass(pulled))
