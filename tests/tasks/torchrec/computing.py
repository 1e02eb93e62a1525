"""Models that compute the inputs of their tables in the forward, by modules or otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tests.tasks.torchrec.models import (
    ROWS,
    Batch,
    Job,
    KeyedJaggedTensor,
    Model,
    batches,
    plain_model,
    sharded,
)
from tests.tasks.torchrec.trial import create, refusal

TWO = Job(modules=2)


def shifted(ids: KeyedJaggedTensor, by: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(ids.keys(), (ids.values() + by) % ROWS, lengths=ids.lengths())


class Move(nn.Module):
    """A module that adds a number to ids, and counts its runs in a buffer."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by
        self.register_buffer("ran", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        self.ran += 1
        return shifted(ids, self.by + self.ran % 3)


class Augment(nn.Module):
    """A module that makes a new batch with other dense values and ids."""

    def forward(self, batch: Batch) -> Batch:
        return replace(batch, dense=batch.dense * 2, ids=shifted(batch.ids, 3))


class Choose(nn.Module):
    """A module that takes collections of other results, and constants."""

    def forward(
        self, parts: list[Any], more: dict[str, Any], by: int = 1
    ) -> tuple[KeyedJaggedTensor, Tensor]:
        batch, factor = parts
        extra = more["extra"][1][0] if "extra" in more else 0
        return shifted(more["ids"], by), batch.dense * factor + extra


class Negatives(nn.Module):
    """A module that draws random ids."""

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return shifted(ids, torch.randint(0, ROWS, (len(ids.values()),)))


class Weights(nn.Module):
    """A module with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.ones(1))

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return shifted(ids, int(self.inner.weight))


class Scales(nn.Module):
    """A module that modifies its batch in place."""

    def forward(self, batch: Batch) -> Batch:
        batch.dense.mul_(2)
        return batch


class Rebinds(nn.Module):
    """A module that gives its batch another tensor."""

    def forward(self, batch: Batch) -> Batch:
        batch.dense = batch.dense * 2
        return batch


class Parts(nn.Module):
    """A module that contains another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        return self.inner(ids)


Inputs: TypeAlias = tuple[Tensor, list[Any]]
"""Dense values, and the ids of each table."""
Kind: TypeAlias = Callable[[Any, Batch], Inputs]


class Computes(Model):
    """A model that computes its tables' inputs by the function ``kind``."""

    flag = True
    kind: Kind

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        dense, ids = self.kind(self, batch)
        parts = [self.bottom(dense)]
        for table, own in zip(self.tables, ids, strict=True):
            if own is None:
                parts.append(parts[-1])  # as wide
                continue
            found = table(**own) if isinstance(own, dict) else table(own)
            parts.append(found.values())
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return self.criterion(logits, batch.labels), logits.detach()


def one(self: Any, batch: Batch) -> Inputs:
    """Compute both tables' inputs and the dense part by one module."""
    more = self.augment(batch)
    return more.dense, [more.ids, more.ids]


def each(self: Any, batch: Batch) -> Inputs:
    """Compute each input by its own module, one of them nested and called by keyword."""
    return batch.dense, [self.move(batch.ids), self.parts.inner(ids=batch.ids)]


def chain(self: Any, batch: Batch) -> Inputs:
    """Compute inputs by a module that takes results of others in lists and dicts, and constants."""
    more = self.augment(batch)
    moved = self.move(more.ids)
    ids, dense = self.choose([more, 0.5], {"ids": moved, "extra": [1, [batch.dense], (2, 3)]}, by=2)
    return dense, [ids, moved]


def draws(self: Any, batch: Batch) -> Inputs:
    """Compute inputs by modules that draw random numbers, used in the reverse order."""
    first, second = self.negatives(batch.ids), self.more_negatives(batch.ids)
    return batch.dense, [second, first]


def flagged(self: Any, batch: Batch) -> Inputs:
    """Call the module with another input if the flag is off."""
    ids = batch.ids if self.flag else shifted(batch.ids, 1)
    moved = self.move(ids)
    return batch.dense, [moved, moved]


def by_flag(self: Any, batch: Batch) -> Inputs:
    """Look up other ids if the flag is off."""
    ids = batch.ids if self.flag else shifted(batch.ids, 1)
    return batch.dense, [ids, ids]


def by_keyword(self: Any, batch: Batch) -> Inputs:
    """Look up other ids if the flag is off, by keyword."""
    dense, ids = by_flag(self, batch)
    return dense, [{"features": one} for one in ids]


def calls_twice(self: Any, batch: Batch) -> Inputs:
    """Call the first tables twice."""
    again = self.tables[0](batch.ids).values().sum()
    return batch.dense + again, [batch.ids, batch.ids]


def permutes(self: Any, batch: Batch) -> Inputs:
    """Compute the input of the first tables outside of modules."""
    return batch.dense, [batch.ids.permute([0, 1, 2, 3]), batch.ids]


def leaves_out(self: Any, batch: Batch) -> Inputs:
    """Leave out the second tables."""
    return batch.dense, [batch.ids, None]


def branches(self: Any, batch: Batch) -> Inputs:
    """Branch on the data."""
    if batch.labels.sum() < 0:
        raise ValueError("labels")
    return batch.dense, [batch.ids, batch.ids]


def rewraps(self: Any, batch: Batch) -> Inputs:
    """Put the same ids into a new container, which changes nothing."""
    ids = batch.ids
    again = ids if self.flag else KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())
    return batch.dense, [again, again]


