"""The headroom: how much shorter a step is without its loader, and without all that may overlap.

Two tasks that both use a state, one of which writes it, keep their order within an iteration and
from one to the next: together they are a cycle, and a step takes at least as long as they do. So of
the groups of tasks that are connected by such states the longest stays, and the others may overlap
with it. Tasks of which nothing is declared are one group. Shortcuts measure what is left
(``swpipe.profiler.rounds``).
"""

from __future__ import annotations

from swpipe._distributed.rank_checks import gather, is_alone
from swpipe._state.loop import LoopState
from swpipe.core.costs import CostModel
from swpipe.core.effects import (
    EffectTable,
    conflicts,
    declared_effects,
    unknown_beside,
    with_the_others,
)
from swpipe.core.plan import OTHERS, PULL
from swpipe.doctor.diagnosis import Headroom
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.rounds import Counts, Kind, Rounds


def measure_headroom(
    timer: WindowTimer, saved: LoopState, costs: CostModel, num_rounds: int
) -> Headroom:
    """Measure the headroom of an idle pipeline's tasks, whose plan is serial; restore all state.

    ``timer`` calls the loader in each iteration, unless the batches are there already.
    """
    tasks, pulls = timer.pipe.tasks, timer.pulls
    effects = with_the_others(declared_effects(tasks), unknown_beside(tasks), apart=True, body=True)
    stays = staying(effects, costs)
    if not is_alone():  # times differ, and the ranks replay the same tasks
        stays = gather(stays)[0]
    pull: Kind = () if pulls is None else (PULL,)
    free: Kind = (*pull, *(one.name for one in tasks if one.name not in stays))
    counts = Counts(timer.warmup, timer.measure, num_rounds)
    rounds = Rounds(timer, counts, saved.restore_training)
    try:
        with saved.trial(), timer.pipe.borrow():
            rounds.warm_up()
            rounds.measure(list(dict.fromkeys(kind for kind in (pull, free) if kind)))
    finally:
        if pulls is not None:
            pulls.end()
    gains, failed = rounds.saved, rounds.failed.get(free)
    note = "" if failed is None else f"not measured: {str(failed).splitlines()[0]}"
    pace = None if pulls is None else pulls.pace
    return Headroom(rounds.step, gains.get(pull), gains.get(free), free, stays, note, pace)


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
