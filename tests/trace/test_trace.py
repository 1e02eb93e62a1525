"""A trace contains everything that ran within its block once, and summarizes it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swpipe import IterContext, PipelinePlan, SWPipeline
from swpipe.core.resolved import resolve_plan
from swpipe.device import CpuDevice
from swpipe.program import Instruction, compile_plan
from swpipe.trace import Trace
from swpipe.trace.perfetto import Arrow
from swpipe.trace.recorder import Recorder
from swpipe.trace.span import Row, Span
from tests.support.budget import examples
from tests.support.plans_for_tests import NAMES, piped, spread, task, tasks
from tests.support.sequencer import await_event

MS = 1_000_000
OWN = ("<admit>", "<pull>", "<retire>")
IO = Row("thread", "io")
DEFAULT = Row("thread", "default")


def turns(trace: Trace) -> Counter[tuple[str, int]]:
    """Return how often each task ran on each iteration."""
    return Counter((span.task, span.iteration) for span in trace.spans)


def once_each(names: tuple[str, ...], iterations: range) -> Counter[tuple[str, int]]:
    """Return every task once on every iteration."""
    return Counter((name, i) for name in names for i in iterations)


def test_every_task_of_every_iteration_is_recorded_once() -> None:
    """It is on its thread group, one after the other, in the order of the dependences.

    The pull that finds the end of the data does not count.
    """
    with SWPipeline(spread(), tasks(), device="cpu") as pipe, pipe.trace() as trace:
        pipe.run(range(10))
    assert turns(trace) == once_each((*OWN, *NAMES), range(10))
    groups = {span.task: span.row for span in trace.spans}
    assert groups == {
        **dict.fromkeys((*OWN, "forward", "backward"), DEFAULT),
        "h2d": IO,
        "dist": Row("thread", "dist"),
        "step": Row("thread", "late"),
    }
    for row in {span.row for span in trace.spans}:
        spans = [span for span in trace.spans if span.row == row]
        for sooner, later in pairwise(spans):
            assert 0 <= sooner.start_ns <= sooner.end_ns <= later.start_ns - later.wait_ns
    span_of = {(span.task, span.iteration): span for span in trace.spans}
    for i in range(10):
        for producer, consumer in pairwise(("<admit>", "<pull>", *NAMES, "<retire>")):
            assert span_of[producer, i].end_ns <= span_of[consumer, i].start_ns


@pytest.fixture
def arrival(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when the recorded lane reaches forward of iteration 1."""
    arrived = threading.Event()
    arrive = Recorder.arrive

    def tell(self: Recorder, ins: Instruction, iteration: int) -> None:
        arrive(self, ins, iteration)
        if (ins.task, iteration) == ("forward", 1):
            arrived.set()

    monkeypatch.setattr(Recorder, "arrive", tell)
    return arrived


def test_waiting_for_another_thread_is_recorded(arrival: threading.Event) -> None:
    """The wait begins before the other task ends, and ends after it."""

    def until_the_caller_waits(ctx: IterContext) -> None:
        if ctx.iter_idx == 1:
            await_event(arrival, "the caller's arrival at forward of iteration 1")

    with (
        SWPipeline(spread(), tasks(dist=until_the_caller_waits), device="cpu") as pipe,
        pipe.trace() as trace,
    ):
        pipe.run(range(3))
    span_of = {(span.task, span.iteration): span for span in trace.spans}
    forward, dist = span_of["forward", 1], span_of["dist", 1]
    assert forward.start_ns - forward.wait_ns <= dist.end_ns <= forward.start_ns


def test_a_wait_that_a_failure_ends_is_not_added_to_a_later_one(arrival: threading.Event) -> None:
    """A serial run of the same task and number has not waited since then."""

    def fail_when_the_caller_waits(ctx: IterContext) -> None:
        if ctx.batch == "bad":
            await_event(arrival, "the caller's arrival at forward of iteration 1")
            raise LookupError("planted")

    with (
        SWPipeline(spread(), tasks(dist=fail_when_the_caller_waits), device="cpu") as pipe,
        pipe.trace() as trace,
    ):
        with pytest.raises(LookupError):
            pipe.run(["good", "bad", "good", "good"])
        pipe.run_one_serial_iter("good", iter_idx=1)
    *_, h2d, dist, forward, _, _ = trace.spans
    assert [span.task for span in (h2d, dist, forward)] == ["h2d", "dist", "forward"]
    assert dist.end_ns <= forward.start_ns - forward.wait_ns


