"""Replaced forwards and the memory that another stream has made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from swpipe.tasks.torchrec.rewriting.forwards import PrefetchForward, SparseDistContext
from tests.support.stream_device import StreamDevice


class Streams(StreamDevice[str]):
    """A device that records what is held for which stream."""

    def __init__(self) -> None:
        super().__init__("look up")
        self.held: list[tuple[Any, str]] = []

    def hold(self, values: Any, streams: Any) -> None:
        self.held += [(value, stream) for value in values for stream in streams]


def test_prefetched_ids_are_held_for_the_stream_that_looks_up() -> None:
    """They were made on the prefetch's stream, and leave the context before the look-up ends."""
    device, ids, module_context = Streams(), torch.arange(3), SimpleNamespace()
    module = SimpleNamespace(compute_and_output_dist=lambda context, data: data * 2)
    forward = PrefetchForward("tables", None, module, device)
    context = SparseDistContext(index=0)
    context.module_input_post_prefetch["tables"] = ids
    context.module_contexts_post_prefetch["tables"] = module_context
    forward.set_context(context)
    assert torch.equal(forward(), ids * 2)
    assert device.held == [(ids, "look up"), (module_context, "look up")]
    assert not context.module_input_post_prefetch
    assert not context.module_contexts_post_prefetch
