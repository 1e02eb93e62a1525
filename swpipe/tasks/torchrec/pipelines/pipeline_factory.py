"""Pipelines by name."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

Builder: TypeAlias = Callable[..., Any]


class PipelineFactory:
    """A registry of pipelines by name, without instances; each subclass has names of its own.

    An unknown name is a KeyError, one that is taken a ValueError.
    """

    _builders: ClassVar[dict[str, Builder]] = {}

    def __init_subclass__(cls) -> None:
        cls._builders = {}

    @classmethod
    def register(cls, name: str, builder: Builder | None = None) -> Any:
        """Add a name for a class or a function; without one, a decorator that does."""
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
        """The pipeline of that name, from ``model, optimizer, device`` and others by keyword."""
        named = zip(("model", "optimizer", "device"), first, strict=False)
        return cls._find(name)(**dict(named), **arguments)

    @classmethod
    def create_from_config(cls, config: Mapping[str, Any], *first: Any, **arguments: Any) -> Any:
        """The pipeline of the name ``config["type"]``; the other entries are keyword arguments."""
        rest = dict(config)
        if "type" not in rest:
            raise KeyError(
                f'a pipeline\'s configuration needs the entry "type", one of {cls._names()}; it '
                f"has {', '.join(map(repr, config)) or 'none'}"
            )
        return cls.create(rest.pop("type"), *first, **arguments, **rest)

    @classmethod
    def list(cls) -> builtins.list[str]:
        """All names, sorted."""
        return sorted(cls._builders)

    @classmethod
    def list_available(cls) -> dict[str, Builder]:
        """All names with their classes, copied."""
        return dict(cls._builders)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Whether a pipeline has that name."""
        return name in cls._builders

    @classmethod
    def clear_registry(cls) -> None:
        """Remove all names."""
        cls._builders.clear()

    @classmethod
    def _find(cls, name: str) -> Builder:
        if name not in cls._builders:
            raise KeyError(f"no pipeline is named {name!r}; there are {cls._names()}")
        return cls._builders[name]

    @classmethod
    def _names(cls) -> str:
        return ", ".join(map(repr, cls._builders)) or "none"
