"""A process group for the tensors of a pipeline, which ends a step on all ranks if one rank fails.

Guarantees
    - If one rank raises in a step, or refuses its arguments before it, every rank that waits for it
      raises at once, and names the rank that failed first, the pass, and the error.
    - The caller's own group stays as it is: it is not used in a step.

Assumptions
    - All ranks reach the job's store; a rank that cannot still raises, but knows no cause.
    - A rank that has done its part of the step does not wait. It raises in its next step.

::

    rank 1    error ── (1) record in the store ── (2) closes its connections ── raises
    rank 0    waits for rank 1 ................. (3) woken, reads the record, closes, raises
    rank 2    waits for rank 0 ........................ (3) the same

The record is written before the connections are closed, so that a rank that is woken by them finds
it. It is the first one that counts: whoever comes later reads it.

Gloo's waits cannot be aborted from Python; but a wait that times out closes all connections of its
group, which ends the waits of the other ranks, too. Others (NCCL) have ``abort``.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from swpipe._distributed.rank_checks import STORE_S, gather, job_store, within
from swpipe.core.messages import shorten
from swpipe.errors import MOST_IN_MESSAGE, add_note
from swpipe.tasks.pipeline_parallel.torch_pipelining import group_like


class StepFailure(NamedTuple):
    """What the rank that failed first says of it.

    Attributes:
        rank: In the group.
        place: The stage and the pass, or "before the step".
        error: Its type and message.
        before: Whether it refused its arguments before the step.
    """

    rank: int
    place: str
    error: str
    before: bool

    def __str__(self) -> str:
        return f"rank {self.rank} failed {self.place}: {self.error}"


class StepLink:
    """A process group of its own over the ranks of a pipeline; making one is a collective.

    Args:
        parent: The ranks; None for the default group.
        device: Where the tensors are that are sent.

    Attributes:
        group: For sends and receives.
        place: The stage and the pass that this rank is at.
    """

    def __init__(self, parent: dist.ProcessGroup | None, device: torch.device) -> None:
        self._parent, self._device = parent, device
        whole = parent or distributed_c10d._get_default_group()
        name = f"swpipe_pipeline_{gather(uuid.uuid4().hex, parent)[0]}"
        self._key = f"swpipe/{name}"
        self.group = group_like(whole, device, name)
        self.place = ""
        self._closed = False

    def fail(self, error: BaseException, *, before: bool) -> StepFailure:
        """Record that this rank failed, unless another one did before, and wake the others.

        Returns:
            The failure that came first.
        """
        place = "before the step" if before else f"at {self.place or 'its start'}"
        told = f"{type(error).__name__}: {error}"
        rank = dist.get_rank(self._parent)
        own = StepFailure(rank, place, shorten(" ".join(told.split()), MOST_IN_MESSAGE), before)
        try:
            first = within(STORE_S, lambda: self._record(own))
        except RuntimeError as gone:
            add_note(error, f"swpipe: the other ranks could not be told: {gone}")
            first = own
        self.close()
        return first

    def _record(self, own: StepFailure) -> StepFailure:
        held = job_store().compare_set(self._key, "", json.dumps(own)).decode()
        return StepFailure(*json.loads(held))

    def close(self) -> None:
        """End all that waits in the group, here and on other ranks."""
        if self._closed or dist.get_world_size(self.group) == 1:
            return
        self._closed = True
        if not isinstance(self.group._get_backend(self._device), dist.ProcessGroupGloo):
            self.group.abort()
            return
        buffer = torch.empty(1)
        for other in range(dist.get_world_size(self.group)):
            # One of these waits has to time out: with a rank that has left it fails at once, and
            # would leave the connections to the others open.
            with suppress(RuntimeError, ValueError):  # it fails in any case; one is this rank
                work = dist.irecv(buffer, group=self.group, group_src=other, tag=_NEVER)
                if work is not None:
                    work.wait(dt.timedelta(milliseconds=1))

    def release(self) -> None:
        """Destroy the group, unless the default group was, which took it along."""
        if dist.is_initialized() and self.group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)


_NEVER = 0x5157
"""A tag under which nothing is sent."""
