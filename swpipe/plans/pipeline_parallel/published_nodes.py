"""The published method's nodes: passes, communication, validation after the step, rollback.

Source: seed 003, section "get_v_schedule".
"""

from __future__ import annotations

from swpipe.plans.pipeline_parallel.published_attempt import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    AttemptResult,
    Sizes,
)
from swpipe.plans.pipeline_parallel.scheduled_node import ScheduledNode


def nodes_of(sizes: Sizes, attempt: AttemptResult) -> list[list[ScheduledNode]]:
    """The nodes of each stage, by start; at one time, communication comes before computation."""
    listed: list[list[tuple[float, int, ScheduledNode]]] = [[] for _ in range(sizes.n_stage)]
    number = _add_validation(sizes, attempt, listed)
    _add_passes(sizes, attempt, listed, number)
    rows = []
    for entries in listed:
        entries.sort(key=lambda entry: entry[:2])
        rows.append(_receive_early([node for _, _, node in entries]))
    return [_with_rollback(row, rows[stage - 1] if stage else []) for stage, row in enumerate(rows)]


def _end(sizes: Sizes, attempt: AttemptResult, kind: int, stage: int, micro: int) -> float:
    return attempt.end_time[(kind * sizes.n_stage + stage) * sizes.n_micro + micro]


def _add_validation(
    sizes: Sizes, attempt: AttemptResult, listed: list[list[tuple[float, int, ScheduledNode]]]
) -> int:
    """Validation of the step before, from the last stage to the first; gives the next number."""
    time: float = 0
    number = 0
    for stage in range(sizes.n_stage - 1, -1, -1):
        micro = min(2 * (sizes.n_stage - 1 - stage), sizes.n_micro - 1)
        end = _end(sizes, attempt, 0, stage, micro)
        time = max(time, end - sizes.costs[FORWARD] - sizes.hop)
        for prefix in ("RECV_", "SEND_", ""):
            first, last = stage == 0, stage == sizes.n_stage - 1
            if not (first and prefix == "SEND_") and not (last and prefix == "RECV_"):
                node = ScheduledNode(prefix + "POST_VALIDATION", 0, stage, 0, time, time)
                listed[stage].append((time, number, node))
                number += 1
    return number


def _add_passes(
    sizes: Sizes,
    attempt: AttemptResult,
    listed: list[list[tuple[float, int, ScheduledNode]]],
    number: int,
) -> None:
    last_number = number + 6 * sizes.n_stage * sizes.n_micro
    names = {FORWARD: "FORWARD", BACKWARD: "BACKWARD"}
    for stage, row in enumerate(attempt.schedule):
        for category, raw, micro in row:
            end = _end(sizes, attempt, 2 * category + raw, stage, micro)
            start = end - sizes.costs[category]
            chunk = raw if category == FORWARD else 1 - raw
            node = ScheduledNode("FBW"[category], chunk, stage, micro, start, end)
            listed[stage].append((start, last_number, node))
            if category == WEIGHT:
                continue
            to = stage - 1 if raw else stage + 1
            if 0 <= to < sizes.n_stage:
                for prefix, at in (("SEND_", stage), ("RECV_", to)):
                    name = prefix + names[category]
                    sent = ScheduledNode(name, chunk, at, micro, end, end)
                    listed[at].append((end, number, sent))
            number += 1


def _receive_early(row: list[ScheduledNode]) -> list[ScheduledNode]:
    """Where a receive starts no later than the pass before it ends, it comes before that pass."""
    for i in range(1, len(row)):
        before, node = row[i - 1], row[i]
        if (
            before.type in "FBW"
            and node.type in ("RECV_FORWARD", "RECV_BACKWARD")
            and node.start_time <= before.completion_time
        ):
            row[i - 1], row[i] = node, before
    return row


def _with_rollback(row: list[ScheduledNode], above: list[ScheduledNode]) -> list[ScheduledNode]:
    """Mark the receives of what the stage above sent before its validation."""
    unvalidated = set()
    for node in above:
        if node.type == "POST_VALIDATION":
            break
        if node.type == "SEND_FORWARD":
            unvalidated.add(node.minibatch)
    return [
        node._replace(rollback=True)
        if node.type == "RECV_FORWARD" and node.chunk == 0 and node.minibatch in unvalidated
        else node
        for node in row
    ]
