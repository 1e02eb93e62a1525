"""The position of a loader in a pass: recorded at each pull, and restored when a loop is resumed.

    plain     1  2  3 ... k-3  k-2  k-1  k  k+1
    resumed               k-3  k-2  k-1  k  k+1     from the loader's state before these batches
    or        1  2  3 ... k-3  k-2  k-1  k  k+1     from the beginning of the pass

What decides which batches come may be in no state: a random generator that swpipe does not know, a
generator in a worker process, a buffer. So a loader's state is never trusted. The batches that were
handed out last are pulled again, and have to be the same; they are compared by a checksum of a
sample of the bytes on the host, of shapes, numbers and strings. The state of a loader that has one
is tried first. If it leads to other batches, the pass is begun again, as for a loader without a
state. If that leads to other batches, too, resuming is refused.

The later batches were pulled ahead, and tasks may have changed them in place. A list gives them
again as they are now: each must be as it was when the loop's state was saved. A difference in
batches that had not been pulled by then is not detected.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, islice, takewhile
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from swpipe.core.loaders import SEQUENCES
from swpipe.loops.batch_memory import Parts, checksum_of, has_parts
from swpipe.loops.live_loaders import (
    end_workers,
    goes_on,
    has_own_state,
    length_of,
    lives_on,
    torchs,
)
from swpipe.loops.pass_generators import PassGenerators, States

_COMPARED = 4
"""The minimum number of compared batches: a refilled buffer has given one or two equal batches
by chance."""

_ASKED = 8
"""The number of pulls from one request for the loader's state to the next."""


class PlaceInPass(NamedTuple):
    """The states that were known when a batch was pulled.

    Attributes:
        loader: The loader's own state before the pull; None if it has none, or was not asked.
        before: The states of the loader's generators before the pull; None if ``loader`` was read
            after the pull.
        after: The states of the loader's generators after the pull.
        parts: The checksums of the batch, as it was pulled; None if they are not known.
    """

    loader: Any
    before: States | None
    after: States
    parts: Parts | None = None


