"""Keeping of objects that are no tensors, to hand out a copy, or the same object, in each replay.

    number, string, function, class                        the object itself
    parameter, module, optimizer, generator,               the object itself: it belongs to the
      object with state_dict                               model, whose state is restored elsewhere
    object whose class has same_in_replay = True           the object itself
    array, buffer, object that copy.deepcopy copies        a copy, equal to what the task produced
    object that cannot be copied, or that leads to         the object itself, until it is modified:
      a model, an optimizer or a parameter                 then refused
    iterator, generator, file                              refused: the first iteration uses it up
    object with a tensor that autograd computed            refused: its graph can be used only once
    other object without visible contents                  refused: a change would not be seen

A refused object raises a ``ShortcutError``, whose message says how to avoid it.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import AsyncIterator, Iterator
from threading import Lock, RLock
from typing import Any

from swpipe._values.fingerprint import Fingerprint, is_fixed, is_object, replays_itself
from swpipe._values.stateful import WHOLE, has_state
from swpipe._values.walk import ValueNode
from swpipe.errors import ShortcutError

_CANNOT_COPY = (TypeError, ValueError, AttributeError, RuntimeError, pickle.PickleError, copy.Error)
"""The errors that ``copy.deepcopy`` raises for objects that cannot be copied."""

_NO_CONTENTS = (type(Lock()), type(RLock()), weakref.ReferenceType)
"""The types whose objects matter only by their identity."""

_MEND = (
    "Produce a dataclass of tensors and plain values instead; or keep it out of the context and "
    "declare it as io; or, if iterations may share one object, give its class same_in_replay = True"
)


class KeptObjects:
    """The objects that a task produced, apart from containers and tensors."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._copies: dict[int, Any] = {}
        self._alone: dict[int, Any] = {}  # objects without attributes, often compared by identity
        self._same: list[tuple[str, Fingerprint]] = []

    def copies(self, value: Any) -> bool:
        """Return whether a replay copies a kept object."""
        return id(value) in self._copies

    def keep(self, value: Any, place: str, memo: dict[int, Any]) -> Any:
        """Return the object that takes the place of ``value`` in the cache.

        Args:
            value: Not a container or tensor.
            place: The attribute or io that contains it, for messages.
            memo: Id to copy, for parts that are shared with objects kept before; new parts are
                added.

        Raises:
            ShortcutError: The object cannot be replayed.
        """
        content = Fingerprint(value)
        self._check(value, content, place)
        if _may_be_shared(value):
            return value
        # A copy of an object that leads to a model would copy the model; a copy of a sentinel would
        # not be equal to the original.
        if not _leads_to_state(content) and not _is_alone(value):
            copied = self._copy(value, content, memo)
            if copied is not None:
                return copied
        # Handed out itself from here on, so every change to it must be visible in its fingerprint.
        if unknown := [leaf for leaf in content.leaves if not _may_be_shared(leaf)]:
            raise ShortcutError(
                self._task,
                f"{place} holds {_described(value, unknown[0])}, which cannot be copied, and whose "
                f"changes cannot be detected. {_MEND}",
            )
        self._same.append((place, content))
        return value

    def hand_out(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return a copy of a kept object; ``memo`` as for ``keep``, one for each replay."""
        # deepcopy returns what its memo has: these objects stay the same in all copies.
        memo.update(self._alone)
        return copy.deepcopy(value, memo)

    def check(self) -> None:
        """Check that objects that are handed out themselves are unmodified.

        Raises:
            ShortcutError: An object was modified in place.
        """
        for place, content in self._same:
            if content.changed():
                raise ShortcutError(
                    self._task,
                    f"{place} holds {_described(content.value)}, which was modified after the "
                    f"task and cannot be copied. {_MEND}",
                )

    def _check(self, value: Any, content: Fingerprint, place: str) -> None:
        """Refuse an object with an iterator, or with a tensor that autograd computed."""
        for part in (*content.leaves, *(node.value for node in content.nodes)):
            # Files and generators are iterators, too.
            if isinstance(part, Iterator | AsyncIterator) and not replays_itself(part):
                raise ShortcutError(
                    self._task,
                    f"{place} holds {_described(value, part)}, an iterator, which the first "
                    f"iteration uses up. Produce a list instead. Otherwise: {_MEND}",
                )
        for tensor in content.tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                raise ShortcutError(
                    self._task,
                    f"{place} holds {_described(value)} with a tensor that autograd computed; its "
                    f"graph can be used only once. {_MEND}",
                )

    def _copy(self, value: Any, content: Fingerprint, memo: dict[int, Any]) -> Any:
        """Return a deep copy, or None if there is none; ``value`` itself if it cannot change."""
        self._alone |= {
            id(node.value): node.value for node in content.nodes if _is_alone(node.value)
        }
        # A memo of its own: a copy that fails half-way must leave no parts behind.
        trial = memo | self._alone
        try:
            copied = copy.deepcopy(value, trial)
        except _CANNOT_COPY:
            return None
        memo.update(trial)
        # deepcopy returns the object itself if it is immutable: every replay can share it.
        if copied is not value:
            self._copies[id(copied)] = copied
        return copied


def _is_alone(value: Any) -> bool:
    """Return whether an object has no attributes, such as a sentinel."""
    return is_object(value) and not ValueNode.of(value).children


def _may_be_shared(value: Any) -> bool:
    """Return whether iterations may share an object that is not opened."""
    return (
        is_fixed(value)
        or replays_itself(value)
        or isinstance(value, (*WHOLE, *_NO_CONTENTS))
        or has_state(value)
        or type(value).__module__.partition(".")[0] == "torch"
    )


def _leads_to_state(content: Fingerprint) -> bool:
    """Return whether an object contains a model, an optimizer, or any other object with state."""
    return any(isinstance(part, WHOLE) or has_state(part) for part in content.leaves) or any(
        has_state(tensor) for tensor in content.tensors
    )


def _described(value: Any, part: Any = None) -> str:
    """Return a description of an object, and of a part of it."""
    name = f"an object of class {type(value).__qualname__!r}"
    if part is None or part is value:
        return name
    return f"{name} with one of class {type(part).__qualname__!r}"