def test_nothing_is_recorded_outside_the_block() -> None:
    """Iterations before and after it are not in the trace, nor does it change any more."""
    with SWPipeline(PipelinePlan.serial(NAMES), tasks(), device="cpu") as pipe:
        pipe.run(range(2))
        with pipe.trace() as trace:
            pipe.run(range(3))
            assert trace.spans == ()
        spans = trace.spans
        pipe.run(range(2))
    assert {span.iteration for span in spans} == {2, 3, 4}
    assert trace.spans is spans


def test_a_block_in_the_middle_of_a_run_is_recorded_as_far_as_it_goes() -> None:
    """Iterations in flight at either end are included in part; those between are complete."""
    with SWPipeline(piped(), tasks(), device="cpu") as pipe:
        batches = iter(range(20))
        for _ in range(3):
            pipe.progress(batches)
        with pipe.trace() as trace:
            for _ in range(9):
                pipe.progress(batches)
        for _ in range(3):
            pipe.progress(batches)
    seen = turns(trace)
    assert max(seen.values()) == 1
    retired = [span.iteration for span in trace.spans if span.task == "<retire>"]
    assert retired == list(range(3, 12))
    assert all(seen[name, i] for name in NAMES for i in range(6, 11))
    assert all(span.wait_ns >= 0 for span in trace.spans)


def test_a_failure_leaves_what_ran_until_then() -> None:
    """The task that raised is included; the error is the task's own."""

    def fail(ctx: IterContext) -> None:
        if ctx.iter_idx == 1:
            raise LookupError("planted")

    with SWPipeline(PipelinePlan.serial(NAMES), tasks(forward=fail), device="cpu") as pipe:
        with pytest.raises(LookupError, match="planted"), pipe.trace() as trace:
            pipe.run(range(3))
        assert turns(trace) == Counter(
            [
                *((name, 0) for name in (*OWN, *NAMES)),
                *((name, 1) for name in ("<admit>", "<pull>", "h2d", "dist", "forward")),
            ]
        )
        with pipe.trace() as trace:
            pipe.run(range(1))
    assert turns(trace) == once_each((*OWN, *NAMES), range(2, 3))


def test_serial_runs_are_recorded() -> None:
    """All tasks are on the caller's thread, in any plan; a failing task, too."""

    def fail(ctx: IterContext) -> None:
        if ctx.batch == "bad":
            raise LookupError("planted")

    with SWPipeline(spread(), tasks(step=fail), device="cpu") as pipe:
        with pytest.raises(LookupError), pipe.trace() as trace:
            pipe.run_serial(["good", "bad"])
    assert turns(trace) == once_each(NAMES, range(2))
    assert {span.row for span in trace.spans} == {DEFAULT}
    assert [span.task for span in trace.spans] == [*NAMES, *NAMES]


def test_two_traces_at_the_same_time_record_the_same_tasks() -> None:
    """The inner one has the iterations of its block, the outer one all of them."""
    with SWPipeline(PipelinePlan.serial(["a"]), [task("a")], device="cpu") as pipe:
        with pipe.trace() as outer:
            pipe.run(range(1))
            with pipe.trace() as inner:
                pipe.run(range(1))
        with pipe.trace() as later:
            pass
    assert turns(outer) == once_each((*OWN, "a"), range(2))
    assert turns(inner) == once_each((*OWN, "a"), range(1, 2))
    assert later.spans == ()


def test_a_trace_knows_which_task_needs_which() -> None:
    """Its arrows are the plan's dependences."""
    plan = replace(piped(), cross_iter_deps=[("forward", "step", 2)])
    with SWPipeline(plan, tasks(), device="cpu") as pipe, pipe.trace() as trace:
        pass
    within = tuple(Arrow(*pair) for pair in pairwise(NAMES))
    assert trace.arrows == (*within, Arrow("step", "forward", 2))


