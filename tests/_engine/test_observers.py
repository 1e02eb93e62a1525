"""Observers are called around every task, on the thread that runs it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline
from swpipe._engine.observers import (
    NvtxRanges,
    Observer,
    Observers,
    ProfilerRanges,
    nvtx_ranges,
)
from swpipe.device import CpuDevice
from swpipe.program import Instruction
from tests.support.plans_for_tests import NAMES, piped, task, tasks
from tests.support.sequencer import await_event

ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def instruction(name: str) -> Instruction:
    """Return the instruction of a task on the default lane."""
    return Instruction(name, 0, 0, 0, None, (), (), False, False)


def ranges(profiled: profile) -> list[str]:
    """Return the names of swpipe's ranges in a profile, once per opening."""
    known = {*NAMES, "a"}
    return [event.name for event in profiled.events() if event.name in known]


class NvtxDevice(CpuDevice):
    """A CPU whose work NVTX tools show."""

    has_nvtx = True


def test_a_torch_profiler_of_all_threads_sees_the_workers() -> None:
    """Tasks of worker groups are ranges, too, on another thread than the caller's."""
    activities = [ProfilerActivity.CPU]
    with (
        SWPipeline(piped(), tasks()) as pipe,
        profile(activities=activities, experimental_config=ALL_THREADS) as seen,
    ):
        pipe.run(range(3))
    assert all(ranges(seen).count(name) == 3 for name in NAMES)
    threads = {event.name: event.thread for event in seen.events()}
    assert threads["h2d"] == threads["dist"] != threads["forward"]


def test_ranges_end_where_a_task_fails() -> None:
    """This holds for pipelined and for serial runs."""

    def fail(ctx: IterContext) -> None:
        raise LookupError("planted")

    with (
        SWPipeline(PipelinePlan.serial(["a"]), [task("a", fail)]) as pipe,
        profile(activities=[ProfilerActivity.CPU]) as seen,
    ):
        for run in (pipe.run, pipe.run_serial):
            with pytest.raises(LookupError):
                run(range(1))
        torch.ones(1)
    assert len(ranges(seen)) == 2
    (after,) = (event for event in seen.events() if event.name == "aten::ones")
    assert after.cpu_parent is None


def test_ranges_nest_where_a_task_drives_a_pipeline_of_its_own() -> None:
    """The inner task's range ends before the outer one's, and both end."""
    inner_tasks = [task("inner")]
    with SWPipeline(PipelinePlan.serial(inner_tasks), inner_tasks) as inner:

        def outer(ctx: IterContext) -> None:
            inner.run_one_serial_iter(ctx.batch)

        outer_tasks = [PipelineTask("outer", outer)]
        with (
            SWPipeline(PipelinePlan.serial(outer_tasks), outer_tasks) as pipe,
            profile(activities=[ProfilerActivity.CPU]) as seen,
        ):
            pipe.run_one_serial_iter(7)
    (event,) = (event for event in seen.events() if event.name == "inner")
    assert event.cpu_parent.name == "outer"


def test_each_thread_closes_its_own_ranges() -> None:
    """A task that began on another thread in the meantime keeps its range."""
    ranges_of_all, began, ended = ProfilerRanges(), threading.Event(), threading.Event()
    seen: list[int] = []

    def other() -> None:
        ranges_of_all.start(instruction("b"), 0)
        began.set()
        await_event(ended, "the end of the other task")
        seen.append(len(ranges_of_all._open))
        ranges_of_all.stop(instruction("b"), 0)

    thread = threading.Thread(target=other)
    ranges_of_all.start(instruction("a"), 0)
    thread.start()
    await_event(began, "a task on another thread")
    (mine,) = ranges_of_all._open
    assert mine.name == "a"
    ranges_of_all.stop(instruction("a"), 0)
    ended.set()
    thread.join()
    assert seen == [1]
    assert ranges_of_all._open == []


class Domain:
    """A stand-in for an NVTX domain that records calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def get_event_attributes(self, message: str, payload: int) -> tuple[str, int]:
        return message, payload

    def push_range(self, attributes: tuple[str, int]) -> None:
        self.calls.append(attributes)

    def pop_range(self) -> None:
        self.calls.append("end")


def test_nvtx_has_a_range_per_task_with_the_iteration_as_payload() -> None:
    """A range begins with the task's start and ends with its stop."""
    domain = Domain()
    nvtx_observer = NvtxRanges(domain)
    ins = instruction("forward")
    nvtx_observer.arrive(ins, 4)
    assert domain.calls == []
    nvtx_observer.start(ins, 4)
    nvtx_observer.stop(ins, 4)
    assert domain.calls == [("forward", 4), "end"]


def test_the_nvtx_package_takes_what_the_observer_gives_it() -> None:
    """The package's own domain, without an attached tool, ignores it."""
    nvtx = pytest.importorskip("nvtx")
    nvtx_observer = NvtxRanges(nvtx.get_domain("swpipe"))
    nvtx_observer.start(instruction("forward"), 0)
    nvtx_observer.stop(instruction("forward"), 0)


def test_nvtx_has_ranges_where_a_tool_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package gives a real domain only then; and only devices with NVTX have ranges."""
    nvtx = pytest.importorskip("nvtx")
    nvtx_ranges.cache_clear()
    assert Observers(NvtxDevice())() == ()
    nvtx_ranges.cache_clear()
    monkeypatch.setattr(nvtx, "Domain", Domain)
    monkeypatch.setattr(nvtx, "get_domain", lambda name: Domain())
    (observer,) = Observers(NvtxDevice())()
    assert isinstance(observer, NvtxRanges)
    assert Observers(CpuDevice())() == ()  # no profiler, no trace
    nvtx_ranges.cache_clear()


def test_without_the_nvtx_package_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a device with NVTX needed the package, which has no wheels for some systems."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    uncached = nvtx_ranges.__wrapped__
    monkeypatch.setattr("swpipe._engine.observers.nvtx_ranges", uncached)
    assert uncached() is None
    with SWPipeline(piped(), tasks(), device=NvtxDevice()) as pipe:
        assert pipe.run(range(3)).iterations == 3


def test_an_added_observer_comes_last() -> None:
    """It starts after the others and stops before them; therefore it does not time them."""
    recorder, observers = NvtxRanges(Domain()), Observers(CpuDevice())
    with profile(activities=[ProfilerActivity.CPU]), observers.adding(recorder):
        *others, last = observers()
    assert len(others) == 1
    assert last is recorder


class Ends(Observer):
    """An observer that notes which tasks have begun and which have ended."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []

    def start(self, ins: Instruction, iteration: int) -> None:
        self.begun.append((ins.task, iteration))

    def stop(self, ins: Instruction, iteration: int, exists: bool = True) -> None:
        self.ended.append((ins.task, iteration))


@pytest.mark.parametrize("run", [SWPipeline.run, SWPipeline.run_serial])
def test_an_observer_is_told_of_the_end_of_a_task_that_fails(run: Any) -> None:
    """The end is reported like any other; each observer that has begun ends once."""

    def fail(ctx: IterContext) -> None:
        if ctx.batch == 1:
            raise LookupError("planted")

    observer = Ends()
    with SWPipeline(piped(), tasks(forward=fail)) as pipe, pipe.observe(observer):
        with pytest.raises(LookupError):
            run(pipe, range(9))
    assert ("forward", 1) in observer.ended
    assert sorted(observer.begun) == sorted(observer.ended)
