"""A registry that makes pipelines by name."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

Builder: TypeAlias = Callable[..., Any]


class PipelineFactory:
    """A registry of pipelines by name, used without instances; each subclass has its own names.

    An unknown name raises KeyError. Registering a name that is taken raises ValueError.
    """

    _builders: ClassVar[dict[str, Builder]] = {}

    def __init_subclass__(cls) -> None:
        # Without this, a subclass would register its names in the dict of its base class.
        cls._builders = {}

    @classmethod
    def register(cls, name: str, builder: Builder | None = None) -> Any:
        """Register a class or function under a name; without a builder, return a decorator."""
        # Used as a decorator: the builder is the decorated class or function.
        if builder is None:
            return partial(cls.register, name)
        if name in cls._builders:
            raise ValueError(
                f"pipeline {name!r} is registered already, as {cls._builders[name]!r}: choose "
                f"another name, or unregister({name!r}) first"
            )
        cls._builders[name] = builder
        return builder

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove a name."""
        cls._find(name)
        del cls._builders[name]

    @classmethod
    def create(cls, name: str, *first: Any, **arguments: Any) -> Any:
        """Create the pipeline of that name.

        ``first`` are the model, the optimizer and the device; the remaining arguments are given by
        keyword.
        """
        # Passed by keyword, so that a builder may declare its parameters in any order.
        named = zip(("model", "optimizer", "device"), first, strict=False)
        return cls._find(name)(**dict(named), **arguments)

    @classmethod
    def create_from_config(cls, config: Mapping[str, Any], *first: Any, **arguments: Any) -> Any:
        """Create the pipeline named ``config["type"]``; the other entries are keyword arguments."""
        # A copy, since the caller may use its configuration again.
        rest = dict(config)
        if "type" not in rest:
            raise KeyError(
                f'a pipeline\'s configuration needs the entry "type", one of {cls._names()}; it '
                f"has {', '.join(map(repr, config)) or 'none'}"
            )
        return cls.create(rest.pop("type"), *first, **arguments, **rest)

    @classmethod
    def list(cls) -> builtins.list[str]:
        """Return all names, sorted."""
        return sorted(cls._builders)

    @classmethod
    def list_available(cls) -> dict[str, Builder]:
        """Return all names with their builders, as a copy."""
        return dict(cls._builders)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Return whether a pipeline has that name."""
        return name in cls._builders

    @classmethod
    def clear_registry(cls) -> None:
        """Remove all names."""
        cls._builders.clear()

    # create, unregister and create_from_config share one error, which lists the known names.
    @classmethod
    def _find(cls, name: str) -> Builder:
        if name not in cls._builders:
            raise KeyError(f"no pipeline is named {name!r}; there are {cls._names()}")
        return cls._builders[name]

    @classmethod
    def _names(cls) -> str:
        return ", ".join(map(repr, cls._builders)) or "none"
