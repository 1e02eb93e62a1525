"""The batches that are measured, the length of visits, and the text about both."""

from __future__ import annotations

from itertools import pairwise

import pytest

from swpipe import (
    IterContext,
    PipelinePlan,
    PipelineTask,
    SWPipeline,
    TaskProfiler,
    TaskSchedule,
)
from swpipe.pipeline import borrowed
from swpipe.profiler import profiler
from swpipe.profiler.measure import WindowTimer
from swpipe.profiler.rounds import Counts
from swpipe.profiler.sampling import MOST, Sample, pattern_of, visit_length
from tests.support.virtual_clock import TimedHost


def test_a_list_is_sampled_in_blocks_from_its_beginning_to_its_end() -> None:
    """Each is long enough for what comes every tenth time; a shorter list is used as it is."""
    assert [*Sample.of(range(MOST))] == [*range(MOST)]
    sample = Sample.of(range(5_000))
    assert (len(sample), sample.given) == (MOST, 5_000)
    assert (sample[0], sample[-1]) == (0, 4_999)
    assert [*sample] == sorted(sample)
    assert sum(late - early == 1 for early, late in pairwise(sample)) == 236
    assert Sample.of(sample) is sample
    assert Sample.of(sample, 40).given == 5_000


def test_what_was_not_seen_is_said() -> None:
    """This concerns an iterator that continues, a long list, and a single batch."""
    endless = Sample.of(iter(range(10**6)))
    assert (len(endless), endless.given) == (MOST, 0)
    assert "nothing is known of later ones" in endless.coverage(50)
    assert Sample.of(iter("abc")).given == 3
    assert Sample.of("abc").coverage(9) == "All 3 batches were seen, in 9 iterations."
    assert Sample.of(range(5_000)).coverage(200).startswith("200 of 5000 batches were seen")
    assert Sample.of([1]).coverage(8).startswith("One batch was given, and seen in 8 iterations")
    with pytest.raises(ValueError, match="batches is empty: give at least one batch"):
        Sample.of([])


def test_sections_are_batches_in_a_row_from_all_over_the_sample() -> None:
    """No section has the batches of another one, for any number of visits."""
    sample = Sample.of(range(100))
    sections = [sample.section(turn, 5) for turn in range(6)]
    for section in sections:
        assert [(b - section[0]) % 100 for b in section] == [0, 1, 2, 3, 4]
    starts = sorted(section[0] for section in sections)
    assert starts[-1] - starts[0] > 60
    assert min(b - a for a, b in pairwise(starts)) > 5
    assert sample.section(3, 200) == [*range(100)]
    assert sample.dividing(48) == 48
    assert Sample.of(range(40)).dividing(48) == 24


def test_a_passage_has_whole_passes_where_they_fit() -> None:
    """They are passes of the loader, if it has a length."""
    sample = Sample.of(range(40))
    assert [sample.iterations(most) for most in (240, 100, 30)] == [240, 80, 30]
    assert [sample.iterations(most, 48) for most in (240, 100, 30)] == [240, 96, 30]


def test_a_visit_is_as_long_as_the_loop_needs() -> None:
    """The means of the step and of each task do not depend on the place then."""
    assert visit_length([5.0] * 60, [], 30) == 1
    assert visit_length([14.0, 34.0] * 30, [], 30) == 2
    assert visit_length([*[10.0] * 9, 70.0] * 6, [], 30) == 10
    assert visit_length([20.0] * 60, [[20.0, 0.0] * 30, [0.0, 20.0] * 30], 30) == 2
    assert visit_length([float(k) for k in range(60)], [], 7) == 7  # it never is


def test_how_iterations_differ_is_said() -> None:
    """It has the median, the 95th percentile, and what comes every so many steps."""
    assert pattern_of([5.0] * 40) == ""
    text = pattern_of([*[0.010] * 9, 0.080] * 4)
    assert text == "median 10.0 ms, 95th percentile 80.0 ms; one in 10 takes 70.0 ms more"
    assert pattern_of([0.010, 0.010, 0.080] * 12).endswith("one in 3 takes 70.0 ms more")


TAKES_MS = {"augment": (20, 0, 8), "train": (1, 30, 5)}


@pytest.fixture
def uneven(host: TimedHost) -> list[PipelineTask]:
    """Two tasks; the second one's time depends on the first one's result."""

    def augment(ctx: IterContext) -> None:
        host.sleep(TAKES_MS["augment"][ctx.batch] / 1e3)
        ctx.kind = ctx.batch

    def train(ctx: IterContext) -> None:
        host.sleep(TAKES_MS["train"][ctx.kind] / 1e3)

    return [PipelineTask("augment", augment), PipelineTask("train", train)]


