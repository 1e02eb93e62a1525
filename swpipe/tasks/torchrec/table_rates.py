"""Learning rates that fused tables hold, saved and set back; no optimizer's state has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from swpipe._tensors.stateful import modules_in


def rates_of(modules: Iterable[nn.Module]) -> list[float]:
    """The rate of each group of tables in the sharded modules, in order."""
    return [table.get_learning_rate() for table in _rated(modules)]


def set_rates(modules: Iterable[nn.Module], rates: Sequence[float]) -> None:
    """Set back what ``rates_of`` returned.

    Raises:
        ValueError: They are of another number of groups.
    """
    tables = list(_rated(modules))
    if len(rates) != len(tables):
        raise ValueError(
            f"the state has {len(rates)} learning rates of tables, and this rank has "
            f"{len(tables)} groups of tables: resume with the ranks and the sharding that saved it"
        )
    for table, rate in zip(tables, rates, strict=True):
        table.set_learning_rate(rate)


def _rated(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What fbgemm keeps a rate in."""
    parts = (part for module in modules for part in modules_in(module))
    return (part for part in parts if hasattr(part, "set_learning_rate"))