def changes(self: Any, batch: Batch) -> Inputs:
    """Modify the ids in place after their exchange."""
    if not self.flag:
        batch.ids.values().remainder_(7)
    return batch.dense, [batch.ids, batch.ids]


def skips(self: Any, batch: Batch) -> Inputs:
    """Leave out the module if the flag is off."""
    moved = self.move(batch.ids) if self.flag else batch.ids
    return batch.dense, [moved, moved]


def replaces_part(self: Any, batch: Batch) -> Inputs:
    """Give the batch other ids before the module runs, which no trace shows."""
    if not self.flag:
        batch.ids = shifted(batch.ids, 1)
    more = self.augment(batch)
    return more.dense, [more.ids, more.ids]


def autocasts(self: Any, batch: Batch) -> Inputs:
    """Enter autocast in the forward."""
    with torch.autocast("cpu", enabled=not self.flag):
        more = self.augment(batch)
    return more.dense, [more.ids, more.ids]


def with_parameters(self: Any, batch: Batch) -> Inputs:
    """Compute the input of the first tables by a module with a parameter."""
    return batch.dense, [self.weights(batch.ids), batch.ids]


def twice(self: Any, batch: Batch) -> Inputs:
    """Call one module twice."""
    return batch.dense, [self.move(batch.ids), self.move(batch.ids)]


def shares(self: Any, batch: Batch) -> Inputs:
    """Call a module, and one that it contains."""
    return batch.dense, [self.parts(batch.ids), self.parts.inner(batch.ids)]


def in_list(self: Any, batch: Batch) -> Inputs:
    """Compute an element of a list outside of modules."""
    ids, dense = self.choose([self.augment(batch), batch.dense.sum()], {"ids": batch.ids})
    return dense, [ids, batch.ids]


def container(self: Any, batch: Batch) -> Inputs:
    """Make the ids' container in the forward."""
    ids = KeyedJaggedTensor(keys=["f0"], values=batch.labels, lengths=batch.labels)
    return batch.dense, [ids, ids]


def in_place(self: Any, batch: Batch) -> Inputs:
    """Modify the batch in place by the module."""
    more = self.scales(batch)
    return more.dense, [more.ids, more.ids]


def reads_before(self: Any, batch: Batch) -> Inputs:
    """Read in the forward what the module modifies later."""
    dense = batch.dense + 1
    more = self.scales(batch)
    return dense, [more.ids, more.ids]


def reads_before_rebound(self: Any, batch: Batch) -> Inputs:
    """Read in the forward what the module replaces later."""
    dense = batch.dense + 1
    more = self.rebinds(batch)
    return dense, [more.ids, more.ids]


def rebound(self: Any, batch: Batch) -> Inputs:
    """Give the batch another tensor by the module."""
    more = self.rebinds(batch)
    return more.dense, [more.ids, more.ids]


def of_embeddings(self: Any, batch: Batch) -> Inputs:
    """Compute the second tables' ids from the first tables' embeddings."""
    found = self.tables[0](batch.ids)
    return batch.dense, [batch.ids, self.move(found)]


def computing(kind: Kind) -> nn.Module:
    """Return a sharded model of a kind, with all modules that a kind may call."""
    model: Any = plain_model(TWO)
    model.__class__ = Computes
    model.kind = kind
    model.move, model.augment, model.choose = Move(5), Augment(), Choose()
    model.negatives, model.parts, model.weights = Negatives(), Parts(Move(7)), Weights()
    model.more_negatives = Negatives()
    model.scales, model.rebinds = Scales(), Rebinds()
    return sharded(TWO, model)


def refused(
    kind: Kind,
    name: str = "jagged_split_sparse_dist",
    flip: int = 9,
    change: Callable[[nn.Module], object] | None = None,
    **options: Any,
) -> str:
    """Return the error of a training of 5 batches, with the flag off from one of them on."""
    model = computing(kind)
    data = batches(5)

    def train() -> None:
        for step in range(5):
            model.module.flag = step < flip
            pipeline.progress(data)

    with create(name, model, TWO, **options) as pipeline:
        if change is not None:
            change(model.module)
        return refusal(train)
