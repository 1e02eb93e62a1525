"""What a recording cannot see, or cannot be sure of, in plain words, with what to declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from swpipe.core.task import PipelineTask
from swpipe.inference.facts import IterationFacts, TaskFacts
from swpipe.inference.generators import TORCH
from swpipe.inference.handed import Handed
from swpipe.inference.uses import Uses

UNSEEN = (
    "Not seen by any recording: what other threads do that a task starts; Python objects outside "
    "the context, files and sockets among them; which tasks read what a kernel outside torch's "
    "dispatcher reads; what other batches do (another branch, another shape). Declare such a thing "
    'in every task that uses it: DeclaredIO(state="its name", mode="r", "w" or "rw").'
)


def notes(
    tasks: Sequence[PipelineTask],
    iterations: Iterable[IterationFacts],
    uses: Mapping[str, Uses],
    handed: Iterable[Handed],
    left_changed: Sequence[str],
) -> tuple[str, ...]:
    """One sentence or two on each thing, each once; the last is on recordings in general."""
    facts = [one for iteration in iterations for one in iteration.tasks]
    found = [
        *_silent(uses),
        *_plain(tasks, facts),
        *_draws(tasks, facts),
        *_collectives(facts),
        *_opaque(facts),
        *_handed(handed),
    ]
    if left_changed:
        found.append(
            f"Not put back after recording: {_listed(left_changed)}. Models, optimizers, "
            "objects with state_dict, tensors and generators were."
        )
    return (*dict.fromkeys(found), UNSEEN)


def _silent(uses: Mapping[str, Uses]) -> Iterator[str]:
    for task, of_task in uses.items():
        if of_task.silent:
            yield (
                f"{task!r} modified {_listed(sorted(of_task.silent))} though no operator says that "
                "it writes there (numpy, or a kernel whose schema hides it). The change was "
                "noticed by its content; who reads in such a way is not seen: declare it there."
            )


def _plain(tasks: Sequence[PipelineTask], facts: Iterable[TaskFacts]) -> Iterator[str]:
    declaring = {task.name for task in tasks if any(io.state and "w" in io.mode for io in task.io)}
    changed: dict[str, set[str]] = {}
    for one in facts:
        changed.setdefault(one.task, set()).update(one.difference.plain)
    for task, paths in changed.items():
        if paths and task not in declaring:
            yield (
                f"{task!r} changes {_listed(sorted(paths))}: plain Python, whose readers are not "
                f'seen. Where another task reads it, give {task!r} DeclaredIO(state="its name", '
                'mode="rw") and the reader the same with mode="r".'
            )


def _draws(tasks: Sequence[PipelineTask], facts: Sequence[TaskFacts]) -> Iterator[str]:
    drawing = {one.task for one in facts if TORCH in one.difference.generators}
    for task in tasks:
        if task.name in drawing:
            yield (
                f"{task.name!r} draws from {TORCH} and does not say random=True: tasks that draw "
                "are kept in their serial order instead. With random=True each run is seeded from "
                "its task and iteration, and they need no order."
            )


def _collectives(facts: Iterable[TaskFacts]) -> Iterator[str]:
    found: dict[str, set[str]] = {}
    for one in facts:
        if one.collectives:
            found.setdefault(one.task, set()).update(one.collectives)
    for task, names in found.items():
        yield (
            f"{task!r} communicates ({_listed(sorted(names))}): it is scheduled as globally "
            "ordered. The order of collectives across ranks is the plan's affair; no recording of "
            "one rank tells it, and hooks of libraries may communicate unseen."
        )


def _opaque(facts: Iterable[TaskFacts]) -> Iterator[str]:
    kinds = {f"ctx.{name} ({kind})": None for one in facts for name, kind in one.opaque.items()}
    if kinds:
        yield (
            f"Not looked into: {_listed(list(kinds))}. Setting, reading and deleting these "
            "attributes is seen; what changes inside them is not. A task that modifies such a "
            "value in place should set the attribute anew."
        )


def _handed(handed: Iterable[Handed]) -> Iterator[str]:
    for one in handed:
        yield (
            f"{one.consumer!r} uses memory ({one.looks}) that {one.producer!r} made or wrote, and "
            "that no attribute led to: inside an object, or along autograd's graph. It comes "
            "after it."
        )


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
