"""The context: the object that carries one iteration's values from task to task."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, cast

from swpipe.core.messages import listed, shown

RELEASED = "_released"


class TypedContext:
    """The base class of contexts that declare their attributes, for type checkers.

    A subclass annotates the attributes that tasks set, so that a type checker reports any other,
    such as a misspelt one. It may have methods and properties, which use the context alone, and an
    ``__init__(self, batch, iter_idx)``. Pass the subclass as ``SWPipeline(context=...)``.

    Attributes:
        batch: The batch from the user's iterator; any object, including None.
        iter_idx: The iteration's number in this pipeline, from 0, counted over all iterators.
    """

    # The slot maps an attribute that a pipeline with ``keep`` has deleted to the reason. It is set
    # only in pipelines with ``keep``. It is a slot because ``vars(ctx)`` has what tasks set.
    __slots__ = (RELEASED, "__dict__", "__weakref__")

    def __init__(self, batch: Any, iter_idx: int) -> None:
        self.batch = batch
        self.iter_idx = iter_idx

    if not TYPE_CHECKING:  # a type checker would take it to declare every attribute

        def __getattr__(self, name: str) -> Any:
            # Not self.__dict__: a log of the context would take the message's list for reads.
            attributes = object.__getattribute__(self, "__dict__")
            number = attributes.get("iter_idx")
            if name != RELEASED and (why := getattr(self, RELEASED, {}).get(name)) is not None:
                # No AttributeError: hasattr() would then say that the attribute was never set.
                raise RuntimeError(f"iteration {number} has no attribute {name!r} any more: {why}")
            raise AttributeError(
                f"iteration {number} has no attribute {name!r} (it has: "
                f"{listed(sorted(attributes))}): correct the name; or, if a task sets it that has "
                "not run before this one, add the dependence to the plan, or set it earlier"
            )

    def __repr__(self) -> str:
        extra = sorted(set(self.__dict__) - {"batch", "iter_idx"})
        return f"{type(self).__name__}(iter_idx={self.iter_idx}, attributes={extra})"


class IterContext(TypedContext):
    """The context of one iteration: ``batch``, ``iter_idx``, and all attributes that tasks set."""

    if TYPE_CHECKING:  # tasks set and read attributes freely

        def __setattr__(self, name: str, value: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default, which typing has since Python 3.13

    C = TypeVar("C", bound=TypedContext, default=IterContext)
else:
    from typing import TypeVar

    C = TypeVar("C", bound=TypedContext)


def context_class(given: type[C] | None) -> type[C]:
    """Return the class of a pipeline's contexts: the given class, or ``IterContext`` for None.

    Raises:
        TypeError: The class cannot be used; the message lists all reasons.
    """
    if given is None:
        return cast("type[C]", IterContext)
    if not (isinstance(given, type) and issubclass(given, TypedContext)):
        raise TypeError(f"context is {shown(given)}: give a subclass of TypedContext")
    if faults := [*_faults(given)]:
        raise TypeError("\n".join(f"context class {given.__name__}: {text}" for text in faults))
    return given


def _faults(context: type[Any]) -> Iterator[str]:
    if is_dataclass(context):
        yield (
            "it is a dataclass, whose __init__ does not take (batch, iter_idx). Leave @dataclass "
            "out: annotated attributes are enough"
        )
    else:
        try:
            inspect.signature(context).bind(None, 0)
        except TypeError as error:
            yield f"it is called with (batch, iter_idx), which its __init__ refuses: {error}"
    for name in dir(context):
        value = inspect.getattr_static(context, name)
        if isinstance(value, MemberDescriptorType) and name != RELEASED:
            yield (
                f"{name!r} is in __slots__, where the engine does not find it. Leave __slots__ out"
            )
        elif type(value).__hash__ is None and not name.startswith("__"):
            kind = type(value).__name__
            yield (
                f"{name!r} is a {kind} of the class, which all iterations would share. Set it in "
                "__init__, or in a task"
            )
