"""Kinds of Python values: which never change, and of which the content can be seen."""

from __future__ import annotations

import argparse
import array
import ctypes
import datetime as dt
import decimal
import fractions
import gc
import io
import re
import sys
import threading
import zlib
from collections import deque
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch

from swpipe._tensors.stateful import PLAIN, is_foreign

CONTAINERS = (list, dict, set, deque)
NAMESPACES = (SimpleNamespace, argparse.Namespace)
"""Types of the standard library whose objects have the attributes that they are given."""

_SimpleCData: Any = ctypes.c_int.__mro__[1]
CTYPES = (_SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)

_Lock: Any = type(threading.Lock())
_RLock: Any = type(threading.RLock())

UNCHANGING = (
    *PLAIN, range, slice, Enum, BuiltinFunctionType, CodeType, FrameType, re.Pattern, PurePath,
    decimal.Decimal, fractions.Fraction, dt.date, dt.time, dt.timedelta,
    dt.tzinfo, _Lock, _RLock, torch.Size, torch.device, torch.dtype, torch.layout,
    torch.memory_format, torch.finfo, torch.iinfo, torch.Stream, type(NotImplemented), type(...),
    type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor), type(torch.ops.aten),
)  # fmt: skip
"""Types whose objects never change, or whose changes give no other numbers, such as a lock's."""

MAX_CONTENT = 2**26
"""Bytes; the content of larger arrays is not compared."""


def is_array(value: Any) -> bool:
    """Whether a value is an array of plain values that code modifies by name or by item."""
    numpy = sys.modules.get("numpy")
    arrays = (bytearray, array.array, *(() if numpy is None else (numpy.ndarray,)))
    return isinstance(value, arrays)


def is_unchanging(value: Any) -> bool:
    """Whether an object never changes, or only in what gives no other numbers."""
    if isinstance(value, UNCHANGING):
        return not (isinstance(value, Enum) and _has_attributes(value))
    name = type(value).__module__
    if name.startswith("swpipe.") and not name.startswith(("swpipe.tasks", "swpipe.tuning")):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic | numpy.dtype | numpy.ufunc)


def _has_attributes(member: Enum) -> bool:
    """Whether code of the user's has given a member of an enumeration attributes of its own."""
    own = [name for name in vars(member) if not name[0] == name[-1] == "_"]
    return bool(own) and not is_foreign(type(member).__module__)


def content_value(value: Any) -> object:
    """What an array or an opaque object has now, as far as it shows, to be compared."""
    if is_array(value):
        return _checksum(value)
    if isinstance(value, CTYPES):
        return bytes(value)
    if isinstance(value, io.StringIO | io.BytesIO) and not value.closed:
        return value.getvalue(), value.tell()
    return None


def identity(value: Any) -> object:
    """A plain value itself, as a string so that NaN equals NaN; the id of anything else."""
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    return None if isinstance(value, torch.Tensor) else id(value)


def _checksum(value: Any) -> object:
    size = memoryview(value).nbytes if not hasattr(value, "nbytes") else value.nbytes
    if size > MAX_CONTENT:
        return size
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        return [id(one) for one in value.ravel()]
    content = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
    return len(content), zlib.crc32(content)


def referents(value: Any) -> list[Any]:
    """What an object that is written in C refers to; no code is run."""
    skipped = (*UNCHANGING, type, ModuleType)
    methods = [one for one in gc.get_referents(value) if isinstance(one, BuiltinFunctionType)]
    return methods + [one for one in gc.get_referents(value) if not isinstance(one, skipped)]


def results_of(function: Any) -> list[Any]:
    """The results that the cache of a function holds; no code of the user's is run."""
    if not function.cache_info().currsize:
        return []
    held = [one for one in gc.get_referents(function) if one is not function.__dict__]
    caches = [one for one in held if type(one) is dict]
    if function.cache_parameters()["maxsize"] is None:
        return [result for cache in caches for result in cache.values()]
    places = [one for one in caches if {type(each).__name__ for each in one.values()} == _PLACE]
    others = [function.__wrapped__, *places, *(key for one in places for key in one)]
    skipped = {id(one) for one in others}
    return [one for one in held if id(one) not in skipped and type(one) not in (object, type)]


_PLACE = {"_lru_list_elem"}
"""What the cache of a size holds for a key: the function itself refers to the results."""


def exporter_of(view: memoryview) -> Any:
    """What a view shows the memory of; None if it was released."""
    try:
        return view.obj
    except ValueError:
        return None


def behind(proxy: Any) -> Any:
    """The object that a weak proxy stands for; None if it is gone."""
    try:
        return getattr(proxy.__repr__, "__self__", None)
    except ReferenceError:
        return None
