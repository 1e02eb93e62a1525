"""The four ways of a stage's tensors: outputs and gradients of inputs go, the others come.

::

    sender      F ── header, once ──> ── tensors ──>      receiver: waits for the header, makes
                I <── header, once ── <── gradients ──      memory, and receives

The header has structure, shapes and strides (``wire``). It goes with the first microbatch; later
ones have to be alike, since the receiver makes its memory by it. Where they may vary, each has one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.tasks.pipeline_parallel.wire import Packed, TensorLayout, layouts_of


class Arrived(NamedTuple):
    """What a stage was given for a microbatch: a header, and the tensors."""

    header: bytes
    tensors: list[Tensor]


class Sender:
    """One of the ways out.

    Args:
        stage: That it belongs to, a ``PipelineStage``.
        to: The stage that receives.
        what: Goes this way, for messages.
        varying: Whether each microbatch has a header.
    """

    def __init__(self, stage: Any, to: int, what: str, varying: bool) -> None:
        self._stage, self._to, self._what, self._varying = stage, to, what, varying
        self._header: bytes | None = None
        self._headers_sent: list[tuple[dist.Work | None, Tensor]] = []

    def start(self, micro: int, packed: Packed) -> list[dist.P2POp]:
        """Send the header if there is need, without waiting; return what sends the tensors.

        Raises:
            ValueError: The structure, or a shape, is another one than before.
        """
        if self._header is None or self._varying:
            self._send_header(packed.header)
        elif self._header != packed.header:
            raise ValueError(
                f"the {self._what} of stage {self._stage.stage_index} for microbatch {micro} are "
                f"{_described(packed.header)}, and those of the first one "
                f"{_described(self._header)}: make the runtime with varying_shapes=True, or pad "
                "them"
            )
        self._header = packed.header
        layouts = layouts_of(packed.header)
        memory = [
            layout.memory_of(tensor).to(self._stage.device)
            for layout, tensor in zip(layouts, packed.tensors, strict=True)
            if layout.elements
        ]
        return _operations(dist.isend, memory, self._stage, self._to)

    def _send_header(self, header: bytes) -> None:
        """The receiver may come to it much later."""
        content = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        to = self._stage._resolve_peer_global_rank(self._to)
        for part in (torch.tensor([len(header)]), content):
            sent = part.to(self._stage.device)
            self._headers_sent.append((dist.isend(sent, to, self._stage.group), sent))

    def finish(self) -> None:
        """Wait for the headers."""
        for work, _ in self._headers_sent:
            if work is not None:
                work.wait()
        self._headers_sent.clear()


class Receiver:
    """One of the ways in.

    Args:
        stage: That it belongs to.
        source: The stage that sends.
        varying: Whether each microbatch has a header.
    """

    def __init__(self, stage: Any, source: int, varying: bool) -> None:
        self._stage, self._source, self._varying = stage, source, varying
        self._header: bytes | None = None
        self._arriving: dict[int, tuple[bytes, list[Tensor]]] = {}

    def start(self, micro: int) -> list[dist.P2POp]:
        """Wait for the header if there is one; return what receives the tensors."""
        header = self._header
        if header is None or self._varying:
            header = self._header = self._receive_header()
        memory = [
            torch.empty(
                layout.elements * layout.dtype.itemsize,
                dtype=torch.uint8,
                device=self._stage.device,
            )
            for layout in layouts_of(header)
        ]
        self._arriving[micro] = header, memory
        return _operations(
            dist.irecv, [one for one in memory if len(one)], self._stage, self._source
        )

    def take(self, micro: int) -> Arrived:
        """Return what has been received."""
        header, memory = self._arriving.pop(micro)
        pairs = zip(layouts_of(header), memory, strict=True)
        return Arrived(header, [layout.tensor_of(part) for layout, part in pairs])

    def _receive_header(self) -> bytes:
        stage = self._stage
        source = stage._resolve_peer_global_rank(self._source)
        length = torch.empty(1, dtype=torch.int64, device=stage.device)
        dist.recv(length, source, stage.group)
        content = torch.empty(int(length), dtype=torch.uint8, device=stage.device)
        dist.recv(content, source, stage.group)
        return content.cpu().numpy().tobytes()


def _operations(op: Any, memory: list[Tensor], stage: Any, peer: int) -> list[dist.P2POp]:
    rank = stage._resolve_peer_global_rank(peer)
    return [dist.P2POp(op, part, rank, stage.group) for part in memory]


def _described(header: bytes) -> str:
    return ", ".join(_of_tensor(layout) for layout in layouts_of(header)) or "without a tensor"


def _of_tensor(layout: TensorLayout) -> str:
    size, stride = list(layout.size), list(layout.stride)
    grad = ", requires_grad" if layout.requires_grad else ""
    return f"{str(layout.dtype).removeprefix('torch.')} {size} with strides {stride}{grad}"
