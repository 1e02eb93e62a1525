"""Failure is loud and clean: whatever goes wrong reaches the caller, and nothing is left."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import swpipe._engine.run
from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe._engine.admission import Admission
from swpipe._engine.driver import Driver
from swpipe.device.cpu import NoEvent
from swpipe.errors import StallError
from swpipe.pipeline import settle
from swpipe.trace import Observer
from tests.support.cpu_on import CpuOn
from tests.support.hang import Hang, has_come_to
from tests.support.pairs import pairwise_cases
from tests.support.plans_for_tests import NAMES, piped, spread, tasks
from tests.support.scripts import Script, Scripts
from tests.support.sequencer import PATIENCE_S, await_event, swpipe_threads
from tests.support.stream_device import StreamDevice
from tests.support.virtual_clock import TimedHost

PLANS = {
    "serial": PipelinePlan.serial(tasks()),
    "two groups": piped(),
    "two groups, deep": piped(depth=5),
    "four groups": spread(),
    "all on workers": spread(("a", "b", "c", "a", "b")),
}


class Planted(Exception):
    """An error that a test raises on purpose."""


def at(iteration: int, act: Callable[[], Any]) -> Callable[[IterContext], None]:
    """Return a task function that calls ``act`` in one iteration only."""

    def run(ctx: IterContext) -> None:
        if ctx.batch == iteration:
            act()

    return run


def throw(error: BaseException) -> Any:
    """Raise an error; usable as an expression."""
    raise error


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for threads that end, for a busy machine."""
    monkeypatch.setattr(swpipe._engine.run, "JOIN_GRACE_S", PATIENCE_S)
    monkeypatch.setattr(swpipe._engine.watchdog, "GRACE_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("which", "name", "iteration", "kind"),
    pairwise_cases(PLANS, NAMES, [0, 1, 4, 9], [Planted, KeyboardInterrupt]),
)
def test_a_failure_in_any_task_reaches_the_caller_as_itself(
    which: str, name: str, iteration: int, kind: type[BaseException]
) -> None:
    """It has its context and a note of its place; no thread remains; the pipeline runs again."""
    plan, planted, first = PLANS[which], kind("planted"), KeyError("first")
    armed = [planted, first]

    def fail() -> None:
        if armed:
            try:
                raise armed.pop()
            except KeyError:
                throw(armed.pop())

    failing = at(iteration, fail)
    with SWPipeline(plan, tasks(**{name: failing})) as pipe:
        with pytest.raises(kind) as caught:
            pipe.run(range(10))
        assert caught.value is planted
        assert planted.__context__ is first
        assert not planted.__suppress_context__
        group = plan.schedule[name].thread_group
        assert planted.__notes__ == [
            f"swpipe: at task {name!r}, iteration {iteration}, thread group {group!r}"
        ]
        assert swpipe_threads() == []
        assert pipe.in_flight == 0
        assert [ctx.batch for ctx in pipe.iterate(range(20, 30))] == list(range(20, 30))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["dist", "forward"])
@pytest.mark.parametrize(
    "plan", [piped(depth=5), PLANS["all on workers"]], ids=["piped", "workers"]
)
def test_everybody_hears_of_a_failure_at_that_moment(
    plan: PipelinePlan, name: str, seed: int
) -> None:
    """On a separate clock, where every task takes a second, no task begins after the failure."""
    host, begun_s, failed_s = TimedHost(seed), [], []

    def second(task: str, ctx: IterContext) -> None:
        begun_s.append(host.perf_counter())
        host.sleep(1.0)
        if task == name and ctx.batch == 4:
            failed_s.append(host.perf_counter())
            raise Planted

    slow = {task: partial(second, task) for task in NAMES}
    with SWPipeline(plan, tasks(**slow), device=CpuOn(host), stall_timeout_s=None) as pipe:
        with pytest.raises(Planted):
            pipe.run(range(30))
        # Running tasks have ended, and others began at that very moment at most.
        assert max(begun_s) <= failed_s[0]
        assert host.perf_counter() <= failed_s[0] + 1.0


