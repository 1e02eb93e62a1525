"""The wires of a stage: its outputs, inputs, and their gradients, to and from a neighbouring stage.

::

    stage s     F ── (1) header ──> ── (2) tensors ──>    stage s + 1: waits for the header,
                I <── (1) header ── <── (2) gradients ──    allocates memory, and receives

The header has the structure, shapes and strides (``wire``). It is sent with the first microbatch.
All later microbatches must have the same header, because the receiver allocates memory by it. If
shapes may vary, each microbatch is sent with its own header.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swpipe.tasks.pipeline_parallel.wire import Packed, layouts_of


class StageWire:
    """Both directions between a stage and a neighbouring stage.

    Args:
        stage: The ``PipelineStage``.
        peer: The number of the neighbouring stage, from 0.
        varying: Whether each microbatch is sent with its own header.
    """

    def __init__(self, stage: Any, peer: int, varying: bool) -> None:
        self._stage = stage
        self._peer = peer
        self._varying = varying
        self._sent_header: bytes | None = None
        self._received_header: bytes | None = None
        self._headers_under_way: list[tuple[dist.Work | None, Tensor]] = []
        self._arriving: dict[int, tuple[bytes, list[Tensor]]] = {}
        self._local: dict[int, Packed] = {}

    # ------------------------------------------------------------------ sends

    def send(self, micro: int, packed: Packed) -> list[dist.P2POp]:
        """Start to send the header if needed, and return the sends of the tensors.

        Raises:
            ValueError: The structure or a shape differs from that of the first microbatch.
        """
        if self._sent_header is None or self._varying:
            self._send_header(packed.header)
        elif self._sent_header != packed.header:
            number = self._stage.stage_index
            what = "outputs" if self._peer > number else "gradients of inputs"
            raise ValueError(
                f"the {what} of stage {number} for microbatch {micro} are "
                f"{_described(packed.header)}, and those of the first one "
                f"{_described(self._sent_header)}: make the runtime with varying_shapes=True, or "
                "pad them"
            )
        self._sent_header = packed.header
        layouts = layouts_of(packed.header)
        # Empty tensors are not sent: the header says all about them.
        memory = [
            layout.memory_of(tensor).to(self._stage.device)
            for layout, tensor in zip(layouts, packed.tensors, strict=True)
            if layout.elements
        ]
        return self._operations(dist.isend, memory)

    def _send_header(self, header: bytes) -> None:
        """Start to send a header without waiting for the receiver."""
        # Waiting could be a deadlock: the receiver may have passes to run first that wait for this
        # rank. The tensors are kept until ``finish``, because the sends read their memory.
        content = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for part in (torch.tensor([len(header)]), content):
            sent = part.to(self._stage.device)
            work = dist.isend(sent, self._peer_rank, self._stage.group)
            self._headers_under_way.append((work, sent))

    def finish(self) -> None:
        """Wait until all headers have been sent."""
        for work, _ in self._headers_under_way:
            # ``isend`` returns None on a rank outside of the group.
            if work is not None:
                work.wait()
        self._headers_under_way.clear()

    # ------------------------------------------------------------------ receives

    def receive(self, micro: int) -> list[dist.P2POp]:
        """Wait for the header if one is sent, and return the receives of the tensors."""
        # Sender and receiver decide alike: a header with the first microbatch, or with each.
        header = self._received_header
        if header is None or self._varying:
            header = self._receive_header()
            self._received_header = header
        memory = [
            self._empty(layout.elements * layout.dtype.itemsize, torch.uint8)
            for layout in layouts_of(header)
        ]
        # By microbatch: torch starts the receives of several microbatches before the first is used.
        self._arriving[micro] = header, memory
        return self._operations(dist.irecv, [part for part in memory if len(part)])

    def put(self, micro: int, packed: Packed) -> None:
        """Store the detached value of a neighbouring stage on this rank, which sends nothing."""
        self._local[micro] = Packed(packed.header, tuple(map(Tensor.detach, packed.tensors)))

    def take(self, micro: int) -> Packed:
        """Return the value of a microbatch that was stored or received."""
        if micro in self._local:
            return self._local.pop(micro)
        header, memory = self._arriving.pop(micro)
        pairs = zip(layouts_of(header), memory, strict=True)
        return Packed(header, tuple(layout.tensor_of(part) for layout, part in pairs))

    def _receive_header(self) -> bytes:
        # Its length first: a receive needs memory of the right size.
        length = self._empty(1, torch.int64)
        dist.recv(length, self._peer_rank, self._stage.group)
        content = self._empty(int(length), torch.uint8)
        dist.recv(content, self._peer_rank, self._stage.group)
        return content.cpu().numpy().tobytes()

    # ------------------------------------------------------------------ both

    @property
    def _peer_rank(self) -> int:
        rank: int = self._stage._resolve_peer_global_rank(self._peer)
        return rank

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._stage.device)

    def _operations(self, op: Any, memory: list[Tensor]) -> list[dist.P2POp]:
        return [dist.P2POp(op, part, self._peer_rank, self._stage.group) for part in memory]


def _described(header: bytes) -> str:
    return ", ".join(map(str, layouts_of(header))) or "without a tensor"