class PlacesPulled:
    """The places of the batches of a pass that were pulled last, as far as a state may need them.

    The thread that pulls adds places, and the caller's thread reads them.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._has_state = has_own_state(loader)
        # Guarded by the lock below: places by the number of the batch in the pass.
        self._known: dict[int, PlaceInPass] = {}
        self._lock = threading.Lock()
        torch_s = torchs(loader)
        workers = torch_s.num_workers if isinstance(torch_s, DataLoader) else 0
        self._compared = max(_COMPARED, workers)  # at least one batch of each worker
        self._is_data = type(loader) in SEQUENCES  # batches need no checksum: the list has them
        # The checksums that a resumed pass still has to find, by the number of the batch.
        self._coming: dict[int, Sequence[int]] = {}
        self._state: Any = None  # the loader's state before the next pull, if it was asked

    def begin(self) -> tuple[Iterator[Any], Any]:
        """Begin a new pass, and return its batches and the loader's state, if it is known.

        A loader of another kind than torch's may have no state before its first batch.
        """
        batches = iter(self._loader)
        if self._has_state and isinstance(self._loader, DataLoader):
            self._state = self.ask()
        return batches, self._state

    def begin_again(self, generators: PassGenerators, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Begin the rest of a pass where a state was saved, and return its batches."""
        handed_out = saved["batches"]
        if not self._has_state:
            if goes_on(self._loader) and handed_out:
                raise ValueError(
                    f"the loader is an iterator ({type(self._loader).__name__}), which cannot be "
                    "begun again: give a DataLoader or another object that makes a new iterator"
                )
            _check_length(length_of(self._loader), handed_out)
        # The compared batches are pulled here; afterwards the generators are set as a running loop
        # would have them: the loader's generators after the last pull, and all others at the save.
        batches, places = _led_back(self._loader, generators, saved)
        after = {**saved["generators"], **(saved["after_pull"] or {})}
        generators.write(after)
        places = places or [PlaceInPass(saved["loader"], None, {})]
        # The last place is the one of the batch handed out last: a save may follow at once.
        places[-1] = places[-1]._replace(after=after)
        self._known = dict(enumerate(places, handed_out - len(places) + 1))
        self._coming = dict(enumerate(saved["coming"], handed_out + 1))
        if self._has_state and (saved["again"] or isinstance(self._loader, DataLoader)):
            self._state = self.ask()
        return batches

    def ask(self) -> Any:
        """Return the loader's own state now; None if it has none."""
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None

    def note(
        self,
        number: int,
        handed_out: int,
        parts: Parts,
        before: States | None,
        after: States,
    ) -> None:
        """Note the place of a batch that was pulled.

        Args:
            number: The number of the batch in the pass, from 1.
            handed_out: The number of batches that the caller has received.
            parts: The checksums of the batch.
            before: The states of the loader's generators before the pull.
            after: The states of the loader's generators after the pull.
        """
        state = self._state
        self._state = None
        # The loader's first state is read after its first pull: it may have none before.
        if self._has_state and not self._known and state is None:
            state = self.ask()
            before = None
        elif number % _ASKED == 0:
            self._state = self.ask()
        with self._lock:
            self._known[number] = PlaceInPass(state, before, after, parts)
            # Places that no state can need any more go, so that their number stays bounded.
            if number % _ASKED == 0:
                first = self._first(handed_out)
                self._known = {place: one for place, one in self._known.items() if place >= first}

    def again(self, handed_out: int) -> list[tuple[States, int | None]]:
        """Return the generators and checksum of each batch that a resumed loop compares.

        The checksum is None for a list, tuple or range, whose batches may differ.
        """
        places = self.up_to(handed_out)
        return [
            (place.before, None if self._is_data else checksum_of(place.parts))
            for place in places
            if place.before is not None and place.parts is not None
        ]

    def up_to(self, handed_out: int) -> list[PlaceInPass]:
        """Return the places that lead to the batch handed out last, and are compared."""
        with self._lock:
            first = self._first(handed_out)
            return [one for place, one in self._known.items() if first <= place <= handed_out]

    def coming(self, handed_out: int, most: int) -> list[Sequence[int]]:
        """Return the checksums, as pulled, of the batches after the one that was handed out last.

        Args:
            handed_out: The number of the batch that was handed out last.
            most: How many more batches a list or tuple may give before the pass is left. Tasks
                change a batch only after its pull was noted, which waits for the lock held here.
        """
        with self._lock:
            pulled = takewhile(self._known.__contains__, count(handed_out + 1))
            parts = [self._known[number].parts for number in pulled]
            if type(self._loader) in (list, tuple):
                rest = self._loader[handed_out + len(parts) : handed_out + most]
                parts += map(Parts.of, rest)
        return [one.checksums for one in parts if one is not None]

    def check_coming(self, number: int, batch: Any) -> None:
        """Raise an error if a batch is not as it was when the state was saved.

        Raises:
            ValueError: The batch differs.
        """
        saved = self._coming.pop(number, None)
        if saved is not None and not has_parts(batch, saved):
            raise ValueError(
                f"batch {number} of the pass is not what it was when the state was saved. Tasks "
                "that ran ahead, or other code, have changed it in place, and the loader "
                f"({type(self._loader).__name__}) gives it again; or the loader gives others now. "
                "Let the tasks make new values, resume with the data as it was; or, if other "
                "batches do not matter, say load_state_dict(state, check=False)"
            )

    def _first(self, handed_out: int) -> int:
        """Return the latest place that leaves enough batches to compare.

        If the loader has a state, the place must have it.
        """
        first = handed_out - self._compared + 1
        if not self._has_state:
            return first
        known = [place for place, one in self._known.items() if one.loader is not None]
        return max((place for place in known if place <= first), default=min(known, default=0))


