"""Batch shufflers: balance the rows of the global batch between ranks.

If rows differ in workload (sequences of unequal length), all ranks wait for the rank with the
largest workload. A shuffler redistributes the rows, the same number to each rank, in two phases::

    start(batch)             own workloads ──gather──> all workloads ──partition──> route
                             (this thread)   (a background thread, over a separate group)
    finish(batch, ticket)    rows ──all-to-all──> the new rows of this rank   (this thread)

``start`` returns at once; its gather uses a separate gloo group, outside the global order.
``finish`` must be globally ordered. The ticket holds all that it needs, so later batches may be
started before it is called. Every rank calls both for every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.distributed import gather, host_group
from swpipe.errors import add_note
from swpipe.tasks.torchrec.shuffling.balance import balanced_partition
from swpipe.tasks.torchrec.shuffling.rows import Group, Route, exchange_rows

Workload: TypeAlias = Callable[[Any], Tensor]
"""A function from a batch of B rows to their workloads, shape [B], in any unit."""


class Shuffler(Protocol):
    """Redistributes the rows of all ranks' batches."""

    def start(self, batch: Any) -> Any:
        """Start with a batch and return a ticket for ``finish`` at once."""

    def finish(self, batch: Any, ticket: Any) -> Any:
        """Return the batch that this rank trains on, on the same device."""

    def close(self) -> None:
        """Release threads and process groups."""


class IdentityShuffler:
    """A shuffler that leaves every rank its rows."""

    def start(self, batch: Any) -> None:
        """Do nothing."""

    def finish(self, batch: Any, ticket: None = None) -> Any:
        """Return the same batch."""
        return batch

    def close(self) -> None:
        """Do nothing."""


class KarmarkarKarpShuffler:
    """A shuffler that gives every rank the same number of rows and about the same workload.

    The partition of N rows takes about N x 10 µs on a background thread.

    Args:
        workload: A function from a batch to the workload of each row, computed on the batch's
            device.
        group: The ranks that exchange rows; None for all. Its backend must support the device of
            the batches that ``finish`` gets.
        timeout_s: Seconds to wait for the other ranks' workloads.

    Raises:
        ValueError: torch.distributed is not initialised: take ``IdentityShuffler`` on one process.
    """

    def __init__(
        self, workload: Workload, *, group: Group = None, timeout_s: float = 300.0
    ) -> None:
        self._workload = workload
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._host_group: dist.ProcessGroup | None = host_group(group, timeout_s)
        self._last: Future[Route] | None = None

    def start(self, batch: Any) -> Future[Route]:
        """Start to gather workloads and to partition them, on another thread.

        Raises:
            ValueError: The workloads are not one number per row.
        """
        work = torch.as_tensor(self._workload(batch))
        if work.ndim != 1:
            raise ValueError(
                f"workload(batch) has shape {list(work.shape)}: give one number per row, shape [B]"
            )
        # Copied without waiting: the background thread waits for the event instead, so that this
        # thread goes on launching.
        on_host = work.detach().to(torch.float64).to("cpu", non_blocking=True)
        copied = None
        if not work.is_cpu:
            copied = torch.Event(work.device)
            copied.record()
        before = self._last
        route: Future[Route] = Future()

        def partition() -> None:
            try:
                # Gathers are collectives of one group, so on every rank they run in the order of
                # the batches. Each thread waits for the thread of the batch before.
                if before is not None:
                    wait_for([before])
                if copied is not None:
                    # The copy to the host has ended only when its event has.
                    copied.synchronize()
                route.set_result(self._route(on_host))
            except BaseException as error:  # noqa: BLE001 - raised by finish()
                add_note(error, "swpipe: while workloads were gathered and rows assigned to ranks")
                route.set_exception(error)

        # One thread per batch, which gathers and partitions. It is a daemon: a gather that waits
        # for a dead rank must not keep the process alive.
        threading.Thread(target=partition, name="swpipe-shuffle", daemon=True).start()
        self._last = route
        return route

    def finish(self, batch: Any, ticket: Future[Route]) -> Any:
        """Wait for the partition and exchange rows; a collective of the group.

        A ticket may be used more than once.

        Raises:
            ValueError: The ranks have different numbers of rows, a workload is not finite, or a
                tensor of the batch has a different number of rows.
            RuntimeError: Another rank failed, or did not send its workloads in time.
        """
        return exchange_rows(batch, ticket.result(), self._group)

    def close(self) -> None:
        """Wait for the pending partition and destroy the process group."""
        if self._host_group is None:
            return
        group = self._host_group
        self._host_group = None
        # A gather that waits for a dead rank needs the group until its timeout.
        if self._last is None or not wait_for([self._last], timeout=1.0).not_done:
            dist.destroy_process_group(group)

    def _route(self, work: Tensor) -> Route:
        gathered = gather(work.tolist(), self._host_group)
        counts = [len(works) for works in gathered]
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks' batches have {counts} rows: every rank must have the same number of "
                "rows (a loader's drop_last=True does that)"
            )
        workloads = [work for works in gathered for work in works]
        return Route.of(balanced_partition(workloads, self._size), self._rank)
