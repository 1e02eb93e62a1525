"""A pipeline on one of several devices, and on backends that lack something."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import memmove
from threading import Event

import pytest
import torch
from torch import Tensor

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.analysis import verify
from swpipe.device import accelerator, resolve
from swpipe.errors import PlanError
from swpipe.inference import record
from swpipe.planning import simulate
from swpipe.profiler import TaskProfiler, measure_costs, measure_memory
from tests import backend
from tests.support.notes import Notes
from tests.support.plans_for_tests import NOBODY_ELSE

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or backend.why_not() is not None,
    reason="these tests have the test backend misbehave",
)

DEVICES = ("sim:0", "sim:1")


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load the test backend into this process."""
    backend.load()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each device, with device 0 as the caller's current device."""
    torch.accelerator.set_device_index(0)
    yield request.param
    assert torch.accelerator.current_device_index() == 0


@pytest.fixture(autouse=True)
def generators_stay() -> Iterator[None]:
    """Check that no pipeline changes a default generator."""
    backend.load()
    before = states()
    yield
    assert [*map(torch.equal, before, states())] == [True] * len(before)


def states() -> list[Tensor]:
    """Return the states of the default generators of the host and of all devices."""
    return [torch.get_rng_state(), *(torch.sim.get_rng_state(k) for k in range(2))]  # type: ignore[attr-defined]


def draw(ctx: IterContext) -> None:
    """Draw on the current device, which has to be the pipeline's."""
    ctx.noise = torch.rand(64, device="sim")


def add(ctx: IterContext) -> None:
    """Add on the caller's stream."""
    ctx.sum = (ctx.noise + ctx.batch).sum()


def total(ctx: IterContext) -> None:
    """Sum on a stream of its own."""
    ctx.total = ctx.sum * 2.0
    del ctx.sum


TASKS = [
    PipelineTask("draw", draw, io=[NOBODY_ELSE], random=True, pure=True),
    PipelineTask("add", add, pure=True),
]
TASKS += [PipelineTask("total", total, pure=True)]
PLAN = PipelinePlan(
    {
        "draw": TaskSchedule(0, "memcpy", "io"),
        "add": TaskSchedule(1),
        "total": TaskSchedule(2, "side", "io"),
    },
    deps=[("add", "draw"), ("total", "add")],
)


def totals(device: str, plan: PipelinePlan = PLAN) -> list[float]:
    """Return the totals of eight iterations under a plan."""
    with SWPipeline(plan, TASKS, device=device, seed=3) as pipe:
        ended = list(pipe.iterate(iter(range(8))))
        assert {ctx.total.device for ctx in ended} == {torch.device(device)}
        return [ctx.total.item() for ctx in ended]


# ------------------------------------------------------------------- one of several devices


def test_serial_runs_draw_and_compute_on_the_pipelines_device(device: str) -> None:
    """Once they ran on the caller's device, with its generator, which nothing had seeded."""
    with SWPipeline(PLAN, TASKS, device=device, seed=3) as pipe:
        ended = [pipe.run_one_serial_iter(k) for k in range(8)]
    assert {ctx.total.device for ctx in ended} == {torch.device(device)}
    assert [ctx.total.item() for ctx in ended] == totals(device)


def test_a_device_seeds_its_own_generator(device: str) -> None:
    """This holds for any current device."""
    where = resolve(device)
    before = states()
    kept = where.generator_states()
    try:
        where.seed_generators(11)
        moved = [not torch.equal(*pair) for pair in zip(before, states(), strict=True)]
    finally:
        where.set_generator_states(kept)
    assert moved == [True, device == "sim:0", device == "sim:1"]


def test_both_devices_draw_the_same() -> None:
    """The same seed gives the same numbers on both."""
    assert totals("sim:0") == totals("sim:1")


def test_a_recording_runs_on_the_device_that_it_is_given(device: str) -> None:
    """Once it saw and restored only the generator of the caller's device."""
    where = Notes()

    def note(ctx: IterContext) -> None:
        where.append(ctx.noise.device)
        ctx.more = torch.rand(3, device="sim")

    recording = record([TASKS[0], PipelineTask("note", note)], 1.0, device=device)
    assert set(where.read()) == {torch.device(device)}
    assert "'note' draws from torch's default generators" in str(recording.report())


