"""A pool of the streams that the tasks of a schedule use, by name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from swpipe.core.messages import listed, shown

DEFAULT = "default"
"""The name of the stream of a task without a stream, and of the caller's thread."""


class StreamPool:
    """A mapping of names to streams (seed section 3.2).

    Args:
        streams: A mapping of names to ``torch.Stream`` or None. The name ``"default"`` is required;
            None for it is the caller's current stream. None for another name is a stream that
            swpipe makes. On a device without streams, names only order the submission of tasks.

    Raises:
        TypeError: A name is no string, or a stream is neither a ``torch.Stream`` nor None.
        ValueError: The name ``"default"`` is missing.
    """

    def __init__(self, streams: Mapping[str, torch.Stream | None]) -> None:
        if not isinstance(streams, Mapping):
            raise TypeError(f"streams is {shown(streams)}: give a dict of name to stream or None")
        for name, stream in streams.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"a stream is named {shown(name)}: give a string")
            if not (stream is None or isinstance(stream, torch.Stream)):
                raise TypeError(f"stream {name!r} is {shown(stream)}: give a torch.Stream, or None")
        if DEFAULT not in streams:
            raise ValueError(
                f'the pool has no stream "default" (it has: {listed(streams)}): add '
                '"default": None for the current stream'
            )
        # A copy, because a later change of the caller's dict would not reach the plan.
        self._streams = dict(streams)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order given."""
        return tuple(self._streams)

    def get(self, name: str) -> torch.Stream | None:
        """Return the stream as it was given; raise KeyError if the pool has no such name."""
        if name not in self._streams:
            raise KeyError(f"the pool has no stream {name!r} (it has: {listed(self._streams)})")
        return self._streams[name]

    def use(self, name: str) -> AbstractContextManager[Any]:
        """Make the stream current within the block; None keeps the current one."""
        stream = self.get(name)
        return nullcontext() if stream is None else stream

    def order(self, later: str, sooner: str) -> None:
        """Make the stream ``later`` wait for the work submitted to ``sooner``."""
        streams = [self.get(name) for name in (later, sooner)]
        # Two Nones are both the current stream, whose work is in order already.
        if any(streams):
            # Asked only here: without an accelerator there is no current stream.
            current = torch.accelerator.current_stream()
            after, before = (current if stream is None else stream for stream in streams)
            after.wait_stream(before)
