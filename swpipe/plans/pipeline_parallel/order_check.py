"""Whether an order of actions can run at all, whatever the costs.

The rules, for the actions of each stage and microbatch:

1. All actions of a stage are on one rank; the stages count from 0 without a gap.
2. There is one F, and either one B, or one I and one W; nothing twice, nothing missing.
3. F comes before I or B, and I before W.
4. The gradients of a stage's weights (W or B) are added up in the order of the microbatches, as a
   single process does: sums of floating-point numbers depend on their order.
5. The waits of the ranks for each other form no cycle; a pair waits for what both its parts need.
6. A pair is an F and a B, of different microbatches.

The checker shares no code with what makes schedules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swpipe.plans.pipeline_parallel.action import (
    OPS,
    Action,
    Entry,
    Pair,
    ScheduleError,
    actions_of,
)

Rows = Sequence[Sequence[Entry]]


class TimedAction(NamedTuple):
    """An action or a pair with its start and end, in the costs' unit; 0 is the step's start."""

    action: Entry
    start: float
    end: float


def placement_of(rows: Rows) -> tuple[int, ...]:
    """The rank of each stage; rule 1."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in actions_of(row):
            other = rank_of.setdefault(action.stage, rank)
            if other != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank}, but stage {action.stage} has actions on rank "
                    f"{other}: all actions of a stage are on one rank",
                    action,
                )
    for stage in range(len(rank_of)):
        if stage not in rank_of:
            raise ScheduleError(
                f"stage {stage} has no action, and stage {max(rank_of)} has: "
                "stages count from 0 without a gap"
            )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def check_order(rows: Rows, n_micro: int) -> None:
    """Raise ScheduleError where an order breaks one of the rules."""
    placement = check_rows(rows, n_micro)
    earliest_times(rows, placement, lambda _: 0, 0)


def check_rows(rows: Rows, n_micro: int) -> tuple[int, ...]:
    """Rules 1 to 4, and 6; gives the placement."""
    if not any(rows):
        raise ScheduleError("there is no action: a schedule has a row of actions per rank")
    for rank, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"rank {rank} has no action: each rank has at least one stage")
        for action in actions_of(row):
            _check_action(action, rank, n_micro)
        for entry in row:
            if isinstance(entry, Pair):
                _check_pair(entry, rank)
    placement = placement_of(rows)
    for rank, row in enumerate(map(actions_of, rows)):
        _check_counts(row, rank, n_micro)
        _check_row(row, rank)
    return placement


def _check_action(action: Action, rank: int, n_micro: int) -> None:
    stage, op, micro = action
    integers = all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (stage, micro)
    )
    if op not in OPS or not integers:
        raise ScheduleError(
            f"rank {rank} has {tuple(action)!r}: an action has a stage, an op of F, I, W and B, "
            "and a microbatch, counted from 0",
            action,
        )
    if micro >= n_micro:
        raise ScheduleError(
            f"{action} on rank {rank} is microbatch {micro}, counted from 0, but n_micro is "
            f"{n_micro}",
            action,
        )


def _check_pair(pair: Pair, rank: int) -> None:
    """Rule 6."""
    f, b = pair
    if (f.op, b.op) != ("F", "B") or f.micro == b.micro:
        raise ScheduleError(
            f"{pair} on rank {rank}: a pair is an F and a B, of different microbatches", b
        )


def _check_counts(row: Sequence[Action], rank: int, n_micro: int) -> None:
    """Rule 2, of the stages of a rank."""
    there: set[Action] = set()
    for action in row:
        if action in there:
            raise ScheduleError(f"{action} is on rank {rank} twice: remove one", action)
        there.add(action)
    for stage in sorted({action.stage for action in row}):
        for micro in range(n_micro):
            full = Action(stage, "B", micro)
            halves = (Action(stage, "I", micro), Action(stage, "W", micro))
            both = next((half for half in halves if half in there and full in there), None)
            if both is not None:
                raise ScheduleError(
                    f"{full} and {both} are on rank {rank}: B is both I and W; keep one of them",
                    both,
                )
            for action in (Action(stage, "F", micro), *(() if full in there else halves)):
                if action not in there:
                    raise ScheduleError(
                        f"{action} is missing on rank {rank}: each stage does F, and I and W or "
                        "B, of each microbatch",
                        action,
                    )


