"""The test backend keeps its promises, so that what is tested on it can fail.

Work is held by gates and ordered by events; nothing here depends on how long anything takes.
"""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from tests import backend
from tests.backend import build
from tests.support.scripts import Script, Scripts

REASON = backend.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FOREVER_US = 1e9


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Each test begins with nothing queued and nothing logged, and ends so."""
    backend.load()
    backend.clear_log()
    yield
    backend.open_gates()
    torch.accelerator.set_device_index(0)
    for device in range(2):
        torch.accelerator.synchronize(device)


def ones(*shape: int, device: str = "sim") -> Tensor:
    """Ones on the device, already written."""
    tensor = torch.ones(*shape, device=device)
    torch.accelerator.synchronize(tensor.device)
    return tensor


def recorded(stream: torch.Stream | None = None, *, timing: bool = False) -> torch.Event:
    """An event recorded on a stream, or else on the current one."""
    event = torch.Event(device="sim", enable_timing=timing)
    event.record(stream or torch.accelerator.current_stream())
    return event


def ended(name: str) -> list[backend.Work]:
    """The kernels of a name in the log."""
    return [work for work in backend.log() if work.name == name]


def give_time() -> None:
    """Give the streams time to do what they must not; what they may do needs no time."""
    with torch.Stream(device="sim") as free:
        backend.lag(30_000)
    free.synchronize()


# ------------------------------------------------------------------------------------- streams


def test_streams_work_side_by_side() -> None:
    """While a gate holds stream A, stream B's work ends; the log shows it before A's goes on."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    x = ones(4)
    with a:
        held = backend.gate()
        x + 1
        event = recorded()
    with b:
        y = x * 3
    b.synchronize()
    assert not event.query()
    held.open()
    event.synchronize()
    (gate,), (mul,), (add,) = ended("gate"), ended("mul"), ended("add")
    assert gate.stream_id == add.stream_id == a.stream_id
    assert mul.stream_id == b.stream_id
    assert mul.end_ns < gate.end_ns <= add.start_ns
    assert y.tolist() == [3.0] * 4


def test_the_log_is_on_pythons_clock() -> None:
    """``time.perf_counter_ns`` and the log tell the same time, and a lag lasts what it says."""
    begin = time.perf_counter_ns()
    backend.lag(2000)
    torch.ops.sim.lag(ones(1, device="sim:1"), 1000)
    for device in range(2):
        torch.accelerator.synchronize(device)
    end = time.perf_counter_ns()
    on_0, on_1 = sorted(ended("lag"))
    assert begin < on_0.start_ns < on_0.end_ns < end
    assert on_0.end_ns - on_0.start_ns >= 2_000_000
    assert (on_0.device, on_1.device) == (0, 1)


def test_a_stream_keeps_the_order_of_submission() -> None:
    """Work of one stream starts when the work before it has ended."""
    x = ones(4)
    for _ in range(50):
        x.add_(1).mul_(0.5)
    torch.accelerator.synchronize()
    done = [work for work in backend.log() if work.name in {"add", "mul", "add_", "mul_"}]
    assert [work.name.strip("_") for work in done] == ["add", "mul"] * 50
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(done))


def test_a_stream_waits_for_an_event() -> None:
    """Work behind ``event.wait`` runs when the event's stream has got there."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    x = ones(4)
    with a:
        held = backend.gate()
        x.add_(1)
        event = recorded()
    with b:
        event.wait(b)
        y = x * 2
        after = recorded()
    give_time()
    assert not after.query()
    held.open()
    after.synchronize()
    assert event.query()
    assert y.tolist() == [4.0] * 4


def test_a_wait_keeps_to_the_mark_it_was_given() -> None:
    """An event that is recorded again does not hold those who wait for its older mark."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    event = recorded(a)
    event.wait(b)
    with a:
        held = backend.gate()
    event.record(a)
    b.synchronize()
    assert not event.query()
    held.open()


