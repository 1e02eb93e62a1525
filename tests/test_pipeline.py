"""The driver: every batch once and in order, however the data ends; misuse is refused."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import swpipe.loops
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.pipeline import borrowed
from swpipe.trace import Observer
from tests.support.plans_for_tests import NAMES, piped, spread, task, tasks
from tests.support.sequencer import await_event

PLANS = {
    "serial": PipelinePlan.serial(tasks()),
    "two groups": piped(),
    "four groups, deep": replace(spread(), pipeline_depth=6),
    "all on workers": spread(("a", "b", "a", "b", "c")),
}


@pytest.fixture(params=PLANS, name="plan")
def any_plan(request: pytest.FixtureRequest) -> PipelinePlan:
    """Return a plan; each test runs with every plan."""
    return PLANS[request.param]


def push_all(pipe: SWPipeline, batches: Iterable[Any]) -> list[IterContext]:
    """Push all batches, then flush; return the results in order."""
    pushed = [pipe.push(batch) for batch in batches]
    return [ctx for ctx in pushed if ctx is not None] + [*pipe.flush()]


@pytest.mark.parametrize("run", [SWPipeline.iterate, push_all])
def test_each_batch_comes_out_once_in_order_with_all_tasks_done(
    plan: PipelinePlan, run: Any
) -> None:
    """Data may be empty, shorter than the depth, or longer; None is a batch like others.

    Iterators for training, evaluation and training again are used up; numbers continue.
    """
    with SWPipeline(plan, tasks()) as pipe:
        first = 0
        for batches in ([], [0], [None, 1], "ab", [], range(5), [None, *range(19)]):
            contexts = [*run(pipe, batches)]
            assert [ctx.batch for ctx in contexts] == [*batches]
            assert [ctx.iter_idx for ctx in contexts] == [*range(first, first + len(batches))]
            assert all(getattr(ctx, name) == ctx.batch for ctx in contexts for name in NAMES)
            first += len(batches)


def test_an_iterator_that_restarts_after_its_end_still_ends(plan: PipelinePlan) -> None:
    """Some loaders reset themselves; one call too many once made a run endless."""

    class Resetting:
        def __init__(self) -> None:
            self.batches = iter(range(3))

        def __iter__(self) -> Resetting:
            return self

        def __next__(self) -> int:
            try:
                return next(self.batches)
            except StopIteration:
                self.batches = iter(range(3))
                raise

    data, other = Resetting(), iter([1])
    with SWPipeline(plan, tasks()) as pipe:
        for _ in range(2):
            assert [ctx.batch for ctx in itertools.islice(pipe.iterate(data), 9)] == [0, 1, 2]
        assert pipe.progress(other).batch == 1
        for _ in range(2):
            with pytest.raises(StopIteration):
                pipe.progress(other)


def test_no_batch_is_pulled_further_ahead_than_the_depth(plan: PipelinePlan) -> None:
    """Filling pulls depth - 1 batches, and each progress one more."""
    pulled: list[int] = []

    def data() -> Iterator[int]:
        for batch in range(20):
            pulled.append(batch)
            yield batch

    source = data()
    with SWPipeline(plan, tasks()) as pipe:
        pipe.fill_pipeline(source)
        assert len(pulled) == pipe.in_flight == plan.depth - 1
        for done in range(1, 5):
            pipe.progress(source)
            assert len(pulled) == plan.depth - 1 + done
            assert pipe.in_flight == plan.depth - 1


def test_a_retired_context_is_the_users_alone(plan: PipelinePlan) -> None:
    """Once the user drops a context, nothing refers to it."""
    data = iter(range(20))
    with SWPipeline(plan, tasks()) as pipe:
        for _ in range(4):
            gone = weakref.ref(pipe.progress(data))
            assert gone() is None


@pytest.mark.parametrize("way", ["iterate", "run", "push"])
def test_no_more_contexts_than_the_depth_are_alive(plan: PipelinePlan, way: str) -> None:
    """No batch lives longer either, and a new one comes when the oldest has gone."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Batch:
        pass

    def count(ctx: IterContext) -> None:
        nonlocal most
        alive.add(ctx)
        alive.add(ctx.batch)
        most = max(most, len(alive))

    batches = (Batch() for _ in range(20))
    with SWPipeline(plan, tasks(h2d=count)) as pipe:
        if way == "iterate":
            for ctx in pipe.iterate(batches):
                del ctx
        elif way == "run":
            pipe.run(batches, verbose=True)
        else:
            for _ in range(20):
                pipe.push(next(batches))
    assert 0 < most <= 2 * plan.depth


