"""Helpers that express recorded effects and dependences in short form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from swpipe import DeclaredIO, PipelineTask
from swpipe._values.stateful import has_state
from swpipe.core.effects import Location
from swpipe.inference import Recording, record

WORD = DeclaredIO(state="a word", mode="r", others="")
"""Says that a task touches what it is seen to touch."""


def recorded(*functions: Callable[[Any], None], batch: Any = None, **options: Any) -> Recording:
    """A recording of plain functions on the CPU; each task is called as its function.

    They declare something, so that they do not all share the state "undeclared". What the object
    has whose methods they are is given as the state, by its names.
    """
    tasks = [PipelineTask(fn.__name__, fn, io=[WORD]) for fn in functions]
    job = next((fn.__self__ for fn in functions if hasattr(fn, "__self__")), None)
    state = {name: one for name, one in vars(job).items() if has_state(one)} if job else {}
    return record(tasks, batch, device="cpu", **{"state": state or None, **options})


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A process group of one rank in this process; its store is in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


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
    names = {place.name if place.persistent else str(place) for place in places}
    return names - {WORD.state}
