"""One pass over a loader: what it pulls ahead, where it is, and how to get there again.

An error of the loader, and the end of its batches, come when the caller has got the batches before.
An iterator has no other pass: batches that were pulled and not handed out are given again.

A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's, is asked for its state
after each pull, and set back; the random generators that it draws from are, too. Any other is begun
again under the random states of the beginning, and as many batches are pulled and dropped as were
handed out: it has to give the same batches then.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swpipe._state.generators import default_generators, set_default_generators
from swpipe._tensors.pytree import tensors_in
from swpipe._tensors.stateful import has_state_dict
from swpipe.core.errors import add_note
from swpipe.device import Device
from swpipe.tuning.live_workers import are_live, check_workers, end_workers
from swpipe.tuning.loader_parts import epochs_of, goes_on
from swpipe.tuning.loader_values import LoaderValues
from swpipe.tuning.shown_values import ShownValues

_NOT_SAVED = "which a state cannot have (state_dict(check=False) saves without)"


class _Kept(NamedTuple):
    """A batch that was pulled and not handed out, and the version counters of its tensors."""

    batch: Any
    versions: list[int]

    def modified(self) -> bool:
        return _versions(self.batch) != self.versions


def _versions(batch: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in(batch) if not tensor.is_inference()]


class _PulledState(NamedTuple):
    """After a pull: of the loader, the default generators, and what the loader keeps."""

    loader: Any
    generators: dict[str, Any] | None
    values: dict[str, Any] | None


class _Memory(NamedTuple):
    """A tensor of a batch that may still be used, and its version counter when it was pulled."""

    tensor: Tensor
    version: int


def _memory_of(batch: Any) -> dict[int, _Memory]:
    """Address to the tensor there."""
    found = [one for one in tensors_in(batch) if one.layout is torch.strided and one.numel()]
    return {
        one.data_ptr(): _Memory(one, 0 if one.is_inference() else one._version) for one in found
    }


class LoaderPass:
    """A pass that has begun.

    Attributes:
        iterator: The rest of its batches.
        batches: The loader's iterator.
        pulled: How many batches were pulled of this pass.
        handed_out: How many batches the caller got of this pass.
        ended: There are no more; the caller says so.
        failure: What the loader raised; the caller raises it at the end of the iterator.
        at_start: The random generators before the pass.
        values: What the loader keeps from pass to pass.
        saved: Where it began, as given.
        shown: What the loader changes with each batch.
        is_used_ahead: Whether batches are pulled while earlier ones are in use.

    Args:
        loader: The loader.
        device: Whose random generators count.
        saved: Where to go on, as ``state_dict`` returned it; None for a new pass.
        loader_draws: Names of the generators that the loader draws from: these go on from where
            the pull of the last batch handed out left them, others from where they were saved.
        shown: What the loader changes with each batch; None for nothing.
        values: Made before the loader was first begun; None if that is now.

    Raises:
        ValueError: The loader has fewer batches than were handed out, or cannot be begun again.
    """

    def __init__(
        self,
        loader: Any,
        device: Device,
        saved: Mapping[str, Any] | None = None,
        loader_draws: frozenset[str] = frozenset(),
        shown: ShownValues | None = None,
        values: LoaderValues | None = None,
    ) -> None:
        self._loader = loader
        self._device = device
        self._epochs = epochs_of(loader)
        self.shown = shown or ShownValues({}, {})
        self.shown.begin()
        self.saved = saved
        self._states: dict[int, _PulledState] = {}  # by batches pulled
        self._has_state = has_state_dict(loader)
        self._again: deque[Any] = deque()
        self._ahead: deque[_Kept] = deque()  # of an iterator
        self._in_use: deque[dict[int, _Memory]] = deque()  # of the body's batch and those ahead
        self._modified = False
        self._latest: Any = None
        self._goes_on = goes_on(loader)
        self._at_end = False
        self.failure: Exception | None = None
        self.handed_out = self.pulled = 0
        self.ended = self.is_used_ahead = False
        self.values = values or LoaderValues(loader)
        if saved is not None:
            end_workers(loader)
            set_default_generators(device, saved["at_start"])
        self.at_start = default_generators(device)
        self._workers_go_on = are_live(loader)
        self.values.begin((saved or {}).get("values_at_start"))
        if saved is None:
            self.batches = iter(loader)
            self.iterator = self._pull()
            self._remember(0)
        else:
            self._go_on(saved, loader_draws)

    def _go_on(self, saved: Mapping[str, Any], loader_draws: frozenset[str]) -> None:
        self.handed_out = self.pulled = saved["batches"]
        after_pull = saved["after_pull"]
        if saved["loader"] is not None:
            self._set_back(saved)
            self.batches = iter(self._loader)
        else:
            self.batches = self._skipped()
            after_pull = default_generators(self._device)
        self.values.go_on(saved.get("values") or {})
        self._epochs = epochs_of(self._loader)
        self.iterator = self._pull()
        if not self.handed_out:
            if saved["after_pull"] is not None:  # the pass had begun; its first pull is made again
                set_default_generators(self._device, saved["after_pull"])
            return
        kept = {name: after_pull[name] for name in loader_draws & after_pull.keys()}
        set_default_generators(self._device, {**saved["generators"], **kept})

    def _skipped(self) -> Iterator[Any]:
        """The loader begun again, without the batches that were handed out."""
        batches: Iterator[Any] = iter(self._loader)
        if batches is self._loader:
            raise ValueError(
                f"the loader is an iterator ({type(self._loader).__name__}), which cannot be begun "
                "again: give a DataLoader or another object that makes a new iterator"
            )
        skipped = sum(1 for _ in islice(batches, self.handed_out))
        if skipped < self.handed_out:
            raise ValueError(
                f"the loader has {skipped} batches, but {self.handed_out} were handed out before "
                "the state was saved: resume with the same data"
            )
        return batches

    def _set_back(self, saved: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(saved["loader"])
        if saved["after_pull"] is not None:
            pulled = _PulledState(saved["loader"], saved["after_pull"], saved.get("values"))
            self._states[self.handed_out] = pulled
            return
        # The pass had ended. torchdata makes its old iterator again when it is first asked for a
        # state or a batch, and draws a seed for it; a process that was not stopped does not.
        self._loader.state_dict()
        set_default_generators(self._device, saved["at_start"])
        self.values.begin(saved.get("values_at_start"))

    def state_dict(self, check: bool) -> dict[str, Any]:
        """Where the pass is: after the last batch handed out; a new pass, once it has ended.

        Args:
            check: Refuse if a state cannot have all that matters.
        """
        if self.ended:
            return state_between_passes(self._loader, self._device, self.values, check)
        if check:
            self.values.check()
        if check and self._workers_go_on:
            check_workers(self._loader, _NOT_SAVED)
        now = default_generators(self._device)
        # What was pulled ahead has changed the values, too; what is skipped changes them again.
        exact = self.handed_out and not self.is_ahead
        pulled = _PulledState(None, None, self.values.in_pass() if exact else None)
        pulled = self._states.get(self.handed_out, pulled)
        return {
            "batches": self.handed_out,
            "at_start": self.at_start,
            "generators": now,
            "loader": pulled.loader,
            "after_pull": pulled.generators,
            "values_at_start": self.values.at_start,
            "values": pulled.values,
        }

    def saved_anew(self) -> Mapping[str, Any] | None:
        """``saved``, with what was set since the pass was begun again, such as an epoch."""
        saved = dict(self.saved or {})
        for name in ("values_at_start", "values"):
            if saved.get(name) is not None:
                saved[name] = self.values.set_since(saved[name])
        return saved or None

    @property
    def is_of_another_epoch(self) -> bool:
        """Whether ``set_epoch`` was called since the pass began."""
        return epochs_of(self._loader) != self._epochs

    def end(self) -> None:
        """The caller got the last batch, and asks for no more: the loader is asked, as a for would.

        Raises:
            ValueError: It has more.
        """
        if not self.ended:
            for _ in self.iterator:
                raise ValueError(f"the loader has more batches than its length, {self.handed_out}")
        self.ended = True
        if self.failure is not None:
            raise self.failure

    def _pull(self) -> Iterator[Any]:
        while True:
            if self._again:
                batch = self._again.popleft()
            elif self._at_end or not self._advance():
                return
            else:
                batch = self._latest
            if self._goes_on:
                self._ahead.append(_Kept(batch, _versions(batch)))
            yield batch

    def _advance(self) -> bool:
        """Pull the next batch; whether there is one."""
        try:
            self._latest = next(self.batches)
            self._check_memory()
        except StopIteration:
            self._at_end = True
        except Exception as error:  # noqa: BLE001 - raised when the batches before are handed out
            add_note(error, f"swpipe: raised by the pull of batch {self.pulled} of the pass")
            self.failure, self._at_end = error, True
        else:
            self.pulled += 1
            self._remember(self.pulled)
            self.shown.remember(self.pulled)
        return not self._at_end

    def _check_memory(self) -> None:
        """Refuse a batch in the memory of an earlier one that tasks or the body may still use.

        Raises:
            RuntimeError: It is.
        """
        if not self.is_used_ahead:
            return
        own = _memory_of(self._latest)
        for earlier in self._in_use:
            for address in own.keys() & earlier.keys():
                now, then = own[address], earlier[address]
                if now.tensor is not then.tensor or now.version != then.version:
                    raise RuntimeError(
                        "the loader has made a batch in the memory of an earlier one, which was "
                        "pulled ahead and is still in use: let it make a new tensor for each batch"
                    )
        self._in_use.append(own)

    def put_back(self, batches: Iterable[Any]) -> None:
        """Let the iterator give these batches, the last that were pulled, once more."""
        again = list(batches)
        self._ahead.clear()
        self._again.extendleft(reversed(again))
        self.iterator = self._pull()

    def hand_out(self) -> None:
        """The caller gets the next batch, and finds what the loader had changed by then."""
        self.handed_out += 1
        if self._ahead:
            self._ahead.popleft()
        while len(self._in_use) > self.pulled - self.handed_out + 1:
            self._in_use.popleft()
        self.shown.show(self.handed_out)

    @property
    def is_ahead(self) -> bool:
        """Whether more was pulled than was handed out, or the end was found."""
        return self.pulled > self.handed_out or self._at_end

    def leave(self, *, failed: bool) -> None:
        """The caller leaves the pass before its end.

        Args:
            failed: In the middle of an iteration, whose batch is lost.
        """
        if failed and self.pulled > self.handed_out:
            self.hand_out()
        kept = list(self._ahead)
        self._modified = any(one.modified() for one in kept)
        self.put_back(one.batch for one in kept)

    def goes_on(self) -> bool:
        """Whether a new pass is the rest of this one.

        Raises:
            RuntimeError: Tasks that ran ahead have modified its batches.
        """
        if not self._goes_on or self.ended:
            return False
        if self._modified:
            raise RuntimeError(
                "the loader is an iterator, and tasks that ran ahead have modified batches that "
                "were dropped when the last pass was left: the loop cannot go on with them. Let "
                "the tasks make new tensors, or give a loader that makes a new iterator"
            )
        return True

    def _remember(self, pulled: int) -> None:
        if self._has_state:
            state = copy.deepcopy(self._loader.state_dict())
            generators = default_generators(self._device)
            self._states[pulled] = _PulledState(state, generators, self.values.in_pass())
            for old in [number for number in self._states if number < self.handed_out]:
                del self._states[old]


def state_between_passes(
    loader: Any, device: Device, values: LoaderValues, check: bool
) -> dict[str, Any]:
    """A state that leads to a new pass.

    Raises:
        RuntimeError: It would lack something that the loader keeps, and ``check``.
    """
    if check:
        check_workers(loader, _NOT_SAVED)
    now = default_generators(device)
    return {
        "batches": 0,
        "at_start": now,
        "generators": now,
        "loader": loader.state_dict() if has_state_dict(loader) else None,
        "after_pull": None,
        "values_at_start": values.between_passes(check),
        "values": None,
    }
