"""Helpers that express recorded effects and dependences in short form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swpipe import PipelineTask
from swpipe.core.effects import Location
from swpipe.inference import Recording, record


def recorded(*functions: Callable[[Any], None], batch: Any = None, **options: Any) -> Recording:
    """A recording of plain functions on the CPU; each task is called as its function."""
    tasks = [PipelineTask(fn.__name__, fn) for fn in functions]
    return record(tasks, batch, device="cpu", **options)


def reads(recording: Recording, task: str) -> set[str]:
    """What a task reads: "ctx.x" for attributes, a state by its name."""
    return _names(recording.effects[task].reads)


def writes(recording: Recording, task: str) -> set[str]:
    """What a task writes, named as in ``reads``."""
    return _names(recording.effects[task].writes)


def orders(recording: Recording) -> set[tuple[str, str, int]]:
    """(consumer, producer, distance) of all dependences, the fewest."""
    return {one[:3] for one in recording.dependences().needed}


def _names(places: frozenset[Location]) -> set[str]:
    return {place.name if place.persistent else str(place) for place in places}
