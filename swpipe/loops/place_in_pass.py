"""Where in a pass a loader is, how it is led there again, and whether it got there.

    plain     1  2  3 ... k-3  k-2  k-1  k  k+1
    resumed               k-3  k-2  k-1  k  k+1     from the loader's state before these
    or        1  2  3 ... k-3  k-2  k-1  k  k+1     from the beginning of the pass

What decides which batches come may be in no state: a generator of random numbers that nobody knows
of, one in a worker process, a buffer. So no loader is taken at its word. The batches that were
handed out last are pulled again, and have to be the same; they are compared by a checksum of a
sample of the bytes on the host, of shapes, numbers and strings. The state of a loader that has one
is tried first. If it leads elsewhere, the pass is begun again, as that of any other loader. If that
does, too, resuming is refused.

The batches after these were pulled ahead, and tasks may have changed them in place. A list gives
them again as they are now: each must be what was pulled when the state was saved. What differs only
later is not seen.
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
"""At least so many batches: a refilled buffer has given the same one or two by chance."""

_ASKED = 8
"""After so many pulls a loader is asked for its state again."""


class PlaceInPass(NamedTuple):
    """What was known when a batch was pulled.

    Attributes:
        loader: The loader's own state before the pull; None if it has none, or was not asked.
        before: The states of the generators that the loader draws from, before the pull; None if
            the loader's state is that after it.
        after: After it.
        parts: Those of the batch, as it was pulled; None if it is not known.
    """

    loader: Any
    before: States | None
    after: States
    parts: Parts | None = None


class PlacesPulled:
    """Of the batches of a pass that were pulled last, as far as a state may need them.

    The thread that pulls notes them, and the caller's asks.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._has_state = has_own_state(loader)
        self._known: dict[int, PlaceInPass] = {}  # by batches pulled
        self._lock = threading.Lock()  # of these
        torch_s = torchs(loader)
        workers = torch_s.num_workers if isinstance(torch_s, DataLoader) else 0
        self._compared = max(_COMPARED, workers)  # of each worker at least one
        self._is_data = type(loader) in SEQUENCES  # at hand as it is
        self._coming: dict[int, Sequence[int]] = {}  # as the state has them, by batches pulled
        self._state: Any = None  # before the next pull

    def begin(self) -> tuple[Iterator[Any], Any]:
        """The batches of a new pass, and the loader's state then, if it is known.

        Another kind of loader than torch's may have none before it was asked for a batch.
        """
        batches = iter(self._loader)
        if self._has_state and isinstance(self._loader, DataLoader):
            self._state = self.ask()
        return batches, self._state

    def begin_again(self, generators: PassGenerators, saved: Mapping[str, Any]) -> Iterator[Any]:
        """The rest of a pass, led back to where a state was saved; the generators are set."""
        handed_out = saved["batches"]
        if not self._has_state:
            if goes_on(self._loader) and handed_out:
                raise ValueError(
                    f"the loader is an iterator ({type(self._loader).__name__}), which cannot be "
                    "begun again: give a DataLoader or another object that makes a new iterator"
                )
            _check_length(length_of(self._loader), handed_out)
        batches, places = _led_back(self._loader, generators, saved)
        after = {**saved["generators"], **(saved["after_pull"] or {})}
        generators.write(after)
        places = places or [PlaceInPass(saved["loader"], None, {})]
        places[-1] = places[-1]._replace(after=after)
        self._known = dict(enumerate(places, handed_out - len(places) + 1))
        self._coming = dict(enumerate(saved["coming"], handed_out + 1))
        if self._has_state and (saved["again"] or isinstance(self._loader, DataLoader)):
            self._state = self.ask()
        return batches

    def ask(self) -> Any:
        """The loader's own state now; None if it has none."""
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None

    def note(
        self,
        number: int,
        handed_out: int,
        parts: Parts,
        before: States | None,
        after: States,
    ) -> None:
        """A batch was pulled, so many were before, and so many of these were handed out."""
        state = self._state
        self._state = None
        if self._has_state and not self._known and state is None:
            state = self.ask()
            before = None
        elif number % _ASKED == 0:
            self._state = self.ask()
        with self._lock:
            self._known[number] = PlaceInPass(state, before, after, parts)
            if number % _ASKED == 0:
                first = self._first(handed_out)
                self._known = {place: one for place, one in self._known.items() if place >= first}

    def again(self, handed_out: int) -> list[tuple[States, int | None]]:
        """Return what a state has of the batches that are compared: generators, and a checksum.

        The checksum of data that is at hand is None: any is good.
        """
        places = self.up_to(handed_out)
        return [
            (place.before, None if self._is_data else checksum_of(place.parts))
            for place in places
            if place.before is not None and place.parts is not None
        ]

    def up_to(self, handed_out: int) -> list[PlaceInPass]:
        """Those from which a state leads to the batch handed out last, and are compared."""
        with self._lock:
            first = self._first(handed_out)
            return [one for place, one in self._known.items() if first <= place <= handed_out]

    def coming(self, handed_out: int, most: int) -> list[Sequence[int]]:
        """Return the checksums, as pulled, of the batches after the one that was handed out last.

        Args:
            handed_out: Its number.
            most: How many a list or tuple may still give before the pass is left: tasks change
                none of these before it is noted, and the lock keeps it from being noted.
        """
        with self._lock:
            pulled = takewhile(self._known.__contains__, count(handed_out + 1))
            parts = [self._known[number].parts for number in pulled]
            if type(self._loader) in (list, tuple):
                rest = self._loader[handed_out + len(parts) : handed_out + most]
                parts += map(Parts.of, rest)
        return [one.checksums for one in parts if one is not None]

    def check_coming(self, number: int, batch: Any) -> None:
        """Refuse a batch that is not what it was when the state was saved.

        Raises:
            ValueError: It is not.
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
        """The latest that leaves enough to compare, with the loader's state if it has one."""
        first = handed_out - self._compared + 1
        if not self._has_state:
            return first
        known = [place for place, one in self._known.items() if one.loader is not None]
        return max((place for place in known if place <= first), default=min(known, default=0))