@pytest.mark.parametrize(
    ("which", "name", "iteration"),
    pairwise_cases(["serial", "two groups", "four groups"], ["h2d", "forward", "step"], [0, 3]),
)
def test_a_hang_in_any_task_is_reported(
    which: str, name: str, iteration: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report says which task each thread runs; the pipeline runs again after the task."""
    plan, place = PLANS[which], Hang(monkeypatch)
    mine = tasks(**{name: at(iteration, place.hang)})
    with SWPipeline(plan, mine, stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        with pytest.raises(StallError, match="nothing has moved for 3600.0 s") as caught:
            pipe.run(range(10))
        assert f"inside task {name!r} of iteration {iteration}" in str(caught.value)
        place.release.set()
        assert [ctx.batch for ctx in pipe.iterate(range(20, 30))] == list(range(20, 30))


@pytest.mark.parametrize("name", ["dist", "forward"])
def test_a_hang_is_reported_after_the_time_that_was_set(name: str) -> None:
    """The time includes the arrival of the interrupt, on the real clock."""
    release = threading.Event()
    hang = at(3, release.wait)
    with SWPipeline(piped(), tasks(**{name: hang}), stall_timeout_s=1.0) as pipe:
        begin_s = time.monotonic()
        with pytest.raises(StallError, match=r"nothing has moved for [1-9]\d*\.\d s") as caught:
            pipe.run(range(10))
        assert time.monotonic() - begin_s >= 1.0
        assert f"inside task {name!r} of iteration 3" in str(caught.value)
        release.set()
        assert [ctx.batch for ctx in pipe.iterate(range(20, 30))] == list(range(20, 30))


def test_a_caller_is_interrupted_though_a_library_hooked_sigint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler with SA_RESTART, as polars installs, made a blocked caller sleep without end."""
    place = Hang(monkeypatch)
    rescue = threading.Timer(PATIENCE_S, place.release.set)
    rescue.start()
    signal.siginterrupt(signal.SIGINT, False)
    mine = tasks(forward=at(1, place.hang))
    with SWPipeline(piped(), mine, stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        with pytest.raises(StallError, match="inside task 'forward' of iteration 1"):
            pipe.run(range(9))
    assert not place.release.is_set()
    rescue.cancel()
    rescue.join()


def test_a_stall_names_the_unmet_edge_and_shows_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which thread group waits for which task and iteration, with the line that hangs."""
    place = Hang(monkeypatch, noticed=lambda: has_come_to(pipe, "default", "dist", 3))
    plan = spread(("io", "default", "default", "default", "default"))
    hang = at(3, lambda: place.hang())
    with SWPipeline(plan, tasks(h2d=hang), stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        with pytest.raises(StallError) as caught:
            pipe.run(range(10))
        place.release.set()
    text = str(caught.value)
    assert "nothing has moved for 3600.0 s" in text
    assert (
        "thread group 'default': task 'dist' of iteration 3 waits for task 'h2d' of iteration 3 "
        "(thread group 'io')" in text
    )
    assert "thread group 'io': inside task 'h2d' of iteration 3" in text
    assert "hang = at(3, lambda: place.hang())" in text
    left = "thread group 'io' is still inside task 'h2d' of iteration 3"
    assert caught.value.__notes__ == [f"swpipe: {left}; its thread ends when that returns"]


def test_a_hanging_iterator_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that never comes is also a stall."""
    place = Hang(monkeypatch)

    def data() -> Iterator[int]:
        yield 0
        place.hang()

    with SWPipeline(piped(), tasks(), stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        with pytest.raises(StallError, match="pulling the batch of iteration 1"):
            pipe.run(data())


def test_what_waits_while_the_pipeline_fills_has_no_iteration_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first batch never comes: the caller waits at its last task, and iteration -2 is none."""
    place = Hang(monkeypatch, noticed=lambda: has_come_to(pipe, "default", "<retire>", -2))
    serial = PipelinePlan.serial(tasks())
    plan = replace(serial, pull_group="loader", pipeline_depth=3, within_calls=True)

    def data() -> Iterator[int]:
        place.hang()
        yield 0

    with SWPipeline(plan, tasks(), stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
        with pytest.raises(StallError) as caught:
            pipe.run(data())
        place.release.set()
    waits = "task '<retire>', before its first iteration, waits for task '<pull>' of iteration 0"
    assert waits in str(caught.value)


def test_ctrl_c_while_the_pipeline_fills_has_no_iteration_yet() -> None:
    """At that point, the caller is in no task of an iteration."""

    class Interrupt(Observer):
        def arrive(self, ins: Any, iteration: int) -> None:
            if iteration < 0 and threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt

    with SWPipeline(piped(), tasks()) as pipe, pipe.observe(Interrupt()):
        with pytest.raises(KeyboardInterrupt) as caught:
            pipe.run(range(3))
    (note,) = caught.value.__notes__
    assert "no iteration yet, thread group 'default'" in note


def test_a_caller_on_another_thread_gets_a_stall_as_soon_as_its_task_runs_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No signal reaches another thread: an asynchronous exception ends its Python code."""
    place = Hang(monkeypatch)
    caught: list[BaseException] = []
    give_up = time.monotonic() + PATIENCE_S

    def spin() -> None:
        place.inside.set()
        while time.monotonic() < give_up:
            pass

    def drive() -> None:
        mine = tasks(step=at(2, spin))
        with SWPipeline(piped(), mine, stall_timeout_s=0.1, device=CpuOn(place)) as pipe:
            try:
                pipe.run(range(5))
            except StallError as error:
                caught.append(error)

    caller = threading.Thread(target=drive)
    caller.start()
    caller.join(2 * PATIENCE_S)
    assert "inside task 'step' of iteration 2" in str(caught[0])


def test_time_between_calls_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only time within ``progress`` counts: the user may take any time between calls."""
    place, looked = Hang(monkeypatch), threading.Event()
    place.noticed = lambda: place.looks < 5 or looked.set() is not None
    data = iter(range(9))
    with SWPipeline(piped(), tasks(), stall_timeout_s=0.05, device=CpuOn(place)) as pipe:
        pipe.fill_pipeline(data)
        place.inside.set()  # the watchdog's clock goes on for five hours
        await_event(looked, "the watchdog's fifth look")
        place.release.set()
        assert pipe.progress(data).batch == 0


class LookedAt(Hang):
    """A clock that counts the watchdog's looks during a call, once ``counts`` is set."""

    in_call = 0
    counts = False
    run: Any = None

    def monotonic(self) -> float:
        self.in_call += self.counts and self.run.in_call
        return super().monotonic()


def test_a_call_has_all_its_time_however_long_the_body_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call waits for the loader, which has not moved since the body began, five hours ago."""
    place, looked, goes_on = LookedAt(monkeypatch), threading.Event(), threading.Event()
    place.noticed = lambda: place.looks < 5 or looked.set() is not None

    def batches() -> Iterator[int]:
        yield 0
        await_event(goes_on, "the first call")
        while place.in_call < 3 and not place.run.stopping:
            looked.wait(1e-3)
        yield 1

    mine = tasks()
    plan = replace(PipelinePlan.serial(mine), pull_group="loader", pipeline_depth=None)
    data = batches()
    with SWPipeline(plan, mine, device=CpuOn(place), stall_timeout_s=0.05) as pipe:
        pipe.fill_pipeline(data)
        place.run = pipe._driver.run
        goes_on.set()
        assert pipe.progress(data).batch == 0
        place.inside.set()
        await_event(looked, "the watchdog's fifth look")
        place.counts = True
        settle(pipe)
        place.release.set()
        assert pipe.progress(data).batch == 1


@pytest.mark.usefixtures("patient")
def test_an_error_of_the_iterator_reaches_the_caller_as_itself() -> None:
    """The error is the user's, and the note says which batch was pulled."""
    planted = Planted("no more")

    def data() -> Iterator[int]:
        yield from range(5)
        raise planted

    with SWPipeline(piped(), tasks()) as pipe:
        with pytest.raises(Planted) as caught:
            pipe.run(data())
        assert caught.value is planted
        assert planted.__notes__ == ["swpipe: pulling the batch of iteration 5"]
        assert swpipe_threads() == []
        assert pipe.run(range(5)).iterations == 5


@pytest.mark.parametrize("name", ["h2d", "forward"])
def test_stop_iteration_out_of_a_task_does_not_end_the_data(name: str) -> None:
    """It would end training silently; therefore it is raised as an error."""
    with SWPipeline(piped(), tasks(**{name: at(2, lambda: throw(StopIteration()))})) as pipe:
        with pytest.raises(RuntimeError, match="only the iterator may raise") as caught:
            pipe.run(range(9))
        assert isinstance(caught.value.__cause__, StopIteration)
        assert f"at task {name!r}, iteration 2" in caught.value.__notes__[0]


def test_the_first_of_two_failures_is_the_one_raised() -> None:
    """A second failure, while the run ends, does not replace the first."""
    forward_is_in, first_is_out = threading.Event(), threading.Event()

    def fail_first() -> None:
        await_event(forward_is_in, "forward")
        first_is_out.set()
        raise Planted("first")

    def fail_second() -> None:
        forward_is_in.set()
        await_event(first_is_out, "the first failure")
        while not runs[0]().stopping:  # type: ignore[union-attr]
            threading.Event().wait(0.001)
        raise Planted("second")

    runs: list[Any] = []
    plan = piped()
    with SWPipeline(plan, tasks(h2d=at(2, fail_first), forward=at(0, fail_second))) as pipe:
        data = iter(range(9))
        pipe.fill_pipeline(data)
        runs.append(weakref.ref(pipe._driver.run))
        with pytest.raises(Planted, match="first"):
            pipe.progress(data)


class StuckDevice(StreamDevice[str]):
    """A device whose work never ends.

    Attributes:
        asked: Somebody has asked whether it has.
        cancelled: Return whether all waits were cancelled.
        asked_in_vain: Somebody has gone on to ask after that.
    """

    def __init__(self) -> None:
        super().__init__("the caller's")
        self.asked = threading.Event()
        self.cancelled: Callable[[], bool] = lambda: False
        self.asked_in_vain = False

    def new_stream(self, spec: Any) -> str:
        return "side"

    def new_event(self, *, timing: bool = False) -> Any:
        return StuckEvent(self)


class StuckEvent(NoEvent):
    """An event that is never reached; after a cancellation it may be queried once more."""

    def __init__(self, device: StuckDevice) -> None:
        self._device = device
        self._is_last = False

    def query(self) -> bool:
        self._device.asked.set()
        if self._is_last:
            self._device.asked_in_vain = True
            return True
        self._is_last = self._device.cancelled()
        return False


def test_a_failure_ends_the_wait_for_the_device() -> None:
    """The caller waits for a hanging device to admit an iteration, while a worker fails."""
    device = StuckDevice()

    def read(ctx: IterContext) -> None:
        if ctx.batch == 1:
            await_event(device.asked, "a wait for the device")
            raise Planted

    plan = PipelinePlan(
        {
            PipelineTask("read", read): TaskSchedule(0, "side", "io"),
            PipelineTask("train", lambda ctx: None): TaskSchedule(1),
        },
        deps=[("train", "read")],
        run_ahead=0,
    )
    with SWPipeline(plan, device=device, stall_timeout_s=None) as pipe:
        data = iter(range(9))
        assert pipe.progress(data).batch == 0
        run = pipe._driver.run
        assert run is not None
        device.cancelled = lambda: run.iterations.generators.cancelled
        with pytest.raises(Planted):
            pipe.progress(data)
    assert not device.asked_in_vain


class AfterRetirement(Observer):
    """An observer that acts directly after an iteration was retired, within the same call."""

    def __init__(self, iteration: int, act: Callable[[], Any]) -> None:
        self.iteration, self.act = iteration, act

    def stop(self, ins: Any, iteration: int, exists: bool = True) -> None:
        if ins.task == "<retire>" and iteration == self.iteration:
            self.act()


@pytest.mark.usefixtures("patient")
def test_what_was_retired_is_handed_out_before_a_failure_of_the_same_turn() -> None:
    """No complete iteration is lost; the next call raises the failure."""
    retired = threading.Event()

    def fail() -> None:
        await_event(retired, "the retirement of iteration 0")
        raise Planted

    def let_it_fail() -> None:
        retired.set()
        while not pipe._driver.run.stopping:  # type: ignore[union-attr]
            threading.Event().wait(0.001)

    with (
        SWPipeline(piped(), tasks(h2d=at(2, fail))) as pipe,
        pipe.observe(AfterRetirement(0, let_it_fail)),
    ):
        data = iter(range(9))
        assert pipe.progress(data).batch == 0
        with pytest.raises(Planted):
            pipe.progress(data)
        assert swpipe_threads() == []
        assert pipe.run(range(20, 25)).iterations == 5


def test_a_pipeline_that_is_closed_right_after_a_retirement_ends_with_the_call() -> None:
    """The iteration is returned, and the call leaves nothing behind."""
    pipe = SWPipeline(piped(), tasks())
    with pipe.observe(AfterRetirement(0, pipe.close)):
        assert pipe.progress(iter(range(9))).batch == 0
    assert pipe._driver.run is None
    assert swpipe_threads() == []


def test_ctrl_c_right_after_the_last_retirement_is_raised() -> None:
    """It is raised though all work is done by then."""
    interrupt = AfterRetirement(0, lambda: throw(KeyboardInterrupt()))
    with SWPipeline(piped(), tasks()) as pipe, pipe.observe(interrupt):
        data = iter([0])
        assert pipe.progress(data).batch == 0
        with pytest.raises(KeyboardInterrupt):
            pipe.progress(data)
        assert pipe.run([1]).iterations == 1


@pytest.mark.usefixtures("patient")
def test_ctrl_c_after_a_retirement_comes_before_a_workers_failure() -> None:
    """The next call raises it, with a note of the failure that came first."""
    retired = threading.Event()

    def fail() -> None:
        await_event(retired, "the retirement of iteration 0")
        raise Planted

    def interrupt() -> None:
        retired.set()
        while not pipe._driver.run.stopping:  # type: ignore[union-attr]
            threading.Event().wait(0.001)
        raise KeyboardInterrupt

    with (
        SWPipeline(piped(), tasks(h2d=at(2, fail))) as pipe,
        pipe.observe(AfterRetirement(0, interrupt)),
    ):
        data = iter(range(9))
        assert pipe.progress(data).batch == 0
        with pytest.raises(KeyboardInterrupt) as caught:
            pipe.progress(data)
        assert any("after Planted" in note for note in caught.value.__notes__)
        assert pipe.run(range(20, 25)).iterations == 5


def test_draining_keeps_what_came_out_before_a_failure() -> None:
    """The failure is raised at once, and the next call returns the complete iterations."""
    data = iter(range(9))
    with SWPipeline(piped(), tasks(forward=at(2, lambda: throw(Planted())))) as pipe:
        assert pipe.progress(data).batch == 0
        with pytest.raises(Planted):
            pipe.drain()
        assert pipe.in_flight == 1
        assert pipe.state_dict(check=False)["next_iteration"] == 1
        assert [ctx.batch for ctx in pipe.drain()] == [1]
        assert pipe.in_flight == 0
        assert pipe.drain() == []


def test_a_drain_that_was_interrupted_goes_on_with_a_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other call would admit more batches: it is refused, and nothing is lost."""
    data = iter(range(9))
    with SWPipeline(piped(), tasks()) as pipe:
        assert pipe.progress(data).batch == 0
        with monkeypatch.context() as interrupted:
            interrupted.setattr(
                Admission, "take_error", lambda admission, i: throw(KeyboardInterrupt())
            )
            with pytest.raises(KeyboardInterrupt):
                pipe.drain()
        for call in (lambda: pipe.progress(data), lambda: pipe.fill_pipeline(data)):
            with pytest.raises(
                RuntimeError, match=r"drain\(\) was interrupted: call it again|full"
            ):
                call()
        assert [ctx.batch for ctx in pipe.drain()] == [1, 2]
        assert next(data) == 3


def test_a_call_that_was_cut_short_while_it_ended_is_ended_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt right after a failure ends the call; its remains do not disturb the next one."""
    with SWPipeline(piped(), tasks(forward=at(1, lambda: throw(Planted())))) as pipe:
        data = iter(range(9))
        assert pipe.progress(data).batch == 0
        with monkeypatch.context() as interrupted:
            interrupted.setattr(Driver, "_end", lambda driver, run: throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                pipe.progress(data)
        assert [ctx.batch for ctx in pipe.iterate(range(20, 25))] == [*range(20, 25)]


def test_the_watchdogs_interrupt_does_not_escape_from_the_handling_of_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task fails just when the stall is reported: the stall is raised unchanged.

    The watchdog has taken the caller's entry by then, and the caller waits for its interrupt.
    """
    stall = StallError("nothing has moved")
    interrupts: list[float] = []

    def interrupt(seconds: float) -> None:
        interrupts.append(seconds)
        raise KeyboardInterrupt

    def fail() -> None:
        run.stalled = stall
        run.stop(stall)
        assert run.driver.pop("thread") == threading.get_ident()
        monkeypatch.setattr(swpipe._engine.run, "time", SimpleNamespace(sleep=interrupt))
        raise Planted

    data = iter(range(9))
    with SWPipeline(piped(), tasks(forward=at(0, fail))) as pipe:
        pipe.fill_pipeline(data)
        run: Any = pipe._driver.run
        monkeypatch.setattr(run, "end", lambda: None)
        with pytest.raises(StallError) as caught:
            pipe.progress(data)
        monkeypatch.undo()
        run.end()
    assert caught.value is stall
    assert len(interrupts) == 1


def test_ctrl_c_while_waiting_for_a_worker_comes_through() -> None:
    """SIGINT on the main thread ends ``progress``, though it sleeps on a lock, and cleans up."""
    release = threading.Event()

    def interrupt() -> None:
        if not release.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await_event(release, "the end of the interrupted call")

    with SWPipeline(piped(), tasks(dist=at(2, interrupt))) as pipe:
        with pytest.raises(KeyboardInterrupt):
            pipe.run(range(9))
        release.set()
        assert pipe.run(range(9)).iterations == 9


@pytest.mark.usefixtures("patient")
def test_closing_while_a_run_begins_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of ranks takes time; a close during it once left threads running."""
    pipe = SWPipeline(piped(), tasks())
    monkeypatch.setattr("swpipe._engine.driver.check_same_plan", lambda digest: pipe.close())
    with pytest.raises(RuntimeError, match="closed during this call"):
        pipe.run(range(9))
    assert swpipe_threads() == []


UNCLOSED = """
import contextlib, threading, torch
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule

torch.set_num_threads(1)
large = torch.rand(600, 600)
inside = threading.Event()
plan = PipelinePlan({"multiply": TaskSchedule(0, None, "io"), "end": TaskSchedule(1)})

def multiply(ctx):
    inside.set()
    for _ in range(8):
        torch.mm(large, large)

def batches():
    yield 0
    inside.wait()
    raise ArithmeticError

tasks = [PipelineTask("multiply", multiply), PipelineTask("end", lambda ctx: None)]
pipe = SWPipeline(plan, tasks, device="cpu")
if WHICH == "never closed":
    pipe.fill_pipeline(iter(range(9)))
    inside.wait()
else:
    with contextlib.suppress(ArithmeticError):
        pipe.run(batches())
"""


def test_a_script_may_end_while_a_worker_is_inside_torch(scripts: Scripts) -> None:
    """A thread that ends there would abort the whole process (exit code 134)."""
    both = [f"WHICH = {which!r}\n{UNCLOSED}" for which in ("never closed", "failed")]
    assert scripts.run_together([Script(code) for code in both]) == [(0, "", "")] * 2


@pytest.mark.usefixtures("patient")
def test_a_thread_that_cannot_start_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses a thread, the threads that started before it end."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "swpipe-late":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with SWPipeline(spread(), tasks()) as pipe:
        with pytest.raises(RuntimeError, match="can't start"):
            pipe.run(range(3))
        assert swpipe_threads() == []
