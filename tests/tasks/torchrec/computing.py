"""Models that compute the inputs of their tables in the forward, by modules and otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.tasks.torchrec.models import (
    ROWS,
    Batch,
    Job,
    KeyedJaggedTensor,
    Model,
    plain_model,
    sharded,
)

TWO = Job(modules=2)


def shifted(ids: KeyedJaggedTensor, by: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(ids.keys(), (ids.values() + by) % ROWS, lengths=ids.lengths())


class Move(nn.Module):
    """Adds a number to ids; how often it ran is a buffer, and part of the state."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by
        self.register_buffer("ran", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        self.ran += 1
        return shifted(ids, self.by + self.ran % 3)


class Augment(nn.Module):
    """A new batch, of other dense values and ids."""

    def forward(self, batch: Batch) -> Batch:
        return replace(batch, dense=batch.dense * 2, ids=shifted(batch.ids, 3))


class Choose(nn.Module):
    """Takes collections of what others computed, with constants."""

    def forward(
        self, parts: list[Any], more: dict[str, Any], by: int = 1
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        batch, factor = parts
        extra = more["extra"][1][0] if "extra" in more else 0
        return shifted(more["ids"], by), batch.dense * factor + extra


class Negatives(nn.Module):
    """Draws random ids."""

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return shifted(ids, torch.randint(0, ROWS, (len(ids.values()),)))


class Weights(nn.Module):
    """Holds a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.ones(1))

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return shifted(ids, int(self.inner.weight))


class Scales(nn.Module):
    """Changes its batch in place."""

    def forward(self, batch: Batch) -> Batch:
        batch.dense.mul_(2)
        return batch


class Rebinds(nn.Module):
    """Gives its batch another tensor."""

    def forward(self, batch: Batch) -> Batch:
        batch.dense = batch.dense * 2
        return batch


class Parts(nn.Module):
    """A module that holds others, one level down."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        return self.inner(ids)


class Computes(Model):
    """A model that computes its tables' inputs in ``inputs``."""

    flag = True

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        raise NotImplementedError

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        dense, ids = self.inputs(batch)
        looked_up = zip(self.tables, ids, strict=True)
        parts = [self.bottom(dense), *(table(own).values() for table, own in looked_up)]
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


class One(Computes):
    """Both tables share the result of one module; so does the dense part."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        more = self.augment(batch)
        return more.dense, [more.ids, more.ids]


class Each(Computes):
    """A module for each; one of them lies within another module, and is called by keyword."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        return batch.dense, [self.move(batch.ids), self.parts.inner(ids=batch.ids)]


class Chain(Computes):
    """One module takes the results of others, in lists and dicts, and constants."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        more = self.augment(batch)
        moved = self.move(more.ids)
        ids, dense = self.choose(
            [more, 0.5], {"ids": moved, "extra": [1, [batch.dense], (2, 3)]}, by=2
        )
        return dense, [ids, moved]


class Draws(Computes):
    """Its modules draw from torch's generator; what is drawn first is used last."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        first, second = self.negatives(batch.ids), self.more_negatives(batch.ids)
        return batch.dense, [second, first]


class Flagged(Computes):
    """Calls its module with another input once the flag is off."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        ids = batch.ids if self.flag else shifted(batch.ids, 1)
        moved = self.move(ids)
        return batch.dense, [moved, moved]


class Skips(Computes):
    """Leaves its module out once the flag is off."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        moved = self.move(batch.ids) if self.flag else batch.ids
        return batch.dense, [moved, moved]


class ReplacesPart(Computes):
    """Gives the batch other ids before its module sees it, which no trace shows."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        if not self.flag:
            batch.ids = shifted(batch.ids, 1)
        more = self.augment(batch)
        return more.dense, [more.ids, more.ids]


class Autocasts(Computes):
    """Enters autocast within its forward."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        with torch.autocast("cpu", enabled=not self.flag):
            more = self.augment(batch)
        return more.dense, [more.ids, more.ids]


class WithParameters(Computes):
    """The module of its first tables holds a parameter."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        return batch.dense, [self.weights(batch.ids), batch.ids]


class Twice(Computes):
    """Calls one module twice."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        return batch.dense, [self.move(batch.ids), self.move(batch.ids)]


class InList(Computes):
    """An element of a list is computed outside of modules."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        ids, dense = self.choose([self.augment(batch), batch.dense.sum()], {"ids": batch.ids})
        return dense, [ids, batch.ids]


class Container(Computes):
    """Makes the ids' container in its forward."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        ids = KeyedJaggedTensor(keys=["f0"], values=batch.labels, lengths=batch.labels)
        return batch.dense, [ids, ids]


class InPlace(Computes):
    """Its module changes the batch in place."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        more = self.scales(batch)
        return more.dense, [more.ids, more.ids]


class ReadsBefore(Computes):
    """The forward reads what its module changes, before it calls the module."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        dense = batch.dense + 1
        more = self.scales(batch)
        return dense, [more.ids, more.ids]


class ReadsBeforeRebound(Computes):
    """The same, where it gets another tensor."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        dense = batch.dense + 1
        more = self.rebinds(batch)
        return dense, [more.ids, more.ids]


class Rebound(Computes):
    """Its module gives the batch another tensor."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        more = self.rebinds(batch)
        return more.dense, [more.ids, more.ids]


class OfEmbeddings(Computes):
    """Its second tables' ids come out of the first's embeddings."""

    def inputs(self, batch: Batch) -> tuple[Tensor, list[Any]]:
        found = self.tables[0](batch.ids)
        return batch.dense, [batch.ids, self.move(found)]


def computing(kind: type[Model]) -> nn.Module:
    """A sharded model of a kind, with all modules that a kind may call."""
    model = plain_model(TWO)
    model.__class__ = kind
    model.move, model.augment, model.choose = Move(5), Augment(), Choose()
    model.negatives, model.parts, model.weights = Negatives(), Parts(Move(7)), Weights()
    model.more_negatives = Negatives()
    model.scales, model.rebinds = Scales(), Rebinds()
    return sharded(TWO, model)
