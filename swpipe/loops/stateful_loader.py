"""Loaders whose iterators have a state, by whatever methods, as loaders with ``state_dict``.

loader.state_dict, load_state_dict      torchdata and others: as they are
iterator.get_state, set_state           grain
get(iterator), set(iterator, state)     anything else, by ``StatefulLoader``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from swpipe.core.keywords import suggests_keywords
from swpipe.core.messages import shown


def _get(iterator: Any) -> Any:
    return iterator.get_state()


def _set(iterator: Any, state: Any) -> None:
    iterator.set_state(state)


@suggests_keywords
class StatefulLoader:
    """A loader that can be resumed in mid-pass by a state of its iterator.

    Loops do this by themselves for grain's datasets, loaders and iterators, and for any iterator
    with ``get_state`` and ``set_state``.

    Args:
        loader: Makes a new iterator for each pass; or an iterator, for one pass.
        get_state: Returns the state of an iterator, which a checkpoint can hold.
        set_state: Sets a new iterator to a state, or returns another iterator that goes on there.

    Raises:
        TypeError: One of the two cannot be called.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        get_state: Callable[[Any], Any] = _get,
        set_state: Callable[[Any, Any], Iterator[Any] | None] = _set,
    ) -> None:
        for function in (get_state, set_state):
            if not callable(function):
                raise TypeError(
                    "StatefulLoader takes functions get_state(iterator) and set_state(iterator, "
                    f"state), not {shown(function)}"
                )
        self._loader = loader
        self._get = get_state
        self._set = set_state
        self._iterator: Any = None  # of a pass that has not ended
        self._loaded: Any = None

    def __iter__(self) -> Iterator[Any]:
        """The batches of a pass, from a state that was loaded on.

        Raises:
            RuntimeError: The loader is an iterator, and the pass before was left: batches may have
                been pulled ahead that were not used.
        """
        iterator = iter(self._loader)
        loaded = self._loaded
        self._loaded = None
        if loaded is not None:
            other = self._set(iterator, loaded)
            iterator = iterator if other is None else other
        elif iterator is self._iterator:
            raise RuntimeError(
                f"the last pass over an iterator ({type(iterator).__name__}) was left, and batches "
                "of it that were pulled ahead are lost: load a state that was saved in that pass, "
                "or give the dataset that makes the iterator"
            )
        self._iterator = iterator
        return self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        if self._iterator is iterator:
            self._iterator = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pass; between two passes, one that leads to a new pass."""
        if self._iterator is None:
            return {"iterator": self._loaded}
        return {"iterator": self._get(self._iterator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass at a state."""
        self._iterator = None
        self._loaded = state["iterator"]