def test_events_tell_the_time_between_them() -> None:
    """``elapsed_time`` is the work between two events; it needs timing, and both to be reached."""
    begin, plain = recorded(timing=True), recorded()
    backend.lag(3000)
    end = recorded(timing=True)
    with pytest.raises((RuntimeError, ValueError)):
        begin.elapsed_time(plain)
    end.synchronize()
    assert begin.elapsed_time(end) >= 3.0


def test_new_streams_are_distinct_and_keep_their_priority() -> None:
    """A pool of 32 for either priority; no stream of the pool is the default one."""
    plain = [torch.Stream(device="sim") for _ in range(32)]
    urgent = torch.Stream(device="sim", priority=-1)
    assert len({stream.stream_id for stream in (*plain, urgent)} - {0}) == 33
    assert [backend.priority(stream) for stream in (plain[0], urgent)] == [0, -1]
    assert torch.accelerator.current_stream().stream_id == 0


def test_python_runs_while_a_thread_waits_for_a_stream() -> None:
    """No wait holds the interpreter: another thread opens the gate."""
    x = ones(4)
    waits: list[Callable[[], object]] = [
        torch.accelerator.synchronize,
        torch.accelerator.current_stream().synchronize,
        torch.accelerator.empty_cache,
        lambda: recorded().synchronize(),
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
    ]
    for wait in waits:
        thread = threading.Thread(target=backend.gate().open)
        thread.start()
        wait()
        thread.join()


def test_autograd_runs_backward_on_the_forwards_stream() -> None:
    """A gradient's kernels are on its forward kernel's stream, and the caller's waits for them."""
    side = torch.Stream(device="sim")
    w = ones(3, 3).requires_grad_()
    with side:
        loss = (w @ w).sum()
    torch.accelerator.current_stream().wait_stream(side)
    torch.accelerator.synchronize()
    backend.clear_log()
    loss.backward()
    assert w.grad is not None
    assert w.grad.tolist() == [[6.0] * 3] * 3
    assert {work.stream_id for work in ended("mm")} == {side.stream_id}


# ------------------------------------------------------------------------------------- kernels


def batch() -> dict[str, Tensor]:
    """The operands of ``KERNELS``, on the host."""
    draw = torch.Generator().manual_seed(1)
    return {
        "a": torch.randn(8, 16, generator=draw),
        "b": torch.randn(8, 16, generator=draw),
        "i": torch.randint(0, 8, (5,), generator=draw),
    }


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "empty": lambda a, b, i: torch.empty(3, device=a.device).zero_(),
    "empty_strided": lambda a, b, i: torch.empty_strided((2, 3), (1, 2), device=a.device).fill_(2),
    "fill": lambda a, b, i: torch.full((3,), 2.5, device=a.device),
    "copy": lambda a, b, i: a.clone().copy_(b.t().contiguous().t()),
    "add": lambda a, b, i: a + 2 * b,
    "add_": lambda a, b, i: a.clone().add_(b, alpha=0.1),
    "mul": lambda a, b, i: a * b * 0.3,
    "mm": lambda a, b, i: a @ b.t(),
    "addmm": lambda a, b, i: torch.addmm(a[:, :8], a, b.t()),
    "relu": lambda a, b, i: a.relu(),
    "threshold_backward": lambda a, b, i: torch.ops.aten.threshold_backward(a, b, 0.0),
    "sum": lambda a, b, i: a.sum(0),
    "extremes": lambda a, b, i: torch.stack([a.amin(), a.amax()]),
    "mse_loss": lambda a, b, i: nn.functional.mse_loss(a, b),
    "layer_norm": lambda a, b, i: nn.functional.layer_norm(a, (16,)),
    "cross_entropy": lambda a, b, i: nn.functional.cross_entropy(a[:5], i),
    "embedding": lambda a, b, i: nn.functional.embedding(i, a),
    "index_add_": lambda a, b, i: a.clone().index_add_(0, i, b[:5]),
    "cat": lambda a, b, i: torch.cat([a, b]),
    "where": lambda a, b, i: torch.where(a > 0, a, b),
    "views": lambda a, b, i: a.view(4, 32)[1:, ::3].t().unfold(0, 2, 1).contiguous(),
}
WAITING: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "conj": lambda a, b, i: torch.view_as_real(torch.complex(a, b).conj() * 2),
    "nonzero": lambda a, b, i: (a > 0).nonzero(),
    "masked": lambda a, b, i: a[a > 0],
    "unique": lambda a, b, i: i.unique(),
    "resized": lambda a, b, i: torch.add(a, b, out=torch.empty(0, device=a.device)),
    "embedding_bag": lambda a, b, i: nn.functional.embedding_bag(i[None], a),
}


