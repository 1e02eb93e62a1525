"""Capture and restoring of rows and learning rates that lie in no parameter or buffer.

Profiling and recording train the model, and restore afterwards the state that they can find:
parameters, buffers, and other tensors that modules have as attributes. The rows of some tables lie
elsewhere: in hash tables, in host memory behind a cache, on disk. The user says how these rows are
captured and restored. Without that, profiling and recording are refused.

Fused tables hold the learning rate of the next look-up, which no optimizer's state has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from swpipe.values import modules_in, parts_of, tensors_in

CaptureRestore: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that returns all rows, and one that restores its result any number of times."""


class TableState:
    """The rows of sharded modules as an object with ``state_dict`` and ``load_state_dict``.

    ``given`` are the user's two functions, or None.
    """

    def __init__(self, modules: Mapping[str, nn.Module], given: CaptureRestore | None) -> None:
        # Even without the user's functions the object is made, so that capturing can be refused.
        self._hidden = [
            f"{name} ({type(module).__name__})"
            for name, module in modules.items()
            if given is None and _hides_rows(module)
        ]
        self._given = given

    def __bool__(self) -> bool:
        """Whether some rows can be restored by the user's functions only."""
        return bool(self._given or self._hidden)

    def state_dict(self) -> dict[str, Any]:
        """Return the captured rows.

        Raises:
            RuntimeError: There is no function to capture the rows.
        """
        if self._given is None:
            raise RuntimeError(
                f"the rows of {', '.join(self._hidden)} lie in no parameter or buffer, so they "
                "would be trained and not restored: give TaskOptions(tables_state=(capture, "
                "restore)), functions that return all rows of this rank and put them back"
            )
        return {"rows": self._given[0]()}

    # A captured state may be restored several times, once after each trial.
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rows."""
        if self._given is not None:
            self._given[1](state["rows"])


def table_parts(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield all modules within sharded modules, also those in TorchRec's plain lists."""
    return (part for module in modules for part in modules_in(module))


def _hides_rows(module: nn.Module) -> bool:
    """Return whether some table's rows are in no tensor that a module below has as an attribute."""
    # By address: split_embedding_weights returns views, which are other objects than the
    # attributes.
    held = (tensor for part in table_parts([module]) for tensor in tensors_in(dict(vars(part))))
    known = {address for tensor in held for address in _addresses(tensor)}
    return any(not known.issuperset(_addresses(weight)) for weight in _weights(module))


def _weights(module: nn.Module) -> Iterator[Any]:
    """Yield the tensors that TorchRec regards as the rows of each table, if this rank has any."""
    for part in table_parts([module]):
        split = getattr(part, "split_embedding_weights", None)
        if callable(split):
            yield from split()


def _addresses(weight: Any) -> Iterator[int | None]:
    """Yield the addresses of a tensor's values, if it has any; None for an unknown place."""
    if not isinstance(weight, Tensor):
        yield None
    elif hasattr(weight, "local_shards"):
        for shard in weight.local_shards():
            yield from _addresses(shard.tensor)
    else:
        for part in parts_of(weight):
            if part.numel():
                # A meta tensor has no data: the rows are somewhere else.
                yield None if part.is_meta else part.untyped_storage().data_ptr()


def rates_of(modules: Iterable[nn.Module]) -> list[float]:
    """Return the learning rate of each group of tables in the sharded modules, in order."""
    return [table.get_learning_rate() for table in _rated(modules)]


def set_rates(modules: Iterable[nn.Module], rates: Sequence[float]) -> None:
    """Set the learning rates that ``rates_of`` returned.

    Raises:
        ValueError: The rates belong to a different number of groups.
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
    """Yield the parts of fbgemm that hold a learning rate."""
    return (part for part in table_parts(modules) if hasattr(part, "set_learning_rate"))
