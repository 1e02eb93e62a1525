"""Groups on the host are there for all ranks at once."""

from __future__ import annotations

import datetime as dt
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from swpipe._distributed.rank_checks import host_group
from tests.support.ranks import Ranks

RETURNED = "test_host_group/returned"


def _late_on_rank_1() -> bool:
    """Delay rank 1 while the group is made; return whether rank 0 had it before rank 1."""
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    make = dist.new_group
    through = []

    def late(*given: Any, **options: Any) -> Any:
        made = make(*given, **options)
        try:
            store.wait([RETURNED], dt.timedelta(seconds=0.5))
        except RuntimeError:
            through.append(False)
        else:
            through.append(True)
        return made

    if dist.get_rank() == 0:
        made = host_group(None, 30.0)
        store.set(RETURNED, "yes")
    else:
        with mock.patch.object(dist, "new_group", late):
            made = host_group(None, 30.0)
    dist.destroy_process_group(made)
    return any(through)


def test_no_rank_continues_while_another_connects(two_ranks: Ranks) -> None:
    """A rank that failed at once and closed the group broke the others' connection to it."""
    assert two_ranks.run(_late_on_rank_1) == [False, False]
