"""One pass over a loader: where it is, and how to get there again.

A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's, is asked for its state
after each pull, and set back; the random generators that it draws from are, too. Any other is begun
again under the random states of the beginning, and as many batches are pulled and dropped as were
handed out: it has to give the same batches then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from swpipe._state.default_generators import default_generators, set_default_generators
from swpipe._state.discovery import has_state_dict
from swpipe.device import Device


class LoaderPass:
    """A pass that has begun.

    Attributes:
        iterator: The rest of its batches.
        handed_out: How many batches the caller got of this pass; the caller counts.
        ended: There are no more; the caller says so.

    Args:
        loader: The loader.
        device: Whose random generators count.
        saved: Where to go on, as ``state_dict`` returned it; None for a new pass.
        loader_draws: Names of the generators that the loader draws from: these go on from where
            the pull of the last batch handed out left them, others from where they were saved.

    Raises:
        ValueError: The loader has fewer batches than were handed out, or cannot be begun again.
    """

    def __init__(
        self,
        loader: Any,
        device: Device,
        saved: Mapping[str, Any] | None = None,
        loader_draws: frozenset[str] = frozenset(),
    ) -> None:
        self._loader = loader
        self._device = device
        # Of the loader and of the generators, by batches pulled.
        self._states: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._first = 0  # batches of the pass before the iterator's own first one
        self._has_state = has_state_dict(loader)
        self.handed_out = 0
        self.ended = False
        if saved is not None:
            set_default_generators(device, saved["at_start"])
        self._at_start = default_generators(device)
        if saved is None:
            self.iterator = self._pull(iter(loader))
            self._remember(0)
            return
        self.handed_out = self._first = saved["batches"]
        after_pull = saved["after_pull"]
        if saved["loader"] is not None:
            self._set_back(saved)
            self.iterator = self._pull(iter(loader))
        else:
            batches = iter(loader)
            if batches is loader:
                raise ValueError(
                    f"the loader is an iterator ({type(loader).__name__}), which cannot be begun "
                    "again: give a DataLoader or another object that makes a new iterator"
                )
            skipped = sum(1 for _ in islice(batches, self.handed_out))
            if skipped < self.handed_out:
                raise ValueError(
                    f"the loader has {skipped} batches, but {self.handed_out} were handed out "
                    "before the state was saved: resume with the same data"
                )
            self.iterator = self._pull(batches)
            after_pull = default_generators(device)
        if not self.handed_out:
            if saved["after_pull"] is not None:  # the pass had begun; its first pull is made again
                set_default_generators(device, saved["after_pull"])
            return
        kept = {name: after_pull[name] for name in loader_draws & after_pull.keys()}
        set_default_generators(device, {**saved["generators"], **kept})

    def _set_back(self, saved: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(saved["loader"])
        if saved["after_pull"] is not None:
            self._states[self._first] = saved["loader"], saved["after_pull"]
            return
        # The pass had ended. torchdata makes its old iterator again when it is first asked for a
        # state or a batch, and draws a seed for it; a process that was not stopped does not.
        self._loader.state_dict()
        set_default_generators(self._device, saved["at_start"])

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: after the last batch handed out; a new pass, once it has ended."""
        now = default_generators(self._device)
        if self.ended:
            state = self._loader.state_dict() if self._has_state else None
            return {
                "batches": 0,
                "at_start": now,
                "generators": now,
                "loader": state,
                "after_pull": None,
            }
        loader, after_pull = self._states.get(self.handed_out, (None, None))
        return {
            "batches": self.handed_out,
            "at_start": self._at_start,
            "generators": now,
            "loader": loader,
            "after_pull": after_pull,
        }

    def _pull(self, batches: Iterator[Any]) -> Iterator[Any]:
        pulled = self._first
        for batch in batches:
            pulled += 1
            self._remember(pulled)
            yield batch

    def _remember(self, pulled: int) -> None:
        if self._has_state:
            state = copy.deepcopy(self._loader.state_dict())
            self._states[pulled] = state, default_generators(self._device)
            for old in [number for number in self._states if number < self.handed_out]:
                del self._states[old]
