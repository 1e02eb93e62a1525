"""Windows: what is timed, what is fed, and that the pipeline comes back as it was."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.profiler.host import HostTimes
from swpipe.profiler.measure import TimedRun, WindowTimer, _Feed
from tests.profiler.sleepers import overlapped

SEEN: list[tuple[int, Any, bool]] = []


def see(ctx: IterContext) -> None:
    """Notes the iteration, the batch and whether garbage is collected."""
    SEEN.append((ctx.iter_idx, ctx.batch, gc.isenabled()))


def act(ctx: IterContext) -> None:
    """Stands for the rest."""
    ctx.done = True


TASKS = [PipelineTask("see", see), PipelineTask("act", act)]


@pytest.fixture
def pipe() -> Iterator[SWPipeline]:
    """Two stages in two thread groups."""
    SEEN.clear()
    with SWPipeline(overlapped({"io": ["see"], "default": ["act"]}), TASKS) as pipe:
        yield pipe


def timer(pipe: SWPipeline, **changes: Any) -> WindowTimer:
    """Times five iterations after two."""
    values = {"batch": "b", "copy": None, "warmup": 2, "measure": 5, "pipelined": False}
    return WindowTimer(pipe, **{**values, **changes})


def test_a_serial_window_has_a_sample_per_iteration(pipe: SWPipeline) -> None:
    """Warm-up runs and is not timed."""
    samples = timer(pipe).window()
    assert len(samples) == 5
    assert [i for i, _, _ in SEEN] == list(range(7))


def test_a_pipelined_sample_spans_depth_iterations(
    pipe: SWPipeline,
) -> None:
    """The window includes fill and drain, and leaves the pipeline empty."""
    assert len(timer(pipe, pipelined=True).window()) == 4
    assert [i for i, _, _ in SEEN] == list(range(10))
    assert pipe.in_flight == 0


def test_warm_up_covers_caching_and_the_prologue(pipe: SWPipeline) -> None:
    """Even if a shorter warm-up is requested."""
    timer(pipe, warmup=0).window()
    assert len(SEEN) == 1 + 5
    SEEN.clear()
    timer(pipe, warmup=0, pipelined=True).window()
    assert len(SEEN) == 4 + 5 + 1


@pytest.mark.parametrize("pipelined", [False, True])
def test_every_iteration_gets_a_copy_where_one_is_asked_for(
    pipe: SWPipeline, pipelined: bool
) -> None:
    """Tasks may then modify the batch in place."""
    original = [1, 2]
    timer(pipe, batch=original, copy=list, pipelined=pipelined).window()
    batches = [batch for _, batch, _ in SEEN]
    assert all(batch == original for batch in batches)
    assert len({id(batch) for batch in (original, *batches)}) == 1 + len(batches)


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_collected_as_in_training(pipe: SWPipeline, was_on: bool) -> None:
    """A step that takes 50 ms, 45 of them for garbage, once was measured as 5."""
    (gc.enable if was_on else gc.disable)()
    try:
        timer(pipe).window()
    finally:
        gc.enable()
    assert {on for _, _, on in SEEN} == {was_on}


@pytest.mark.parametrize("pipelined", [False, True])
def test_tasks_are_timed_on_their_threads(pipe: SWPipeline, pipelined: bool) -> None:
    """Every measured iteration, and none of the warm-up and the drain."""
    times = HostTimes(["see", "act"])
    timer(pipe, pipelined=pipelined).window(times)
    pipe.run_one_serial_iter("after")
    SEEN.pop()
    kept = {name: [turn.iteration for turn in turns] for name, turns in times._kept.items()}
    ran = [i for i, _, _ in SEEN]
    begin = 4 if pipelined else 2
    assert kept == {"see": ran[begin : begin + 5], "act": ran[begin : begin + 5]}
    assert times.host_s.keys() == {"see", "act"}


def test_a_borrowed_pipeline_is_restored(pipe: SWPipeline) -> None:
    """Iteration count and shortcuts, with their caches."""
    pipe.run(["x", "y"])
    with pipe.shortcut("act"):
        pipe.run(["z"])
        SEEN.clear()
        with pipe.borrow():
            timer(pipe, pipelined=True).window()
            pipe.enable_shortcut("see")
            pipe.disable_shortcut("act")
        shortcuts = pipe._driver.engine.shortcuts
        assert shortcuts.names == {"act"}
        assert shortcuts._caches["act"]
        SEEN.clear()
        pipe.run(["w"])
    assert [i for i, _, _ in SEEN] == [3]


def borrow_and_fail(pipe: SWPipeline) -> None:
    """Break off with iterations in flight."""
    with pipe.borrow():
        pipe.progress(iter("abc"))
        raise KeyError


def test_a_borrowed_pipeline_is_drained_after_a_failure(pipe: SWPipeline) -> None:
    """No iteration stays in flight."""
    with pytest.raises(KeyError):
        borrow_and_fail(pipe)
    assert pipe.in_flight == 0
    pipe.run_one_serial_iter("d")


def test_the_first_failure_is_raised_even_if_draining_fails_too() -> None:
    """The borrower's error reaches the user, not the one that followed from it."""

    def fail_late(ctx: IterContext) -> None:
        if ctx.iter_idx == 1:
            raise ZeroDivisionError

    tasks = [PipelineTask("early", act), PipelineTask("late", fail_late)]
    with SWPipeline(overlapped({"io": ["early"], "default": ["late"]}), tasks) as pipe:
        with pytest.raises(KeyError):
            borrow_and_fail(pipe)
        assert pipe.in_flight == 0
        assert pipe.next_iteration == 0


