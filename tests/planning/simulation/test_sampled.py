"""Plans over sampled iterations: alternating times, tasks slow together, and bursts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swpipe import PipelinePlan, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.planning import simulate
from swpipe.planning.simulation.interval import interval_us


def plan(depth: int, **changes: TaskSchedule) -> PipelinePlan:
    """Return a plan that reads ahead of training, on a separate thread."""
    schedule = {"read": TaskSchedule(thread_group="io"), "train": TaskSchedule(stage=1)}
    return PipelinePlan(
        {**schedule, **changes},
        deps=[("train", "read")],
        cross_iter_deps=[("train", "train")],
        pipeline_depth=depth,
    )


def costs(read: tuple[float, ...], train: tuple[float, ...], **more: float) -> CostModel:
    """Return means and tables of costs."""
    each = {"read": read, "train": train}
    return CostModel(
        {n: TaskCost(sum(us) / len(us), host_each_us=us, **more) for n, us in each.items()}
    )


def by_hand_us(read: tuple[float, ...], train: tuple[float, ...], depth: int) -> float:
    """Return the interval of two threads, of which reading is at most ``depth`` - 1 ahead."""
    done = [0.0, 0.0]
    ends: list[float] = []
    for i in range(40 * len(read)):
        begin = max(done[0], ends[i - depth] if i >= depth else 0.0)
        done[0] = begin + read[i % len(read)]
        done[1] = max(done[1], done[0]) + train[i % len(read)]
        ends.append(done[1])
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


TABLES = {
    "two kinds": ((2.0, 22.0), (12.0, 12.0)),
    "in turns": ((20.0, 0.0), (0.0, 20.0)),
    "slow together": ((20.0, 0.0), (20.0, 0.0)),
    "bursts": ((*[27.0] * 5, *[1.0] * 15), (6.0,) * 20),
}


@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("name", TABLES)
def test_an_interval_is_that_of_the_sampled_iterations(name: str, depth: int) -> None:
    """It equals a manual calculation; what is slow in one iteration is slow together."""
    read, train = TABLES[name]
    found = simulate(plan(depth), costs(read, train), streams=False)
    assert found.ii_us == pytest.approx(by_hand_us(read, train, depth))


def test_planners_search_by_the_means() -> None:
    """A table does not change their comparison; the simulator judges the result."""
    alternating = costs((2.0, 22.0), (12.0, 12.0))
    assert interval_us(plan(2), alternating, streams=False) == pytest.approx(12.0)
    assert simulate(plan(2), alternating, streams=False).ii_us == pytest.approx(17.0)
    assert "iterations that differ" in simulate(plan(2), alternating, streams=False).limit


def test_the_interpreter_lock_is_held_for_the_same_part_of_each_run() -> None:
    """If it is held all the time, two threads are no faster than one."""
    held = costs((2.0, 22.0), (22.0, 2.0), gil_us=12.0)
    assert simulate(plan(3), held, streams=False).ii_us == pytest.approx(24.0)
    # A short run frees it as early.
    reads = [span for span in simulate(plan(3), held, streams=False).spans if span.task == "read"]
    assert [span.start_ns for span in reads[:2]] == [0, 2_000]
    free = costs((2.0, 22.0), (22.0, 2.0))
    assert simulate(plan(3), free, streams=False).ii_us < 18.0


def test_device_work_has_a_table_of_its_own() -> None:
    """A stream is busy for 4 and for 20 alternately."""
    model = costs((1.0, 1.0), (1.0, 1.0))
    train = replace(model.tasks["train"], device_us=12.0, device_each_us=(4.0, 20.0))
    model = replace(model, tasks={**model.tasks, "train": train})
    assert simulate(plan(3), model).ii_us == pytest.approx(12.0)
    assert simulate(plan(3), model, streams=False).ii_us == pytest.approx(13.0)


def test_a_timeline_shows_iterations_as_they_differ() -> None:
    """They follow each other, and repeat."""
    spans = simulate(plan(2), costs((2.0, 22.0), (12.0, 12.0)), streams=False).spans
    reads = [span.duration_ns for span in spans if span.task == "read"]
    assert reads[:4] == [2_000, 22_000, 2_000, 22_000]