def test_running_reports_iterations_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """``verbose`` draws progress on standard error; otherwise nothing is drawn."""
    with SWPipeline(piped(), tasks()) as pipe:
        for report in (pipe.run(range(7)), pipe.run_serial(range(7))):
            assert report.iterations == 7
            assert report.seconds > 0
        assert capsys.readouterr().err == ""
        pipe.run(range(3), verbose=True)
        assert "3/3" in capsys.readouterr().err


def test_groups_run_on_their_own_threads_and_the_default_on_the_callers() -> None:
    """A group has one worker thread, named after it."""
    seen: dict[str, set[str]] = {name: set() for name in NAMES}

    def note(name: str) -> Any:
        return lambda ctx: seen[name].add(threading.current_thread().name)

    with SWPipeline(spread(), tasks(**{name: note(name) for name in NAMES})) as pipe:
        pipe.run(range(5))
    caller = threading.current_thread().name
    assert list(seen.values()) == [
        {"swpipe-io"}, {"swpipe-dist"}, {caller}, {caller}, {"swpipe-late"}
    ]  # fmt: skip


def test_stages_overlap() -> None:
    """While one iteration is in forward, the next is already in h2d on another thread."""
    in_forward, in_h2d = threading.Event(), threading.Event()

    def forward(ctx: IterContext) -> None:
        if ctx.iter_idx == 0:
            in_forward.set()
            await_event(in_h2d, "h2d of a later iteration while forward runs")

    def h2d(ctx: IterContext) -> None:
        if ctx.iter_idx == 2:
            await_event(in_forward, "forward of iteration 0")
            in_h2d.set()

    with SWPipeline(piped(), tasks(forward=forward, h2d=h2d)) as pipe:
        assert pipe.run(range(5)).iterations == 5


# -------------------------------------------------------------------------------------------- push


def test_push_returns_none_while_the_prologue_fills(plan: PipelinePlan) -> None:
    """That is for ``depth - 1`` calls; then each call returns the oldest context."""
    with SWPipeline(plan, tasks()) as pipe:
        out = [pipe.push(batch) for batch in range(9)]
        assert pipe.in_flight == plan.depth - 1
    assert out[: plan.depth - 1] == [None] * (plan.depth - 1)
    assert [ctx.batch for ctx in out if ctx] == list(range(9 - plan.depth + 1))


@pytest.mark.parametrize("name", ["h2d", "forward"])
def test_a_failure_reaches_a_push_and_the_pipeline_can_be_used_again(name: str) -> None:
    """Complete iterations come out before the failure, and no pushed batch is left behind."""

    def fail(ctx: IterContext) -> None:
        if ctx.batch == 4:
            raise LookupError("planted")

    done: list[IterContext | None] = []

    def push_until_it_fails() -> None:
        for batch in range(20):
            done.append(pipe.push(batch))  # noqa: PERF401 - what came out before it fails counts

    with SWPipeline(piped(), tasks(**{name: fail})) as pipe:
        with pytest.raises(LookupError, match="planted") as caught:
            push_until_it_fails()
        assert f"at task {name!r}, iteration 4" in caught.value.__notes__[0]
        assert [ctx.batch for ctx in done if ctx] == list(range(len(done)))[: len(done) - 2]
        assert pipe.in_flight == 0
        assert [ctx.batch for ctx in push_all(pipe, range(5, 9))] == [5, 6, 7, 8]


def test_pushing_and_progress_do_not_mix_in_mid_flight() -> None:
    """Each refuses the other's iterations, says how to finish them, and loses none."""
    data = iter(range(9))
    with SWPipeline(piped(), tasks()) as pipe:
        pipe.fill_pipeline(data)
        for call in (lambda: pipe.push(0), pipe.flush):
            with pytest.raises(RuntimeError, match="iterations of another iterator.*drain"):
                call()
        assert [ctx.batch for ctx in pipe.drain()] == [0, 1]
        pipe.push("z")
        assert [ctx.batch for ctx in pipe.drain()] == ["z"]
        pipe.push("a")
        with pytest.raises(
            RuntimeError, match=r"iterations of pushed batches are in flight \(1\): .*flush"
        ):
            pipe.progress(data)
        with pytest.raises(RuntimeError, match="in flight"):
            pipe.fill_pipeline(data)
        assert [ctx.batch for ctx in pipe.flush()] == ["a"]
        assert [ctx.batch for ctx in pipe.iterate(data)] == [2, 3, 4, 5, 6, 7, 8]