def _led_back(
    loader: Any, generators: PassGenerators, saved: Mapping[str, Any]
) -> tuple[Iterator[Any], list[PlaceInPass]]:
    """Return the rest of a pass, and the places of the compared batches, pulled again."""
    again = saved["again"]
    own = saved["loader"]
    for way, (state, number) in enumerate(_beginnings(loader, saved)):
        # From the second try on, the pass is read from its beginning, which may take long.
        if way and number > len(again):
            warnings.warn(
                f"the state of the loader ({type(loader).__name__}) does not lead to the batches "
                f"that were handed out last: {number} batches of the pass are read again",
                RuntimeWarning,
                stacklevel=2,
            )
        # Each try starts from new workers and from the generators at the beginning of the pass.
        end_workers(loader)
        generators.write(saved["at_start"])
        batches = iter(loader) if state is None else begun_at(loader, state)
        with _of_state(loader, state):
            # Skip the batches before the compared ones; a state leads behind them.
            found = sum(1 for _ in islice(batches, number - len(again)))
            places, same = _pulled_again(loader, generators, batches, saved)
        # Without a state, too few batches mean other data; with one, another beginning is tried.
        if own is None:
            _check_length(found + len(places), number)
        if same and len(places) == len(again):
            return batches, places
    kind = type(loader).__name__
    what = f"the loader ({kind}), begun again, does not give"
    raise ValueError(
        f"{what if own is None else f'the state of the loader ({kind}) does not lead to'} the "
        f"batches that were handed out last, up to batch {saved['batches']} of the pass: what "
        "decides which come is in no state, such as a random generator that swpipe does not know, "
        "or rows that a dataset or collate_fn keeps; or it is not as it was. Resume with the same "
        "data, seeds and epoch (set_epoch); let "
        "samplers and the dataset have their generators as attributes; or, if other "
        "batches do not matter, say load_state_dict(state, check=False)"
    )


def _pulled_again(
    loader: Any, generators: PassGenerators, batches: Iterator[Any], saved: Mapping[str, Any]
) -> tuple[list[PlaceInPass], bool]:
    """Pull the batches to compare, and return their places and whether all are the same."""
    own = saved["loader"]
    same = True
    places = list[PlaceInPass]()
    asked = own is not None and isinstance(torchs(loader), DataLoader)
    # Each pull starts from the generators that it had in the saved run: bodies drew in between.
    for before, checksum in saved["again"]:
        state = copy.deepcopy(loader.state_dict()) if asked else own
        generators.write(before)
        for batch in islice(batches, 1):
            parts = Parts.of(batch)
            same = same and checksum in (None, checksum_of(parts))
            places.append(PlaceInPass(state, before, {}, parts))
    return places, same


def _beginnings(loader: Any, saved: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield each beginning to try: the loader's state, or None, and how many batches to pull."""
    own = saved["loader"]
    compared = len(saved["again"])
    handed_out = saved["batches"]
    if own is None:
        yield None, handed_out
        return
    # Workers that live on would begin later passes at this state, too.
    if not compared or not lives_on(loader):
        yield own, compared
    # The beginning of the pass: by the loader's state there, and last by a new iterator.
    if compared and isinstance(torchs(loader), DataLoader):
        yield saved["loader_at_start"], handed_out
        yield None, handed_out


def begun_at(loader: Any, state: Any) -> Iterator[Any]:
    """Return the iterator of a loader with a state of its own, begun at that state."""
    with _of_state(loader, state):
        loader.load_state_dict(state)
        return iter(loader)


@contextmanager
def _of_state(loader: Any, state: Any) -> Iterator[None]:
    """Report an exception of the loader within the block as one of its state, if there is one."""
    try:
        yield
    except Exception as error:
        if state is None:
            raise
        raise ValueError(
            f"the loader ({type(loader).__name__}) does not take the state that was saved of it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_length(found: float, handed_out: int) -> None:
    if found < handed_out:
        raise ValueError(
            f"the loader has {found} batches, but {handed_out} were handed out before the state "
            "was saved: resume with the same data"
        )
