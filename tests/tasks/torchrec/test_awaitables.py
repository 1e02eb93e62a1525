"""Handles are waited for once, and their results can be read again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from swpipe.device import CpuDevice
from swpipe.tasks.torchrec._torchrec import Awaitable
from swpipe.tasks.torchrec.rewriting.awaitables import Replayable, fused_splits


class OneShot(Awaitable):  # type: ignore[misc]
    """An awaitable that can be waited for once, and fills in a context, as TorchRec's do."""

    def __init__(self, result: Any, context: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.result = result
        self.context = context
        self.waits = 0

    def _wait_impl(self) -> Any:
        self.waits += 1
        assert self.waits == 1
        if self.context is not None:
            self.context["filled"] = torch.ones(1)
        return self.result


class TwoStreams:
    """A device that records requests; its current stream is a name."""

    has_streams = True
    type = "two"

    def __init__(self) -> None:
        self.current = "exchange"
        self.log: list[Any] = []

    def current_stream(self) -> str:
        return self.current

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def new_event(self) -> TwoStreams:
        return self

    def record(self, stream: str) -> None:
        self.log.append(("record", stream))

    def wait(self, stream: str) -> None:
        self.log.append(("wait", stream))

    def hold(self, values: Any, streams: list[str]) -> None:
        self.log.append(("hold", *streams))


def test_later_waits_return_the_values_without_the_graph() -> None:
    """The first returns the result and the filled context; later ones return leaves and a copy."""
    result = {"a": torch.ones(2, requires_grad=True) * 2, "b": torch.ones(1)}
    context: dict[str, Any] = {}
    handle = Replayable(OneShot(result, context), CpuDevice(), context)
    first, filled = handle.wait_with_context()
    assert first is result
    assert filled is context
    again, copied = handle.wait_with_context()
    assert again["a"].is_leaf
    assert (again["a"].requires_grad, again["b"].requires_grad) == (True, False)
    assert torch.equal(again["a"], result["a"])
    assert copied is not context
    assert torch.equal(copied["filled"], torch.ones(1))


def test_only_one_of_two_threads_waits() -> None:
    """The other thread gets the same result."""
    handle = Replayable(OneShot(torch.ones(1)), CpuDevice())
    ready = threading.Barrier(2)

    def wait() -> torch.Tensor:
        ready.wait()
        return handle.wait()

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(wait) for _ in range(2))
        assert torch.equal(first.result(), second.result())


def test_fused_sizes_give_one_handle_per_module_and_the_same_ones_again() -> None:
    """A handle that was waited for under one iteration is not waited for under the next."""
    inner = [OneShot("ids of a"), OneShot("ids of b")]
    handle = fused_splits(OneShot(inner), ["context of a", "context of b"], CpuDevice())
    for _ in range(2):
        found = [request.wait_with_context() for request in handle.wait()]
        assert found == [("ids of a", "context of a"), ("ids of b", "context of b")]


def test_an_exchange_is_completed_on_the_stream_that_started_it() -> None:
    """A different waiting stream waits for it and holds the result."""
    device = TwoStreams()
    seen = []

    class Seen(OneShot):
        def _wait_impl(self) -> Any:
            seen.append(device.current)
            return self.result

    handle = Replayable(Seen(torch.ones(1)), device)
    device.current = "compute"
    handle.wait()
    assert seen == ["exchange"]
    assert device.log == [("record", "exchange"), ("wait", "compute"), ("hold", "compute")]
    device.current = "exchange"
    handle.wait()
    assert len(device.log) == 3
