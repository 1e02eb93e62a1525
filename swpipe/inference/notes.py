"""Notes on a recording: what to declare, which declarations are wrong, what was not observed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from swpipe._values.generators import TORCH
from swpipe.core.effects import Effects, EffectTable, Location
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.inference.accesses import MemoryTransfer
from swpipe.inference.observing import TaskObservation
from swpipe.inference.states import StateItem

NEVER_RECORDED = (
    "Never recorded: what threads started by a task do; Python values and objects outside the "
    "context, such as files; which tasks read data in a kernel outside torch's dispatcher; what "
    "other batches do (another branch, another shape). Undeclared tasks keep their serial order in "
    "any case. A task that declares anything has to declare such state as well: "
    'DeclaredIO(state="its name", mode="r", "w" or "rw").'
)

_MOST = 3
"""The number of states that are written out as declarations; the rest are counted."""


def notes_on(
    tasks: Sequence[PipelineTask],
    effects: EffectTable,
    states: Mapping[str, Sequence[StateItem]],
    trained: Set[StateItem],
    observed: Sequence[TaskObservation],
    transfers: Iterable[MemoryTransfer],
) -> tuple[str, ...]:
    """Return all notes on a recording, without duplicates; the last one applies to every recording.

    Args:
        tasks: In serial order.
        effects: Task to its observed effects, whatever the task declares.
        states: State to its members.
        trained: Members that require grad.
        observed: All runs of tasks.
        transfers: Memory that passed between tasks without an attribute that shows it.
    """
    # A state with one trained member counts as trained: a reader may read that member.
    inside = {name for name, items in states.items() if trained & {*items}}
    notes = [*_on_words(tasks, effects, inside), *_on_unseen(tasks, observed)]
    notes += [
        f"{producer!r} and {consumer!r} use the same memory ({description}), and one of them "
        "creates or writes it, which no attribute shows: it passed inside an object or along "
        f"autograd's graph. {consumer!r} is ordered after {producer!r}."
        for consumer, producer, description in transfers
    ]
    return (*dict.fromkeys(notes), NEVER_RECORDED)


def _on_words(
    tasks: Sequence[PipelineTask], observed: EffectTable, trained: Set[str]
) -> Iterator[str]:
    """Yield notes on undeclared tasks and on pure tasks that are not pure."""
    written = {place for effects in observed.values() for place in effects.writes}
    free: list[str] = []
    for task in tasks:
        effects = observed[task.name]
        lasting = {place for place in effects.reads | effects.writes if place.persistent}
        # Three cases: pure tasks are checked, tasks that could be pure are collected for one note,
        # and any other undeclared task gets the declaration that matches its observed effects.
        if task.pure:
            yield from _broken(task, effects, trained)
        elif task.undeclared and not lasting & written:
            # It touches no state that any task writes, so it could be declared pure.
            free.append(task.name)
        elif task.undeclared:
            yield _serial(task.name, effects, lasting)
    if free:
        yield (
            f"The effects of {listed([repr(name) for name in free])} are not declared. In the "
            "recording these tasks changed their context only, and used nothing else that a task "
            "changes; Python values are not recorded. If this always holds, declare pure=True: "
            "pure tasks may run ahead of undeclared ones."
        )


def _broken(task: PipelineTask, effects: Effects, trained: Set[str]) -> Iterator[str]:
    """Yield the observed effects of a pure task that ``pure=True`` rules out."""
    # Three disjoint sets of locations, since each needs another remedy: draws can be seeded,
    # changes must be declared, and a read of trained state can be detached.
    drawn = {place for place in effects.writes if place.name.endswith(_GENERATORS)}
    changed = {place for place in effects.writes - drawn if place.persistent}
    read = {place for place in effects.reads - changed if place.name in trained}
    seed = "declare random=True, too" if {place.name for place in drawn} == {TORCH} else _NOT_PURE
    for places, does, why, mend in (
        (drawn, "draws from", "", seed),
        (changed, "changes", "", _NOT_PURE),
        (
            read,
            "reads",
            ", which is trained",
            f"detach a copy, if it is not trained; otherwise {_NOT_PURE}",
        ),
    ):
        if places:
            names = listed(sorted(map(str, places)))
            yield f"{task.name!r} is declared pure=True, but {does} {names}{why}: {mend}."


_GENERATORS = ("default generators", "default generator")
_NOT_PURE = "take pure=True away, or declare the state, DeclaredIO(state=..., mode=...)"


def _serial(name: str, effects: Effects, lasting: Set[Location]) -> str:
    """Return why a task keeps its serial order, and the declaration that matches what it did."""
    modes = {
        place.name: "r" * (place in effects.reads) + "w" * (place in effects.writes)
        for place in sorted(lasting)
    }
    declarations = [f'DeclaredIO(state="{state}", mode="{mode}")' for state, mode in modes.items()]
    more = f" and {len(declarations) - _MOST} more" if len(declarations) > _MOST else ""
    return (
        f"The effects of {name!r} are not declared, so it keeps its serial order with all other "
        f"undeclared tasks. To declare its recorded effects, write "
        f"io=[{', '.join(declarations[:_MOST])}]{more}."
    )


def _on_unseen(tasks: Sequence[PipelineTask], observed: Sequence[TaskObservation]) -> Iterator[str]:
    """Yield what is uncertain, was not inspected, or cannot be checked on one rank."""
    for task in tasks:
        # Merged over all iterations: a task may do a thing only in some of them.
        runs = [run for run in observed if run.task == task.name]
        # A silent write was found in the content; a silent read leaves no trace.
        if silent := sorted({name for run in runs for name in _silent(run)}):
            yield (
                f"{task.name!r} modified {listed(silent)}, but no operator says that it writes "
                "there (numpy, or a kernel whose schema does not declare it). The write was "
                "detected by its content; reads of this kind are not detected: declare them."
            )
        # _broken reports draws of pure tasks.
        if not task.pure and any(StateItem.alone(TORCH) in run.states for run in runs):
            yield (
                f"{task.name!r} draws from {TORCH} without random=True: tasks that draw keep their "
                "serial order. With random=True each run is seeded by its task and iteration, and "
                "no order is needed."
            )
        if operators := sorted({name for run in runs for name in run.operators.collectives}):
            yield (
                f"{task.name!r} communicates ({listed(operators)}): it is scheduled as globally "
                "ordered. The plan sets the order of collectives across ranks, which a recording "
                "of one rank cannot check; library hooks may communicate without being recorded."
            )
    # A dict instead of a set keeps the order in which the attributes were set.
    kinds = {f"ctx.{name} ({kind})": None for run in observed for name, kind in run.opaque.items()}
    if kinds:
        yield (
            f"Not inspected: {listed(list(kinds))}. Setting, reading and deleting these "
            "attributes is recorded; changes inside them are not. A task that modifies such a "
            "value in place should set the attribute again."
        )


def _silent(run: TaskObservation) -> Iterator[str]:
    """Yield the names of the memory that changed although no operator wrote it."""
    for name, storages in run.held.items():
        if storages & run.silent:
            yield f"ctx.{name}"
    for item, storages in run.items.items():
        if storages & run.silent:
            yield item.name
