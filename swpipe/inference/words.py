"""What tasks say of themselves, beside what a recording has seen: notes on what to declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from swpipe._state.generators import TORCH
from swpipe.core.effects import Effects, Location
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.inference.state_items import StateItem

_MOST = 3
"""So many states are written out as declarations."""


def notes_on_words(
    tasks: Sequence[PipelineTask],
    seen: Mapping[str, Effects],
    states: Mapping[str, Sequence[StateItem]],
    trained: Set[StateItem],
) -> Iterator[str]:
    """Which tasks say nothing, and how to say it; and which pure ones do not keep their word.

    Args:
        tasks: In serial order.
        seen: Task to what it was seen to touch, whatever it declares.
        states: State to its members.
        trained: Members that require grad.
    """
    written = {place for effects in seen.values() for place in effects.writes}
    inside = {name for name, items in states.items() if trained & {*items}}
    free: list[str] = []
    for task in tasks:
        effects = seen[task.name]
        lasting = {place for place in effects.reads | effects.writes if place.persistent}
        if task.pure:
            yield from _broken(task, effects, inside)
        elif task.undeclared and not lasting & written:
            free.append(task.name)
        elif task.undeclared:
            yield _serial(task.name, effects, lasting)
    if free:
        yield (
            f"Nothing is declared of {listed([repr(name) for name in free])}, seen to change the "
            "context only, and to use what no task changes; Python values were not looked at. Say "
            "so with pure=True, if it is always so, and they may run ahead of what is undeclared."
        )


def _broken(task: PipelineTask, effects: Effects, trained: Set[str]) -> Iterator[str]:
    """What a pure task does that it says it does not."""
    drawn = {place for place in effects.writes if place.name.endswith(_GENERATORS)}
    changed = {place for place in effects.writes - drawn if place.persistent}
    read = {place for place in effects.reads - changed if place.name in trained}
    for places, does, mend in (
        (drawn, "draws from", "say random=True, too" if _only_torch(drawn) else _NOT_PURE),
        (changed, "changes", _NOT_PURE),
        (read, "reads", f"detach a copy, if it is not trained; otherwise {_NOT_PURE}"),
    ):
        if places:
            names = listed(sorted(map(str, places)))
            why = ", which is trained" if places is read else ""
            yield f"{task.name!r} says pure=True, but {does} {names}{why}: {mend}."


_GENERATORS = ("default generators", "default generator")
_NOT_PURE = "take pure=True away, or declare the state, DeclaredIO(state=..., mode=...)"


def _only_torch(drawn: Set[Location]) -> bool:
    return {place.name for place in drawn} == {TORCH}


def _serial(name: str, effects: Effects, lasting: Set[Location]) -> str:
    """Why a task keeps its serial order, and what says what it was seen to do."""
    why = f"Nothing is declared of {name!r}, so it keeps its serial order with all of its like."
    modes = {
        place.name: "r" * (place in effects.reads) + "w" * (place in effects.writes)
        for place in sorted(lasting)
    }
    said = [f'DeclaredIO(state="{state}", mode="{mode}")' for state, mode in modes.items()]
    more = f" and {len(said) - _MOST} more" if len(said) > _MOST else ""
    return f"{why} What was seen of it would be io=[{', '.join(said[:_MOST])}]{more}."
