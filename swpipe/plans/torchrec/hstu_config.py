"""HSTU's schedule as data: a configuration changes threads, lookaheads and waits of its tasks.

    {"version": 1,
     "thread_map": "all_noncritical_on_io",
     "lookahead": {"h2d": 5, "start_shuffle": 4},
     "same_progress_sync": {"h2d": [{"task": "compute_output_dist", "sides": "gpu"}]}}

Source: the schedule configuration of the schedulable pipeline for HSTU in recsys-examples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swpipe.core.messages import listed, shown

VARIABLE = "HSTU_PIPELINE_CONFIG"
"""The environment variable with a configuration: JSON, or the path of a JSON file."""

ALIASES = {
    # The model's forward after the look-up, or with it if compute_output_dist does not look up.
    "forward": "dense_forward",
    # The look-up; its exchange is waited for where the dense part uses the embeddings.
    "ranking_embedding_forward": "compute_output_dist",
}
"""Task names of recsys-examples to the names used here."""

_FIELDS = ("lookahead", "same_progress_sync")
_KEYS = ("version", "thread_map", *_FIELDS)


@dataclass(frozen=True)
class HSTUConfig:
    """A configuration of HSTU's schedule.

    Attributes:
        thread_map: See ``HSTUPipeline``; None if the configuration has none.
        fields: Task to the fields in which its ``Task`` differs from the default schedule.
    """

    thread_map: Any = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def hstu_config(given: Mapping[str, Any] | str | Path | None, tasks: Collection[str]) -> HSTUConfig:
    """Read a configuration.

    Args:
        given: A mapping, JSON, or the path of a JSON file. None for the value of
            ``HSTU_PIPELINE_CONFIG`` in the environment, if it is set.
        tasks: The names of all tasks.

    Raises:
        TypeError: The configuration or one of its fields has the wrong type.
        ValueError: It is not JSON, or has another version, an unknown key or an unknown task.
    """
    # `place` begins each message, so that the reader knows where the configuration comes from.
    place = "schedule_config"
    if given is None:
        place = f"the environment variable {VARIABLE}"
        given = os.environ.get(VARIABLE) or {}
    data = _parsed(place, given)
    unknown = [key for key in data if key not in _KEYS]
    if unknown:
        raise ValueError(f"{place} has unknown keys {listed(unknown)}; known are {listed(_KEYS)}")
    if data.get("version", 1) != 1:
        raise ValueError(f"{place} is of version {shown(data['version'])}: give version 1")
    # Regrouped from field -> task to task -> fields, as the tasks are made from them.
    fields: dict[str, dict[str, Any]] = {}
    for key in _FIELDS:
        of_tasks = renamed(data.get(key) or {})
        if not isinstance(of_tasks, dict):
            raise TypeError(f"{place}: {key} is {shown(of_tasks)}: give an object, by task")
        for task, value in of_tasks.items():
            if task not in tasks:
                raise ValueError(
                    f"{place}: {key} names task {shown(task)}, which HSTU's step does not have (it "
                    f"has: {', '.join(tasks)}): correct the name, or take it out"
                )
            fields.setdefault(task, {})[key] = value
    return HSTUConfig(data.get("thread_map"), fields)


def _parsed(place: str, given: Any) -> Mapping[str, Any]:
    if isinstance(given, str | Path):
        text = str(given)
        # JSON of an object begins with a brace; anything else is the path of a file.
        if not text.lstrip().startswith("{"):
            text = Path(given).expanduser().read_text(encoding="utf-8")
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is no JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise TypeError(f"{place} is {shown(given)}: give an object with {listed(_KEYS)}")
    return given


def renamed(value: Any) -> Any:
    """Return names, and nested containers of names, with the task names used here.

    Raises:
        ValueError: A mapping has a task twice, under both of its names.
    """
    if isinstance(value, str):
        return ALIASES.get(value, value)
    if isinstance(value, list | tuple):
        return [*map(renamed, value)]
    if not isinstance(value, Mapping):
        return value
    ours = {renamed(key): renamed(entry) for key, entry in value.items()}
    # Two keys of the given mapping were renamed to the same task.
    if len(ours) < len(value):
        twice = [f"{name!r} is {ALIASES[name]!r}" for name in ALIASES if name in value]
        raise ValueError(f"a task is named twice ({'; '.join(twice)}): keep one of the two names")
    return ours