@pytest.mark.parametrize("name", [*KERNELS, *WAITING])
def test_kernels_have_the_cpus_bits(name: str) -> None:
    """Values, type and strides are those of the CPU."""
    kernel = {**KERNELS, **WAITING}[name]
    operands = batch()
    expected = kernel(**operands)
    found = kernel(**{key: value.to("sim") for key, value in operands.items()})
    assert found.device == torch.device("sim:0")
    assert torch.equal(found.cpu(), expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_asynchronous(name: str) -> None:
    """The call returns while its stream is held."""
    operands = {key: value.to("sim") for key, value in batch().items()}
    KERNELS[name](**operands)  # the first call of an operator may import its meta kernel
    with backend.gate():
        KERNELS[name](**operands)
        assert not recorded().query()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_training_has_the_cpus_bits(optimizer: type[torch.optim.Optimizer]) -> None:
    """A model in training comes to the parameters that it comes to on the CPU."""

    def train(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
        model.to(device)
        x = batch()["a"].to(device)
        steps = optimizer(model.parameters(), lr=0.1, foreach=False)  # type: ignore[call-arg]
        for _ in range(5):
            steps.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(1), x[:, 0]).backward()
            steps.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train("cpu"), train("sim"), strict=True))


def test_inference_mode() -> None:
    """Tensors made and changed in inference mode are right."""
    with torch.inference_mode():
        x = torch.ones(2, 2, device="sim")
        x.add_(1)
        assert nn.functional.layer_norm((x @ x).relu_(), (2,)).tolist() == [[0.0, 0.0]] * 2


def test_a_kernels_failure_is_raised_by_the_next_wait() -> None:
    """Once, in the words of the kernel, with its stream; the stream goes on."""
    x, far = ones(4), torch.tensor([99], device="sim")
    x[far]
    with pytest.raises(RuntimeError, match="sim:0: index on stream 0 failed: index 99 is out of"):
        torch.accelerator.synchronize()
    assert (x + 1).tolist() == [2.0] * 4


def test_a_gate_that_nobody_opens_is_a_failure() -> None:
    """A test that forgets to open a gate fails; it does not hang."""
    backend.gate(deadline_s=0.01)
    with pytest.raises(RuntimeError, match="gate on stream 0 failed: nobody opened it"):
        torch.accelerator.synchronize()


def test_copies_from_pinned_memory_are_read_when_the_stream_gets_there() -> None:
    """Pinned memory is read late, other memory at the call."""
    pinned, plain = torch.zeros(3).pin_memory(), torch.zeros(3)
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    with backend.gate():
        late, early = (host.to("sim", non_blocking=True) for host in (pinned, plain))
        pinned.fill_(1)
        plain.fill_(1)
    assert late.tolist() == [1.0] * 3
    assert early.tolist() == [0.0] * 3


def test_copies_to_pinned_memory_are_written_when_the_stream_gets_there() -> None:
    """The host sees the old values until it waits."""
    pinned = torch.zeros(3).pin_memory()
    x = ones(3)
    with backend.gate():
        pinned.copy_(x, non_blocking=True)
        assert pinned.tolist() == [0.0] * 3
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1.0] * 3


# -------------------------------------------------------------------------------------- memory


