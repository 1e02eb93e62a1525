"""Ranks that share experts run the same steps in the same order, or say so before they exchange.

Ranks of other groups, such as those of another pipeline stage, may run other layers: plans are
compared within the expert group. Each call of a schedule first starts an exchange of a few bytes,
which is the first of the call whatever the ranks run, so that two such exchanges always meet.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from swpipe._distributed.agreement import differences, name_ranks, plan_facts
from swpipe._distributed.rank_checks import gather
from swpipe.core.plan import PipelinePlan
from swpipe.plans.transformer import Steps
from swpipe.tasks.transformer.token_exchange import size_of

_WAYS_OUT = (
    "and would wait for each other's exchanges for ever. Build and run the same layers on all of "
    "them, forward and backward"
)


class SameOrder:
    """A comparison that has begun.

    Args:
        order: What this rank is about to run.
        group: The ranks to compare with; None for none.
        device: Where the group's collectives find their tensors.
    """

    def __init__(
        self, order: Steps, group: dist.ProcessGroup | None, device: torch.device | str
    ) -> None:
        self._handle: dist.Work | None = None
        if size_of(group) > 1:
            digest = hashlib.sha256(" ".join(step.name for step in order).encode()).digest()
            own = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
            self._all = own.new_empty(size_of(group))
            self._handle = dist.all_gather_into_tensor(self._all, own, group=group, async_op=True)

    def check(self) -> None:
        """Wait for the others, once.

        Raises:
            RuntimeError: One of them runs another order; raised on all ranks of the group.
        """
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        digests: list[int] = self._all.tolist()
        if others := [rank for rank, one in enumerate(digests) if one != digests[0]]:
            raise RuntimeError(
                "ranks of one expert group run layers of different kinds, or in another order: "
                f"{name_ranks(others)} of the group others than rank 0, {_WAYS_OUT}"
            )


def check_same_plan_in_group(plan: PipelinePlan, group: dist.ProcessGroup | None) -> None:
    """Compare a plan within an expert group. A collective of the group; without one, nothing.

    Raises:
        RuntimeError: The ranks hold different plans; raised on all of them.
    """
    if size_of(group) > 1 and len(set(gather(plan.digest(), group))) > 1:
        raise RuntimeError(
            "ranks of one expert group train layers by different plans: "
            f"{differences(gather(plan_facts(plan), group))}, {_WAYS_OUT}"
        )
