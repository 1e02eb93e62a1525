"""The test backend keeps its guarantees, so that tests on it can fail.

Work is held by gates and ordered by events; nothing here depends on how long anything takes.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swpipe.testing.simulated import build
from tests import backend
from tests.support.scripts import Script, Scripts

REASON = backend.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FOREVER_US = 1e9


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """Begin and end each test with nothing queued and nothing logged."""
    backend.load()
    backend.clear_log()
    yield
    backend.open_gates()
    torch.accelerator.set_device_index(0)
    for device in range(2):
        torch.accelerator.synchronize(device)


def ones(*shape: int, device: str = "sim") -> Tensor:
    """Return ones on the device, after they were written."""
    tensor = torch.ones(*shape, device=device)
    torch.accelerator.synchronize(tensor.device)
    return tensor


def recorded(stream: torch.Stream | None = None, *, timing: bool = False) -> torch.Event:
    """Return an event recorded on a stream, or else on the current one."""
    event = torch.Event(device="sim", enable_timing=timing)
    event.record(stream or torch.accelerator.current_stream())
    return event


def ended(name: str) -> list[backend.Work]:
    """Return the logged kernels of a name."""
    return [work for work in backend.log() if work.name == name]


def give_time() -> None:
    """Give the streams time for work that must not happen."""
    with torch.Stream(device="sim") as free:
        backend.lag(30_000)
    free.synchronize()


# ------------------------------------------------------------------------------------- streams


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
    """Return the operands of ``KERNELS``, on the host."""
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


def test_kernels_have_the_cpus_bits() -> None:
    """Values, type and strides are those of the CPU."""
    for name, kernel in {**KERNELS, **WAITING}.items():
        operands = batch()
        expected = kernel(**operands)
        found = kernel(**{key: value.to("sim") for key, value in operands.items()})
        assert found.device == torch.device("sim:0"), name
        assert torch.equal(found.cpu(), expected), name
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), name


def test_kernels_are_asynchronous() -> None:
    """Each call returns while its stream is held."""
    operands = {key: value.to("sim") for key, value in batch().items()}
    for name, kernel in KERNELS.items():
        kernel(**operands)  # the first call of an operator may import its meta kernel
        with backend.gate():
            kernel(**operands)
            assert not recorded().query(), name


def test_training_has_the_cpus_bits() -> None:
    """A model in training gets the same parameters as on the CPU."""

    def train(device: str) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
        model.to(device)
        x = batch()["a"].to(device)
        steps = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
        for _ in range(5):
            steps.zero_grad()
            nn.functional.mse_loss(model(x).squeeze(1), x[:, 0]).backward()
            steps.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train("cpu"), train("sim"), strict=True))


def test_a_kernels_failure_is_raised_by_the_next_wait() -> None:
    """It is raised once, with the kernel's message and stream; the stream goes on."""
    x, far = ones(4), torch.tensor([99], device="sim")
    x[far]
    with pytest.raises(RuntimeError, match="sim:0: index on stream 0 failed: index 99 is out of"):
        torch.accelerator.synchronize()
    assert (x + 1).tolist() == [2.0] * 4


def test_a_gate_that_nobody_opens_is_a_failure() -> None:
    """A test that forgets to open a gate fails, and does not hang."""
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


# ------------------------------------------------------------------------------------- devices


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
    """Otherwise they wait long; a wait also starts the streams behind its events."""
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


def test_a_copy_from_pageable_memory_can_block_the_host() -> None:
    """It blocks until its stream has reached it; a copy from pinned memory does not."""
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
    """The next launch returns when the stream has begun one; waits for events count, too."""
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
warnings.simplefilter("ignore")  # Python's, about forks with threads
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
    """It ends without a crash in any state of its streams; a forked child gets an error."""
    assert scripts.run(Script(START + ENDINGS[name])) == (0, "", "")


def test_where_it_cannot_be_built_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, the message says so."""
    assert backend.why_not() is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert backend.why_not() == "there is no C++ compiler: neither $CXX nor g++ nor clang++"


def test_several_processes_build_it_once(scripts: Scripts, tmp_path: Path) -> None:
    """One builds and says how long it took; the others wait. The compiler is a fake."""
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
    assert sum("built the simulated device in" in one.stderr for one in ended) == 1