def planted_use_after_free(*, record: bool) -> Tensor:
    """What stream B reads of a block of stream A that was freed before B came to it."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    with a:
        x = torch.ones(1000, device="sim")
    b.wait_stream(a)
    with b:
        held = backend.gate()
        seen = x * 1
    if record:
        x.record_stream(b)
    del x
    a.synchronize()  # the poison is on A
    held.open()
    b.synchronize()
    return seen


def test_poison_finds_a_use_after_free() -> None:
    """A block that is freed while another stream has yet to read it reads as NaN."""
    with backend.misbehaving(poison=True):
        assert planted_use_after_free(record=False).isnan().all()


def test_a_recorded_stream_reads_what_it_should() -> None:
    """With ``record_stream`` the same reader is right."""
    with backend.misbehaving(poison=True):
        assert planted_use_after_free(record=True).eq(1).all()


def test_a_block_goes_back_to_its_own_stream() -> None:
    """At once to the stream that it was made on, and never to another."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    with a:
        x = torch.empty(3000, device="sim")
    block = x.data_ptr()
    with b:
        del x
        other = torch.empty(3000, device="sim")
    with a:
        assert other.data_ptr() != block
        assert torch.empty(3000, device="sim").data_ptr() == block


def test_a_recorded_block_waits_for_all_its_streams() -> None:
    """A freed block is out of use until the last stream it was recorded on is past."""
    readers = [torch.Stream(device="sim") for _ in range(2)]
    with torch.Stream(device="sim"):
        x = torch.empty(5000, device="sim")
        block = x.data_ptr()
        gates = []
        for reader in readers:
            with reader:
                gates.append(backend.gate())
            x.record_stream(reader)
        del x
        kept = []
        give_time()
        for reader, gate in zip(readers, gates, strict=True):
            kept.append(torch.empty(5000, device="sim"))
            assert kept[-1].data_ptr() != block
            gate.open()
            reader.synchronize()
        assert torch.empty(5000, device="sim").data_ptr() == block


def test_memory_is_counted() -> None:
    """``torch.accelerator`` tells what is allocated, and what is cached can be given back."""
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1024, device="sim")
    assert torch.accelerator.memory_allocated() - before == x.nbytes
    del x
    assert torch.accelerator.memory_allocated() == before
    reserved = torch.accelerator.memory_reserved()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == reserved - 4096


# ------------------------------------------------------------------------------ random numbers


def test_seeds_make_draws_repeat() -> None:
    """``torch.manual_seed`` seeds all devices; a state put back gives the same draws again."""
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append([torch.rand(4, device=f"sim:{device}").cpu() for device in range(2)])
    assert torch.equal(torch.stack(draws[0]), torch.stack(draws[1]))
    state = torch.sim.get_rng_state("sim:1")
    first = [torch.randn(4, device="sim:1").cpu(), torch.bernoulli(ones(9) / 2).cpu()]
    torch.sim.set_rng_state(state, "sim:1")
    assert torch.equal(torch.randn(4, device="sim:1").cpu(), first[0])


def test_devices_draw_from_generators_of_their_own() -> None:
    """A draw on one device leaves the other's generator and the CPU's alone."""
    states = [torch.get_rng_state(), torch.sim.get_rng_state(0)]
    torch.rand(4, device="sim:1")
    nn.functional.dropout(ones(8, device="sim:1"))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.sim.get_rng_state(0), states[1])
    mine = [torch.Generator("sim").manual_seed(2) for _ in range(2)]
    assert torch.equal(*(torch.rand(4, device="sim", generator=one) for one in mine))


