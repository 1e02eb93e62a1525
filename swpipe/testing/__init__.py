"""For tests of your own: the same numbers, and the first difference."""

from swpipe.testing.differences import Difference, first_difference
from swpipe.testing.same_numbers import Loop, assert_same_numbers

__all__ = [
    "Difference",
    "Loop",
    "assert_same_numbers",
    "first_difference",
]
