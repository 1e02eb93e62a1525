"""Whose a class or a function is, the user's or a library's, and which methods code may call.

swpipe's own tasks count as the user's; the rest of swpipe does not.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterator
from enum import Enum
from functools import cached_property, partial
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any, Generic, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset

from swpipe._state.discovery import CACHE, is_installed
from swpipe._state.kinds import CONTAINERS, NAMESPACES
from swpipe._tensors.stateful import is_foreign

_NOT_CALLED = {
    "__init__", "__post_init__", "__new__", "__repr__", "__str__", "__init_subclass__",
    "__class_getitem__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__del__",
    "__deepcopy__", "__copy__", "__sizeof__", "__dir__", "__subclasshook__", "__set_name__",
}  # fmt: skip
"""Methods that Python does not call while an object is used."""

_FOR_ATTRIBUTES = {"__getattr__", "__getattribute__", "__setattr__", "__delattr__"}

_WITHOUT_ATTRIBUTES = (ABC, Protocol, Dataset, IterableDataset, *NAMESPACES)
"""Classes of libraries whose methods use no attributes."""


def is_librarys(cls: type) -> bool:
    """Whether a class is Python's, torch's or installed; swpipe's own tasks count as the user's."""
    if (name := cls.__module__).startswith("swpipe."):
        return not name.startswith(_OWN)
    return is_foreign(name) or is_installed(getattr(sys.modules.get(name), "__file__", None))


def is_library_function(function: FunctionType) -> bool:
    """Whether a function is installed: it then knows nothing of the tasks but its arguments."""
    if (name := function.__module__ or "").startswith("swpipe."):
        return not name.startswith(_OWN)
    return is_foreign(name) or is_installed(function.__code__.co_filename)


_OWN = ("swpipe.tasks", "swpipe.tuning")


def is_of_user(value: Any) -> bool:
    """Whether a value is a function or an object of the user's, wherever it was found."""
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, FunctionType):
        return not is_library_function(value)
    return not isinstance(value, type | MethodType) and not is_librarys(type(value))


def is_cover(cls: type) -> bool:
    """Whether a library's class is known to be nothing but a cover of what its objects hold."""
    return cls.__module__ in _COVERS


_COVERS = (
    "tempfile", "csv", "multiprocessing.sharedctypes", "collections", "weakref", "_weakrefset",
)  # fmt: skip


def is_partly_librarys(cls: type) -> bool:
    """Whether a user's class has methods of a library's class, which may use all its attributes."""
    known = (torch.nn.Module, torch.optim.Optimizer, torch.autograd.Function, Generic, Enum)
    bases = [base for base in cls.__mro__ if base not in (object, *_WITHOUT_ATTRIBUTES)]
    return not issubclass(cls, (*known, *CONTAINERS, tuple, frozenset)) and any(
        map(is_librarys, bases)
    )


def methods_of(
    cls: type, names: set[Any] | None, only_named: bool = False
) -> Iterator[FunctionType]:
    """The functions of a class and its bases that code may call; all, if nobody knows the names.

    Python calls others for operators, loops and the like, if code does not only take attributes.
    """
    for base in cls.__mro__:
        if not is_foreign(base.__module__):
            for name, member in vars(base).items():
                implicit = name.startswith("__") and name.endswith("__") and name not in _NOT_CALLED
                implicit = implicit and (not only_named or name in _FOR_ATTRIBUTES)
                called = name in names if names is not None else not name.startswith("__")
                if called or implicit:
                    yield from (one for one in functions_of(member) if not _is_generated(one))


def _is_generated(function: FunctionType) -> bool:
    """Whether ``dataclasses`` has written a method."""
    return function.__code__.co_filename == "<string>"


def is_users_descriptor(member: Any) -> bool:
    """Whether a member of a class is an object of the user's that gives or sets a value."""
    return hasattr(type(member), "__get__") and not is_librarys(type(member))


def constructors_of(cls: type) -> Iterator[FunctionType]:
    """The user's functions that choose what a call of a class gives: a new object, or one again.

    What ``__init__`` does besides is not read: it would lead through all classes of a code base.
    """
    called = [getattr_static(type(cls), "__call__", None)]
    called += [vars(base).get("__new__") for base in cls.__mro__]
    yield from (
        one for each in called for one in functions_of(each) if not is_library_function(one)
    )


def functions_of(member: Any) -> Iterator[FunctionType]:
    """The functions behind a member of a class."""
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        yield from (one for one in parts if isinstance(one, FunctionType))
    elif isinstance(member, cached_property):
        yield from functions_of(member.func)
    elif isinstance(member, CACHE):
        yield from functions_of(member.__wrapped__)
    elif is_users_descriptor(member):
        for each in ("__get__", "__set__", "__delete__"):
            yield from functions_of(getattr_static(type(member), each, None))
    else:
        member = getattr(member, "__func__", member)
        if isinstance(member, FunctionType):
            yield member