def test_draws_follow_the_order_of_submission() -> None:
    """Which stream draws first in time does not matter."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")

    def draw(held: torch.Stream) -> list[Tensor]:
        torch.manual_seed(9)
        with held:
            gate = backend.gate()
        with a:
            first = torch.rand(4, device="sim")
        with b:
            second = torch.rand(4, device="sim")
        (b if held is a else a).synchronize()
        gate.open()
        torch.accelerator.synchronize()
        return [first.cpu(), second.cpu()]

    assert torch.equal(torch.stack(draw(a)), torch.stack(draw(b)))


# ------------------------------------------------------------------------------------- devices


def test_two_devices() -> None:
    """Each has its own current stream and memory; a kernel takes tensors of one only."""
    torch.accelerator.set_device_index(1)
    assert torch.ones(1, device="sim").device.index == 1
    with torch.Stream(device="sim:0"):
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_stream("sim:1").stream_id == 0
    assert torch.accelerator.current_device_index() == 1
    with pytest.raises(RuntimeError, match="same device|all tensors on"):
        ones(2, device="sim:0") + ones(2, device="sim:1")
    with pytest.raises(RuntimeError, match="no device 7"):
        torch.accelerator.set_device_index(7)


def test_a_copy_between_devices_is_ordered_on_both() -> None:
    """It waits for the source's stream, and the destination's stream waits for it."""
    x = ones(4, device="sim:0")
    with backend.gate("sim:0"):
        x.add_(1)
        y = x.to("sim:1", non_blocking=True)
        z = y * 2
        on_1 = torch.Event(device="sim:1")
        on_1.record(torch.accelerator.current_stream("sim:1"))
        give_time()
        assert not on_1.query()
    assert z.tolist() == [4.0] * 4


# -------------------------------------------------------------------------------- misbehaviour


def test_late_streams_start_when_someone_waits() -> None:
    """Else not for a long time; a wait reaches through events to the streams behind them."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    x = ones(4)
    with backend.misbehaving(late_streams=FOREVER_US):
        with a:
            x.add_(1)
            event = recorded()
        with b:
            event.wait(b)
            y = x * 2
        assert not event.query()
        b.synchronize()
        assert event.query()
    assert y.tolist() == [4.0] * 4


def test_late_streams_start_after_a_while_by_themselves() -> None:
    """Polling an event comes to an end."""
    with backend.misbehaving(late_streams=1000):
        ones(4).add_(1)
        event = recorded()
        while not event.query():
            time.sleep(0)


def test_events_without_timing() -> None:
    """``elapsed_time`` raises, as on a backend that lacks it."""
    with backend.misbehaving(event_timing=False):
        begin, end = recorded(timing=True), recorded(timing=True)
        end.synchronize()
        with pytest.raises(RuntimeError, match="does not time events"):
            begin.elapsed_time(end)


def test_no_record_stream() -> None:
    """The operator raises as where nobody registered it."""
    with backend.misbehaving(record_stream=False):
        with pytest.raises(NotImplementedError, match="aten::record_stream"):
            ones(4).record_stream(torch.Stream(device="sim"))


def test_a_copy_from_pageable_memory_can_block_the_host() -> None:
    """Until its stream has come to it; one from pinned memory does not."""
    batch = torch.ones(1000)
    with backend.charging():
        with backend.gate("sim:0", deadline_s=60):
            batch.pin_memory().to("sim", non_blocking=True)  # returns
            returned = threading.Event()
            copy = threading.Thread(
                target=lambda: (batch.to("sim", non_blocking=True), returned.set())
            )
            copy.start()
            assert not returned.wait(0.05)
        assert returned.wait(30)
        copy.join()


def test_a_full_queue_blocks_the_host() -> None:
    """The next launch comes back when the stream has begun one; waits for events count as well."""
    x, launched = torch.zeros(1, device="sim"), [0]

    def launch() -> None:
        for _ in range(20):
            x.add_(1)
            launched[0] += 1

    with backend.charging(queue=8):
        with backend.gate("sim:0", deadline_s=60):
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join(0.2)
            assert launched[0] <= 8  # besides the gate, which may have begun
        thread.join()
    assert launched[0] == x.item() == 20


def test_copies_in_one_direction_take_turns() -> None:
    """On two streams: the second has the link when the first is done."""
    host = torch.zeros(2**18).pin_memory()  # a MiB
    with backend.misbehaving(link_us_per_mib=20_000):
        backend.clear_log()
        for stream in (torch.Stream(device="sim"), torch.Stream(device="sim")):
            with stream:
                host.to("sim", non_blocking=True)
        torch.accelerator.synchronize()
        one, other = sorted(work.end_ns for work in backend.log() if work.name == "copy_")
    assert other - one >= 20e6