def test_a_trace_of_the_last_iterations() -> None:
    """It has each of their tasks, and nothing of earlier ones."""
    with SWPipeline(spread(), tasks(), device="cpu") as pipe:
        with pipe.trace(last=3) as trace:
            pipe.run(range(20))
        with pytest.raises(ValueError, match="last is 0: keep 1 iteration or more"), pipe.trace(0):
            pass
    assert turns(trace) == once_each((*OWN, *NAMES), range(17, 20))


def test_a_long_recording_of_the_last_iterations_takes_no_more_memory() -> None:
    """A hundred thousand iterations of three tasks once took 147 MB."""
    program = compile_plan(resolve_plan(piped()), streams=False)
    recorder = Recorder(program, CpuDevice(), {}, 5)
    ins = program.instructions["forward"]
    for iteration in range(1000):
        recorder.arrive(ins, iteration)
        recorder.start(ins, iteration)
        recorder.stop(ins, iteration)
    (log,) = recorder._logs
    assert len(log.runs) == 5
    assert [span.iteration for span in recorder.finish()] == list(range(995, 1000))


# -------------------------------------------------------------------------------- hand-made

# ms    0    1    2    3    4    5    6    7
# io    [read 0 ] [read 1 ][read 2 ]
# def.            [ train 0   ]. [ train 1 ]
HAND_MADE = Trace(
    [
        Span("read", 0, IO, 0 * MS, 2 * MS),
        Span("read", 1, IO, 2 * MS, 4 * MS),
        Span("read", 2, IO, 4 * MS, 6 * MS, wait_ns=1 * MS),
        Span("train", 0, DEFAULT, 2 * MS, 5 * MS, wait_ns=2 * MS),
        Span("<retire>", 0, DEFAULT, 5 * MS, 5 * MS),
        Span("train", 1, DEFAULT, 6 * MS, 8 * MS),
        Span("<retire>", 1, DEFAULT, 8 * MS, 8 * MS),
    ],
    arrows=[Arrow("read", "train")],
)


def test_a_window_holds_its_iterations_and_what_ran_beside_them() -> None:
    """Overlapping parts of others are in ``beside``; earlier and later parts are left out."""
    window = HAND_MADE.window(1, 1)
    assert [(span.task, span.iteration) for span in window.spans] == [
        ("read", 1),
        ("train", 1),
        ("<retire>", 1),
    ]
    assert [(span.task, span.iteration) for span in window.beside] == [
        ("train", 0),
        ("read", 2),
        ("<retire>", 0),
    ]
    assert window.arrows == HAND_MADE.arrows
    assert HAND_MADE.window(0, 2).spans == HAND_MADE.spans
    assert HAND_MADE.window(0, 2).beside == ()
    assert HAND_MADE.window(0, 1).window(1, 1).beside == window.beside


def test_a_window_without_a_span_is_refused() -> None:
    """The error lists the iterations."""
    with pytest.raises(ValueError, match=r"iterations 3 to 9 are not in the trace.*0 to 2"):
        HAND_MADE.window(3, 9)
    with pytest.raises(ValueError, match=r"which has none"):
        Trace().window(0, 0)


@examples("timelines", 100)
@given(
    st.integers(1, 20), st.integers(1, 6), st.lists(st.integers(1, 50), min_size=20, max_size=20)
)
def test_the_steady_part_has_successive_iterations_from_the_middle(
    iterations: int, count: int, took: list[int]
) -> None:
    """It has as many as asked for; the first ones only if there are few."""
    ends = list(accumulate(took))
    spans = [Span("train", 3 + k, DEFAULT, ends[k] - took[k], ends[k]) for k in range(iterations)]
    shown = sorted({span.iteration for span in Trace(spans).steady(count).spans})
    assert shown == list(range(shown[0], shown[0] + min(count, iterations)))
    if iterations > 2 * count:
        assert shown[0] > 3