class _TimedEvent:
    """An event of a device whose clock ticks once, a millisecond, per record."""

    clock_ms = 0.0

    def record(self, stream: object) -> None:
        type(self).clock_ms += 1.0
        self.at_ms = self.clock_ms

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: _TimedEvent) -> float:
        return end_event.at_ms - self.at_ms


def device(event: type, log: list[str]) -> Any:
    """A device with streams and such events."""
    return SimpleNamespace(
        name="x:0",
        has_streams=True,
        new_event=lambda timing: event(),
        current_stream=lambda: None,
        synchronize=lambda: log.append("synchronize"),
    )


def plan_run(device: Any) -> TimedRun:
    """A run of a pipeline that only counts."""
    numbers = iter(range(100))
    pipe = SimpleNamespace(
        device=device,
        in_flight=1,
        progress=lambda feed: SimpleNamespace(iter_idx=next(numbers)),
        drain=lambda: None,
    )
    return TimedRun(pipe, _Feed(None, None))  # type: ignore[arg-type]


def test_timing_events_mark_the_ends_of_iterations() -> None:
    """The host does not wait for the device in between."""
    log: list[str] = []
    run = plan_run(device(_TimedEvent, log))
    measured = run.iterate(1, 2)
    assert log == []
    assert run.seconds()[measured] == pytest.approx([1e-3, 1e-3])
    assert log == ["synchronize"]


def test_without_timing_events_the_host_clock_is_used() -> None:
    """Events that tell no time are of no use here."""
    begin = time.perf_counter()
    run = plan_run(device(object, []))
    with pytest.warns(UserWarning, match="have no timing"):
        measured = run.iterate(1, 1)
    (seconds,) = run.seconds()[measured]
    assert 0 < seconds < time.perf_counter() - begin


def test_a_run_goes_on_where_it_was(pipe: SWPipeline) -> None:
    """Several measured parts of one run, without a drain in between."""
    run = timer(pipe, pipelined=True).run()
    first, second = run.iterate(2, 3), run.iterate(1, 2)
    assert pipe.in_flight == 1
    run.end()
    assert list(run.numbers[first]) == [2, 3, 4]
    assert list(run.numbers[second]) == [6, 7]
    assert [i for i, _, _ in SEEN] == list(range(9))
    assert len(run.seconds()) == 8


@pytest.mark.parametrize("pipelined", [False, True])
def test_batches_are_copied_before_the_first_iteration_that_gets_one(
    pipe: SWPipeline, pipelined: bool
) -> None:
    """A copy between warm-up and the measured iterations would be part of their time."""
    log: list[str] = []

    def copied(batch: list[int]) -> list[int]:
        log.append("copy")
        return [*batch]

    run = timer(pipe, batch=[1], copy=copied, pipelined=pipelined).run()
    run.iterate(2, 3, lambda: log.append("measure"))
    run.end()
    assert log.index("measure") == len(log) - 1
    assert log.count("copy") == 5 + (1 if pipelined else 0)


def test_serial_iterations_are_timed_from_idle_to_idle(
    pipe: SWPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is waited for before the clock is read, at both ends of each."""
    log: list[str] = []
    monkeypatch.setattr(pipe.device, "synchronize", lambda: log.append("wait"), raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: log.append("clock") or 0.0)
    timer(pipe, warmup=0, measure=1).window()
    assert log == ["wait", "clock", "wait", "clock"] * 2


def test_a_serial_plan_can_be_measured_under_the_plan() -> None:
    """Depth one: nothing to fill and nothing to drain."""
    SEEN.clear()
    with SWPipeline(PipelinePlan.serial(TASKS), TASKS) as pipe:
        assert len(timer(pipe, pipelined=True).window()) == 5
    assert len(SEEN) == 3 + 5
