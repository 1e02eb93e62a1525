"""The headroom: how much shorter a step is without its loader, and without all that may overlap.

Two tasks that both use a state, one of which writes it, keep their order within an iteration and
from one to the next: together they are a cycle, and a step takes at least as long as they do. So of
the groups of tasks that are connected by such states the longest stays, and the others may overlap
with it. Tasks of which nothing is declared are one group. Shortcuts measure what is left
(``swpipe.profiler.rounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from swpipe._distributed.rank_checks import gather, is_alone
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
from swpipe.pipeline import SWPipeline
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.measured import Measured
from swpipe.profiler.pulls import Pulls
from swpipe.profiler.rounds import Counts, Kind, Rounds
from swpipe.profiler.trial_state import trial_state


def measure_headroom(
    pipe: SWPipeline[Any],
    batch: Any,
    loader: Iterable[Any] | None,
    costs: CostModel,
    num_rounds: int,
    state: Any,
    copy: Callable[[Any], Any] | None,
) -> Headroom:
    """Measure the headroom of an idle pipeline's tasks, and restore all state.

    Args:
        pipe: Its plan is serial.
        batch: Of every iteration.
        loader: Called in every iteration; None if the batches are there already.
        costs: Of the tasks.
        num_rounds: 2 or more.
        state: As for ``TaskProfiler``.
        copy: As for ``TaskProfiler``.
    """
    unknown = unknown_beside(pipe.tasks)
    apart = with_the_others(declared_effects(pipe.tasks), unknown, apart=True, body=True)
    stays = staying(apart, costs)
    if not is_alone():  # times differ, and the ranks replay the same tasks
        stays = gather(stays)[0]
    pull: Kind = () if loader is None else (PULL,)
    free: Kind = (*pull, *(one.name for one in pipe.tasks if one.name not in stays))
    kinds = list(dict.fromkeys(kind for kind in (pull, free) if kind))
    pulls = None if loader is None else Pulls(loader)
    timer = WindowTimer(pipe, batch, copy, 1, 3, pipelined=False, pulls=pulls)
    saved = trial_state(pipe, batch, state, copy)
    rounds = Rounds(timer, Counts(1, 3, num_rounds), saved.restore_training)
    try:
        with saved.trial(), pipe.borrow():
            rounds.warm_up()
            rounds.measure(kinds, lambda: None, exact=True)
    finally:
        if pulls is not None:
            pulls.end()
    measured = Measured("headroom", timer, rounds, {}, {})
    failed = rounds.failed.get(free)
    return Headroom(
        step=measured.step,
        cached=measured.saved.get(pull),
        free=measured.saved.get(free),
        overlappable=free,
        stays=stays,
        note="" if failed is None else f"not measured: {str(failed).splitlines()[0]}",
    )


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
