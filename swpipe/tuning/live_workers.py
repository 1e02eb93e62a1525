"""Worker processes that live on from pass to pass, by ``DataLoader(persistent_workers=True)``.

What they draw and count goes on with them. So a pass that is begun anew, as if it were the first,
has new ones; and a pass after batches that were dropped, or a state, that would need them as they
were is refused.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader

from swpipe._state.code_names import read_code
from swpipe._state.draws import draws_by
from swpipe._state.owners import is_librarys
from swpipe._state.reach import reach_of
from swpipe._tensors.stateful import is_generator
from swpipe.inference.loader_code import in_workers
from swpipe.tuning.accelerate_loader import AccelerateLoader


def end_workers(loader: Any) -> None:
    """Let the next pass have new workers, as the first one has."""
    if (live := _with_live_workers(loader)) is not None:
        live._iterator = None


def check_workers(loader: Any, why: str) -> None:
    """Refuse what the workers would have to be as they were for.

    Raises:
        RuntimeError: They live on, and may draw or count.
    """
    live = _with_live_workers(loader)
    if live is not None and _may_draw(live):
        raise RuntimeError(
            f"the loader's workers live on from pass to pass and may draw or count, {why}: let "
            "each pass have new ones, by DataLoader(persistent_workers=False)"
        )


def are_live(loader: Any) -> bool:
    """Whether there are workers of an earlier pass."""
    return _with_live_workers(loader) is not None


def _with_live_workers(loader: Any) -> DataLoader[Any] | None:
    loader = loader.prepared if isinstance(loader, AccelerateLoader) else loader
    loader = getattr(loader, "base_dataloader", loader)
    live = isinstance(loader, DataLoader) and loader.persistent_workers
    return loader if live and loader._iterator is not None else None


def _may_draw(loader: DataLoader[Any]) -> bool:
    """Whether the code of the dataset, or that of a library's transforms, draws or counts."""
    reach = reach_of(in_workers(loader))
    holders = list(reach.holders.values())
    counts = any(place.name in reach.stores for place in reach.places)
    classes = {cls for one in holders for cls in type(one).__mro__ if is_librarys(cls)}
    functions = [
        one for cls in classes for one in vars(cls).values() if isinstance(one, FunctionType)
    ]
    return bool(
        reach.draws
        or counts
        or any(map(is_generator, holders))
        or any(any(draws_by(read_code(one.__code__, ""), one.__globals__)) for one in functions)
    )
