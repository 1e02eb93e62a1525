"""The identity of a storage is never that of an earlier one."""

from __future__ import annotations

import torch

from swpipe._values.storages import Storages


def test_the_number_of_memory_that_has_gone_is_not_used_again() -> None:
    """The allocator returns the same addresses, but each tensor is new."""
    storages = Storages()
    for _ in range(100):
        assert [new for _, new in storages.add(torch.ones(4))] == [True]
