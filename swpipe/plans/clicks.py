"""Ready-made plans of the click job (``swpipe.tasks.clicks``), by name."""

from __future__ import annotations

from swpipe.core.plan import PipelinePlan
from swpipe.plans.prefetch import prefetch_plan

__all__ = ["PLANS", "pipelined", "serial"]

FEED = ("read", "decode", "hash", "copy")
"""Tasks that bring a batch from the file to the device."""

COMPUTE = ("embed", "forward", "backward", "step", "auc")
"""Tasks that train on it."""

TASKS = (*FEED, *COMPUTE)


def serial() -> PipelinePlan:
    """One task after the other on the caller's thread: what a plain loop does."""
    return PipelinePlan.serial(TASKS)


def pipelined() -> PipelinePlan:
    """The next batches are read, decoded, hashed and copied while this one is computed.

    Reading and decoding keep the host busy, so they have a thread group of their own. Polars and
    torch release the interpreter lock, so the two threads run in parallel. A depth of 3 evens out
    batches that take longer to read.
    """
    return prefetch_plan(
        FEED,
        COMPUTE,
        carried=[("embed", "step"), ("forward", "step")],
        depth=3,
        pull_group=None,  # a batch is a range of rows: it costs nothing
        streams={"copy": "memcpy"},
    )


PLANS = {"serial": serial, "pipelined": pipelined}
