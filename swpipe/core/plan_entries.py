"""The entries of a plan that are lists and tables, checked one by one when the plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from swpipe.core.messages import shown
from swpipe.core.task import PipelineTask, is_label, name_of, names_of
from swpipe.errors import Problem

MOST_ITERATIONS = 1_000
"""The largest pipeline depth, distance of a dependence, and staleness; stages are below it."""


def checked_order(order: Iterable[Any], problems: list[Problem]) -> tuple[str, ...]:
    """The names in ``order``."""
    refs = tuple(order)
    problems += [
        Problem(f"order has {shown(ref)}, which is neither a task nor a task's name")
        for ref in refs
        if not isinstance(ref, str | PipelineTask)
    ]
    return names_of(ref for ref in refs if isinstance(ref, str | PipelineTask))


def checked_stale(stale: Mapping[Any, Any], problems: list[Problem]) -> dict[str, int]:
    """The table ``stale``."""
    for state, behind in stale.items():
        is_count = type(behind) is int and 1 <= behind <= MOST_ITERATIONS
        if not isinstance(state, str) or not is_count:
            rule = f"write state = iterations, 1 to {MOST_ITERATIONS}"
            text = f"stale entry {shown(state)}: {shown(behind)}: {rule}"
            problems.append(Problem(text))
    return dict(stale)


def checked_keep(keep: Any, problems: list[Problem]) -> tuple[str, ...] | None:
    """The names in ``keep``; None where all stay."""
    if keep is None:
        return None
    rule = 'write a list of names of attributes, such as ["loss"]'
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        problems.append(Problem(f"keep is {shown(keep)}: {rule}"))
        return ()
    names = tuple(keep)
    wrong = [name for name in names if not (isinstance(name, str) and is_label(name))]
    problems += [Problem(f"keep has {shown(name)}: {rule}") for name in wrong]
    return () if wrong else tuple(dict.fromkeys(names))


def checked_edges(
    what: str, entries: Iterable[Any], problems: list[Problem], *, far: bool = False
) -> tuple[tuple[Any, ...], ...]:
    """Checked (consumer, producer) pairs; with ``far``, each has a distance too."""
    form = f"(consumer, producer[, distance]) with a distance of 1 to {MOST_ITERATIONS} iterations"
    good: list[tuple[Any, ...]] = []
    for entry in entries:
        match entry:
            case (str() | PipelineTask() as consumer, str() | PipelineTask() as producer):
                good.append((name_of(consumer), name_of(producer), *([1] if far else [])))
            case (
                str() | PipelineTask() as consumer,
                str() | PipelineTask() as producer,
                int() as distance,
            ) if far and 1 <= distance <= MOST_ITERATIONS:
                good.append((name_of(consumer), name_of(producer), distance))
            case _:
                write = form if far else "(consumer, producer)"
                problems.append(Problem(f"{what} entry {shown(entry)}: write {write}"))
    return tuple(good)
