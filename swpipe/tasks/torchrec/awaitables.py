"""Handles of collectives that are waited for once and return their result again.

TorchRec's awaitables are one-shot: a second wait would launch a second collective or use released
buffers. A shortcut restores the same handle in every iteration, so every handle is wrapped. The
first wait returns the result itself; later waits return the same values in copied containers,
detached from the first result's graph.

A result is completed on the stream on which its exchange started, which owns the memory of its
buffers. The waiting stream then waits for that stream, as in TorchRec's forwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from swpipe._tensors.pytree import map_tensors
from swpipe.device import Device, Stream
from swpipe.tasks.torchrec._torchrec import Awaitable

_PENDING = object()


class Replayable(Awaitable):  # type: ignore[misc]
    """An awaitable that can be waited for again.

    ``module_context`` is completed by the wait; ``then`` is applied to the result. The result's
    graph belongs to ``iteration``, if given: a replay in another one gets a detached result, also
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
        self._lock = threading.Lock()
        self._stream = device.current_stream()

    def wait(self) -> Any:
        """The result: itself the first time, then a detached copy."""
        return self.wait_with_context()[0]

    def wait_in(self, iteration: int) -> Any:
        """The result for one iteration: a detached copy in another than its own."""
        result = self.wait()
        return result if iteration == self._iteration else map_tensors(result, _again)

    def wait_with_context(self) -> tuple[Any, Any]:
        """The result and the module's context, which the wait completes."""
        with self._lock:
            first = self._result is _PENDING
            if first:
                with self._device.on(self._stream):
                    result = self._awaitable.wait()
                    self._result = result if self._then is None else self._then(result)
                self._awaitable = None
        found = (self._result, self._module_context)
        use_here(self._device, self._stream, found)
        return found if first else map_tensors(found, _again)

    def before_wait(self, fn: Callable[[Any, Any], None]) -> None:
        """Call ``fn(awaitable, module_context)`` where the first wait will be completed.

        Nothing is called after that wait.
        """
        with self._lock:
            if self._result is _PENDING:
                with self._device.on(self._stream):
                    fn(self._awaitable, self._module_context)

    def _wait_impl(self) -> Any:
        return self.wait()


def fused_splits(fused: Any, contexts: Sequence[Any], device: Device) -> Replayable:
    """Wrap the fused exchange of sizes; its result is one ``Replayable`` for each module."""

    def tensors_requests(requests: Sequence[Any]) -> tuple[Replayable, ...]:
        return tuple(
            Replayable(request, device, context)
            for request, context in zip(requests, contexts, strict=True)
        )

    return Replayable(fused, device, then=tensors_requests)


def use_here(device: Device, source: Stream, value: Any) -> None:
    """Make the current stream wait for ``source``, and hold the memory of ``value`` for it."""
    if not device.has_streams:
        return
    current = device.current_stream()
    if current != source:
        event = device.new_event()
        event.record(source)
        event.wait(current)
        device.hold([value], [current])


def _again(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
