"""Tools for your tests: the same numbers, the first difference, and races between streams."""

from swpipe.testing.differences import Difference, first_difference
from swpipe.testing.same_numbers import Loop, assert_same_numbers
from swpipe.testing.stream_races import Access, Race, find_races

__all__ = [
    "Access",
    "Difference",
    "Loop",
    "Race",
    "assert_same_numbers",
    "find_races",
    "first_difference",
]