def _led_back(
    loader: Any, generators: PassGenerators, saved: Mapping[str, Any]
) -> tuple[Iterator[Any], list[PlaceInPass]]:
    """The rest of a pass, and what was pulled again."""
    again = saved["again"]
    own = saved["loader"]
    for way, (state, number) in enumerate(_beginnings(loader, saved)):
        if way and number > len(again):
            warnings.warn(
                f"the state of the loader ({type(loader).__name__}) does not lead to the batches "
                f"that were handed out last: {number} batches of the pass are read again",
                RuntimeWarning,
                stacklevel=2,
            )
        end_workers(loader)
        generators.write(saved["at_start"])
        batches = iter(loader) if state is None else begun_at(loader, state)
        with _of_state(loader, state):
            found = sum(1 for _ in islice(batches, number - len(again)))
            places, same = _pulled_again(loader, generators, batches, saved)
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
    """What is pulled to be compared, and whether it is the same."""
    own = saved["loader"]
    same = True
    places = list[PlaceInPass]()
    asked = own is not None and isinstance(torchs(loader), DataLoader)
    for before, checksum in saved["again"]:
        state = copy.deepcopy(loader.state_dict()) if asked else own
        generators.write(before)
        for batch in islice(batches, 1):
            parts = Parts.of(batch)
            same = same and checksum in (None, checksum_of(parts))
            places.append(PlaceInPass(state, before, {}, parts))
    return places, same


def _beginnings(loader: Any, saved: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """States to begin with, None for none, and the number of batches to pull then."""
    own = saved["loader"]
    compared = len(saved["again"])
    handed_out = saved["batches"]
    if own is None:
        yield None, handed_out
        return
    # Workers that live on would begin later passes there, too.
    if not compared or not lives_on(loader):
        yield own, compared
    if compared and isinstance(torchs(loader), DataLoader):
        yield saved["loader_at_start"], handed_out
        yield None, handed_out


def begun_at(loader: Any, state: Any) -> Iterator[Any]:
    """A loader with a state of its own, begun where the state was saved."""
    with _of_state(loader, state):
        loader.load_state_dict(state)
        return iter(loader)


@contextmanager
def _of_state(loader: Any, state: Any) -> Iterator[None]:
    """What the loader raises comes of the state, if there is one."""
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