def test_few_streams_and_none() -> None:
    """The pool hands out the same streams again, or the default one."""
    with backend.misbehaving(streams=2):
        assert len({torch.Stream(device="sim").stream_id for _ in range(6)}) == 2
    with backend.misbehaving(no_new_streams=True):
        assert torch.Stream(device="sim") == torch.accelerator.current_stream()


# ------------------------------------------------------------------------- processes and builds

START = """
import os, sys, threading, time, warnings, torch
from tests import backend
backend.load()
"""
ENDINGS = {
    "queued work": "backend.lag(1e9); torch.ones(3, device='sim') + 1",
    "a closed gate": "backend.gate('sim:1', deadline_s=1e6); torch.ones(3, device='sim:1') + 1",
    "late streams": "backend.misbehaving(late_streams=1e9).__enter__()\n"
    "torch.ones(3, device='sim') + 1",
    # Python aborts where a daemon thread comes out of torch meanwhile: it has to be in its wait.
    "a waiting thread": """
backend.gate()
waiting = threading.Thread(target=torch.accelerator.synchronize, daemon=True)
waiting.start()
def innermost():
    frame = sys._current_frames()[waiting.ident]
    return frame.f_code.co_name == "synchronize"
seen = 0
while seen < 20:
    time.sleep(0.01)  # without the interpreter lock, which it then takes if it wants it
    state = open(f"/proc/self/task/{waiting.native_id}/stat").read().split(") ")[1][0]
    seen = seen + 1 if innermost() and state == "S" else 0
""",
    # A thread's first kernels take locks of the C library, and a child would inherit them as taken:
    # the stream has run some, and is in the lag.
    "a fork": """
x = torch.ones(3, device="sim")
x + 1
torch.accelerator.synchronize()
backend.lag(1e5)
warnings.simplefilter("ignore")  # Python's, of forks beside threads
child = os.fork()
if child == 0:
    torch.manual_seed(1)
    try:
        x + 1
    except RuntimeError as error:
        del x
        sys.exit(7 if "forked child" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert (x + 1).sum().item() == 6
""",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_ends_at_once(scripts: Scripts, name: str) -> None:
    """Whatever its streams are at, without a crash; a forked child is told what it may not do."""
    assert scripts.run(Script(START + ENDINGS[name])) == (0, "", "")


def test_where_it_cannot_be_built_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, in words."""
    assert backend.why_not() is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert backend.why_not() == "there is no C++ compiler: neither $CXX nor g++ nor clang++"


def test_several_processes_build_it_once(scripts: Scripts, tmp_path: Path) -> None:
    """One builds and says how long it took; the others wait for it. The compiler is a stand-in."""
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(
        f'#!/bin/sh\necho called >> {calls}\nfor last; do :; done\ncp {build.library()} "$last"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    worker = Script(
        START + "print(torch.ones(2, device='sim').sum().item())",
        environment={"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
    )
    ended = scripts.run_together([worker] * 3)
    assert [one.stdout for one in ended] == ["2.0\n"] * 3
    assert calls.read_text() == "called\n"
    assert sum("built the test backend in" in one.stderr for one in ended) == 1


def test_a_pipeline_runs_on_it() -> None:
    """A plan with streams and a thread, under late streams and poison, gives the right values."""
    found = []

    def read(ctx: IterContext) -> None:
        ctx.x = torch.full((100,), float(ctx.batch)).pin_memory().to("sim", non_blocking=True)

    def use(ctx: IterContext) -> None:
        ctx.y = ctx.x * 2
        del ctx.x

    plan = PipelinePlan(
        {
            PipelineTask("read", read): TaskSchedule(0, "copies", "io"),
            PipelineTask("use", use): TaskSchedule(1),
        },
        deps=[("use", "read")],
    )
    with backend.misbehaving(late_streams=500, poison=True):
        with SWPipeline(plan, device="sim") as pipe:
            found = [ctx.y.sum() for ctx in pipe.iterate(range(30))]
        assert [total.item() for total in found] == [200.0 * i for i in range(30)]
