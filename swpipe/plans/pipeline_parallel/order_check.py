"""The rules by which an order of actions can run, whatever the costs.

The rules for the actions of each stage and microbatch are:

1. All actions of a stage are on one rank. Stages are numbered from 0 without a gap.
2. There is exactly one F, and either exactly one B, or exactly one I and one W.
3. F comes before I or B, and I comes before W.
4. The gradients of a stage's weights (W or B) are added up in the order of the microbatches, as in
   a single process, because sums of floating-point numbers depend on their order.
5. The waits of the ranks for each other form no cycle. A pair waits for the inputs of both passes.
6. A pair consists of an F and a B of different microbatches.
7. If the schedule unshards stages, every stage is unsharded at each of its passes and reductions,
   is never unsharded twice without a reshard in between, and is sharded at the end. If the schedule
   reduces gradients, every stage is reduced exactly once, after its last weight gradients.

The checker shares no code with the planners.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swpipe.plans.pipeline_parallel.action import (
    COLLECTIVES,
    OPS,
    Action,
    Communication,
    Entry,
    Pair,
    ScheduleError,
    actions_of,
    parts_of,
)

Rows = Sequence[Sequence[Entry]]


class TimedAction(NamedTuple):
    """An entry with its start and end times in the unit of the costs, from the step's start."""

    action: Entry
    start: float
    end: float


def placement_of(rows: Rows) -> tuple[int, ...]:
    """Check rule 1, and return the rank of each stage.

    Raises:
        ScheduleError: A stage has no action, or has actions on two ranks.
    """
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
    """Check all rules.

    Raises:
        ScheduleError: The order breaks a rule.
    """
    placement = check_rows(rows, n_micro)
    # Rule 5 does not depend on the costs: a deadlock is one under any times.
    earliest_times(rows, placement, lambda _: 0, 0)


def check_rows(rows: Rows, n_micro: int) -> tuple[int, ...]:
    """Check rules 1 to 4, 6 and 7, and return the placement: the rank of each stage.

    Raises:
        ScheduleError: The rows break a rule.
    """
    # In an order in which each check may rely on those before: the later ones index by stage and
    # microbatch, and need valid numbers.
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
            if isinstance(entry, Communication) and entry.op not in COLLECTIVES:
                raise ScheduleError(
                    f"{entry} on rank {rank} is none of {', '.join(COLLECTIVES)}: remove it; the "
                    "runtime places sends and receives itself"
                )
    placement = placement_of(rows)
    for rank, row in enumerate(map(actions_of, rows)):
        _check_counts(row, rank, n_micro)
        _check_row(row, rank)
    # The kinds of collectives on any rank: a rank without them then breaks rule 7.
    ops = {part.op for row in rows for part in row if isinstance(part, Communication)}
    for rank, row in enumerate(rows):
        if not ops.isdisjoint(("UNSHARD", "RESHARD")):
            _check_shards(row, rank)
        if "REDUCE_GRAD" in ops:
            _check_reductions(row, rank)
    return placement


def _check_action(action: Action, rank: int, n_micro: int) -> None:
    stage, op, micro = action
    # bool is a subclass of int, and would print as True instead of a number.
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
    """Check rule 6 for one pair."""
    # The B of a microbatch needs its F, so that the two cannot overlap.
    f, b = pair
    if (f.op, b.op) != ("F", "B") or f.micro == b.micro:
        raise ScheduleError(
            f"{pair} on rank {rank}: a pair is an F and a B, of different microbatches", b
        )


def _check_counts(row: Sequence[Action], rank: int, n_micro: int) -> None:
    """Check rule 2 for the stages of a rank."""
    there: set[Action] = set()
    for action in row:
        if action in there:
            raise ScheduleError(f"{action} is on rank {rank} twice: remove one", action)
        there.add(action)
    for stage in sorted({action.stage for action in row}):
        for micro in range(n_micro):
            full = Action(stage, "B", micro)
            halves = (Action(stage, "I", micro), Action(stage, "W", micro))
            # Each microbatch may choose for itself: B, or I and W, but not parts of both.
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
    """Check rules 3 and 4 for a rank that has all actions of its stages."""
    done: set[Action] = set()
    next_weight: dict[int, int] = defaultdict(int)
    for action in row:
        stage, op, micro = action
        before = None if op == "F" else Action(stage, "I" if op == "W" else "F", micro)
        if before is not None and before not in done:
            raise ScheduleError(
                f"{action} on rank {rank} comes before {before}, whose result it needs", action
            )
        if op in "WB":  # the ops that add to the gradients of weights
            if micro != next_weight[stage]:
                raise ScheduleError(
                    f"{action} on rank {rank} comes before microbatch {next_weight[stage]} of its "
                    "stage: gradients of weights are added up in the order of the microbatches; "
                    "sort them, or read the file with renumbered=True",
                    action,
                )
            next_weight[stage] += 1
        done.add(action)


def _check_shards(row: Sequence[Entry], rank: int) -> None:
    """Check rule 7 for the parameters of a rank's stages."""
    unsharded: set[int] = set()
    for part in parts_of(row):
        stage = part.stage
        if part.op == "UNSHARD":
            if stage in unsharded:
                raise ScheduleError(
                    f"{part} on rank {rank}: the stage is unsharded already: remove one"
                )
            unsharded.add(stage)
        elif stage not in unsharded:
            raise ScheduleError(
                f"{part} on rank {rank} comes where its stage is sharded: put {stage}UNSHARD "
                "before it",
                part if isinstance(part, Action) else None,
            )
        elif part.op == "RESHARD":
            # The stage is in the set: the branch before refuses a reshard of a sharded stage.
            unsharded.remove(stage)
    for stage in sorted(unsharded):
        raise ScheduleError(
            f"{stage}RESHARD is missing on rank {rank}: no stage may be unsharded after a step"
        )


