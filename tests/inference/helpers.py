"""Helpers that show recorded effects and dependences in a short form."""

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
    """Return a recording of functions on the CPU; each task has the name of its function.

    The tasks declare a state, so that they do not share the state "undeclared". If the functions
    are methods, the stateful attributes of their object are given as the state, by name.
    """
    tasks = [PipelineTask(fn.__name__, fn, io=[WORD]) for fn in functions]
    job = next((fn.__self__ for fn in functions if hasattr(fn, "__self__")), None)
    state = {name: one for name, one in vars(job).items() if has_state(one)} if job else {}
    return record(tasks, batch, device="cpu", **{"state": state or None, **options})


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Make a process group of one rank in this process, with its store in the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def reads(recording: Recording, task: str) -> set[str]:
    """Return what a task reads: "ctx.x" for an attribute, and the name of a state."""
    return _names(recording.effects[task].reads)


def writes(recording: Recording, task: str) -> set[str]:
    """Return what a task writes, named as in ``reads``."""
    return _names(recording.effects[task].writes)


def orders(recording: Recording) -> set[tuple[str, str, int]]:
    """Return (consumer, producer, distance) of the fewest dependences."""
    return {one[:3] for one in recording.dependences().needed}


def _names(places: frozenset[Location]) -> set[str]:
    names = {place.name if place.persistent else str(place) for place in places}
    return names - {WORD.state}
