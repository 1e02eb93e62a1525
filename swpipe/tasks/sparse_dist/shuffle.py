"""Batch shufflers: which rank trains which rows of the global batch.

Where rows differ in work (sequences of unequal length, say), the rank with the heaviest batch
keeps the others waiting in every step. A shuffler deals the rows of all ranks' batches anew, the
same number to each rank. It works in two phases, so that tasks can put other work in between::

    start(batch)             own workloads ──gather──> all ranks' ──partition──> a deal
                             (this thread)   (a background thread, over a group of its own)
    finish(batch, ticket)    rows ──all-to-all──> the rows dealt to this rank   (this thread)

``start`` returns at once. Its gather runs on the host, over a gloo group that nobody else uses, so
it needs no place in the global order; ``finish`` is a collective on the group of the tasks, and
belongs to the globally ordered ones. Every rank calls both for every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe._distributed.rank_checks import gather
from swpipe.tasks.sparse_dist.balance import balanced_partition
from swpipe.tasks.sparse_dist.host_group import host_group
from swpipe.tasks.sparse_dist.rows import Group, Route, exchange_rows

Workload: TypeAlias = Callable[[Any], Tensor]
"""A batch of B rows to [B] numbers: the work of each row, in any unit."""


class Shuffler(Protocol):
    """Deals the rows of all ranks' batches anew."""

    def start(self, batch: Any) -> Any:
        """Begin with a batch; returns at once, with a ticket for ``finish``."""

    def finish(self, batch: Any, ticket: Any) -> Any:
        """The batch that this rank trains in place of ``batch``, on the same device."""

    def close(self) -> None:
        """Let go of threads and process groups."""


class IdentityShuffler:
    """Every rank keeps its rows."""

    def start(self, batch: Any) -> None:
        """Do nothing."""

    def finish(self, batch: Any, ticket: None = None) -> Any:
        """The same batch."""
        return batch

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class ShuffleTicket:
    """A deal under way. It can be used for more than one ``finish``.

    Attributes:
        route: Where the rows of this rank go, once it is known.
    """

    route: Future[Route]


class KarmarkarKarpShuffler:
    """Deals rows so that every rank gets as many as it had, and about equal work.

    For N rows on all ranks together the partition takes about N x 10 µs of host time on a thread of
    its own: suited to batches of up to some thousand rows.

    Args:
        workload: Takes a batch, gives the work of each of its rows. Computed where the batch lies:
            for a batch on the host this costs no device any time.
        group: The ranks that deal with each other; None for all. The default group's backend must
            reach the device that batches are on when ``finish`` gets them.
        timeout_s: Seconds that the other ranks' workloads may be late.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(
        self, workload: Workload, *, group: Group = None, timeout_s: float = 300.0
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "a Karmarkar-Karp shuffler needs ranks to deal rows to, and torch.distributed is "
                "not initialised: call init_process_group() first, or take IdentityShuffler"
            )
        self._workload = workload
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._host_group: dist.ProcessGroup | None = host_group(group, timeout_s)
        self._last: Future[Route] | None = None

    def start(self, batch: Any) -> ShuffleTicket:
        """Begin to gather workloads and to partition, on another thread.

        Raises:
            ValueError: The workloads are not one number per row.
        """
        work = torch.as_tensor(self._workload(batch))
        if work.ndim != 1:
            raise ValueError(
                f"workload(batch) has shape {list(work.shape)}: give one number per row, shape [B]"
            )
        on_host = work.detach().to(torch.float64).to("cpu", non_blocking=True)
        copied = None
        if not work.is_cpu:
            copied = torch.Event(work.device)
            copied.record()
        route: Future[Route] = Future()
        threading.Thread(
            target=self._deal,
            args=(on_host, copied, self._last, route),
            name="swpipe-shuffle",
            daemon=True,
        ).start()
        self._last = route
        return ShuffleTicket(route)

    def finish(self, batch: Any, ticket: ShuffleTicket) -> Any:
        """Wait for the deal, and exchange rows. A collective of the group.

        Raises:
            ValueError: Ranks with different numbers of rows, workloads that are not finite, or a
                tensor of the batch with another number of rows.
            RuntimeError: Another rank failed, or did not send its workloads in time.
        """
        return exchange_rows(batch, ticket.route.result(), self._group)

    def close(self) -> None:
        """Wait for what is under way, and let go of the process group."""
        if self._host_group is None:
            return
        group, self._host_group = self._host_group, None
        # A gather that waits for a rank which is gone ends by itself, and keeps the group so long.
        if self._last is None or not wait_for([self._last], timeout=1.0).not_done:
            dist.destroy_process_group(group)

    # ----------------------------------------------------------------- background

    def _deal(
        self,
        work: Tensor,
        copied: torch.Event | None,
        before: Future[Route] | None,
        route: Future[Route],
    ) -> None:
        try:
            if before is not None:
                wait_for([before])  # gathers go in the order of the batches, on every rank
            if copied is not None:
                copied.synchronize()
            route.set_result(self._route(work))
        except BaseException as error:  # noqa: BLE001 - handed to finish()
            error.add_note("swpipe: while workloads were gathered and rows dealt to the ranks")
            route.set_exception(error)

    def _route(self, work: Tensor) -> Route:
        gathered = gather(work.tolist(), self._host_group)
        counts = [len(works) for works in gathered]
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks' batches have {counts} rows: rows are dealt evenly, so every rank must "
                "bring as many (a loader's drop_last=True does)"
            )
        workloads = [work for works in gathered for work in works]
        return Route.of(balanced_partition(workloads, self._size), self._rank)
