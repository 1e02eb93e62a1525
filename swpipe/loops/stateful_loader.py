"""An adapter that gives a ``state_dict`` to loaders whose iterators have a state.

loader.state_dict, load_state_dict      torchdata and others, which need no adapter
iterator.get_state, set_state           grain: ``StatefulLoader(loader)``
get(iterator), set(iterator, state)     anything else, by two functions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import methodcaller
from typing import Any


class StatefulLoader:
    """A loader that can be resumed in mid-pass from a state of its iterator.

    Without functions, the iterators have ``get_state`` and ``set_state``, as grain's do.

    Args:
        loader: An iterable that makes a new iterator for each pass, or an iterator for one pass.
        get_state: Returns the state of an iterator, which a checkpoint can hold.
        set_state: Sets a new iterator to a state, or returns another iterator at this state.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        get_state: Callable[[Any], Any] = methodcaller("get_state"),
        set_state: Callable[[Any, Any], Iterator[Any] | None] = (
            lambda iterator, state: iterator.set_state(state)
        ),
    ) -> None:
        self._loader = loader
        self._get = get_state
        self._set = set_state
        self._iterator: Any = None  # the iterator of a pass that has not ended
        self._loaded: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of a pass, which begins at the loaded state if there is one.

        Raises:
            RuntimeError: The loader is an iterator and the previous pass was left. Batches may
                have been pulled ahead that were not used.
        """
        iterator = iter(self._loader)
        loaded = self._loaded
        self._loaded = None
        # A loaded state applies to one pass: the next pass begins anew.
        if loaded is not None:
            other = self._set(iterator, loaded)
            iterator = iterator if other is None else other
        # An iterable returns a new iterator here; only an iterator returns itself again.
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
        # An older pass that ends late must not hide the pass that is under way.
        if self._iterator is iterator:
            self._iterator = None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look up names before __init__ has set _loader: without this check, the
        # lookup of _loader would recurse.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the current pass; between passes, a state that begins a new one."""
        if self._iterator is None:
            return {"iterator": self._loaded}
        return {"iterator": self._get(self._iterator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state at which the next pass begins."""
        self._iterator = None
        self._loaded = state["iterator"]
