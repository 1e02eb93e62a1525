"""Where a pass over an iterator ends."""

from __future__ import annotations

from itertools import chain

from swpipe.tasks.torchrec import EvenData
from swpipe.tasks.torchrec.passes import Pass


def test_a_pass_ends_with_its_data_and_stays_ended() -> None:
    """None ends the data, and what comes after it is not read."""
    one = Pass(chain([1, 2], [None], [3]))
    assert list(one) == [1, 2]
    assert list(one) == []
    assert not one.stopped


def test_batches_kept_back_are_dropped_at_the_end() -> None:
    """Two are read ahead; with fewer than three there is none to hand out."""
    assert list(Pass(iter(range(5)), keep_back=2)) == [0, 1, 2]
    assert list(Pass(iter(range(2)), keep_back=2)) == []


def test_a_stopped_pass_hands_out_what_it_has_read() -> None:
    """And leaves the other batches in the iterator."""
    data = iter(range(6))
    one = Pass(data, keep_back=2)
    assert next(one) == 0
    one.stop()
    assert (one.kept, list(one), list(data)) == (2, [1, 2], [3, 4, 5])


def test_a_limit_leaves_the_other_batches_in_the_iterator() -> None:
    """It counts the batches that are handed out."""
    data = iter(range(4))
    assert list(Pass(data, limit=1)) == [0]
    assert list(Pass(data, limit=0)) == []
    assert list(data) == [1, 2, 3]


def test_batches_that_are_read_ahead_below_a_pass_are_waiting_too() -> None:
    """An ``EvenIterator`` pulls some for later steps."""
    one = Pass(EvenData("stop", ahead=3).over(range(9)), keep_back=2)
    assert next(one) == 0
    assert (one.kept, one.waiting) == (2, 5)
    assert list(one)[-1] == 6
    assert one.waiting == 0