def test_the_body_of_pushed_batches_comes_before_the_next_iterations_tasks() -> None:
    """This includes the last ones, which ``flush`` returns: each task sees earlier bodies."""
    bodies: list[int] = []
    seen: dict[int, list[int]] = {}

    def body(ctx: IterContext) -> None:
        bodies.append(ctx.batch)

    def train(ctx: IterContext) -> None:
        seen[ctx.batch] = [*bodies]

    made = [PipelineTask("read", lambda ctx: None, pure=True), PipelineTask("train", train)]
    plan = PipelinePlan(
        {"read": TaskSchedule(stage=0), "train": TaskSchedule(stage=2)}, deps=[("train", "read")]
    )
    with SWPipeline(plan, made, device="cpu") as pipe:
        for batch in range(5):
            if (ctx := pipe.push(batch)) is not None:
                body(ctx)
        for ctx in pipe.flush():
            body(ctx)
        assert seen == {n: list(range(n)) for n in range(5)}


def test_a_flush_that_is_not_iterated_is_refused_and_told() -> None:
    """A push after it is refused, ``drain`` finishes it, and ``close`` warns of what it drops."""
    with SWPipeline(piped(), tasks()) as pipe:
        pipe.push(0)
        pipe.flush()
        with pytest.raises(RuntimeError, match=r"flush\(\) was not iterated to its end"):
            pipe.push(1)
        assert [ctx.batch for ctx in pipe.drain()] == [0]
        pipe.push(2)
        pipe.flush()
        with pytest.warns(RuntimeWarning, match="1 pushed batches are dropped"):
            pipe.close()


# --------------------------------------------------------------------------------- observe, borrow


