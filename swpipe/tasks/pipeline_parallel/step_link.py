"""A process group for a pipeline's tensors that ends a step on all ranks if one rank fails.

Guarantees
    - If a rank raises in a step, or refuses its arguments before the step, every rank that waits
      for this rank raises at once, and names the rank that failed first, the pass, and the error.
    - The caller's own group stays usable: steps do not use it.

Assumptions
    - All ranks can reach the job's store; a rank that cannot reach it still raises, but does not
      name the cause.
    - A rank that has finished its part of the step does not wait. It raises in its next step.

::

    rank 1    error ── (1) record in the store ── (2) closes its connections ── raises
    rank 0    waits for rank 1 ................. (3) woken, reads the record, closes, raises
    rank 2    waits for rank 0 ........................ (3) the same

A failing rank writes its record (1) before it closes its connections (2), so that a rank that
wakes (3) finds the record. Only the first record counts: a rank that fails later reads it instead
of writing one.

Gloo's waits cannot be aborted from Python, but a wait that times out closes all connections of its
group, which also ends the waits of the other ranks. Other backends (NCCL) have ``abort``.
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

from swpipe.core.messages import shorten
from swpipe.distributed import STORE_S, gather, job_store, within
from swpipe.errors import MOST_IN_MESSAGE, add_note
from swpipe.tasks.pipeline_parallel.torch_pipelining import group_like


class StepFailure(NamedTuple):
    """The record of the first failure in a step.

    Attributes:
        rank: The rank that failed first, in the pipeline's group.
        place: The stage and the pass that failed, or "before the step".
        error: The type and message of the error.
        before: Whether the rank refused its arguments before the step.
    """

    rank: int
    place: str
    error: str
    before: bool

    def __str__(self) -> str:
        return f"rank {self.rank} failed {self.place}: {self.error}"


class StepLink:
    """A separate process group over the ranks of a pipeline; making one is a collective.

    Args:
        parent: The ranks; None for the default group.
        device: The device of the tensors to send.

    Attributes:
        group: The process group for sends and receives.
        place: The stage and the pass that this rank is running, for messages.
    """

    def __init__(self, parent: dist.ProcessGroup | None, device: torch.device) -> None:
        self._parent = parent
        self._device = device
        whole = parent or distributed_c10d._get_default_group()
        # All ranks need the same name, which no earlier link may have had: rank 0 draws it.
        name = f"swpipe_pipeline_{gather(uuid.uuid4().hex, parent)[0]}"
        self._key = f"swpipe/{name}"
        self.group = group_like(whole, device, name)
        self.place = ""
        self._closed = False

    def fail(self, error: BaseException, *, before: bool) -> StepFailure:
        """Record this rank's failure unless another rank failed first, and wake the other ranks.

        Returns:
            The first failure of the step.
        """
        place = "before the step" if before else f"at {self.place or 'its start'}"
        text = f"{type(error).__name__}: {error}"
        rank = dist.get_rank(self._parent)
        own = StepFailure(rank, place, shorten(" ".join(text.split()), MOST_IN_MESSAGE), before)
        try:
            first = within(STORE_S, lambda: self._record(own))
        except RuntimeError as gone:
            add_note(error, f"swpipe: the other ranks do not learn of this failure: {gone}")
            first = own
        self.close()
        return first

    def _record(self, own: StepFailure) -> StepFailure:
        # Atomic: it stores the value only if the key is unset, and returns the stored value.
        held = job_store().compare_set(self._key, "", json.dumps(own)).decode()
        return StepFailure(*json.loads(held))

    def close(self) -> None:
        """End all waits in the group, on this rank and on the others."""
        if self._closed or dist.get_world_size(self.group) == 1:
            return
        self._closed = True
        if not isinstance(self.group._get_backend(self._device), dist.ProcessGroupGloo):
            self.group.abort()
            return
        buffer = torch.empty(1)
        for other in range(dist.get_world_size(self.group)):
            # At least one of these waits has to time out. A receive from a rank that has left
            # fails at once, and leaves the connections to the other ranks open.
            with suppress(RuntimeError, ValueError):  # each fails; ValueError is for this rank
                work = dist.irecv(buffer, group=self.group, group_src=other, tag=_NEVER)
                if work is not None:
                    work.wait(dt.timedelta(milliseconds=1))

    def release(self) -> None:
        """Destroy the group, unless it was destroyed together with the default group."""
        if dist.is_initialized() and self.group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)


_NEVER = 0x5157
"""A tag under which no rank sends."""
