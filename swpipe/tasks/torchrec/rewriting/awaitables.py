"""Awaitables of collectives that wait once and can return their result again.

TorchRec's awaitables are one-shot: a second wait would launch a second collective or use released
buffers. A shortcut restores the same awaitable in every iteration, so every awaitable is wrapped.
The first wait returns the result itself. Later waits return the same values in copied containers,
detached from the first result's graph.

A result is completed on the stream on which its exchange started, which owns the memory of its
buffers. The waiting stream then waits for that stream, as in TorchRec's forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from swpipe.device import Device
from swpipe.tasks.torchrec._torchrec import Awaitable
from swpipe.values import map_tensors

_PENDING = object()


class Replayable(Awaitable):  # type: ignore[misc]
    """An awaitable that can be waited for again.

    The wait completes ``module_context``, and ``then`` is applied to the result. The result's graph
    belongs to ``iteration``, if given: a replay in another iteration gets a detached result, even
    if it is the first to wait.
    """

    same_in_replay = True

    def __init__(
        self,
        awaitable: Any,
        device: Device,
        module_context: Any = None,
        then: Callable[[Any], Any] | None = None,
        iteration: int | None = None,
    ) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._device = device
        self._module_context = module_context
        self._then = then
        self._iteration = iteration
        self._result: Any = _PENDING
        # A shortcut may replay the awaitable in two iterations, whose tasks run on different
        # threads.
        self._lock = threading.Lock()
        self._stream = device.current_stream() if device.has_streams else None

    def wait(self) -> Any:
        """Return the result itself the first time, then a detached copy."""
        return self.wait_with_context()[0]

    def wait_in(self, iteration: int) -> Any:
        """Return the result for one iteration: a detached copy in any but the awaitable's own."""
        result = self.wait()
        return result if iteration == self._iteration else map_tensors(result, _again)

    def wait_with_context(self) -> tuple[Any, Any]:
        """Return the result and the module's context, which the wait completes."""
        # Only completion needs the lock: it must happen once. Streams are ordered by events below,
        # outside of the lock.
        with self._lock:
            first = self._result is _PENDING
            if first:
                with self._on_stream():
                    self._complete()
        result = (self._result, self._module_context)
        if self._stream is not None:
            self._use_here(result)
        return result if first else map_tensors(result, _again)

    def before_wait(self, fn: Callable[[Any, Any], None]) -> None:
        """Call ``fn(awaitable, module_context)`` on the stream that will complete the first wait.

        After that wait nothing is called.
        """
        with self._lock:
            if self._result is _PENDING:
                with self._on_stream():
                    fn(self._awaitable, self._module_context)

    def _wait_impl(self) -> Any:
        return self.wait()

    def _on_stream(self) -> AbstractContextManager[object]:
        """Return a block on the stream of the exchange, if the device has streams."""
        return nullcontext() if self._stream is None else self._device.on(self._stream)

    def _complete(self) -> None:
        result = self._awaitable.wait()
        self._result = result if self._then is None else self._then(result)
        # The awaitable holds buffers of the exchange, which are not needed any more.
        self._awaitable = None

    def _use_here(self, value: Any) -> None:
        """Make the current stream wait for the result, and hold its memory for this stream."""
        current = self._device.current_stream()
        if current != self._stream:
            event = self._device.new_event()
            event.record(self._stream)
            event.wait(current)
            # The caching allocator must not give this memory to its own stream while this one reads
            # it.
            self._device.hold([value], [current])


def fused_splits(fused: Any, contexts: Sequence[Any], device: Device) -> Replayable:
    """Wrap the fused exchange of sizes; its result is one ``Replayable`` per module."""

    def each(requests: Sequence[Any]) -> list[Replayable]:
        pairs = zip(requests, contexts, strict=True)
        return [Replayable(request, device, context) for request, context in pairs]

    return Replayable(fused, device, then=each)


def _again(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
