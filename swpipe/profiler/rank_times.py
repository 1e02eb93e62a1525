"""Times on several ranks: the median, the worst, and which rank waits for which.

    rank 0    copy | exchange ............ ====    waits in the exchange
    rank 1    copy ------------ | exchange ====    is waited for: its copy takes longer

Iterations take about the same time on all ranks, since ranks meet in collectives. A task is
shortcut on all ranks at the same time. Suppose that the task takes longer on one rank than on
another, and that without it the other rank spends less time in a collective. Then the other rank
waits in that collective, and the task is the reason. A collective is no reason: it takes long on a
rank that waits in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from swpipe.core.messages import listed
from swpipe.core.tables import table, wrapped
from swpipe.profiler.figures import RankTimes
from swpipe.profiler.spread import Estimate, ms, short_ms

_LEAST = 0.02
"""The smallest difference of ranks that is reported, as a fraction of an iteration."""


@dataclass(frozen=True, slots=True)
class RankWait:
    """A wait of one rank for another; seconds per iteration.

    Attributes:
        rank: The rank that waits.
        waits_for: The rank that arrives last.
        waited: How long ``rank`` waits, with its interval.
        waits_in: Collective to how long ``rank`` waits in it.
        longer_there: Task to how much longer it takes on the rank ``waits_for``.
    """

    rank: int
    waits_for: int
    waited: Estimate
    waits_in: Mapping[str, float]
    longer_there: Mapping[str, float]

    @property
    def text(self) -> str:
        """A sentence about the wait, without its full stop."""
        waits, longer = (
            listed([f"{name} {ms(s)}" for name, s in of.items()], 4)
            for of in (self.waits_in, self.longer_there)
        )
        return (
            f"Rank {self.rank} waits for rank {self.waits_for}: {self.waited.exact} ms per "
            f"iteration, in {waits}; "
            f"rank {self.waits_for} takes longer in {longer}"
        )


def rank_waits(ranks: Sequence[RankTimes], collectives: Sequence[str]) -> tuple[RankWait, ...]:
    """Return which ranks wait for which other rank, and because of which task, longest first."""
    if len(ranks) < 2:
        return ()
    least_s = _LEAST * median(of.baseline_s for of in ranks)
    # Only a task that all ranks measured can be compared between ranks.
    reasons = [
        name
        for name in ranks[0].tasks
        if name not in collectives and all(of.exposed(name) for of in ranks)
    ]
    each = (_wait(of, name, ranks, collectives) for name in reasons for of in ranks)
    # Shorter differences may be noise of the measurement.
    waits = [w for w in each if w.waited.is_clear and w.waited.value_s > least_s]
    return tuple(sorted(waits, key=lambda wait: -wait.waited.value_s))


def _wait(
    here: RankTimes, name: str, ranks: Sequence[RankTimes], collectives: Sequence[str]
) -> RankWait:
    """Return how long a rank waits because a task takes longer on another rank."""
    own = here.tasks[name].thread
    last = max(ranks, key=lambda of: of.tasks[name].thread.host_s)
    there = last.tasks[name].thread
    longer_s = there.host_s - own.host_s
    # The wait is limited by both: how much longer the task takes there, and how much less time this
    # rank spends in collectives without the task.
    less_s = {n: s for n, s in here.tasks[name].in_others_s.items() if n in collectives}
    all_s = sum(less_s.values())
    seconds = min(longer_s, all_s)
    part = seconds / all_s if all_s else 0.0
    spread_s = math.hypot(own.host.spread_s, there.host.spread_s)
    return RankWait(
        rank=here.rank,
        waits_for=last.rank,
        waited=Estimate(seconds, spread_s),
        waits_in={other: part * s for other, s in less_s.items()},
        longer_there={name: longer_s},
    )


class RankEnds(NamedTuple):
    """A time over the ranks: its median, and its largest value with the number of its rank."""

    median_s: float
    worst: Estimate
    rank: int

    @classmethod
    def of(cls, times: Sequence[Estimate]) -> RankEnds:
        """Return the median and the worst of the times of all ranks, in their order."""
        worst = max(range(len(times)), key=lambda rank: times[rank].value_s)
        return cls(median(each.value_s for each in times), times[worst], worst)


def step_ends(ranks: Sequence[RankTimes]) -> RankEnds:
    """Return the median and the worst time of an iteration over the ranks."""
    return RankEnds.of([of.step for of in ranks])


def host_ends(ranks: Sequence[RankTimes]) -> dict[str, RankEnds]:
    """Return for each task its median and worst host time over the ranks."""
    return {
        name: RankEnds.of([of.tasks[name].thread.host for of in ranks]) for name in ranks[0].tasks
    }


def waited_for(ranks: Sequence[RankTimes], waits: Sequence[RankWait]) -> int:
    """Return the rank of the longest wait, or the one with the longest iterations if none waits."""
    return waits[0].waits_for if waits else step_ends(ranks).rank


def rank_lines(ranks: Sequence[RankTimes], waits: Sequence[RankWait]) -> Iterator[str]:
    """Yield a table of the iteration and all tasks over the ranks, then a line for each wait."""
    # An iteration has no host time of its own, so these columns stay empty in its row.
    rows = [("iteration", *_cells(step_ends(ranks)), "", "", "")]
    for name, host in host_ends(ranks).items():
        times = [time for of in ranks if (time := of.exposed(name)) is not None]
        # A task that failed or was left out on some rank has no exposed time to compare.
        exposed = _cells(RankEnds.of(times)) if len(times) == len(ranks) else ("", "", "")
        rows.append((name, *exposed, *_cells(host)))
    titles = [f"{len(ranks)} ranks, ms"]
    for what in ("exposed", "host"):
        titles += [f"{what}\nmedian", "\nworst", "\non"]
    yield table(titles, rows)
    yield from (wrapped(wait.text) for wait in waits)
    if not waits:
        yield "no rank waits for another by more than the measurement's error"


def _cells(ends: RankEnds) -> tuple[str, str, str]:
    return short_ms(max(0.0, ends.median_s)), ends.worst.text, str(ends.rank)
