"""What single Python values hold: saved, and put back into the same object, or into a copy of it.

value                                               put back
lists, dicts, sets, deques, bytearrays, arrays      their items
numpy arrays, values of ctypes                      their content
``io.StringIO``, ``io.BytesIO``, ``mmap.mmap``      their content and position
files that can seek                                 length and position
context variables                                   their value
caches of functions                                 a cache that was empty is emptied
iterators that Python can copy                      whoever holds one gets a copy
"""

from __future__ import annotations

import array
import contextvars
import copy
import ctypes
import io
import mmap
import queue
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from swpipe._state.discovery import CACHE
from swpipe._state.kinds import CONTAINERS, CTYPES, MAX_CONTENT, content_value, is_array

_NOTHING = object()
_BASES = (OrderedDict, dict, list, set, deque, bytearray, array.array)


def saving(value: Any, most_items: int) -> Callable[[], object] | None:
    """Save what a value holds; the result puts it back. None if there is nothing to put back."""
    if isinstance(value, (*CONTAINERS, bytearray, array.array)):
        return None if len(value) > most_items else partial(refill, value, _items(value))
    if is_array(value):
        return _save_array(value)
    if isinstance(value, CTYPES):
        return partial(_move, value, bytes(value))
    if isinstance(value, mmap.mmap):
        if value.closed or len(value) > MAX_CONTENT:
            return None
        return partial(_rewrite_map, value, value[:], value.tell())
    if isinstance(value, io.StringIO | io.BytesIO):
        return None if value.closed else partial(_rewrite, value, value.getvalue(), value.tell())
    if isinstance(value, io.IOBase):
        return _save_file(value)
    if isinstance(value, contextvars.ContextVar):
        return partial(_set_variable, value, value.get(_NOTHING))
    if isinstance(value, CACHE):
        return partial(_clear_cache, value) if not value.cache_info().currsize else None
    if isinstance(value, queue.SimpleQueue):
        items = [value.get_nowait() for _ in range(value.qsize())]
        _refill_queue(value, items)
        return partial(_refill_queue, value, items)
    return None


def is_copyable_iterator(value: Any) -> bool:
    """Whether a value is one of Python's own iterators, and can be copied with its position."""
    return _reduced(value) is not None


def is_lost(value: Any) -> bool:
    """Whether a value changes when it is used, and nobody can set it back.

    These are iterators that cannot be copied, such as generators, and connections to databases.
    """
    if type(value).__module__ == "sqlite3" and not isinstance(value, tuple):
        return True
    if isinstance(value, io.IOBase) or not hasattr(type(value), "__next__"):
        return False
    written_in_c = type(value).__module__ in ("builtins", "itertools", "_csv")
    of_a_loader = type(value).__module__.startswith("torch.utils.data")
    return (written_in_c or of_a_loader) and not is_copyable_iterator(value)


def position_of(value: Any) -> object:
    """Where a copyable iterator is: equal as long as nobody has advanced it."""
    return [id(one) if not isinstance(one, int) else one for one in _parts(value)]


def _parts(value: Any) -> Iterator[Any]:
    for one in _reduced(value) or ():
        if isinstance(one, tuple):
            for part in one:
                yield from _parts(part) if is_copyable_iterator(part) else (part,)
        else:
            yield one


def copied(value: Any) -> Any:
    """A copy of a copyable iterator, with copies of the iterators that it is made of."""
    make, given, *state = _reduced(value)
    new = make(*(copied(one) if is_copyable_iterator(one) else one for one in given))
    for one in state:
        if one is not None:
            new.__setstate__(copy.deepcopy(one) if isinstance(one, tuple) else one)
    return new


def _reduced(value: Any) -> Any:
    """How Python would make the iterator anew; None if it cannot, or if it is no iterator."""
    if type(value).__module__ not in ("builtins", "itertools") or not hasattr(value, "__next__"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            reduced = value.__reduce__()
    except TypeError:
        return None
    given = reduced[1] if isinstance(reduced, tuple) else ()
    if any(hasattr(type(one), "__next__") and _reduced(one) is None for one in given):
        return None
    return reduced


def _items(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(zip(*[flat(container)] * 2, strict=True))
    return copy.copy(container) if type(container) in _BASES else list(container)


def refill(container: Any, items: Any) -> None:
    """Put the items back, if others are there now; an object's own comparison is not run."""
    now, then = list(flat(container)), list(flat(items))
    if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
        return
    base: Any = next(one for one in _BASES if isinstance(container, one))  # not its own methods
    if base in (list, bytearray, array.array):  # of the same length also while there is a view
        new = array.array(container.typecode, items) if base is array.array else items
        base.__setitem__(container, slice(None), new)
        return
    base.clear(container)
    (base.update if issubclass(base, dict | set) else base.extend)(container, items)


def flat(container: Any) -> Iterator[Any]:
    """The items of a container; of a dict its keys, each before its value."""
    if not isinstance(container, dict):
        yield from container
        return
    keys: Any = OrderedDict.keys if isinstance(container, OrderedDict) else dict.keys
    for key in keys(container):
        yield from (key, dict.__getitem__(container, key))


def _save_array(value: Any) -> Callable[[], object] | None:
    if value.nbytes > MAX_CONTENT or not value.flags.writeable:
        return None
    saved, before = value.copy(), content_value(value)

    def restore() -> None:
        if content_value(value) != before:
            value[...] = saved

    return restore


def _move(value: Any, content: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), content, len(content))


def _rewrite_map(value: Any, content: bytes, position: int) -> None:
    if not value.closed:
        if value[:] != content:  # it may be read-only
            value[:] = content
        value.seek(position)


def _rewrite(value: Any, content: Any, position: int) -> None:
    if value.closed or (value.getvalue(), value.tell()) == (content, position):
        return
    value.seek(0)
    value.truncate()
    value.write(content)
    value.seek(position)


def _save_file(file: Any) -> Callable[[], object] | None:
    """Of a file that was only written at its end, length and position are all that changed."""
    if file in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return None
    try:
        if file.closed or not file.seekable():
            return None
        position, writable = file.tell(), file.writable()
        if writable:
            file.flush()
        length = file.seek(0, io.SEEK_END)
        file.seek(position)
    except (OSError, ValueError):
        return None

    def restore() -> None:
        if not file.closed and (file.tell() != position or writable):
            if writable:
                file.truncate(length)
            file.seek(position)

    return restore


def _set_variable(variable: contextvars.ContextVar[Any], value: Any) -> None:
    if variable.get(_NOTHING) is not value and value is not _NOTHING:
        variable.set(value)


def _clear_cache(function: Any) -> None:
    if function.cache_info().currsize:
        function.cache_clear()


def _refill_queue(value: Any, items: list[Any]) -> None:
    while value.qsize():
        value.get_nowait()
    for one in items:
        value.put(one)
