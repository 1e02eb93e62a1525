"""A rewritten forward is called with the very input that was exchanged, or the call is refused.

The trace sees one batch in one mode. A model that chose another input later got embeddings of ids
that it had not asked for, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swpipe.tasks.torchrec.exchanged import CallInputs, _same
from tests.support.ranks import Ranks
from tests.tasks.torchrec.computing import TWO
from tests.tasks.torchrec.models import (
    BATCH,
    Batch,
    KeyedJaggedTensor,
    Model,
    batches,
    plain_model,
    sharded,
)
from tests.tasks.torchrec.trial import (
    EXACT,
    Outcome,
    by_torchrec,
    create,
    everything,
    refusal,
    to_the_end,
)


@dataclass
class _Ids(Batch):
    """A batch with a second kind of ids."""

    other: KeyedJaggedTensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> _Ids:
        plain = Batch.to(self, device, non_blocking)
        assert self.other is not None
        return _Ids(plain.dense, plain.ids, plain.labels, self.other.to(device))


def _data(count: int) -> Iterator[_Ids]:
    for one, other in zip(batches(count), batches(count, seed=9), strict=True):
        yield _Ids(one.dense, one.ids, one.labels, other.ids)


class _Chooses(Model):
    """A model that picks its inputs in ``choose``."""

    flag = True

    def choose(self, batch: _Ids) -> list[Any]:
        return [batch.ids for _ in self.tables]

    def forward(self, batch: _Ids) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        picked = zip(self.tables, self.choose(batch), strict=True)
        parts = [self.bottom(batch.dense), *(table(ids).values() for table, ids in picked)]
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class _ByMode(_Chooses):
    def choose(self, batch: _Ids) -> list[Any]:
        return [batch.ids if self.training else batch.other for _ in self.tables]


class _ByFlag(_Chooses):
    def choose(self, batch: _Ids) -> list[Any]:
        return [batch.ids if self.flag else batch.other for _ in self.tables]


class _Swapped(_Chooses):
    def choose(self, batch: _Ids) -> list[Any]:
        both = [batch.ids, batch.other]
        return both if self.flag else both[::-1]


class _Keyword(_Chooses):
    def forward(self, batch: _Ids) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ids = batch.ids if self.flag else batch.other
        parts = [self.bottom(batch.dense), *(t(features=ids).values() for t in self.tables)]
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class _Rewraps(_Chooses):
    """The same ids in a new container, which changes nothing."""

    def choose(self, batch: _Ids) -> list[Any]:
        if self.flag:
            return [batch.ids for _ in self.tables]
        ids = batch.ids
        again = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())
        return [again for _ in self.tables]


class _Changes(_Chooses):
    """Changes its ids in place, after they were exchanged."""

    def choose(self, batch: _Ids) -> list[Any]:
        if not self.flag:
            batch.ids.values().remainder_(7)
        return [batch.ids for _ in self.tables]


def _model(kind: type[_Chooses]) -> nn.Module:
    model = plain_model(TWO)
    model.__class__ = kind
    return sharded(TWO, model)


def _trained(name: str, kind: type[_Chooses], at: int, **options: Any) -> str:
    """Train 9 batches, and let the model choose otherwise from one of them on."""
    model = _model(kind)

    def train() -> None:
        data = _data(9)
        for _ in range(min(at, 9)):
            pipeline.progress(data)
        if at < 9 and kind is _ByMode:
            pipeline.drain()
            model.eval()
        model.module.flag = at > 9
        to_the_end(pipeline, data)

    with create(name, model, TWO, **options) as pipeline:
        return refusal(train)


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(EXACT, [_ByMode, _ByFlag, _Swapped, _Keyword], strict=True)]
)
def test_another_input_than_the_exchanged_one_is_refused(
    two_ranks: Ranks, name: str, kind: type[_Chooses]
) -> None:
    """By mode, by a flag that flips at batch 2, between two modules, by keyword."""
    for said in two_ranks.run(_trained, name, kind, 2):
        assert "module 'tables.0': its input batch.ids was exchanged" in said.replace(
            "features=", ""
        )
        assert "called with another one" in said
    assert two_ranks.run(_trained, name, kind, 12) == ["nothing raised"] * 2


@pytest.mark.parametrize("name", EXACT[::2])
def test_an_input_that_was_changed_in_place_is_refused(two_ranks: Ranks, name: str) -> None:
    """The ids as they were have been exchanged."""
    for said in two_ranks.run(_trained, name, _Changes, 2):
        assert "which the forward has changed since" in said


def _rewrapped(name: str) -> list[str]:
    wanted = by_torchrec(TWO, _data(6), _model(_Chooses))
    model = _model(_Rewraps)
    outputs = []
    with create(name, model, TWO) as pipeline:
        data = _data(6)
        outputs.append(pipeline.progress(data))
        model.module.flag = False
        outputs += to_the_end(pipeline, data)
    return Outcome(outputs, everything(model)).differences(wanted)


@pytest.mark.parametrize("name", EXACT[1::2])
def test_the_same_ids_in_a_new_container_are_the_same_input(two_ranks: Ranks, name: str) -> None:
    """As a property of the batch makes one, or a wrapper that moves inputs."""
    assert two_ranks.run(_rewrapped, name) == [[], []]


def test_what_counts_as_the_same() -> None:
    """The same memory and keys; equal values in other memory do not."""
    ids = next(batches(1, rank=0)).ids
    weights = torch.rand(len(ids.values()))

    def made(**changed: Any) -> KeyedJaggedTensor:
        parts = {"keys": ids.keys(), "values": ids.values(), "weights": weights, **changed}
        return KeyedJaggedTensor(**{"lengths": ids.lengths(), **parts})

    assert _same(made(), made())
    assert not _same(made(), made(keys=ids.keys()[::-1]))
    assert not _same(made(), made(values=ids.values().clone()))
    assert not _same(made(), made(weights=weights.clone()))
    assert not _same(made(), made(weights=None))
    assert not _same(made(), made(lengths=ids.lengths().flip(0)))
    assert _same([made(), 3, {"a": None}], [made(), 3, {"a": None}])
    assert not _same([made(), 3], [made(), 4])
    assert not _same({"a": 1}, {"b": 1})
    assert not _same(weights[1:], weights[:-1])
    assert not _same(made(), weights)


def test_what_counts_as_changed() -> None:
    """A tensor that was written to, or replaced; not one in the same memory, nor a cached one."""

    def after(change: Any) -> bool:
        batch = next(batches(1, rank=0))
        inputs = CallInputs([batch], {"more": [batch.labels]})
        change(batch)
        return bool(inputs.changes())

    assert not after(lambda batch: None)
    assert not after(lambda batch: setattr(batch, "dense", batch.dense.view(BATCH, -1)))
    assert not after(lambda batch: batch.ids.offsets())
    assert after(lambda batch: setattr(batch, "dense", batch.dense.clone()))
    assert after(lambda batch: batch.dense.mul_(2))
    assert after(lambda batch: batch.ids.values().add_(1))