class Started(Observer):
    """An observer that collects the started tasks and iterations."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def start(self, ins: Any, iteration: int) -> None:
        if not ins.task.startswith("<"):
            self.seen.append((ins.task, iteration))


def test_several_observers_see_what_runs_in_their_blocks() -> None:
    """Under the plan and serially; an observer entered twice is called twice."""
    outer, inner = Started(), Started()
    with SWPipeline(PipelinePlan.serial(["a"]), [task("a")]) as pipe:
        with pipe.observe(outer):
            pipe.run(range(1))
            with pipe.observe(inner), pipe.observe(inner):
                pipe.run_serial(range(1))
            pipe.push(0)
            assert not [*pipe.flush()]
        pipe.run(range(1))
    assert outer.seen == [("a", 0), ("a", 1), ("a", 2)]
    assert inner.seen == [("a", 1), ("a", 1)]


def test_only_an_idle_pipeline_can_be_borrowed() -> None:
    """The error says how to make it idle."""
    with SWPipeline(piped(), tasks()) as pipe:
        pipe.fill_pipeline(iter(range(9)))
        with pytest.raises(
            RuntimeError, match=r"iterations are in flight \(2\).*before borrowing it"
        ):
            with borrowed(pipe):
                pass
        pipe.drain()
        with borrowed(pipe):
            assert pipe.run(range(3)).iterations == 3
        assert pipe.next_iteration == 2
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        with borrowed(pipe):
            pass


def test_a_borrowed_pipeline_has_caches_of_its_own() -> None:
    """What its shortcut tasks had cached before, they replay again afterwards."""
    cached: list[int] = []
    with SWPipeline(piped(), tasks(dist=lambda ctx: cached.append(ctx.batch))) as pipe:
        pipe.enable_shortcut("dist")
        pipe.run([1, 2])
        with borrowed(pipe):
            pipe.run([3, 4])
        pipe.run([5, 6])
    assert cached == [1, 3]


# ------------------------------------------------------------------------------------------ misuse


def test_a_closed_pipeline_refuses_to_run() -> None:
    """After ``close``, every call that would run something says so; closing again is fine."""
    pipe = SWPipeline(piped(), tasks())
    pipe.fill_pipeline(iter(range(9)))
    pipe.close()
    pipe.close()
    for call in (
        lambda: pipe.progress(iter([1])),
        lambda: pipe.fill_pipeline(iter([1])),
        lambda: pipe.push(1),
        pipe.flush,
        lambda: pipe.run_one_serial_iter(1),
        lambda: pipe.run([1]),
        pipe.drain,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_another_iterator_in_mid_flight_is_refused() -> None:
    """Otherwise batches would be mixed up; the advice is to drain. Nor is it filled twice."""
    data = iter(range(9))
    with SWPipeline(piped(), tasks()) as pipe:
        pipe.fill_pipeline(data)
        with pytest.raises(RuntimeError, match=r"iterations are in flight \(2\).*drain"):
            pipe.fill_pipeline(data)
        with pytest.raises(RuntimeError, match="another iterator.*drain"):
            pipe.progress(iter(range(9)))
        for serial in (lambda: pipe.run_one_serial_iter(0), lambda: pipe.run_serial([0])):
            with pytest.raises(RuntimeError, match="in flight.*drain"):
                serial()
        assert [ctx.batch for ctx in pipe.drain()] == [0, 1]
        assert (pipe.in_flight, pipe.drain(), next(data)) == (0, [], 2)


def test_where_nothing_is_in_flight_another_iterator_may_begin() -> None:
    """With one stage nothing is between two calls; it was "0 iterations are in flight"."""
    made = tasks()
    one, other = iter(range(3)), iter(range(10, 13))
    with SWPipeline(PipelinePlan.serial(made), made) as pipe:
        turns = [pipe.progress(data).batch for data in (one, other, one, other)]
        assert turns == [0, 10, 1, 11]
        assert pipe.run_one_serial_iter(20).iter_idx == 4
        assert pipe.progress(one).batch == 2
        assert [*pipe.flush()] == []
        assert pipe.push(30).batch == 30
        pipe.fill_pipeline(other)
        assert [ctx.batch for ctx in pipe.iterate(other)] == [12]


def test_a_second_thread_cannot_drive() -> None:
    """While one thread is inside ``progress``, another gets an error."""
    inside, refused = threading.Event(), threading.Event()
    refusals: list[BaseException] = []

    def forward(_: IterContext) -> None:
        inside.set()
        await_event(refused, "the refusal")

    with SWPipeline(piped(), tasks(forward=forward)) as pipe:

        def intrude() -> None:
            await_event(inside, "progress")
            try:
                pipe.progress(iter([1]))
            except RuntimeError as error:
                refusals.append(error)
            refused.set()

        intruder = threading.Thread(target=intrude)
        intruder.start()
        pipe.run(range(2))
        intruder.join()
    assert "in use already, by another thread" in str(refusals[0])


def test_a_task_cannot_drive_its_own_pipeline() -> None:
    """It is refused like a second thread."""
    with SWPipeline(piped(), tasks(forward=lambda ctx: pipe.drain())) as pipe:
        with pytest.raises(RuntimeError, match="by one of its own tasks"):
            pipe.run(range(2))


# ----------------------------------------------------------------------------------------- pictures


def test_the_schedule_prints_as_a_grid() -> None:
    """Rows are tasks in period order, cells the iteration each works on."""
    with SWPipeline(piped(), tasks()) as pipe:
        assert pipe.format_schedule(4).splitlines() == [
            "                    p0  p1  p2  p3",
            "dist [io]            .   0   1   2",
            "h2d [io]             0   1   2   3",
            "forward [default]    .   .   0   1",
            "backward [default]   .   .   0   1",
            "step [default]       .   .   0   1",
        ]


def test_the_stages_print_with_what_each_task_waits_for() -> None:
    """One row a task, with its place and the lag of each wait."""
    with SWPipeline(piped(), tasks()) as pipe:
        lines = pipe.format_stage_analysis().splitlines()
    assert lines[0] == "depth 3"
    assert "dist (1), step (1)" in next(line for line in lines if "forward" in line)


def test_a_warning_names_the_line_of_the_call() -> None:
    """It is no line of swpipe."""
    task = PipelineTask("work", lambda ctx: None)
    with pytest.warns(RuntimeWarning, match="nothing runs ahead") as found:
        swpipe.overlap(iter([1]), [task])
    assert found[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="has no effect on") as found:
        SWPipeline(replace(PipelinePlan.serial([task]), run_ahead=1), device="cpu")
    assert found[0].filename == __file__


def test_pipelines_and_loops_show_what_they_are() -> None:
    """They print a few lines, before, within and after a run."""
    task = PipelineTask("work", lambda ctx: None, pure=True)
    loop = swpipe.overlap([1, 2], [task])
    assert repr(loop).splitlines() == ["<OverlappedLoop over list>", "ahead: the loader, work"]
    assert repr(swpipe.ahead([1, 2])).splitlines() == ["<AheadLoop over list>", "ahead: the loader"]
    with SWPipeline(PipelinePlan.serial([task]), [task], device="cpu") as pipe:
        assert repr(pipe).splitlines() == [
            "<SWPipeline of work>",
            "  on cpu; threads: default; 0 of 1 in flight, next is 0",
        ]
        pipe.run([1, 2])
        assert "next is 2" in repr(pipe)
    assert "closed" in repr(pipe)
    assert repr(swpipe.loops.ResumableLoop(pipe, [1])).startswith("<ResumableLoop over list>\n<SWP")
