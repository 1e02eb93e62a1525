"""Candidates: plans that are tried, with their measurements; and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swpipe.core.costs import CostModel
from swpipe.core.messages import in_ms
from swpipe.core.plan import PipelinePlan
from swpipe.profiler.spread import mean_of

_TRUSTED = 0.1  # relative error of a prediction that is still trusted
_LOCKED = 0.9  # the lock limits if it is held for this fraction of the interval


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that is tried. All times are microseconds per iteration.

    Attributes:
        name: ``serial``, the name of a ready-made plan, or how the plan was made.
        plan: The plan.
        predicted_us: The prediction of the simulator.
        why: Sentences about the plan.
        rounds_us: The measured time in each round. All candidates run in each round.
    """

    name: str
    plan: PipelinePlan
    predicted_us: float
    why: tuple[str, ...] = ()
    rounds_us: tuple[float, ...] = ()

    @property
    def interval_us(self) -> float:
        """The median over the rounds."""
        return median(self.rounds_us)

    @property
    def spread_us(self) -> float:
        """Half the range over the rounds."""
        return (max(self.rounds_us) - min(self.rounds_us)) / 2


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first candidate, in order of simplicity, that the fastest does not clearly beat.

    Candidates are compared round by round, since a slow round is slow for all of them. Their
    spreads count too: in a few rounds, differences may agree by chance.
    """
    best = min(candidates, key=lambda each: each.interval_us)
    return next(each for each in candidates if each is best or not _beats(best, each))


def _beats(best: Candidate, other: Candidate) -> bool:
    """Return whether ``best`` is faster than ``other`` by more than the spread of the trial."""
    gain_us = other.interval_us - best.interval_us
    by_round = mean_of([b - a for a, b in zip(best.rounds_us, other.rounds_us, strict=True)])
    # Both tests must pass: the range over the rounds, and the interval of the differences.
    return gain_us > max(best.spread_us, other.spread_us) and by_round.is_clear


def explain(
    candidates: Sequence[Candidate], chosen: Candidate, alone: CostModel
) -> tuple[str, ...]:
    """Return why a candidate was chosen, what limits it, and whether to trust its prediction.

    ``alone`` has costs measured one task at a time: only these include the times of the lock.
    """
    best = min(candidates, key=lambda each: each.interval_us)
    # The serial plan is always the first candidate.
    serial = candidates[0]
    took_us = chosen.interval_us
    why = list(chosen.why)
    if chosen is serial:
        why.append("No plan is faster than the serial one by more than the spread of the trial.")
    else:
        gain = 1 - took_us / serial.interval_us
        why.append(f"It takes {gain:.1%} less time per iteration than the serial plan.")
        if chosen is not best:
            why.append(f"{best.name} is not faster by more than the spread, and less simple.")
    if abs(chosen.predicted_us - took_us) > max(chosen.spread_us, _TRUSTED * took_us):
        why.append(
            f"Do not trust the prediction: {in_ms(chosen.predicted_us)} predicted, "
            f"{in_ms(took_us)} measured."
        )
    # No thread can use the lock while a task holds it, so its times add up over all tasks.
    locked_us = {name: cost.gil_us for name, cost in alone.tasks.items()}
    held_us = sum(locked_us.values())
    if held_us > _LOCKED * took_us:
        most = max(locked_us, key=lambda name: locked_us[name])
        why.append(
            f"The interpreter lock limits the interval: tasks hold it for {in_ms(held_us)}, {most} "
            "the longest, and threads cannot share it; use processes (DataLoader workers)."
        )
    return tuple(why)
