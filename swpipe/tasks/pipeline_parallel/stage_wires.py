"""Senders and receivers of a stage's outputs, inputs, and their gradients.

::

    stage s     F ── (1) header ──> ── (2) tensors ──>    stage s + 1: waits for the header,
                I <── (1) header ── <── (2) gradients ──    allocates memory, and receives

The header has the structure, shapes and strides (``wire``). It is sent with the first microbatch.
All later microbatches must have the same header, because the receiver allocates memory by it. If
shapes may vary, each microbatch is sent with its own header.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.tasks.pipeline_parallel.wire import Packed, TensorLayout, layouts_of


class Arrived(NamedTuple):
    """The header and the tensors that a stage has received for a microbatch."""

    header: bytes
    tensors: list[Tensor]


class Sender:
    """The sender of a stage's outputs, or of the gradients of its inputs.

    Args:
        stage: The ``PipelineStage`` that sends.
        to: The number of the stage that receives, from 0.
        what: The name of the values, for error messages.
        varying: Whether each microbatch is sent with its own header.
    """

    def __init__(self, stage: Any, to: int, what: str, varying: bool) -> None:
        self._stage = stage
        self._to = to
        self._what = what
        self._varying = varying
        self._header: bytes | None = None
        self._headers_sent: list[tuple[dist.Work | None, Tensor]] = []

    def start(self, micro: int, packed: Packed) -> list[dist.P2POp]:
        """Start to send the header if needed, and return the sends of the tensors.

        Raises:
            ValueError: The structure or a shape differs from that of the first microbatch.
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
        # Empty tensors are not sent: the header says all about them.
        memory = [
            layout.memory_of(tensor).to(self._stage.device)
            for layout, tensor in zip(layouts, packed.tensors, strict=True)
            if layout.elements
        ]
        return _operations(dist.isend, memory, self._stage, self._to)

    def _send_header(self, header: bytes) -> None:
        """Start to send a header without waiting for the receiver."""
        # Waiting could be a deadlock: the receiver may have passes to run first that wait for this
        # rank. The tensors are kept until ``finish``, because the sends read their memory.
        content = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        to = self._stage._resolve_peer_global_rank(self._to)
        for part in (torch.tensor([len(header)]), content):
            sent = part.to(self._stage.device)
            self._headers_sent.append((dist.isend(sent, to, self._stage.group), sent))

    def finish(self) -> None:
        """Wait until all headers have been sent."""
        for work, _ in self._headers_sent:
            # ``isend`` returns None on a rank outside of the group.
            if work is not None:
                work.wait()
        self._headers_sent.clear()


class Receiver:
    """The receiver of a stage's inputs, or of the gradients of its outputs.

    Args:
        stage: The ``PipelineStage`` that receives.
        source: The number of the stage that sends, from 0.
        varying: Whether each microbatch is sent with its own header.
    """

    def __init__(self, stage: Any, source: int, varying: bool) -> None:
        self._stage = stage
        self._source = source
        self._varying = varying
        self._header: bytes | None = None
        self._arriving: dict[int, tuple[bytes, list[Tensor]]] = {}
        self._local: dict[int, Arrived] = {}

    def start(self, micro: int) -> list[dist.P2POp]:
        """Wait for the header if one is sent, and return the receives of the tensors."""
        # Sender and receiver decide alike: a header with the first microbatch, or with each.
        header = self._header
        if header is None or self._varying:
            header = self._receive_header()
            self._header = header
        memory = [
            torch.empty(
                layout.elements * layout.dtype.itemsize,
                dtype=torch.uint8,
                device=self._stage.device,
            )
            for layout in layouts_of(header)
        ]
        # By microbatch: torch starts the receives of several microbatches before the first is used.
        self._arriving[micro] = header, memory
        return _operations(
            dist.irecv, [part for part in memory if len(part)], self._stage, self._source
        )

    def put(self, micro: int, packed: Packed) -> None:
        """Store the detached value of a neighbouring stage on this rank, which sends nothing."""
        self._local[micro] = Arrived(packed.header, [tensor.detach() for tensor in packed.tensors])

    def take(self, micro: int) -> Arrived:
        """Return the header and the tensors of a microbatch that was stored or received."""
        if micro in self._local:
            return self._local.pop(micro)
        header, memory = self._arriving.pop(micro)
        pairs = zip(layouts_of(header), memory, strict=True)
        return Arrived(header, [layout.tensor_of(part) for layout, part in pairs])

    def _receive_header(self) -> bytes:
        stage = self._stage
        source = stage._resolve_peer_global_rank(self._source)
        # Its length first: a receive needs memory of the right size.
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
    size = list(layout.size)
    stride = list(layout.stride)
    grad = ", requires_grad" if layout.requires_grad else ""
    return f"{str(layout.dtype).removeprefix('torch.')} {size} with strides {stride}{grad}"
