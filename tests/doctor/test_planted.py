"""Each planted fault is found, and nothing else; clean loops have no findings.

Faults of device work are planted in ``tests/accelerator/test_doctor.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

import swpipe.doctor.environment
from swpipe import DeclaredIO, IterContext, PipelinePlan, PipelineTask, TaskSchedule
from swpipe.doctor import Diagnosis, diagnose
from swpipe.profiler.other_load import OtherLoad
from tests.profiler.sleepers import sleeper
from tests.support.virtual_clock import TimedHost

CORES = len(os.sched_getaffinity(0))


def rules(found: Diagnosis) -> list[tuple[str, str]]:
    """Rule and place of each finding."""
    return [(one.rule, one.place) for one in found.findings]


def training(compiled: bool = False) -> list[PipelineTask]:
    """A small model in training; a pure task before it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model

    def decode(ctx: IterContext) -> None:
        batch = ctx.batch[0] if isinstance(ctx.batch, list) else ctx.batch
        ctx.x = batch * 2.0

    def forward(ctx: IterContext) -> None:
        ctx.loss = call(ctx.x).square().mean()

    def backward(ctx: IterContext) -> None:
        ctx.loss.backward()

    def step(ctx: IterContext) -> None:
        optimizer.step()
        optimizer.zero_grad()

    rest = [PipelineTask(fn.__name__, fn) for fn in (forward, backward, step)]
    return [PipelineTask("decode", decode, pure=True), *rest]


def waiting(host: TimedHost) -> PipelineTask:
    """The longest task by the host's clock."""
    return PipelineTask("wait", sleeper(host, 5))


def batches() -> list[Tensor]:
    """In memory."""
    return list(torch.ones(3, 4, 8))


def of_data(**options: Any) -> DataLoader[Any]:
    """The same by torch's loader."""
    return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4, **options)


# ------------------------------------------------------------------------------------------ clean


def test_a_clean_loop_over_a_list_has_no_findings() -> None:
    """Batches in memory, and reading a loss that is on the host anyway."""
    log = PipelineTask("log", lambda ctx: ctx.loss.item())
    found = diagnose([*training(), log], batches())
    assert (found.findings, found.examined[:6]) == ((), "decode")
    assert str(found).startswith("no findings: decode, forward, backward, step, log, on device cpu")


def test_a_clean_loop_with_a_worker_has_no_findings(host: TimedHost) -> None:
    """Of a loader's workers the loop's thread only takes batches; a plan has its threads."""
    tasks = [*training(), waiting(host)]
    plan = PipelinePlan(
        {t: TaskSchedule(thread_group="io" if t.name == "decode" else "default") for t in tasks}
    )
    before = set(multiprocessing.active_children())
    gc.disable()
    try:
        assert rules(diagnose(tasks, of_data(num_workers=1), plan=plan)) == []
        assert set(multiprocessing.active_children()) <= before  # its workers have ended
    finally:
        gc.enable()


def test_a_clean_compiled_loop_has_no_findings(fresh_compiler: None) -> None:
    """One graph is compiled, without a break."""
    assert rules(diagnose(training(compiled=True), batches())) == []


def test_a_loader_in_this_process_that_costs_nothing_is_no_finding(host: TimedHost) -> None:
    """What counts is what the loop waits for, not where the loader runs."""
    tasks = [*training(), waiting(host)]
    assert rules(diagnose(tasks, DataLoader(Made(host, 0.05), batch_size=4))) == []


def test_machine_and_settings_are_examined_without_a_loop() -> None:
    """Without tasks nothing runs, and there is no headroom."""
    found = diagnose()
    assert (found.findings, found.headroom) == ((), None)
    assert str(found) == "no findings: machine and settings, for device cpu"


# ---------------------------------------------------------------------------------------- planted


class Made(Dataset[Tensor]):
    """Samples that are computed when they are asked for."""

    def __init__(self, host: TimedHost, ms: float) -> None:
        self._host, self._ms = host, ms

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self._host.compute(self._ms / 1e3)
        return torch.ones(8)


def test_a_loader_in_this_process_is_found(host: TimedHost) -> None:
    """Its batches take 4 ms between two steps, on the CPU."""
    found = diagnose(training(), DataLoader(Made(host, 1), batch_size=4))
    assert rules(found) == [("loader-in-process", "loader")]
    assert "4.000 ± " in found.findings[0].text
    assert "on the CPU" in found.findings[0].text


class Slow(SequentialSampler):
    """The loop waits 4 ms for each index."""

    def __init__(self, host: TimedHost, source: Dataset[Any]) -> None:
        super().__init__(source)  # type: ignore[arg-type]
        self._host = host

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self._host.sleep(1e-3)
            yield index


def test_workers_that_are_too_slow_are_found(host: TimedHost) -> None:
    """The loop waits for a loader that has workers."""
    data = TensorDataset(torch.ones(64, 8))
    loader = DataLoader(data, 4, sampler=Slow(host, data), num_workers=1)
    assert rules(diagnose(training(), loader)) == [("slow-loader", "loader")]


PURE: dict[str, Any] = {"pure": True}
TRAINS = {"io": [DeclaredIO(state="model")]}


