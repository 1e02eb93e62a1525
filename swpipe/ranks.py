"""One plan on all ranks."""

from __future__ import annotations

import torch.distributed as dist


def check_same_plan(digest: str) -> None:
    """Compare plans across the ranks of torch.distributed's default group; without one, do nothing.

    Every rank has to call this: it is a collective.

    Raises:
        RuntimeError: The ranks hold different plans; raised on all of them.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        groups = {d: [rank for rank, other in enumerate(digests) if other == d] for d in digests}
        held = "; ".join(f"ranks {ranks} hold plan {d[:12]}" for d, ranks in groups.items())
        raise RuntimeError(
            "the ranks hold different plans, and would wait for each other's collectives for ever: "
            f"{held}. "
            "Give every rank the same plan (PipelinePlan.digest tells plans apart)"
        )
