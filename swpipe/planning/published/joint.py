"""Joint search: beam search over threads, streams and the order of the period.

    round   each candidate in the beam
              |- with each thread preset                      (presets)
              |- with each bundle on each other stream        (its tasks move together)
              `- with each policy, and each swap of two neighbours  (policies)
            evaluate each new one: assign lookaheads, simulate
            keep the best of those with the same threads, streams and lookaheads
            the best of these are the next beam
    until   the number of rounds is reached, or ``patience`` rounds bring no better score

Lookaheads are not searched, but assigned by ``lookahead``. A score is the simulated interval; among
equals, fewer threads are better, then fewer iterations in flight. The search starts from the given
plan and from the default preset's threads, so the result is never worse than the given plan, nor
than ``assign_lookaheads`` of it, if these are within the limits.

Frozen tasks and the caller's tasks keep thread, stream and lookahead. No edge is dropped, and
communicators keep their order. The plan must declare all dependences. The search is deterministic.

Source: the joint search of the schedulable engine in NVIDIA's recsys-examples, made there for the
fourteen tasks of one model by name, with limits of 4 threads and 5 iterations in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swpipe.core.costs import CostModel
from swpipe.core.plan import PipelinePlan
from swpipe.planning.limits import Limits
from swpipe.planning.published.candidates import GIVEN, Evaluated, SearchSpace
from swpipe.planning.simulation.interval import interval_us


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the search.

    Attributes:
        number: From 1; 0 is the start of the search.
        tried: Number of candidates evaluated.
        kept: How many of them were not dominated.
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
    """The result of the joint search.

    Attributes:
        plan: The best plan.
        ii_us: Its simulated interval; microseconds.
        given_ii_us: The simulated interval of the given plan; microseconds.
        threads: Name of its thread preset, or "as given".
        rejected: Thread preset to its number of threads, for those above the limit.
        history: The rounds, from round 0.
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
    """Search threads, streams and order together, and assign lookaheads.

    Args:
        plan: Serial or pipelined; it may name tasks without functions. Tasks that may run ahead
            have a stream or a thread group other than the caller's.
        costs: A cost for each of its tasks.
        limits: The planner's limits; by default ``Limits()``.
        beam_width: How many candidates each round continues from; 1 or more.
        rounds: The most rounds; with 0 only the initial candidates are evaluated.
        patience: The search ends after so many rounds without a better score; 1 or more.
        streams: Plan for a device with streams; on a CPU all cost is host time, and no task is
            moved to another stream.

    Raises:
        PlanError: The plan cannot run, a task has no cost, a frozen task is unknown; or the limits
            allow no plan: the message names the limit and the least value that would do.
        ValueError: A number that is out of range.
    """
    _require_numbers(beam_width=(beam_width, 1), rounds=(rounds, 0), patience=(patience, 1))
    limits = limits or Limits()
    space = SearchSpace(plan, costs, limits, streams=streams)
    initial = space.evaluate(space.initial())
    beam = _best_first(initial)[:beam_width]
    best, without = beam[0], 0
    history = [Round(0, len(initial), len(initial), best.ii_us, best.ii_us)]
    ended = "all rounds were used"
    for number in range(1, rounds + 1):
        evaluated = space.evaluate(near for one in beam for near in space.neighbours(one))
        kept = prune(evaluated)
        if not kept:
            ended = "nothing was left to try"
            break
        beam = _best_first(kept)[:beam_width]
        without += 1
        if beam[0].score < best.score:
            best, without = beam[0], 0
        history.append(Round(number, len(evaluated), len(kept), beam[0].ii_us, best.ii_us))
        if without == patience:
            ended = "patience ran out"
            break
    given_us = interval_us(plan, costs, streams=streams)
    rejected = {
        name: count
        for name, count in space.threads_needed.items()
        if count > limits.threads and name != GIVEN
    }
    threads = best.candidate.threads
    tried = sum(one.tried for one in history)
    why = (
        f"{given_us:.0f} us become {best.ii_us:.0f} us; iterations in flight: {best.plan.depth}; "
        f"threads: {len(best.plan.thread_groups)} ({threads}); candidates tried: {tried}, until "
        f"{ended}"
    )
    return JointSearch(best.plan, best.ii_us, given_us, threads, rejected, tuple(history), why)


def prune(evaluated: Iterable[Evaluated]) -> list[Evaluated]:
    """Keep the best of those with the same threads, streams and lookaheads."""
    best: dict[object, Evaluated] = {}
    for one in evaluated:
        if one.layout not in best or one.score < best[one.layout].score:
            best[one.layout] = one
    return list(best.values())


def _best_first(evaluated: Iterable[Evaluated]) -> list[Evaluated]:
    """By score; the sort is stable, so that the search is deterministic."""
    return sorted(evaluated, key=lambda one: one.score)


def _require_numbers(**numbers: tuple[object, int]) -> None:
    for what, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{what} is {value!r}: give an integer of {least} or more")
