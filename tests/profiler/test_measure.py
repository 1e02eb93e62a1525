"""Windows: what is timed, which batches are used, and that the pipeline is restored."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe.pipeline import borrowed
from swpipe.profiler.measure import TimedRun, WindowTimer
from tests.profiler.sleepers import overlapped

SEEN: list[tuple[int, Any, bool]] = []


def see(ctx: IterContext) -> None:
    """Note the iteration, the batch and whether garbage collection is on."""
    SEEN.append((ctx.iter_idx, ctx.batch, gc.isenabled()))


def act(ctx: IterContext) -> None:
    """Set an attribute."""
    ctx.done = True


TASKS = [PipelineTask("see", see), PipelineTask("act", act)]


@pytest.fixture
def pipe() -> Iterator[SWPipeline]:
    """A pipeline of two stages in two thread groups."""
    SEEN.clear()
    with SWPipeline(overlapped({"io": ["see"], "default": ["act"]}), TASKS) as pipe:
        yield pipe


def timer(pipe: SWPipeline, **changes: Any) -> WindowTimer:
    """Return a timer of five iterations after two."""
    values = {"batches": ["b"], "copy": None, "warmup": 2, "measure": 5, "pipelined": False}
    return WindowTimer(pipe, **{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "samples", "ran"),
    [
        ({}, 5, 2 + 5),
        ({"warmup": 0}, 5, 1 + 5),  # in which a shortcut is cached
        ({"pipelined": True}, 5, 4 + 5 + 1),  # the prologue, and the drain
        ({"pipelined": True, "warmup": 0}, 5, 4 + 5 + 1),
    ],
)
def test_a_window(pipe: SWPipeline, changes: dict[str, Any], samples: int, ran: int) -> None:
    """Warm-up, fill and drain run and are not timed; the pipeline is empty afterwards."""
    found = timer(pipe, **changes).passage(5)
    assert len(found.steps_s) == samples
    assert [i for i, _, _ in SEEN] == list(range(ran))
    assert pipe.in_flight == 0
    assert {name: len(times.each_s) for name, times in found.tasks.items()} == {"see": 5, "act": 5}


def test_a_serial_plan_can_be_measured_under_the_plan() -> None:
    """With depth one there is nothing to fill and nothing to drain."""
    SEEN.clear()
    with SWPipeline(PipelinePlan.serial(TASKS), TASKS) as pipe:
        assert len(timer(pipe, pipelined=True).window()) == 5
    assert len(SEEN) == 3 + 5


@pytest.mark.parametrize("pipelined", [False, True])
def test_every_iteration_gets_a_copy_where_one_is_asked_for(
    pipe: SWPipeline, pipelined: bool
) -> None:
    """Tasks may modify it; all are made before the first iteration, and not while one is timed."""
    original, log = [1, 2], []

    def copied(batch: list[int]) -> list[int]:
        log.append("copy")
        return [*batch]

    run = timer(pipe, batches=[original], copy=copied, pipelined=pipelined).run()
    run.iterate(2, 3, lambda: log.append("measure"))
    run.end()
    assert log == [*["copy"] * (5 + pipelined), "measure"]
    batches = [batch for _, batch, _ in SEEN]
    assert all(batch == original for batch in batches)
    assert len({id(batch) for batch in (original, *batches)}) == 1 + len(batches)


@pytest.mark.parametrize("pipelined", [False, True])
def test_iterations_go_through_the_batches_in_their_order(
    pipe: SWPipeline, pipelined: bool
) -> None:
    """Iteration i gets batch i modulo their number, also after a drain; all are as frequent."""
    pipe.run(["first"])
    SEEN.clear()
    chosen = timer(pipe, batches=[*"abc"], measure=4, pipelined=pipelined)
    assert chosen.whole_cycles(4) == 6
    run = chosen.run()
    measured = run.iterate(chosen.num_warmup, chosen.whole_cycles(4))
    run.end()
    more = run.iterate(1, 3)
    run.end()
    assert all(batch == "abc"[number % 3] for number, batch, _ in SEEN)
    assert [len(run.numbers[part]) for part in (measured, more)] == [6, 3]
    assert chosen.num_warmup >= 3  # each batch is cached before it is measured


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_collected_as_in_training(pipe: SWPipeline, was_on: bool) -> None:
    """A step that takes 50 ms, 45 of them for garbage collection, was once measured as 5."""
    (gc.enable if was_on else gc.disable)()
    try:
        timer(pipe).window()
    finally:
        gc.enable()
    assert {on for _, _, on in SEEN} == {was_on}


def test_a_borrowed_pipeline_is_restored(pipe: SWPipeline) -> None:
    """Its iteration count and its shortcuts, with their caches, are restored."""
    pipe.run(["x", "y"])
    with pipe.shortcut("act"):
        pipe.run(["z"])
        SEEN.clear()
        with borrowed(pipe):
            timer(pipe, pipelined=True).window()
            pipe.enable_shortcut("see")
            pipe.disable_shortcut("act")
        shortcuts = pipe._driver.engine.shortcuts
        assert shortcuts.names == {"act"}
        assert shortcuts._caches["act"]
        SEEN.clear()
        pipe.run(["w"])
    assert [i for i, _, _ in SEEN] == [3]


def test_a_borrowed_pipeline_is_drained_after_a_failure() -> None:
    """The borrower's error is raised, also if draining fails, too."""

    def fail_late(ctx: IterContext) -> None:
        if ctx.iter_idx == 1:
            raise ZeroDivisionError

    def fail(pipe: SWPipeline) -> None:
        with borrowed(pipe):
            pipe.progress(iter("abc"))
            raise KeyError

    tasks = [PipelineTask("early", act), PipelineTask("late", fail_late)]
    with SWPipeline(overlapped({"io": ["early"], "default": ["late"]}), tasks) as pipe:
        with pytest.raises(KeyError):
            fail(pipe)
        assert pipe.in_flight == pipe.next_iteration == 0


