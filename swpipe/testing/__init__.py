"""For tests of your own: the same numbers, the first difference, and what ran at the same time."""

from swpipe.testing.differences import Difference, first_difference
from swpipe.testing.same_numbers import Loop, assert_same_numbers
from swpipe.testing.span_order import assert_after, assert_never_overlaps, assert_overlaps

__all__ = [
    "Difference",
    "Loop",
    "assert_after",
    "assert_never_overlaps",
    "assert_overlaps",
    "assert_same_numbers",
    "first_difference",
]
