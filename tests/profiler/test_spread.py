"""From visits to exposed times with 95% intervals."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from swpipe.profiler.rounds import visits
from swpipe.profiler.spread import (
    BASE,
    Estimate,
    Kind,
    between,
    differences_in,
    mean_of,
    mean_of_loop,
    ms,
    student_95,
    time_saved,
    within,
)


def test_students_distribution() -> None:
    """The values are those of its table."""
    for freedom, point in ((1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (1000, 1.962)):
        assert student_95(freedom) == pytest.approx(point, rel=0.005)


def test_more_rounds_make_the_interval_narrower() -> None:
    """It is the mean of four, with Student's factor for three degrees of freedom."""
    found = mean_of([1.0, 2.0, 3.0, 2.0])
    assert found.value_s == 2.0
    assert found.spread_s == pytest.approx(3.18 * math.sqrt(2 / 3) / 2)


def test_the_noise_of_others_shows_in_the_spread() -> None:
    """Three equal differences are no certainty if the other kinds are noisy."""
    found = time_saved({"quiet": [6.0, 6.0, 6.0], "noisy": [6.0, 9.0, 7.0]})
    assert found["quiet"].spread_s > 1.0
    assert found["quiet"].value_s == 6.0


def test_a_noisy_task_has_a_larger_spread() -> None:
    """Its own differences count in addition to those of the others."""
    steady = {f"steady {i}": [4.0, 4.1] * 4 for i in range(9)}
    found = time_saved({"noisy": [4.0, 1.0, 4.0, 7.0] * 2, **steady})
    assert found["noisy"].spread_s > 1.5 * found["steady 0"].spread_s


def noisy_machine(chance: random.Random) -> list[float]:
    """Return iterations of about 10 ms on a machine with drift, and some slow ones."""
    drift, times = 0.0, []
    for _ in range(600):
        drift += chance.gauss(0, 0.1) - 0.02 * drift
        slow = chance.expovariate(0.5) if chance.random() < 0.05 else 0.0
        times.append(10 + drift + chance.gauss(0, 0.3) + slow)
    return times


def test_a_task_that_costs_nothing_reads_zero_in_95_of_100_profiles() -> None:
    """Drift and outliers are present; it happens neither much less nor more often."""
    rounds = 4
    chance = random.Random(rounds)
    kinds: list[Kind] = [*"abcdefgh"]
    hits = []
    for _ in range(250):
        machine = iter(noisy_machine(chance))
        saved_s: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            order = visits(chance.sample(kinds, len(kinds)))
            measured = []
            for kind in order:
                _, *timed = (next(machine) for _ in range(5))
                measured.append((kind, timed[1:]))
            for kind, difference in differences_in(measured).items():
                saved_s[kind].append(difference)
        hits += [abs(of.value_s) <= of.spread_s for of in time_saved(saved_s).values()]
    assert 0.91 <= fmean(hits) <= 0.99


def test_visits_and_their_differences() -> None:
    """Every three visits are between two without a shortcut."""
    names: list[Kind] = [*"abcd"]
    order = visits(names)
    assert order == [BASE, "a", "b", "c", BASE, "d", BASE]
    times = [[10.0], [8.0], [8.0], [8.0], [14.0], [8.0, 6.0], [16.0]]
    found = differences_in(list(zip(order, times, strict=True)))
    assert found == {"a": 3.0, "b": 4.0, "c": 5.0, "d": 8.0}
    assert visits([]) == [BASE, BASE]


@pytest.mark.parametrize(
    ("saved_s", "replay_s", "value_s", "spread_s"),
    [(7.0, 3.0, 8.5, 1.6), (0.0, 3.0, 1.5, 1.6), (-2.0, 3.0, -0.5, 1.6)],
)
def test_the_time_of_a_replay_is_added(
    saved_s: float, replay_s: float, value_s: float, spread_s: float
) -> None:
    """Other work may hide it, or wait for it: the interval includes both."""
    found = between(Estimate(saved_s, 0.1), replay_s)
    assert (found.value_s, found.spread_s) == pytest.approx((value_s, spread_s))


def test_differences_of_batches_are_no_uncertainty() -> None:
    """The means of whole passes count; a loop with one pass has parts."""
    even = mean_of_loop([14.0, 34.0] * 30, cycle=2)
    assert even == Estimate(24.0, 0.0)
    noisy = mean_of_loop([14.0, 34.0, 15.0, 35.0] * 15, cycle=2)
    assert noisy.value_s == 24.5
    assert 0 < noisy.spread_s < 2.0
    grows = mean_of_loop([float(number) for number in range(60)], cycle=60)
    assert grows.value_s == 29.5
    assert grows.spread_s > 10.0


def test_an_interval_of_nothing_is_not_printed() -> None:
    """An interval that rounds to nothing is not printed either."""
    assert Estimate(0.012, 0.0).text == "12.0"
    assert Estimate(0.012, 0.0006).text == "12.0 ± 0.60"
    assert within(0.000001) == ""
    assert within(0.000001, ms) == " ± 0.001"