def test_a_failed_run_restores_the_generator_of_its_own_device() -> None:
    """A drawing task that kept running gave device 0 the state of device 1."""
    entered, leave = Event(), Event()

    def draw_for_long(ctx: IterContext) -> None:
        torch.rand(8, device="sim")
        entered.set()
        leave.wait(60)

    def fail(ctx: IterContext) -> None:
        entered.wait(60)
        raise ValueError("as planned")

    tasks = [
        PipelineTask("draw", draw_for_long, io=[NOBODY_ELSE], random=True),
        PipelineTask("fail", fail),
    ]
    plan = PipelinePlan({"draw": TaskSchedule(0, thread_group="io"), "fail": TaskSchedule(0)})
    before = states()
    with SWPipeline(plan, tasks, device="sim:1", seed=3) as pipe:
        with pytest.raises(ValueError, match="as planned"):
            pipe.progress(iter(range(8)))
        assert [*map(torch.equal, before, states())] == [True] * 3
        leave.set()


def test_pipelines_on_two_devices_may_be_nested() -> None:
    """An iterator that drives a pipeline on another device keeps its draws on its own."""

    def batches() -> Iterator[float]:
        with SWPipeline(PLAN, TASKS, device="sim:1", seed=5) as inner:
            for ctx in inner.iterate(iter(range(8))):
                yield ctx.total.item() + torch.rand(1, device="sim:0").item()

    def outer(plan: PipelinePlan) -> list[float]:
        torch.sim.set_rng_state(fixed, 0)  # type: ignore[attr-defined]
        with SWPipeline(plan, TASKS, device="sim:0", seed=3) as pipe:
            return [ctx.total.item() for ctx in pipe.iterate(batches())]

    before = torch.sim.get_rng_state(0)  # type: ignore[attr-defined]
    fixed = before.clone()
    try:
        assert outer(PLAN) == outer(PipelinePlan.serial(TASKS))
    finally:
        torch.sim.set_rng_state(before, 0)  # type: ignore[attr-defined]


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["sim:2", "cuda"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    """Once the process was aborted later."""
    with pytest.raises(ValueError, match=f"'{name}' is not on this machine, which has sim"):
        SWPipeline(PLAN, TASKS, device=name)


def test_a_stream_of_another_device_of_the_same_kind_is_refused(device: str) -> None:
    """The pipeline's own device has an index, even if the user gave none."""
    other = DEVICES[device == "sim:0"]
    plan = PipelinePlan({PipelineTask("a", add): TaskSchedule(0, torch.Stream(device=other))})
    with pytest.raises(PlanError, match=rf"belongs to {other}.*device \({device}\)"):
        SWPipeline(plan, device=device)
    if device == "sim:0":
        with pytest.raises(PlanError, match=rf"belongs to {other}.*device \({device}\)"):
            SWPipeline(plan, device="sim")


def test_a_backend_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it; once the first retirement crashed."""

    def none(device: object) -> object:
        raise NotImplementedError("no streams here")

    monkeypatch.setattr(accelerator, "_current_stream", none)
    with pytest.raises(ValueError, match="'sim:0' has no streams and events .* no streams here"):
        resolve("sim:0")


def test_new_streams_that_are_the_default_one_are_told(device: str) -> None:
    """The numbers are right, and nothing overlaps: a warning says so once."""
    expected = totals(device)
    with backend.misbehaving(no_new_streams=True):
        with pytest.warns(UserWarning, match=f"'{device}' has one stream only") as told:
            assert totals(device) == expected
    assert len(told) == 1


# ------------------------------------------------------------------- without record_stream


@pytest.mark.parametrize("stream", ["side", "an object"])
def test_without_record_stream_a_plan_with_streams_is_refused(device: str, stream: str) -> None:
    """Once it crashed at the first retirement. The caller may drop what a stream still reads."""
    ref = torch.Stream(device=device) if stream == "an object" else stream
    plan = PipelinePlan({"draw": TaskSchedule(0), "add": TaskSchedule(1), "total": TaskSchedule(1)})
    streamed = PipelinePlan({**plan.schedule, "total": TaskSchedule(1, ref)})
    with backend.misbehaving(record_stream=False):
        with pytest.raises(ValueError, match=f"'{device}' cannot keep memory .*stream=None"):
            SWPipeline(streamed, TASKS, device=device)


def test_without_record_stream_a_plan_without_streams_runs(device: str) -> None:
    """Threads, depth and the numbers stay the same."""
    expected = totals(device)
    alone = {n: TaskSchedule(e.stage, None, e.thread_group) for n, e in PLAN.schedule.items()}
    with backend.misbehaving(record_stream=False, poison=True, late_streams=200.0):
        assert totals(device, PipelinePlan(alone, deps=PLAN.deps)) == expected


def test_one_stream_needs_no_record_stream(device: str) -> None:
    """An example is a backend whose new streams are all the default one."""
    expected = totals(device)
    with (
        backend.misbehaving(record_stream=False, no_new_streams=True, poison=True),
        pytest.warns(UserWarning, match="has one stream only"),
    ):
        assert totals(device) == expected


# ------------------------------------------------------------------- small storages


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64, torch.bool])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_state_of_any_size_is_recorded(dtype: torch.dtype, count: int) -> None:
    """A scalar on the device with fewer than 8 bytes once made every recording fail."""
    counter = torch.zeros(count, dtype=dtype, device="sim:0")

    def write(ctx: IterContext) -> None:
        counter.logical_not_()

    def read(ctx: IterContext) -> None:
        ctx.seen = counter.clone()

    recording = record([PipelineTask("w", write), PipelineTask("r", read)], None, device="sim:0")
    assert recording.plan().cross_iter_deps == (("w", "r", 1),)


@pytest.mark.parametrize("size", [4, 7, 8, 12])
def test_bytes_that_change_places_are_a_write(size: int) -> None:
    """A kernel unknown to torch writes; the bytes after the last whole word were only added up."""
    flags = (torch.arange(size) == size - 2).to("sim:0")

    def write(ctx: IterContext) -> None:
        moved = flags.roll(1 if flags[-2].item() else -1).cpu().numpy().tobytes()
        memmove(flags.data_ptr(), moved, size)  # the backend's memory is the host's

    def read(ctx: IterContext) -> None:
        ctx.seen = flags.clone()

    recording = record([PipelineTask("w", write), PipelineTask("r", read)], None, device="sim:0")
    assert recording.plan().cross_iter_deps == (("w", "r", 1),)


# ------------------------------------------------------------------- without event timing


def test_without_event_timing_a_trace_has_the_threads(device: str) -> None:
    """Once it raised; every backend's events have the method, but some have no times."""
    with (
        backend.misbehaving(event_timing=False),
        SWPipeline(PLAN, TASKS, device=device, seed=3) as pipe,
        pytest.warns(UserWarning, match=f"events of device '{device}' have no timing: .*no spans"),
        pipe.trace() as trace,
    ):
        pipe.run(range(4))
    assert {span.row.kind for span in trace.spans} == {"thread"}
    assert {span.task for span in trace.spans} >= {"draw", "add", "total"}


@pytest.mark.parametrize("pipelined", [False, True])
def test_without_event_timing_a_profile_has_the_hosts_times(device: str, pipelined: bool) -> None:
    """Once it raised at the end, and the measurements were lost."""
    with (
        backend.misbehaving(event_timing=False),
        SWPipeline(PLAN, TASKS, device=device, seed=3) as pipe,
    ):
        with pytest.warns(UserWarning, match="profiles have times of the host's clock"):
            result = TaskProfiler(pipe).profile(1.0, 1, 4, 2, pipelined=pipelined)
    assert result.exposed_s.keys() == {"draw", "add", "total"}
    assert result.baseline_s > 0


def test_copies_come_from_pinned_memory_where_the_backend_pins() -> None:
    """Once this was done for CUDA only."""
    assert resolve("sim").pins_memory
    assert not resolve("cpu").pins_memory


# ------------------------------------------------------------------- one place that compares


class Incomparable(str):
    """A device type that must not be compared."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError(f"the device type is compared with {other!r}")

    __ne__ = __eq__


def test_nothing_compares_the_type_of_a_device(device: str) -> None:
    """Code that depends on the device asks it; so a new backend needs a new device only."""
    where = resolve(device)
    where.type = Incomparable("sim")
    with pytest.raises(AssertionError, match="compared with 'cpu'"):
        assert where.type != "cpu"
    batch = torch.ones(64, device=device)
    recording = record(TASKS, batch, device=where)
    with SWPipeline(PLAN, TASKS, device=where, seed=3) as pipe, pipe.trace() as trace:
        pipe.fill_pipeline(iter([batch] * 4))
        pipe.drain()
        pipe.run_serial([batch] * 2)
        with pipe.shortcut("add"):
            pipe.run([batch] * 4)
    assert trace.spans
    with SWPipeline(PLAN, TASKS, device=where, seed=3) as pipe:
        for pipelined in (False, True):
            TaskProfiler(pipe).profile(batch, 1, 2, 2, pipelined=pipelined)
        costs = measure_costs(pipe, [batch])
    simulate(PLAN, costs).format()
    memory = measure_memory(TASKS, [batch], device=where)
    verify(PLAN, TASKS, recording.effects, memory=memory, pull_ahead=True)
