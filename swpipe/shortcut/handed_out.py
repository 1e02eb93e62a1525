"""Detection of the outputs of a task that later tasks modify in place.

Sharing one tensor among iterations copies nothing, and is right if no later task modifies it. To
find out, the outputs of the cached iteration and of the first replays are different tensors, and
are compared once their iterations have ended::

    modified in             the cached iteration   replays
    share                           no                no
    copy for each replay         yes or no            yes
    refuse                          yes               no     (*)

(*) The output is modified through another tensor that shares its memory, such as the base of a
view. A copy does not share this memory, so it would not change. States of io are restored by the
user's own function, and not refused.

An iteration has ended when nobody holds its context. If that cannot be known, it has ended when the
next one is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from swpipe._values.fingerprint import Fingerprint

MAX_WATCHED = 16
"""The largest number of iterations watched at once: above it, the oldest counts as ended."""


class HandedOut:
    """The outputs of one iteration, as they were when the task ended.

    Args:
        ctx: The iteration's context.
        outputs: Key to a tensor, or to an array or another object that is copied for each replay.
    """

    def __init__(self, ctx: Any, outputs: Mapping[int, Any]) -> None:
        self._ctx = _reference(ctx)
        self._id = id(ctx)
        self._prints = {key: Fingerprint(_alias(value)) for key, value in outputs.items()}

    def ended(self) -> bool:
        """Return whether the iteration has ended."""
        return self._ctx() is None

    def accept(self, ctx: Any) -> None:
        """Take the outputs as they are now, if they belong to the iteration of ``ctx``."""
        # By id, since contexts of some classes have no weak reference.
        if self._id == id(ctx):
            self._prints = {k: Fingerprint(old.value) for k, old in list(self._prints.items())}

    def modified(self) -> set[int]:
        """Return the keys of the outputs that were modified since."""
        return {key for key, fingerprint in self._prints.items() if fingerprint.changed()}


def _alias(output: Any) -> Any:
    """Return an alias that shares a tensor's memory and version counter, but no autograd graph."""
    # Watching a tensor with its graph would keep the graph's saved tensors alive.
    return output.detach() if isinstance(output, Tensor) else output


def _reference(ctx: Any) -> Callable[[], Any]:
    """Return a weak reference to a context, or a function that returns None if there is none."""
    try:
        return weakref.ref(ctx)
    except TypeError:  # SimpleNamespace, for example
        return lambda: None


class LaterUses:
    """The later uses of each output, by key; known once the first iterations have ended."""

    def __init__(self, cached: HandedOut) -> None:
        self.known = False
        self._cached: HandedOut | None = cached
        self._replays: list[HandedOut] = []
        self._ended = 0
        self._in_cached: set[int] = set()
        self._in_replays: set[int] = set()

    def add(self, replay: HandedOut) -> None:
        """Watch the outputs of a replay."""
        self._replays.append(replay)

    def accept(self, ctx: Any) -> None:
        """Accept the changes on ``ctx`` by another shortcut task: its replays repeat them."""
        cached = self._cached  # another thread may set it to None
        if cached is not None:
            cached.accept(ctx)

    def become_known(self) -> bool:
        """Compare the iterations that have ended.

        Returns:
            Whether the uses have become known by this call.
        """
        if self.known:
            return False
        late = len(self._replays) >= MAX_WATCHED
        if self._cached is not None and (late or self._cached.ended()):
            self._in_cached = self._cached.modified()
            self._cached = None
        for replay in [*self._replays]:
            if replay.ended() or (late and replay is self._replays[0]):
                self._in_replays |= replay.modified()
                self._replays.remove(replay)
                self._ended += 1
        # Both columns of the table above have to be known: the cached iteration, and one replay.
        if self._cached is None and self._ended:
            self.known = True
            self._replays.clear()
        return self.known

    def only_read(self, key: int) -> bool:
        """Return whether no later task modifies an output; valid if ``known``."""
        return key not in self._in_replays and key not in self._in_cached

    def modified_through_another(self, key: int) -> bool:
        """Return whether an output is modified through another object that shares its memory."""
        return key in self._in_cached and key not in self._in_replays
