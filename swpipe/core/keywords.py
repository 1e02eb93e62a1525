"""Suggestions for misspelt keyword arguments, as Python itself makes from 3.13 on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

Call = TypeVar("Call", bound=Callable[..., Any])

_UNKNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'$")


def suggests_keywords(call: Call) -> Call:
    """Decorate a function; or a class, for its constructor and methods with keyword-only arguments.

    A correct call costs one more frame, and nothing else. Type checkers see the decorated object.
    """
    if isinstance(call, type):
        for name, member in [*vars(call).items()]:
            if isinstance(member, FunctionType) and _is_asked(name, member):
                setattr(call, name, suggests_keywords(member))
        return cast(Call, call)

    @wraps(call)
    def checked(*args: Any, **given: Any) -> Any:
        try:
            return call(*args, **given)
        except TypeError as error:
            # Without a deeper frame, the error is about this call and not about a call inside it.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                _suggest(error, call)
            raise

    return cast(Call, checked)


def _is_asked(name: str, method: FunctionType) -> bool:
    return name == "__init__" or (not name.startswith("_") and bool(method.__kwdefaults__))


def _suggest(error: TypeError, call: Callable[..., Any]) -> None:
    """Add the nearest keyword to a message that has no suggestion."""
    if unknown := _UNKNOWN.search(str(error)):
        # From Python 3.13 on, the message itself has a suggestion, and _UNKNOWN does not match.
        near = get_close_matches(unknown[1], inspect.signature(call).parameters, 1)
        if near:
            error.args = (f"{error}. Did you mean {near[0]!r}?",)
