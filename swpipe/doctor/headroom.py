"""The headroom: how much shorter a step is without all that may overlap.

Two tasks that both use a state, one of which writes it, keep their order within an iteration and
from one to the next: together they are a cycle, and a step takes at least as long as they do. So of
the groups of tasks that are connected by such states the longest stays, and the others may overlap
with it. Tasks of which nothing is declared are one group.
Nor does a step take less than all tasks together hold the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from swpipe.core.costs import CostModel
from swpipe.core.effects import (
    EffectTable,
    conflicts,
    declared_effects,
    unknown_beside,
    with_the_others,
)
from swpipe.core.plan import OTHERS, PULL
from swpipe.core.task import PipelineTask
from swpipe.doctor.diagnosis import Headroom
from swpipe.profiler import ProfileResult


def headroom_of(
    tasks: Sequence[PipelineTask], profile: ProfileResult, locks: CostModel | None = None
) -> Headroom:
    """The headroom of tasks, by a profile of their plain loop.

    ``locks``: How long they hold the interpreter lock, which one thread at a time can.
    """
    effects = with_the_others(declared_effects(tasks), unknown_beside(tasks), apart=True, body=True)
    costs, pace = profile.costs, profile.loader
    stays = staying(effects, costs)
    left_s = sum(costs.tasks[name].total_us for name in stays) / 1e6
    held = locks.tasks.values() if locks is not None else ()
    left_s = max(left_s, sum(cost.gil_us for cost in held) / 1e6)
    if pace is not None:
        left_s = max(left_s, pace.rate_s if pace.works_ahead else 0.0) + pace.start_s
    free = [one.name for one in tasks if one.name not in stays]
    if pace is not None:
        free.insert(0, PULL)
    return Headroom(profile.step, min(left_s, profile.baseline_s), (*free,), stays, pace)


def staying(effects: EffectTable, costs: CostModel) -> tuple[str, ...]:
    """The tasks whose times add up under every plan, in serial order."""
    groups = {name: frozenset([name]) for name in effects}
    for conflict in conflicts(effects):
        both = groups[conflict.consumer] | groups[conflict.producer]
        groups.update(dict.fromkeys(both, both))

    def length_us(group: frozenset[str]) -> float:
        return sum(costs.tasks[name].total_us for name in group if name not in OTHERS)

    longest = max(groups.values(), key=length_us)
    return tuple(name for name in effects if name in longest and name not in OTHERS)