@pytest.mark.parametrize(
    ("holds", "declared", "is_found"),
    [(True, PURE, True), (False, PURE, False), (True, {}, False), (True, TRAINS, False)],
)
def test_a_task_that_holds_the_interpreter_lock_is_found(
    host: TimedHost, holds: bool, declared: dict[str, Any], is_found: bool
) -> None:
    """A task that is all Python, if another process could do it: none that trains."""

    def parse(ctx: IterContext) -> None:
        host.compute(1e-3)
        for _ in range(60_000 if holds else 0):
            pass

    found = diagnose([PipelineTask("parse", parse, **declared), waiting(host)], batches())
    told = [("interpreter-lock", "task 'parse'")]
    assert rules(found) == (told if is_found else [])


def test_too_many_intra_op_threads_are_found() -> None:
    """More threads for one operator than there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(CORES + 1)
    try:
        found = diagnose(training(), batches())
    finally:
        torch.set_num_threads(before)
    assert rules(found) == [("threads", "torch's intra-op threads")]


def test_too_many_loader_workers_are_found(
    monkeypatch: pytest.MonkeyPatch, host: TimedHost
) -> None:
    """More workers than cores; the loader's own warning aside, they are started all the same."""
    monkeypatch.setattr(swpipe.doctor.environment, "cores", lambda: 1)
    found = diagnose([*training(), waiting(host)], of_data(num_workers=2))
    assert rules(found) == [("threads", "loader")]


def test_too_many_thread_groups_are_found() -> None:
    """A plan with more threads than there are cores."""
    tasks = [PipelineTask(f"t{i}", lambda ctx: None, pure=True) for i in range(CORES + 1)]
    plan = PipelinePlan({t: TaskSchedule(thread_group=f"group {t.name}") for t in tasks})
    assert rules(diagnose(tasks, batches(), plan=plan)) == [("threads", "plan")]


def test_ranks_that_share_the_cores_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank starts, all ranks of the machine start."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(CORES + 1))
    assert rules(diagnose(training(), batches())) == [("threads", "torch's intra-op threads")]


def test_threads_that_are_too_many_together_are_found(
    monkeypatch: pytest.MonkeyPatch, host: TimedHost
) -> None:
    """None is too many alone, and together they are more than twice the cores."""
    monkeypatch.setattr(swpipe.doctor.environment, "cores", lambda: 2)
    tasks = [*training(), waiting(host)]
    plan = PipelinePlan(
        {t: TaskSchedule(thread_group="io" if t.name == "decode" else "default") for t in tasks}
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = diagnose(tasks, of_data(num_workers=2), plan=plan)
    assert rules(found) == [("threads", "machine")]


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What other tests have compiled is forgotten, before and after."""
    import torch._dynamo.utils as dynamo

    def forget() -> None:
        torch._dynamo.reset()
        dynamo.counters.clear()
        dynamo.clear_compilation_metrics()

    forget()
    yield
    forget()


def test_a_graph_break_is_found(fresh_compiler: None) -> None:
    """At its line, with torch's reason."""

    @torch.compile(backend="eager")
    def scale(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    tasks = [PipelineTask("scale", lambda ctx: scale(ctx.batch))]
    found = diagnose(tasks, batches())
    line = scale.__wrapped__.__code__.co_firstlineno + 3  # type: ignore[attr-defined]
    assert rules(found) == [("graph-break", f"{__file__}:{line}")]
    assert "graph_break()" in found.findings[0].mend


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_break_that_torch_makes_itself_is_no_finding(fresh_compiler: None) -> None:
    """Its optimizers run their hooks between two graphs, whatever the loop does."""
    tasks = training()
    step = torch.compile(tasks[-1].fn, backend="eager")
    tasks[-1] = replace(tasks[-1], fn=lambda ctx: step(ctx))
    assert rules(diagnose(tasks, batches())) == []


def test_anomaly_detection_is_found() -> None:
    """A setting of torch's that makes the host read every gradient."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found = diagnose(training(), batches())
    assert rules(found) == [("blocking-setting", "anomaly detection")]


def test_a_long_switch_interval_is_found() -> None:
    """A setting of Python's that makes threads wait for each other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.1)
    try:
        found = diagnose(training(), batches())
    finally:
        sys.setswitchinterval(before)
    assert rules(found) == [("blocking-setting", "switch interval of 0.1 s")]


def test_spinning_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of OpenMP's; those of CUDA's are no fault of a loop on the CPU."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert rules(diagnose(training(), batches())) == [
        ("blocking-setting", "OMP_WAIT_POLICY=ACTIVE")
    ]


def test_a_busy_machine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the profiler goes by, too: other processes take most of the cores."""
    load = SimpleNamespace(others=partial(OtherLoad, 1.5, 2))
    monkeypatch.setattr(swpipe.doctor.examination, "load_so_far", lambda **given: load)
    for found in (diagnose(), diagnose(training(), batches())):
        assert rules(found) == [("busy-machine", "machine")]
        assert "other processes use 1.5 of 2 cores" in str(found)


def test_a_loader_without_a_batch_is_refused() -> None:
    """There is nothing to run."""
    with pytest.raises(ValueError, match="no batch"):
        diagnose(training(), ())


def test_all_state_is_put_back() -> None:
    """A diagnosis trains nothing."""
    model = nn.Linear(8, 1)
    before = model.weight.detach().clone()

    def train(ctx: IterContext) -> None:
        model(ctx.batch).sum().backward()
        with torch.no_grad():
            model.weight -= model.weight.grad

    diagnose([PipelineTask("train", train)], batches())
    assert torch.equal(model.weight, before)