class _TimedEvent:
    """An event of a device whose clock advances by 1 ms per record."""

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


def run_on(event: type, log: list[str]) -> TimedRun:
    """Return a run of a pipeline that counts, on a device with these events."""
    numbers = iter(range(100))
    device = SimpleNamespace(
        name="x:0",
        has_streams=True,
        new_event=lambda timing: event(),
        current_stream=lambda: None,
        synchronize=lambda: log.append("synchronize"),
    )
    pipe: Any = SimpleNamespace(
        device=device,
        in_flight=1,
        next_iteration=0,
        progress=lambda feed: SimpleNamespace(iter_idx=next(numbers)),
        drain=lambda: None,
    )
    return timer(pipe, batches=[None], pipelined=True).run()


def test_timing_events_mark_the_ends_of_iterations() -> None:
    """The host does not wait for the device in between."""
    log: list[str] = []
    run = run_on(_TimedEvent, log)
    measured = run.iterate(1, 2)
    assert log == []
    assert run.seconds()[measured] == pytest.approx([1e-3, 1e-3])
    assert log == ["synchronize"]


def test_without_timing_events_the_host_clock_is_used() -> None:
    """Events without times are not used."""
    begin = time.perf_counter()
    run = run_on(object, [])
    with pytest.warns(UserWarning, match="have no timing"):
        measured = run.iterate(1, 1)
    (seconds,) = run.seconds()[measured]
    assert 0 < seconds < time.perf_counter() - begin


def test_a_run_goes_on_where_it_was(pipe: SWPipeline) -> None:
    """Several parts are measured without a drain in between; after a drain it fills again."""
    run = timer(pipe, pipelined=True).run()
    first, second = run.iterate(2, 3), run.iterate(1, 2)
    assert pipe.in_flight == 1
    run.end()
    assert pipe.in_flight == 0
    third = run.iterate(1, 1)
    run.end()
    assert [run.numbers[part] for part in (first, second, third)] == [[2, 3, 4], [6, 7], [10]]
    assert len(run.seconds()) == 10


def test_serial_iterations_are_timed_from_idle_to_idle(
    pipe: SWPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is read after the device has finished, at both ends of each."""
    log: list[str] = []
    monkeypatch.setattr(pipe.device, "synchronize", lambda: log.append("wait"), raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: log.append("clock") or 0.0)
    timer(pipe, warmup=0, measure=1).window()
    assert log == ["wait", "clock", "wait", "clock"] * 2
