"""Rows and learning rates of tables that lie where nobody else finds them, saved and set back.

Profiling and recording train, and restore afterwards what they find: parameters, buffers, and other
tensors that modules have as attributes. The rows of some tables lie elsewhere: in hash tables, in
host memory behind a cache, on disk. The user says how these are captured and restored; without
that, whoever would have to restore them is refused.

Fused tables hold the learning rate of the next look-up, which no optimizer's state has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from swpipe._values.stateful import modules_in
from swpipe._values.walk import parts_of, tensors_in

CaptureRestore: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]
"""Returns all rows; and restores what that returned, as often as it is called."""


class TableState:
    """The rows of sharded modules, with a ``state_dict`` as an object with state has.

    ``given`` are the user's functions, if any, which restore the ``restored_modules``.
    """

    def __init__(self, modules: Mapping[str, nn.Module], given: CaptureRestore | None) -> None:
        self._hidden = [] if given else [name for name in modules if _hides_rows(modules[name])]
        self._modules = modules
        self._given = given
        self.restored_modules = tuple(modules.values()) if given else ()

    def __bool__(self) -> bool:
        """Whether there are rows that only the user's functions restore."""
        return bool(self._given or self._hidden)

    def state_dict(self) -> dict[str, Any]:
        """The rows; RuntimeError where it is not known how to capture them."""
        if self._given is None:
            told = ", ".join(f"{n} ({type(self._modules[n]).__name__})" for n in self._hidden)
            raise RuntimeError(
                f"the rows of {told} lie in no parameter or buffer, so they would be trained and "
                "not restored: give TaskOptions(tables_state=(capture, restore)), functions "
                "that return all rows of this rank and put them back"
            )
        return {"rows": self._given[0]()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rows."""
        if self._given is not None:
            self._given[1](state["rows"])


def _hides_rows(module: nn.Module) -> bool:
    """Whether some table's rows are in no tensor that a module below has as an attribute."""
    held = (tensor for m in modules_in(module) for tensor in tensors_in(dict(vars(m))))
    known = {address for tensor in held for address in _addresses(tensor)}
    return any(not known.issuperset(_addresses(weight)) for weight in _weights(module))


def _weights(module: nn.Module) -> Iterator[Any]:
    """What TorchRec takes for the rows of each table, as far as this rank has some."""
    for inner in modules_in(module):
        split: Any = getattr(inner, "split_embedding_weights", None)
        if callable(split):
            yield from split()


def _addresses(weight: Any) -> Iterator[int | None]:
    """Where a tensor's values lie, if it has some; None for an unknown place."""
    if not isinstance(weight, Tensor):
        yield None
    elif hasattr(weight, "local_shards"):
        for shard in weight.local_shards():
            yield from _addresses(shard.tensor)
    else:
        for part in parts_of(weight):
            if part.numel():
                yield None if part.is_meta else part.untyped_storage().data_ptr()


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
