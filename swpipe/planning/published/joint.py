"""Joint search: a beam over thread map x stream map x order of the period.

    round   each candidate in the beam
              |- with each thread preset                      (presets)
              |- with each home on each other stream          (its tasks move together)
              `- with each policy for ties, and each swap of two neighbours  (policies)
            each of these, once: lookaheads, and a score from the simulator
            of those alike in threads, streams and lookaheads: the best
            the best of what is left: the next beam
    until   so many rounds, or as many as patience without a better score

Lookaheads are not searched: they are what ``lookahead`` makes of threads, streams and
order. A score is the interval under the simulator; of equals, fewer threads are better, then fewer
iterations in flight. The search begins with the plan as given, and with its threads as in the
default preset; so what it returns is never worse than the plan given, nor than lookaheads alone
make of it, where that keeps to the limits.

Frozen tasks and the caller's own stay on the caller's thread, on their stream, and at the lookahead
that they have. No edge is dropped, and the tickets of a communicator stay in their order. The
search takes the plan's word for its dependences: whatever must keep its order is to be declared.
The same plan, costs and limits always give the same result.

Source: the joint search of the schedulable engine in NVIDIA's recsys-examples, made there for the
fourteen tasks of one model by name, with limits of 4 threads and 5 iterations in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.planning.limits import Limits
from swpipe.planning.published.candidates import GIVEN, Judged, Space
from swpipe.planning.published.queue_rules import interval_us


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the search.

    Attributes:
        number: From 1; 0 is what the search begins with.
        tried: Candidates that were given lookaheads and simulated.
        kept: How many of them were left after the dominated ones had gone.
        best_us: The shortest interval in this round; microseconds.
        so_far_us: The shortest until now, this round included; microseconds.
    """

    number: int
    tried: int
    kept: int
    best_us: float
    so_far_us: float


@dataclass(frozen=True, slots=True)
class JointSearch:
    """What the search found.

    Attributes:
        plan: The best plan.
        ii_us: Its interval under the simulator; microseconds.
        given_ii_us: The same for the plan as it was given.
        threads: Name of its thread preset, or "as given".
        rejected: Thread preset to how many threads it takes, where that is above the limit.
        history: The rounds, the first of them what the search began with.
        why: What was chosen, and why the search ended, in words.
    """

    plan: PipelinePlan
    ii_us: float
    given_ii_us: float
    threads: str
    rejected: Mapping[str, int]
    history: tuple[Round, ...]
    why: str


def joint_search(
    plan: PipelinePlan,
    costs: CostModel,
    *,
    limits: Limits | None = None,
    beam_width: int = 4,
    rounds: int = 8,
    patience: int = 2,
    streams: bool = True,
) -> JointSearch:
    """Search threads, streams and order together; lookaheads follow.

    Args:
        plan: Serial or pipelined; it needs no functions. Tasks that may run ahead name a stream, or
            a thread group other than the caller's.
        costs: What each of its tasks costs.
        limits: What to keep to; the default limits where left out.
        beam_width: How many candidates each round goes on from; 1 or more.
        rounds: How many rounds at most; with 0 only the beginnings are scored.
        patience: The search ends after so many rounds without a better score; 1 or more.
        streams: Plan for a device with streams; on a CPU all cost is host time, and no task is
            moved to another stream.

    Raises:
        PlanError: The plan cannot run, a task has no cost, a frozen task is unknown; or the limits
            admit no plan: the message says which limit, and the least that would do.
        ValueError: A number that is out of range.
    """
    _require_numbers(beam_width=(beam_width, 1), rounds=(rounds, 0), patience=(patience, 1))
    limits = limits or Limits()
    space = Space(plan, costs, limits, streams=streams)
    begun = space.judge(space.beginnings())
    beam = _best_first(begun)[:beam_width]
    best, without = beam[0], 0
    history = [Round(0, len(begun), len(begun), best.ii_us, best.ii_us)]
    ended = "all rounds were used"
    for number in range(1, rounds + 1):
        judged = space.judge(near for one in beam for near in space.neighbours(one))
        kept = prune(judged)
        if not kept:
            ended = "nothing was left to try"
            break
        beam = _best_first(kept)[:beam_width]
        without += 1
        if beam[0].score < best.score:
            best, without = beam[0], 0
        history.append(Round(number, len(judged), len(kept), beam[0].ii_us, best.ii_us))
        if without == patience:
            ended = "patience ran out"
            break
    given_us = interval_us(plan, costs, streams=streams)
    rejected = {
        name: count
        for name, count in space.threads_needed.items()
        if count > limits.threads and name != GIVEN
    }
    why = _why(best, given_us, history, ended)
    return JointSearch(
        best.plan, best.ii_us, given_us, best.candidate.threads, rejected, tuple(history), why
    )


def prune(judged: Iterable[Judged]) -> list[Judged]:
    """Drop the dominated: of those alike in threads, streams and lookaheads the best is kept."""
    best: dict[object, Judged] = {}
    for one in judged:
        if one.layout not in best or one.score < best[one.layout].score:
            best[one.layout] = one
    return list(best.values())


def _best_first(judged: Iterable[Judged]) -> list[Judged]:
    """By score; equals stay as they come, so that nothing depends on chance."""
    return sorted(judged, key=lambda one: one.score)


def _why(best: Judged, given_us: float, history: Iterable[Round], ended: str) -> str:
    _, threads, depth = best.score
    tried = sum(one.tried for one in history)
    return (
        f"{given_us:.0f} us become {best.ii_us:.0f} us; iterations in flight: {depth}; threads: "
        f"{threads} ({best.candidate.threads}); candidates tried: {tried}, until {ended}"
    )


def _require_numbers(**numbers: tuple[object, int]) -> None:
    for what, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{what} is {value!r}: give an integer of {least} or more")
