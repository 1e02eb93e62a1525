"""Ratings as histories of users: from a file, or generated from a known model.

A file has one rating per line, ``user item rating timestamp``, apart by white space: as MovieLens'
u.data has them. Users and items are numbers, ratings 0.5 to 5 stars, timestamps seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from swpipe.core.messages import shown
from swpipe.tasks.torchrec.hstu.sequence_batch import Event
from swpipe.tasks.workload import InputError

USERS = 2000
"""Users in generated ratings."""


class RatingsError(InputError):
    """A file of ratings that cannot be used."""


def read_ratings(paths: Sequence[str | Path], items: int, longest: int) -> list[list[Event]]:
    """The histories of all users, in the order in which the files first name them.

    Args:
        paths: The files.
        items: Rows of the table of items; an item's row is its number modulo ``items``.
        longest: Events in a history; the newest are kept.

    Raises:
        RatingsError: A file is missing or empty, or a line is malformed; it says which and why.
    """
    histories: dict[str, list[Event]] = {}
    for path in map(Path, paths):
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    if fields := line.split():
                        event = _event(fields, items, f"{path}, line {number}")
                        histories.setdefault(fields[0], []).append(event)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not a text file"
            raise RatingsError(f"{path}: {why}; give lines of user item rating timestamp") from None
    if not histories:
        raise RatingsError(
            f"{', '.join(map(str, paths)) or 'no file'}: there is no rating; give lines of user "
            "item rating timestamp"
        )
    return [sorted(h, key=lambda event: event.time)[-longest:] for h in histories.values()]


def _event(fields: Sequence[str], items: int, where: str) -> Event:
    if len(fields) != 4:
        raise RatingsError(
            f"{where}: it has {len(fields)} fields: a line is user item rating timestamp"
        )
    try:
        item, stars, time = int(fields[1]), float(fields[2]), int(fields[3])
    except ValueError:
        raise RatingsError(
            f"{where}: {shown(' '.join(fields[1:]))} is not item rating timestamp: items and "
            "timestamps are whole numbers, ratings are numbers"
        ) from None
    if not 0.5 <= stars <= 5:
        raise RatingsError(f"{where}: the rating is {fields[2]}: ratings are 0.5 to 5 stars")
    return Event(item % items, math.floor(2 * stars), time)


def generate_ratings(
    users: int, items: int, longest: int, seed: int, *, least: int = 1
) -> list[list[Event]]:
    """Histories drawn from a model of tastes, which a ranking model can learn up to a limit.

    An item's rating follows its quality, how well it suits the user, and chance; users come back to
    what suits them. Histories have ``least`` to ``longest`` events.
    """
    draws = np.random.default_rng(seed)
    quality = draws.normal(size=items)
    kinds, tastes = draws.normal(size=(items, 4)), draws.normal(size=(users, 4))
    histories = []
    for taste in tastes:
        count = int(draws.integers(least, longest + 1))
        offered = draws.integers(0, items, size=(count, 2))
        suits = (kinds[offered] @ taste) / 2
        rows = offered[np.arange(count), suits.argmax(axis=1)]
        stars = 3.2 + 0.7 * quality[rows] + 0.5 * suits.max(axis=1, initial=-9.0)
        stars = stars + draws.normal(scale=0.5, size=count)
        actions = np.clip(np.rint(2 * stars), 1, 10)
        times = np.exp(draws.uniform(0, 14, size=count)).cumsum()
        histories.append([*_events(rows, actions, times)])
    return histories


def _events(*columns: np.typing.NDArray[np.generic]) -> Iterable[Event]:
    return (Event(*map(int, row)) for row in zip(*columns, strict=True))
