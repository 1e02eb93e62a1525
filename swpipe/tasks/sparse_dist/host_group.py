"""A process group on the host, apart from those that the training step communicates in."""

from __future__ import annotations

import datetime as dt

import torch.distributed as dist


def host_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of the same ranks. Making one is a collective of theirs.

    Args:
        group: Which ranks; None for all.
        timeout_s: Seconds that a collective of the new group may take.
    """
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group or dist.group.WORLD),
        timeout=dt.timedelta(seconds=timeout_s),
        backend="gloo",
        use_local_synchronization=group is not None,
    )
    # A rank that is through closes the group when it fails at once: others, still connecting to
    # it, would be told of a connection that was closed and not of that failure.
    dist.barrier(group=made)
    return made
