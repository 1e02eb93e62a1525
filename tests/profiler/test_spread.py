"""From windows of samples to exposed times with error bars."""

from __future__ import annotations

import random

import pytest

from swpipe.profiler.spread import Column, Estimate, iteration_time, time_saved, with_replay


def windows(*means: float) -> Column:
    """A column of windows that have one sample each."""
    return Column([[mean] for mean in means])


def test_the_value_of_a_window_is_its_mean() -> None:
    """A slow iteration counts in full, and shows beside the median."""
    column = Column([[10.0, 10.0, 100.0], [10.0, 10.0, 10.0]])
    assert iteration_time(column).value_s == 25.0
    assert column.median_s == 10.0


def test_exposed_time_is_baseline_minus_the_tasks_column() -> None:
    """Negative if iterations with the shortcut are longer."""
    found = time_saved(windows(10, 10, 10), {"read": windows(6, 6, 6), "nop": windows(11, 11, 11)})
    assert found == {"read": Estimate(4.0, 0.0), "nop": Estimate(-1.0, 0.0)}


def test_a_shift_of_a_whole_round_cancels_out() -> None:
    """A round at half speed changes neither value nor spread."""
    found = time_saved(windows(10, 15, 10), {"read": windows(6, 11, 6)})
    assert found["read"] == Estimate(pytest.approx(4.0), pytest.approx(0.0, abs=1e-9))


def test_noise_of_other_columns_shows_in_the_spread() -> None:
    """Three equal windows do not mean certainty if the other columns are noisy."""
    quiet, noisy = windows(6, 6, 6), windows(6, 9, 7)
    found = time_saved(windows(10, 10, 10), {"quiet": quiet, "noisy": noisy})
    assert found["quiet"].spread_s > 1.0


def test_a_noisy_task_has_a_larger_spread() -> None:
    """Its own differences count in addition to the noise of all columns."""
    steady = {f"steady {i}": windows(*[6.0] * 9) for i in range(9)}
    noisy = windows(6, 9, 6, 3, 6, 9, 6, 3, 6)
    found = time_saved(windows(*[10.0] * 9), {"noisy": noisy, **steady})
    assert found["noisy"].spread_s > 2 * found["steady 0"].spread_s


def test_one_round_has_a_spread_from_its_samples() -> None:
    """With one window per task, the error comes from the samples within the windows."""
    column = Column([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert time_saved(column, {"read": column})["read"].spread_s > 1.0
    assert iteration_time(column).spread_s > 1.0


def test_samples_that_share_iterations_count_less() -> None:
    """Overlapping samples are not treated as independent."""
    samples = [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert Column(samples, overlap=4).error_s == pytest.approx(2 * Column(samples).error_s)


@pytest.mark.parametrize(("rounds", "tasks"), [(2, 2), (3, 5), (5, 1)])
def test_a_task_that_costs_nothing_reads_zero_within_its_spread(rounds: int, tasks: int) -> None:
    """Under noise with outliers, drift and skewed windows, in nearly all cases."""
    chance = random.Random(rounds)

    def window(at: float) -> list[float]:
        lean = chance.gauss(0, 0.03)
        return [
            at + lean + chance.gauss(0, 0.1) + (chance.random() < 0.1) * chance.expovariate(0.5)
            for _ in range(10)
        ]

    missed = 0
    for _ in range(200):
        columns: dict[str, list[list[float]]] = {str(i): [] for i in range(tasks + 1)}
        for number in range(rounds):
            drift = 10 + 0.3 * number + chance.gauss(0, 0.3)
            for column in columns.values():
                column.append(window(drift))
        baseline, *others = [Column(rows) for rows in columns.values()]
        found = time_saved(baseline, {str(i): column for i, column in enumerate(others)})
        missed += sum(max(0.0, value) > spread for value, spread in found.values())
    assert missed <= 0.01 * 200 * tasks


@pytest.mark.parametrize(
    ("saved_s", "host_s", "replay_s", "alone", "value_s", "spread_s"),
    [
        (7.0, 10.0, 3.0, True, 10.0, 0.1),
        (-9.3, 1.0, 9.9, True, 0.6, 0.1),  # 2,000 rows that take longer to replay than to read
        (7.0, 10.0, 3.0, False, 8.5, 1.6),  # the rest of the task may be hidden, or not
        (3.5, 10.0, 3.0, False, 4.25, 0.85),
        (0.0, 10.0, 3.0, False, 0.0, 0.1),
        (-0.5, 10.0, 3.0, False, -0.5, 0.1),
        (8.0, 10.0, 3.0, False, 9.5, 1.6),
        (-2.0, 1.0, 3.0, False, -0.5, 1.6),
    ],
)
def test_the_time_of_a_replay_is_added(
    saved_s: float, host_s: float, replay_s: float, alone: bool, value_s: float, spread_s: float
) -> None:
    """As much of it as can be exposed; where that is not known, the error bar says so."""
    found = with_replay(Estimate(saved_s, 0.1), host_s, replay_s, alone=alone)
    assert found == Estimate(pytest.approx(value_s), pytest.approx(spread_s))
