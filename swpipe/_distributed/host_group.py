"""Process groups on the host, beside those of the training step."""

from __future__ import annotations

import datetime as dt

import torch.distributed as dist


def host_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of the same ranks (None: all), separate from those of the training step.

    Creating it is a collective of these ranks.
    """
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group or dist.group.WORLD),
        timeout=dt.timedelta(seconds=timeout_s),
        backend="gloo",
        use_local_synchronization=group is not None,
    )
    # Without it, ranks that still connect would report a closed connection if one rank fails here.
    dist.barrier(group=made)
    return made
