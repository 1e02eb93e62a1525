"""The factory of recsys-examples: pipelines by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

Maker = TypeVar("Maker", bound=Callable[..., Any])


class TrainPipelineFactory:
    """Makes pipelines by name; it has no instances.

    The names from the start are ``jagged_none``, ``jagged_sw_serial``, ``jagged_sparse_dist``,
    ``jagged_prefetch_sparse_dist``, ``jagged_split_sparse_dist`` and
    ``jagged_semi_sync_sparse_dist``. An unknown name is a KeyError.
    """

    _registry: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self) -> None:
        raise TypeError("TrainPipelineFactory has no instances: call TrainPipelineFactory.create()")

    @classmethod
    def register(cls, name: str, pipeline_class: Callable[..., Any]) -> None:
        """Add a name for a class, or anything that takes ``model``, ``optimizer`` and ``device``.

        Raises:
            ValueError: The name is taken.
        """
        if name in cls._registry:
            raise ValueError(
                f"pipeline {name!r} is registered already, as {cls._registry[name]!r}: choose "
                f"another name, or unregister({name!r}) first"
            )
        cls._registry[name] = pipeline_class

    @classmethod
    def unregister(cls, name: str) -> None:
        """Remove a name."""
        cls._find(name)
        del cls._registry[name]

    @classmethod
    def create(
        cls,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        **kwargs: Any,
    ) -> Any:
        """A pipeline by name; the keyword arguments are those of its class."""
        return cls._find(name)(model=model, optimizer=optimizer, device=device, **kwargs)

    @classmethod
    def create_from_config(
        cls,
        config: Mapping[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> Any:
        """A pipeline by the name in ``config["type"]``; the other entries are keyword arguments."""
        rest = dict(config)
        if "type" not in rest:
            raise KeyError(
                f'a pipeline\'s configuration needs the entry "type", one of {cls._names()}; it '
                f"has {', '.join(map(repr, config)) or 'none'}"
            )
        return cls.create(rest.pop("type"), model, optimizer, device, **rest)

    @classmethod
    def list_available(cls) -> dict[str, Callable[..., Any]]:
        """All names with their classes, copied."""
        return dict(cls._registry)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Whether a pipeline has that name."""
        return name in cls._registry

    @classmethod
    def clear_registry(cls) -> None:
        """Remove all names."""
        cls._registry.clear()

    @classmethod
    def _find(cls, name: str) -> Callable[..., Any]:
        if name not in cls._registry:
            raise KeyError(f"no pipeline is named {name!r}; there are {cls._names()}")
        return cls._registry[name]

    @classmethod
    def _names(cls) -> str:
        return ", ".join(map(repr, cls._registry)) or "none"


def register_train_pipeline(name: str) -> Callable[[Maker], Maker]:
    """Decorator: ``TrainPipelineFactory.register`` with the decorated class."""

    def register(pipeline_class: Maker) -> Maker:
        TrainPipelineFactory.register(name, pipeline_class)
        return pipeline_class

    return register
