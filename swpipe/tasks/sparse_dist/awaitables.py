"""Handles of collectives that are waited for once, and whose result can be handed out again.

TorchRec's awaitables are one-shot: to wait a second time would issue a second collective, or find
buffers that have been given back. A task that is replayed puts back the handle that its kept run
had made, and those who come after it wait for that handle in every iteration. So every handle in a
context is wrapped: whoever waits first gets the result itself; whoever comes later, a copy of its
containers around the same numbers, detached from the first one's graph.

On a device with streams a result is finished on the stream on which its exchange was begun, and the
stream that waits is made to wait for that one, as TorchRec's own forwards do: buffers of the
exchange come from that stream's memory and go back to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from swpipe._tensors.pytree import map_tensors
from swpipe.device import Device, Stream
from swpipe.tasks.sparse_dist._torchrec import Awaitable

_PENDING = object()


class Replayable(Awaitable):  # type: ignore[misc]
    """An awaitable that can be waited for again.

    Args:
        awaitable: What is waited for, once.
        device: Where its tensors lie.
        module_context: What the wait fills in beside its result: a module's context, or None.
        then: Makes of the result what is kept.
    """

    def __init__(
        self,
        awaitable: Any,
        device: Device,
        module_context: Any = None,
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._awaitable = awaitable
        self._device = device
        self._module_context = module_context
        self._then = then
        self._result: Any = _PENDING
        self._lock = threading.Lock()
        self._stream = device.current_stream()

    def wait(self) -> Any:
        """The result: itself the first time, a detached copy after that."""
        return self.wait_with_context()[0]

    def wait_with_context(self) -> tuple[Any, Any]:
        """The result, and the module's context, which is complete only then."""
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

    def _wait_impl(self) -> Any:
        return self.wait()


def fused_splits(fused: Any, contexts: Sequence[Any], device: Device) -> Replayable:
    """The exchange of sizes of several modules; its result is one ``Replayable`` for each.

    Args:
        fused: TorchRec's awaitable.
        contexts: The modules' contexts, in its order.
        device: Where the tensors lie.
    """

    def tensors_requests(requests: Sequence[Any]) -> tuple[Replayable, ...]:
        return tuple(
            Replayable(request, device, context)
            for request, context in zip(requests, contexts, strict=True)
        )

    return Replayable(fused, device, then=tensors_requests)


def use_here(device: Device, source: Stream, value: Any) -> None:
    """Let the current stream come after ``source``, and keep the memory of ``value`` for it."""
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
