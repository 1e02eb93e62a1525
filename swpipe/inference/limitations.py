"""Notes on what a recording did not observe or is unsure of, and what to declare instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from swpipe._state.generators import TORCH
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.inference.accesses import TaskAccesses
from swpipe.inference.observation import TaskObservation
from swpipe.inference.transfers import Transfer

NEVER_RECORDED = (
    "Never recorded: what threads started by a task do; Python values and objects outside the "
    "context, such as files; which tasks read data in a kernel outside torch's dispatcher; what "
    "other batches do (another branch, another shape). Tasks of which nothing is declared keep "
    "their serial order in any case. Where something is declared, such state has to be, too: "
    'DeclaredIO(state="its name", mode="r", "w" or "rw").'
)


def notes_on(
    tasks: Sequence[PipelineTask],
    observed: Sequence[TaskObservation],
    accesses: Mapping[str, TaskAccesses],
    transfers: Iterable[Transfer],
) -> tuple[str, ...]:
    """All notes on a recording, each once; the last one applies to every recording."""
    found = [
        *_silent_writes(accesses),
        *_draws(tasks, observed),
        *_collectives(observed),
        *_opaque_values(observed),
        *_transfers(transfers),
    ]
    return (*dict.fromkeys(found), NEVER_RECORDED)


def _silent_writes(accesses: Mapping[str, TaskAccesses]) -> Iterator[str]:
    for task, of_task in accesses.items():
        if of_task.silent:
            yield (
                f"{task!r} modified {listed(sorted(of_task.silent))}, but no operator says that it "
                "writes there (numpy, or a kernel whose schema does not declare it). The write was "
                "detected by its content; reads of this kind are not detected: declare them."
            )


def _draws(tasks: Sequence[PipelineTask], observed: Sequence[TaskObservation]) -> Iterator[str]:
    drawing = {one.task for one in observed if TORCH in one.changes.generators}
    for task in tasks:
        if task.name in drawing and not task.pure:  # that is told elsewhere
            yield (
                f"{task.name!r} draws from {TORCH} without random=True: tasks that draw keep their "
                "serial order. With random=True each run is seeded by its task and iteration, and "
                "no order is needed."
            )


def _collectives(observed: Iterable[TaskObservation]) -> Iterator[str]:
    found: dict[str, set[str]] = defaultdict(set)
    for one in observed:
        found[one.task] |= one.operators.collectives
    for task, names in found.items():
        if names:
            yield (
                f"{task!r} communicates ({listed(sorted(names))}): it is scheduled as globally "
                "ordered. The plan sets the order of collectives across ranks, which a recording "
                "of one rank cannot check; library hooks may communicate without being recorded."
            )


def _opaque_values(observed: Iterable[TaskObservation]) -> Iterator[str]:
    kinds = {f"ctx.{name} ({kind})": None for one in observed for name, kind in one.opaque.items()}
    if kinds:
        yield (
            f"Not inspected: {listed(list(kinds))}. Setting, reading and deleting these "
            "attributes is recorded; changes inside them are not. A task that modifies such a "
            "value in place should set the attribute again."
        )


def _transfers(transfers: Iterable[Transfer]) -> Iterator[str]:
    for one in transfers:
        yield (
            f"{one.consumer!r} uses memory ({one.description}) that {one.producer!r} created or "
            "wrote, and that no attribute led to: it passed inside an object or along autograd's "
            f"graph. {one.consumer!r} is ordered after {one.producer!r}."
        )