def _check_reductions(row: Sequence[Entry], rank: int) -> None:
    """Check rule 7 for the gradients of a rank's stages."""
    left = Counter(part.stage for part in actions_of(row) if part.op in "WB")
    reduced: set[int] = set()
    for part in parts_of(row):
        if isinstance(part, Action) and part.op in "WB":
            left[part.stage] -= 1
        elif part.op == "REDUCE_GRAD":
            # Reduced already, not a stage of this rank, or with weight gradients still to come.
            if part.stage in reduced or part.stage not in left or left[part.stage]:
                raise ScheduleError(
                    f"{part} on rank {rank}: the gradients of a stage of the rank are reduced "
                    "once, after the last of them"
                )
            reduced.add(part.stage)
    for stage in sorted({*left} - reduced):
        raise ScheduleError(
            f"{stage}REDUCE_GRAD is missing on rank {rank}: a schedule that has reductions reduces "
            "every stage"
        )


def earliest_times(
    rows: Rows,
    placement: Sequence[int],
    cost: Callable[[Entry], float],
    hop: float,
) -> tuple[tuple[TimedAction, ...], ...]:
    """Check rule 5, and return each entry's times, as early as its rank's order and inputs allow.

    Args:
        rows: Rows that obey all other rules.
        placement: The rank of each stage.
        cost: Returns the time of an entry. The time of a collective occupies the rank's link to the
            ranks that hold the other shards, while the rank runs passes.
        hop: The time from the end of an action to its result's arrival at another rank.

    Raises:
        ScheduleError: The order deadlocks.
    """
    # Each rank in ``ready`` runs its row until an input is missing. It is then noted in ``waiting``
    # under this input, and is ready again when the input's time is known. If no rank is ready, the
    # ranks that still wait are in a deadlock.
    ends: dict[Action, float] = {}
    link_free: list[float] = [0] * len(rows)
    reduced: list[float] = [0] * len(rows)
    gathered: dict[int, float] = {}
    clocks: list[float] = [0] * len(rows)
    timed: list[list[TimedAction]] = [[] for _ in rows]
    ready = list(range(len(rows)))
    waiting: dict[Action, int] = {}
    while ready:
        rank = ready.pop()
        row = rows[rank]
        times = timed[rank]
        clock = clocks[rank]
        for entry in row[len(times) :]:
            if isinstance(entry, Communication):
                # Collectives queue up on the rank's link; a reshard only frees memory. A rank
                # reduces one stage at a time: a reduction's input takes memory until it ends.
                if entry.op == "REDUCE_GRAD":
                    clock = max(clock, reduced[rank])
                start = clock if entry.op == "RESHARD" else max(clock, link_free[rank])
                end = start + cost(entry)
                link_free[rank] = max(end, link_free[rank])
                if entry.op == "UNSHARD":
                    gathered[entry.stage] = end
                elif entry.op == "REDUCE_GRAD":
                    reduced[rank] = end
                times.append(TimedAction(entry, start, end))
                continue
            passes = actions_of((entry,))
            inputs = (_needed(action, len(placement)) for action in passes)
            needs = [needed for needed in inputs if needed is not None]
            if missing := [needed for needed in needs if needed not in ends]:
                waiting[missing[0]] = rank
                break
            arrivals = [ends[n] + (hop if placement[n.stage] != rank else 0) for n in needs]
            start = max([clock, *arrivals, *(gathered.get(a.stage, 0) for a in passes)])
            clock = start + cost(entry)
            times.append(TimedAction(entry, start, clock))
            for action in passes:
                # A rank that waits for a gradient is noted under I, whichever op makes it.
                result = action._replace(op="I") if action.op == "B" else action
                ends[result] = clock
                if result in waiting:
                    ready.append(waiting.pop(result))
        clocks[rank] = clock
    if waiting:
        raise _deadlock(rows, placement, {rank: needed for needed, rank in waiting.items()})
    return tuple(map(tuple, timed))


def _needed(action: Action, n_stages: int) -> Action | None:
    """Return the pass of a neighbouring stage that an action needs, or None; I stands for B too."""
    stage, op, micro = action
    if op == "F":
        return Action(stage - 1, "F", micro) if stage else None
    # W needs only its own stage's results, which are earlier in the row.
    return None if op == "W" or stage == n_stages - 1 else Action(stage + 1, "I", micro)


def _deadlock(rows: Rows, placement: Sequence[int], waits: dict[int, Action]) -> ScheduleError:
    """Return the error of a deadlock, which names the ranks that wait for each other."""
    # Follow the waits from any rank until a rank comes up twice: from there on they are a cycle,
    # which is shown from its lowest rank on.
    rank = next(iter(waits))
    path = []
    while rank not in path:
        path.append(rank)
        rank = placement[waits[rank].stage]
    cycle = path[path.index(rank) :]
    start = cycle.index(min(cycle))
    cycle = cycle[start:] + cycle[:start]
    lines = []
    waiting = []
    for rank in cycle:
        needed = waits[rank]
        row = actions_of(rows[rank])
        waiting.append(next(a for a in row if _needed(a, len(placement)) == needed))
        other = placement[needed.stage]
        # I stood for both ops above; the message names the one that the row has.
        if needed not in actions_of(rows[other]):
            needed = needed._replace(op="B")
        lines.append(f"rank {rank} waits at {waiting[-1]} for {needed} of rank {other}")
    return ScheduleError("the schedule deadlocks: " + ", ".join(lines), waiting[0])
