"""The position of a loader in a pass, restored when a loop is resumed.

    plain     1  2  3 ... k-3  k-2  k-1  k  k+1
    resumed               k-3  k-2  k-1  k  k+1     from the loader's state before these batches
    or        1  2  3 ... k-3  k-2  k-1  k  k+1     from the beginning of the pass

What decides which batches come may be in no state: a random generator that swpipe does not know, a
generator in a worker process, a buffer. So a loader's state is never trusted. The batches that were
handed out last are pulled again, and have to be the same; they are compared by a checksum of a
sample of the bytes on the host, of shapes, numbers and strings. The state of a loader that has one
is tried first. If it leads to other batches, the pass is begun again, as for a loader without a
state. If that leads to other batches, too, resuming is refused. ``pass_record`` has what a state
needs for this.

A difference in later batches is not detected: a list that has been changed gives them as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from swpipe.errors import add_note
from swpipe.loops.batch_memory import Contents
from swpipe.loops.pass_generators import States
from swpipe.loops.pass_record import PassRecord, Pull
from swpipe.loops.pulled_loader import PulledLoader


def begun_again(of: PulledLoader, record: PassRecord, saved: Mapping[str, Any]) -> Iterator[Any]:
    """Begin the rest of a pass where a state was saved, and return its batches.

    Args:
        of: The loader, whose generators are set to their saved states.
        record: The record of the pass, which gets the pulls that are compared.
        saved: The state.

    Raises:
        ValueError: The loader is an iterator, or does not give the same batches again.
    """
    loader = of.loader
    kind = type(loader).__name__
    again = saved["again"]
    own = saved["loader"]
    if own is None and of.goes_on and saved["batches"]:
        raise ValueError(
            f"{saved['batches']} batches of the pass were handed out before the state was saved, "
            f"and the loader is an iterator ({kind}), which cannot be begun again to skip them: "
            "give a DataLoader or another object that makes a new iterator"
        )
    for way, (state, number) in enumerate(_beginnings(of, saved)):
        # From the second try on, the pass is read from its beginning, which may take long.
        if way and number > len(again):
            warnings.warn(
                f"the state of the loader ({kind}) does not lead to the batches that were handed "
                f"out last: {number} batches of the pass are read again",
                RuntimeWarning,
                stacklevel=2,
            )
        # Each try starts from new workers and from the generators at the beginning of the pass.
        of.end_workers()
        of.generators.write(saved["at_start"])
        batches = iter(loader) if state is None else begun_at(loader, state)
        # Skip the batches before the compared ones; a state leads behind them.
        skipped = sum(1 for _ in islice(batches, number - len(again)))
        # The saved state may not have led here. Only torch's kind always tells its state.
        here = record.ask() if own is not None and isinstance(of.inner, DataLoader) else own
        pulls = [*_pulled_again(of, batches, again)]
        # Without a state, too few batches mean other data; with one, another beginning is tried.
        length = skipped + len(pulls)
        if own is None and length < number:
            raise ValueError(
                f"the loader has {length} batches, but {number} were handed out before the state "
                "was saved: resume with the same data"
            )
        same = [
            checksum in (None, pull.contents.checksum)
            for pull, (_, checksum) in zip(pulls, again, strict=False)
        ]
        if all(same) and len(same) == len(again):
            record.begin_again(pulls, here, saved)
            return batches
    what = f"the loader ({kind}), begun again, does not give"
    raise ValueError(
        f"{what if own is None else f'the state of the loader ({kind}) does not lead to'} the "
        f"batches that were handed out last, up to batch {saved['batches']} of the pass: what "
        "decides which come is in no state, such as a random generator that swpipe does not know, "
        "or rows that a dataset or collate_fn keeps; or it is not as it was. Resume with the same "
        "data, seeds and epoch (set_epoch); let samplers and the dataset have their generators as "
        "attributes; or, if other batches do not matter, load_state_dict(state, check=False)"
    )


def _pulled_again(
    of: PulledLoader, batches: Iterator[Any], again: Iterable[tuple[States, int | None]]
) -> Iterator[Pull]:
    """Make the compared pulls again."""
    # Each pull starts from the generators that it had in the saved run: bodies drew in between.
    for before, _ in again:
        of.generators.write(before)
        for batch in islice(batches, 1):
            yield Pull(Contents(batch), before)


def _beginnings(of: PulledLoader, saved: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Yield each beginning to try: the loader's state, or None, and how many batches to pull."""
    own = saved["loader"]
    compared = len(saved["again"])
    handed_out = saved["batches"]
    if own is None:
        yield None, handed_out
        return
    # Workers that live on would begin later passes at this state, too.
    if not compared or not of.lives_on:
        yield own, compared
    # The beginning of the pass: by the loader's state there, and last by a new iterator.
    if compared and isinstance(of.inner, DataLoader):
        yield saved["loader_at_start"], handed_out
        yield None, handed_out


def begun_at(loader: Any, state: Any) -> Iterator[Any]:
    """Return the iterator of a loader with a state of its own, begun at that state."""
    try:
        loader.load_state_dict(state)
        return iter(loader)
    except Exception as error:
        kind = type(loader).__name__
        add_note(error, f"swpipe: raised by the loader ({kind}) when it was given its saved state")
        raise