def _check_row(row: Sequence[Action], rank: int) -> None:
    """Rules 3 and 4, of a rank that has all actions of its stages."""
    done: set[Action] = set()
    next_weight: dict[int, int] = defaultdict(int)
    for action in row:
        stage, op, micro = action
        before = None if op == "F" else Action(stage, "I" if op == "W" else "F", micro)
        if before is not None and before not in done:
            raise ScheduleError(
                f"{action} on rank {rank} comes before {before}, whose result it needs", action
            )
        if op in "WB":
            if micro != next_weight[stage]:
                raise ScheduleError(
                    f"{action} on rank {rank} comes before microbatch {next_weight[stage]} of its "
                    "stage: gradients of weights are added up in the order of the microbatches",
                    action,
                )
            next_weight[stage] += 1
        done.add(action)


def earliest_times(
    rows: Rows, placement: Sequence[int], cost: Callable[[Entry], float], hop: float
) -> tuple[tuple[TimedAction, ...], ...]:
    """Each action's times, as early as the order of its rank and its input allow; rule 5.

    Args:
        rows: Rows that keep the other rules.
        placement: The rank of each stage.
        cost: How long an action, or a pair, takes.
        hop: How much later a result is on another rank.

    Raises:
        ScheduleError: A deadlock.
    """
    ends: dict[Action, float] = {}
    timed: list[list[TimedAction]] = [[] for _ in rows]
    ready = list(range(len(rows)))
    waiting: dict[Action, int] = {}
    while ready:
        rank = ready.pop()
        row, times = rows[rank], timed[rank]
        clock = times[-1].end if times else 0
        for entry in row[len(times) :]:
            parts = entry if isinstance(entry, Pair) else (entry,)
            needs = [n for one in parts if (n := _needed(one, ends, len(placement))) is not None]
            if missing := [needed for needed in needs if needed not in ends]:
                waiting[missing[0]] = rank
                break
            away = [hop if placement[needed.stage] != rank else 0 for needed in needs]
            start = max([clock, *(ends[n] + late for n, late in zip(needs, away, strict=True))])
            clock = start + cost(entry)
            times.append(TimedAction(entry, start, clock))
            for action in parts:
                ends[action] = clock
                # Whoever waits for a gradient waits for I or for B, whichever this is.
                names = (action, action._replace(op="I")) if action.op == "B" else (action,)
                ready += [waiting.pop(name) for name in names if name in waiting]
    if waiting:
        raise _deadlock(rows, placement, {rank: needed for needed, rank in waiting.items()})
    return tuple(map(tuple, timed))


def _needed(action: Action, ends: dict[Action, float], n_stages: int) -> Action | None:
    """What the action needs of a neighbouring stage."""
    stage, op, micro = action
    if op == "F":
        return Action(stage - 1, "F", micro) if stage else None
    if op == "W" or stage == n_stages - 1:
        return None  # its own stage's results: they are before it in the row
    whole = Action(stage + 1, "B", micro)
    return whole if whole in ends else Action(stage + 1, "I", micro)


def _deadlock(rows: Rows, placement: Sequence[int], waits: dict[int, Action]) -> ScheduleError:
    """The cycle of ranks that wait for each other, in words."""
    rank, seen = next(iter(waits)), []
    while rank not in seen:
        seen.append(rank)
        rank = placement[waits[rank].stage]
    cycle = seen[seen.index(rank) :]
    start = cycle.index(min(cycle))
    cycle = cycle[start:] + cycle[:start]
    told, first = [], None
    for rank in cycle:
        needed = waits[rank]
        if needed not in actions_of(rows[placement[needed.stage]]):
            needed = needed._replace(op="B")
        action = next(
            a for a in actions_of(rows[rank]) if _needed(a, {needed: 0}, len(placement)) == needed
        )
        first = first or action
        told.append(f"rank {rank} waits at {action} for {needed} of rank {placement[needed.stage]}")
    return ScheduleError("the schedule deadlocks: " + ", ".join(told), first)
