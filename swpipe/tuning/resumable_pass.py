"""One pass over a loader: where it is, by what the pipeline handed out, and how to get there again.

    a loader with a state    is asked for it after each pull, and set back
    any other                is begun again under the random states of the beginning; batches that
                             were handed out are pulled and dropped

Random generators go on where they were saved; those that the loader draws from, ahead of the tasks,
where they were after the pull of the batch handed out last. Which these are, the second pull tells,
before any task runs: samplers draw their seed in the first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from swpipe._state.default_generators import default_generators, set_default_generators
from swpipe._state.discovery import has_state_dict
from swpipe.core.messages import listed
from swpipe.device import Device


class ResumablePass:
    """A pass that has begun.

    Attributes:
        iterator: The rest of its batches, for the pipeline.
        handed_out: How many batches the caller got of this pass.
        fed: How many the pipeline got.
        draws: Names of the generators that the loader draws from; None while that is not known.
        ended: There are no more; the caller says so.

    Args:
        loader: The loader.
        device: Whose random generators count.
        saved: Where to go on, as ``state_dict`` returned it; None for a new pass.
        draws: As found in an earlier pass.
        ahead: Whether batches are pulled ahead of tasks.

    Raises:
        ValueError: The loader has fewer batches than were handed out, or cannot be begun again.
    """

    def __init__(
        self,
        loader: Any,
        device: Device,
        saved: Mapping[str, Any] | None,
        draws: frozenset[str] | None,
        ahead: bool,
    ) -> None:
        self._loader, self._device = loader, device
        self._has_state = has_state_dict(loader)
        # Of the loader and of the generators, by batches pulled.
        self._states: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._after_pull: dict[str, Any] = {}
        self.ended = False
        if saved is not None and (known := saved.get("loader_draws")) is not None:
            draws = (draws or frozenset()) | frozenset(known)
        self.draws = draws
        self.handed_out = 0 if saved is None else saved["batches"]
        self.fed = self._pulled = self.handed_out
        if saved is None:
            self._at_start = default_generators(device)
            batches = iter(loader)
            self._remember()
        else:
            set_default_generators(device, saved["at_start"])
            self._at_start = default_generators(device)
            batches = self._set_back(saved) if saved["loader"] is not None else self._skipped()
            self._set_generators(saved)
        pulls = self._pull(batches)
        self.iterator = self._feed(self._measured(pulls) if ahead and draws is None else pulls)

    def _set_back(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        self._loader.load_state_dict(saved["loader"])
        if saved["after_pull"] is not None:
            self._states[self.handed_out] = saved["loader"], saved["after_pull"]
        else:
            # The pass had ended. torchdata makes its old iterator again when it is first asked for
            # a state or a batch, and draws a seed for it; a process that was not stopped does not.
            self._loader.state_dict()
            set_default_generators(self._device, saved["at_start"])
        batches: Iterator[Any] = iter(self._loader)
        return batches

    def _skipped(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._loader)
        if batches is self._loader:
            raise ValueError(
                f"the loader is an iterator ({type(self._loader).__name__}), which cannot be begun "
                "again: give a DataLoader or another object that makes a new iterator"
            )
        skipped = sum(1 for _ in islice(batches, self.handed_out))
        if skipped < self.handed_out:
            raise ValueError(
                f"the loader has {skipped} batches, but {self.handed_out} were handed out "
                "before the state was saved: resume with the same data"
            )
        return batches

    def _set_generators(self, saved: Mapping[str, Any]) -> None:
        after_pull = saved["after_pull"]
        if not self.handed_out:
            if after_pull is not None:  # the pass had begun; its first pull is made again
                set_default_generators(self._device, after_pull)
            return
        if saved["loader"] is None:
            after_pull = default_generators(self._device)
        # With nothing pulled ahead, all are where the next pull finds them.
        own = self.draws or frozenset() if saved["ahead"] else frozenset()
        kept = {name: after_pull[name] for name in own & after_pull.keys()}
        set_default_generators(self._device, {**saved["generators"], **kept})

    def end(self) -> None:
        """The caller got the last batch, and asks for no more: the loader is asked, as a for would.

        Raises:
            ValueError: It has more.
        """
        if not self.ended:
            for _ in self.iterator:
                raise ValueError(f"the loader has more batches than its length, {self.handed_out}")
        self.ended = True

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: after the last batch handed out; a new pass, once it has ended."""
        draws = None if self.draws is None else sorted(self.draws)
        if self.ended:
            return state_between_passes(self._loader, self._device) | {"loader_draws": draws}
        loader, after_pull = self._states.get(self.handed_out, (None, None))
        return {
            "batches": self.handed_out,
            "ahead": self._pulled - self.handed_out,
            "at_start": self._at_start,
            "generators": default_generators(self._device),
            "loader": loader,
            "after_pull": after_pull,
            "loader_draws": draws,
        }

    def count(self, in_flight: int) -> None:
        """Set how many batches were handed out, ``drain`` included."""
        self.handed_out = self.fed - in_flight

    def check_draws(self) -> None:
        """Refuse to save where the loader and others draw in turn, and it has drawn ahead."""
        if not self.draws or self._pulled == self.handed_out:
            return
        changed = _changed(self._after_pull, default_generators(self._device)) & self.draws
        if changed:
            raise RuntimeError(
                f"the loader and something else, a task or the body of the loop, draw from the "
                f"default random generators of {listed(sorted(changed))}, and the loader has drawn "
                "ahead: call drain() before you save, let the loader's workers draw "
                "(DataLoader(num_workers=1)), or give tasks random=True"
            )

    def _pull(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._pulled += 1
            self._remember()
            if self.draws:
                self._after_pull = default_generators(self._device)
            yield batch

    def _remember(self) -> None:
        if self._has_state:
            state = copy.deepcopy(self._loader.state_dict())
            self._states[self._pulled] = state, default_generators(self._device)
            for old in [number for number in self._states if number < self.handed_out]:
                del self._states[old]

    def _measured(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; the first two are pulled together."""
        head = [*islice(batches, 1)]
        before = default_generators(self._device)
        head += islice(batches, 1)
        self._after_pull = default_generators(self._device)
        self.draws = _changed(before, self._after_pull)
        yield from chain(head, batches)

    def _feed(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.fed += 1
            yield batch


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Names of the generators whose states differ."""
    return frozenset(name for name in before if not _equal(before[name], after.get(name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):  # torch's, by device
        return all(name in other and torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)


def state_between_passes(loader: Any, device: Device) -> dict[str, Any]:
    """A state that leads to a new pass."""
    now = default_generators(device)
    return {
        "batches": 0,
        "ahead": 0,
        "at_start": now,
        "generators": now,
        "loader": loader.state_dict() if has_state_dict(loader) else None,
        "after_pull": None,
        "loader_draws": None,
    }
