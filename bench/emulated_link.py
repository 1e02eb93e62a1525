"""An emulated slow link between ranks of one machine: a collective lasts at least the latency L.

    issue          the other ranks' data is here      L is over
      |------------------------|---------------------------|
      all_to_all_single()      real handle would return    this handle's wait() returns

Those functions of ``torch.distributed`` that return a handle are wrapped, for all callers that look
them up there. The handle is a ``dist.Work``, since TorchRec tests for this type. Its ``wait``
sleeps without the interpreter lock and without a core. Any number of exchanges may be in flight, as
on a link with enough bandwidth. With ``bytes_per_s``, the bytes that ``all_to_all_single`` sends to
other ranks queue up; reductions have a link of their own. With ``in_turn``, each collective begins
when the previous one has ended, as on one communicator.

Collectives that C++ issues are not wrapped, among them DDP's all-reduces. Give such a model a
communication hook that issues them from Python (``reduce_by_link``); its futures are late, too.
"""

from __future__ import annotations

import datetime as dt
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
"""The collectives that TorchRec and FSDP issue, and similar ones; some are new in torch 2.13."""


class Exchange(NamedTuple):
    """One collective; times are of ``time.perf_counter_ns``.

    Attributes:
        name: The function that issued it.
        issued_ns: When it was called.
        wait_ns: When it was waited for the first time.
        done_ns: When that wait was over.
    """

    name: str
    issued_ns: int
    wait_ns: int
    done_ns: int

    @property
    def waited_ns(self) -> int:
        """The time that the caller waited, in ns."""
        return self.done_ns - self.wait_ns


class EmulatedLink:
    """A context manager under which this process's link is slow.

    Attributes:
        latency_ms: Least time from a collective's issue to its end; may be set at any time, and
            holds for those issued after that.
        bytes_per_s: The bytes that a rank can send; may be set at any time.
        in_turn: Whether a collective begins only when the one before it has ended.
        issued: How often each function was called.
        exchanges: The exchanges since ``recording`` was set, in the order of their waits.
        recording: Whether to keep ``exchanges``.
    """

    def __init__(
        self, latency_ms: float = 0.0, bytes_per_s: float = math.inf, *, in_turn: bool = False
    ) -> None:
        self.latency_ms = latency_ms
        self.bytes_per_s = bytes_per_s
        self.in_turn = in_turn
        self._free_ns = 0
        self.issued: Counter[str] = Counter()
        self.exchanges: list[Exchange] = []
        self.recording = False
        self._real: dict[str, Callable[..., Any]] = {}
        self._futures: SimpleQueue[tuple[LateWork, Any] | None] = SimpleQueue()
        self._completer = threading.Thread(target=self._complete, name="link", daemon=True)

    def __enter__(self) -> Self:
        self._completer.start()
        for name in filter(functools.partial(hasattr, dist), COLLECTIVES):
            self._real[name] = getattr(dist, name)
            setattr(dist, name, self._slow(name, self._real[name]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._real:
            setattr(dist, *self._real.popitem())
        self._futures.put(None)
        self._completer.join()

    def future(self, work: LateWork) -> Any:
        """Return a future with the work's result, which completes when the work does."""
        future: Any = torch.futures.Future()
        self._futures.put((work, future))
        return future

    def _complete(self) -> None:
        while (asked := self._futures.get()) is not None:
            work, future = asked
            try:
                future.set_result(work.result_when_due())
            except Exception as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)

    def _slow(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def collective(*args: Any, **kwargs: Any) -> Any:
            issued_ns = time.perf_counter_ns()
            work = real(*args, **kwargs)
            self.issued[name] += 1
            sent_ns = issued_ns
            if name == "all_to_all_single" and self.bytes_per_s < math.inf:
                seconds = _sent_bytes(*args, **kwargs) / self.bytes_per_s
                sent_ns = self._free_ns = max(self._free_ns, issued_ns) + round(seconds * 1e9)
            if self.in_turn:
                sent_ns = max(self._free_ns, issued_ns)
                self._free_ns = sent_ns + round(self.latency_ms * 1e6)
            handle = LateWork(work, name, issued_ns, self, sent_ns)
            if isinstance(work, dist.Work):
                return handle
            handle.wait()
            return work

        return collective


class LateWork(dist.Work):
    """A handle that completes no sooner than the emulated link allows.

    Args:
        work: The real one; anything else for a collective that has completed already.
        name: The function that issued it.
        issued_ns: When.
        link: Tells how late it is, and is told of the first wait.
        sent_ns: When the link has taken its bytes.
    """

    def __init__(
        self, work: Any, name: str, issued_ns: int, link: EmulatedLink, sent_ns: int
    ) -> None:
        super().__init__()
        self._work = work if isinstance(work, dist.Work) else None
        self._name = name
        self._issued_ns = issued_ns
        self._due_ns = sent_ns + round(link.latency_ms * 1e6)
        self._link = link
        self._done = False

    def wait(self, timeout: dt.timedelta = dt.timedelta(0)) -> bool:
        """Sleep until the collective is done and the latency is over; at most once."""
        if self._done:
            return True
        wait_ns = time.perf_counter_ns()
        self._wait_until_due(timeout)
        self._done = True
        if self._link.recording:
            done_ns = time.perf_counter_ns()
            self._link.exchanges.append(Exchange(self._name, self._issued_ns, wait_ns, done_ns))
        return True

    def is_completed(self) -> bool:
        """Return whether the real collective is done and the latency is over."""
        real = self._work is None or self._work.is_completed()
        return real and time.perf_counter_ns() >= self._due_ns

    def is_success(self) -> bool:
        """Return whether the collective completed without an error."""
        return self.is_completed() and (self._work is None or self._work.is_success())

    def get_future(self) -> Any:
        """Return a future that completes no sooner than this handle does."""
        return self._link.future(self)

    def result_when_due(self) -> Any:
        """Return the real collective's result once it is done and the latency is over."""
        self._wait_until_due(dt.timedelta(0))
        return None if self._work is None else self._work.get_future().value()

    def _wait_until_due(self, timeout: dt.timedelta) -> None:
        if self._work is not None:
            self._work.wait(timeout)
        while (left_ns := self._due_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)


def _sent_bytes(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name
    output_split_sizes: Any = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    **_: Any,
) -> int:
    """Return how many bytes go to other ranks."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    counts = input_split_sizes or [len(input) // world] * world
    row = input.nbytes // max(1, len(input))
    return row * (sum(counts) - counts[rank])


def reduce_by_link(model: nn.Module) -> None:
    """Make a model's DDP wrappers all-reduce over the emulated link, otherwise as by default."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group = module.process_group
            # torch refuses a hook whose annotations are strings; this has none.
            module.register_comm_hook(group, lambda group, bucket: _mean(group, bucket.buffer()))


def _mean(group: dist.ProcessGroup, buffer: torch.Tensor) -> Any:
    buffer.mul_(1.0 / dist.get_world_size(group))
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