def test_the_steady_part_takes_as_long_as_most_iterations_do() -> None:
    """One slow iteration is left out, if there are enough others."""
    ends = list(accumulate([9, 9, 9, 9, 9, 90, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]))
    spans = [
        Span("train", k, DEFAULT, before, end) for k, (before, end) in enumerate(pairwise(ends))
    ]
    shown = Trace(spans).steady(3)
    assert shown.initiation_interval_s == 9e-9
    assert 4 not in {span.iteration for span in shown.spans}
    with pytest.raises(ValueError, match="count is 0"):
        Trace(spans).steady(0)


def test_work_of_two_threads_on_one_stream_counts_once() -> None:
    """Both may give it work at the same time."""
    stream = Row("stream", "caller's")
    work = [Span(f"{a}", 0, stream, a, b) for a, b in ((0, 8), (2, 4), (6, 10))]
    (on_stream,) = (lane for lane in Trace(work).lanes() if lane.row == stream)
    assert on_stream.busy_ns == 10


def test_nothing_is_said_of_an_empty_trace() -> None:
    """The error says what is missing."""
    for ask in (Trace().lanes, Trace().critical_path, Trace().format, Trace().steady):
        with pytest.raises(ValueError, match="there are no spans"):
            ask()


def test_task_times_are_means_in_seconds() -> None:
    """Per task and row, in the order of the rows, with the wait before the task."""
    assert [
        (times.row.name, times.task, times.runs, times.mean_s, times.mean_wait_s)
        for times in HAND_MADE.task_times()
    ] == [
        ("io", "read", 3, 0.002, pytest.approx(0.001 / 3)),
        ("default", "train", 2, 0.0025, 0.001),
        ("default", "<retire>", 2, 0.0, 0.0),
    ]


def test_the_initiation_interval_is_the_median_distance_of_retirements() -> None:
    """One slow iteration does not move it."""
    ends_ms = (10, 14, 18, 99, 103)
    trace = Trace(
        Span("<retire>", i, DEFAULT, (end_ms - 1) * MS, end_ms * MS)
        for i, end_ms in enumerate(ends_ms)
    )
    assert trace.initiation_interval_s == 0.004
    serial = [("a", 0, 0), ("b", 0, 2), ("a", 1, 5), ("b", 1, 9)]  # ends with its last task
    spans = [Span(name, i, DEFAULT, ms * MS, (ms + 1) * MS) for name, i, ms in serial]
    assert Trace(spans).initiation_interval_s == 0.007
    assert Trace(spans[:2]).initiation_interval_s is None


def test_the_summary_is_a_table() -> None:
    """It has rows with how busy they are, tasks with their means, and the interval."""
    assert [line.rstrip() for line in HAND_MADE.format_summary().splitlines()] == [
        "row        busy    waits    idle  task        runs    mean ms    mean wait ms",
        "-------  ------  -------  ------  --------  ------  ---------  --------------",
        "io          75%       0%     25%  read           3      2.000           0.333",
        "default     62%      25%     12%  train          2      2.500           1.000",
        "                                  <retire>       2      0.000           0.000",
        "default waits for read 25%",
        "initiation interval: 3.000 ms (median)",
        "critical path, per iteration 4.000 ms: train 3.000, gaps 1.000",
        "  train i -> <retire> i (dependence)",
        "  <retire> i -> train i+1 (the thread 'default' was busy)",
    ]


def test_rows_for_other_tools() -> None:
    """There is a row per span; a notebook shows the summary."""
    rows = HAND_MADE.records()
    assert rows[0] == {
        "task": "read",
        "iteration": 0,
        "kind": "thread",
        "row": "io",
        "start_us": 0.0,
        "duration_us": 2_000.0,
        "wait_us": 0.0,
    }
    assert HAND_MADE.to_csv().count("\n") == 1 + len(HAND_MADE.spans)
    assert "critical path" in HAND_MADE._repr_html_()
    drawn = ("<svg", "iteration 1") if find_spec("matplotlib") else ("▌tra",)
    assert all(each in HAND_MADE._repr_html_() for each in drawn)
    assert "0 spans" in Trace()._repr_html_()