def test_the_result_of_many_batches_is_of_the_loop_and_of_each(
    host: TimedHost, uneven: list[PipelineTask]
) -> None:
    """A replay leaves the task's result for the current batch: others take their usual time."""
    with SWPipeline(PipelinePlan.serial(uneven), uneven, device="cpu") as pipe:
        results = TaskProfiler(pipe).profile_many(range(3), 1, 3, 2)
    loop = results.loop
    assert loop is not None
    assert loop.baseline_s == pytest.approx(64e-3 / 3)
    assert loop.exposed_s == pytest.approx({"augment": 28e-3 / 3, "train": 12e-3})
    assert all(task.in_others_s == {} for task in loop.tasks.values())
    for batch, result in enumerate(results):
        of = {name: ms[batch] / 1e3 for name, ms in TAKES_MS.items()}
        assert result.exposed_s == pytest.approx(of, abs=1e-9)
        assert result.baseline_s == pytest.approx(sum(of.values()))
        assert result.advice == loop.advice
    text = results.format_report()
    assert text.index("loop, serial") < text.index("batch 0, serial")
    read = type(results).from_json(results.to_json())
    assert (read, read.loop) == (results, loop)


def test_what_comes_every_tenth_time_is_not_laid_to_other_tasks(host: TimedHost) -> None:
    """Saves of 50 ms fall into some visits and not into others."""
    tasks = [
        PipelineTask("read", lambda ctx: host.sleep(3e-3), pure=True),
        PipelineTask("save", lambda ctx: host.sleep(50e-3 * (ctx.iter_idx % 10 == 9))),
    ]
    with SWPipeline(PipelinePlan.serial(tasks), tasks, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile_loop(range(7), num_rounds=2)
    assert result.exposed_s == pytest.approx({"read": 3e-3, "save": 5e-3}, rel=0.05)
    assert result.exposures["read"].spread_s < 0.1e-3
    assert result.baseline_s == pytest.approx(8e-3, rel=0.02)
    assert result.measurement.coverage.startswith("All 7 batches were seen, in ")
    steps_s = result.iteration.each_s
    assert len(result.tasks["save"].thread.each_s) == len(steps_s)
    assert result.costs.iterations == len(steps_s)


def test_a_loop_is_profiled_under_a_plan_over_all_its_batches(
    host: TimedHost, uneven: list[PipelineTask]
) -> None:
    """The next batch is augmented during training: what is left is what neither hides."""
    plan = PipelinePlan(
        {"augment": TaskSchedule(thread_group="io"), "train": TaskSchedule(stage=1)},
        deps=[("train", "augment")],
        cross_iter_deps=[("train", "train")],
    )
    with SWPipeline(plan, uneven, device="cpu") as pipe:
        result = TaskProfiler(pipe).profile_loop(range(3), num_rounds=3, pipelined=True)
        seen = [host.perf_counter() for _ in pipe.iterate(list(range(3)) * 40)]
    assert result.baseline_s == pytest.approx((seen[99] - seen[39]) / 60, rel=0.01)
    assert result.exposed_s["augment"] == pytest.approx(result.baseline_s - 12e-3, rel=0.02)


def test_a_profile_of_a_loop_has_as_many_rounds_as_fit(
    host: TimedHost, uneven: list[PipelineTask]
) -> None:
    """They fit into the given time, after the iterations in their order."""
    with SWPipeline(PipelinePlan.serial(uneven), uneven, device="cpu") as pipe:
        begin_s = host.perf_counter()
        result = TaskProfiler(pipe).profile_loop(range(3), num_rounds=None, seconds=20.0)
    assert 15.0 < host.perf_counter() - begin_s < 22.0
    assert result.measurement.num_rounds > 5


def test_all_ranks_make_visits_of_one_length(
    uneven: list[PipelineTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the longest that any of them needs: here another rank needs all four batches."""

    def gathered(own: float) -> list[float]:
        return [own, 4 if isinstance(own, int) else own]

    monkeypatch.setattr(profiler, "is_alone", lambda: False)
    monkeypatch.setattr(profiler, "gather", gathered)
    sample = Sample.of([0, 1, 0, 1])
    with SWPipeline(PipelinePlan.serial(uneven), uneven, device="cpu") as pipe, borrowed(pipe):
        timer = WindowTimer(pipe, sample, None, 1, 1, pipelined=False)
        _, counts, section = TaskProfiler(pipe)._passage(timer, sample, Counts(1, 1), 3)
    assert (counts.num_measure, section) == (4, 4)
