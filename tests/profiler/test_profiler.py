"""The profiler for users: the figures are right, and all else stays as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskProfiler
from swpipe.profiler import ProfileResults
from swpipe.profiler.measure import WindowTimer
from tests.profiler.sleepers import overlapped
from tests.support.notes import Notes

QUICK = {"num_warmup": 1, "num_measure": 2, "num_rounds": 2}


class Job:
    """A small training job with everything that profiling might disturb."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.ran = Notes()
        self.fails_at = 10**9

    def read(self, ctx: IterContext) -> None:
        ctx.x = ctx.batch * 1

    def forward(self, ctx: IterContext) -> None:
        self.ran.append("forward")
        if len(self.ran.read()) >= self.fails_at:
            raise ZeroDivisionError("planted")
        noise = torch.rand(1) + random.random()
        ctx.loss = (self.model(ctx.x) + noise).square().mean()

    def backward(self, ctx: IterContext) -> None:
        self.optimizer.zero_grad()
        ctx.loss.backward()

    def step(self, ctx: IterContext) -> None:
        self.ran.append("step")
        self.optimizer.step()

    @property
    def tasks(self) -> list[PipelineTask]:
        """The tasks in serial order."""
        functions = (self.read, self.forward, self.backward, self.step)
        return [PipelineTask(fn.__name__, fn) for fn in functions]

    def state(self) -> list[Any]:
        """Return all state as plain data."""
        return [
            {name: tensor.tolist() for name, tensor in self.model.state_dict().items()},
            [None if p.grad is None else p.grad.tolist() for p in self.model.parameters()],
            [module.training for module in self.model.modules()],
            copy.deepcopy(_plain(self.optimizer.state_dict())),
            torch.get_rng_state().tolist(),
            random.getstate(),
        ]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


BATCH = torch.linspace(0, 1, 12).view(4, 3)


@pytest.fixture
def job() -> Job:
    """A job before its first step."""
    return Job()


@pytest.fixture
def pipe(job: Job) -> Iterator[SWPipeline]:
    """A pipeline of the job that reads one batch ahead in a thread group of its own."""
    plan = overlapped({"io": ["read"], "default": ["forward", "backward", "step"]})
    with SWPipeline(plan, job.tasks) as pipe:
        yield pipe


def test_a_profile_has_every_task_in_serial_order(pipe: SWPipeline) -> None:
    """It has figures for all tasks, in the order in which they run."""
    result = TaskProfiler(pipe).profile(BATCH, **QUICK)
    names = ("read", "forward", "backward", "step")
    for figures in (result.tasks, result.measured, result.exposed_s, result.host_s):
        assert tuple(figures) == names
    most_s = result.baseline_s
    raw_s = {name: exposed.value_s for name in names if (exposed := result.exposed(name))}
    assert result.exposed_s == {name: min(max(0.0, s), most_s) for name, s in raw_s.items()}
    assert (result.batch, result.mode, result.measurement.num_rounds) == ("batch 0", "serial", 2)
    assert result.baseline_s > 0


@pytest.mark.parametrize(("pipelined", "steps"), [(False, 0), (True, 2)])
def test_everything_is_restored_bit_for_bit(
    job: Job, pipe: SWPipeline, pipelined: bool, steps: int
) -> None:
    """This includes model, gradients, flags, optimizer, generators and the iteration's number."""
    pipe.run_serial([BATCH] * steps)
    before = job.state()
    result = TaskProfiler(pipe).profile(BATCH, pipelined=pipelined, **QUICK)
    assert job.state() == before
    assert result.measurement.put_back == ("Sequential", "Adam")
    assert pipe.next_iteration == steps


@pytest.mark.parametrize("pipelined", [False, True])
def test_after_a_failure_everything_is_restored(
    job: Job, pipe: SWPipeline, pipelined: bool
) -> None:
    """The task's own error is raised; no shortcut is enabled, and the pipeline runs."""
    before = job.state()
    job.fails_at = 12
    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        TaskProfiler(pipe).profile(BATCH, pipelined=pipelined, **QUICK)
    assert any(note.startswith("swpipe: while profiling with") for note in caught.value.__notes__)
    assert job.state() == before
    assert pipe.shortcut_tasks == set()
    assert pipe.in_flight == 0
    job.fails_at = 10**9
    job.ran.clear()
    contexts = list(pipe.iterate([BATCH]))
    assert [ctx.iter_idx for ctx in contexts] == [0]
    assert job.ran.read() == ["forward", "step"]


def test_a_task_that_cannot_be_replayed_is_a_row_with_the_reason() -> None:
    """The others are measured, and the state is restored."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def forward(ctx: IterContext) -> None:
        ctx.x = ctx.batch * 1
        ctx.factors = iter([1.0, 2.0])

    def rectify(ctx: IterContext) -> None:
        ctx.x.relu_().mul_(next(ctx.factors))  # uses up what a replay of forward would restore
        ctx.loss = (ctx.x * weight).sum()

    def step(ctx: IterContext) -> None:
        ctx.loss.backward()
        optimizer.step()

    tasks = [PipelineTask(fn.__name__, fn) for fn in (forward, rectify, step)]
    plan = overlapped({"io": ["forward"], "default": ["rectify", "step"]})
    with SWPipeline(plan, tasks) as pipe:
        result = TaskProfiler(pipe).profile(torch.ones(3), pipelined=True, **QUICK)
    assert tuple(result.exposed_s) == ("rectify", "step")
    assert tuple(result.measured) == ("forward", "rectify", "step")
    why = result.tasks["forward"].not_measured
    assert "ShortcutError: task 'forward' cannot be replayed" in why
    assert (
        "not measured: forward, since iterations with its shortcut fail" in result.format_report()
    )
    assert torch.equal(weight, torch.ones(3))
    assert weight.grad is None


def test_a_task_whose_replay_fails_in_a_later_round_is_a_row_with_the_reason() -> None:
    """Its visits of the earlier rounds are left out as well."""
    ran: list[int] = []
    replays: list[int] = []

    def forward(ctx: IterContext) -> None:
        ran.append(ctx.iter_idx)
        ctx.x = ctx.batch * 1

    def step(ctx: IterContext) -> None:
        if ran[-1] != ctx.iter_idx:
            replays.append(ctx.iter_idx)
            if len(replays) > 20:
                raise ValueError("replayed once too often")
        ctx.loss = ctx.x.sum()

    tasks = [PipelineTask(fn.__name__, fn) for fn in (forward, step)]
    with SWPipeline(overlapped({"default": ["forward", "step"]}), tasks) as pipe:
        result = TaskProfiler(pipe).profile(torch.ones(3), num_measure=4, num_rounds=8)
    assert len(replays) > 20
    assert tuple(result.exposed_s) == ("step",)
    assert "replayed once too often" in result.tasks["forward"].not_measured


def test_the_users_shortcuts_stay_and_are_not_measured(job: Job, pipe: SWPipeline) -> None:
    """Their caches stay, too, although the profile used another batch."""
    pipe.enable_shortcut("forward")
    (cached,) = pipe.iterate([BATCH])
    job.ran.clear()
    result = TaskProfiler(pipe).profile(5 * BATCH, **QUICK)
    assert job.ran.read().count("forward") == 2  # once to see what it touches
    assert tuple(result.measured) == ("read", "backward", "step")
    assert result.measurement.already_shortcut == ("forward",)
    job.ran.clear()
    (replayed,) = pipe.iterate([BATCH])
    assert job.ran.read() == ["step"]
    assert torch.equal(replayed.loss, cached.loss)


def test_several_batches_come_out_in_order(
    pipe: SWPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one named result each, for some tasks or their names, in serial order."""
    profiler = TaskProfiler(pipe)
    results = profiler.profile_many(
        iter([BATCH, 2 * BATCH]), tasks=["step", pipe.tasks[1]], verbose=True, **QUICK
    )
    assert isinstance(results, ProfileResults)
    assert [result.batch for result in results] == ["batch 0", "batch 1"]
    assert {tuple(result.measured) for result in results} == {("forward", "step")}
    assert "4/4" in capsys.readouterr().err  # one tick per visit to a task
    (only,) = profiler.profile_many([BATCH], tasks="step", **QUICK)
    assert (only.batch, tuple(only.measured)) == ("batch 0", ("step",))
    assert capsys.readouterr().err == ""


def test_a_profile_of_batches_runs_no_iterations_but_its_visits(
    pipe: SWPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds without streams, whose work would have to be timed separately."""
    monkeypatch.setattr(WindowTimer, "passage", lambda *given: pytest.fail("a passage"))
    results = TaskProfiler(pipe).profile_many([BATCH, 2 * BATCH], **QUICK)
    assert results.loop is not None
    assert not results.loop.on_streams
    assert not results[1].on_streams


def test_state_can_be_given(job: Job, pipe: SWPipeline) -> None:
    """Then only that state is restored, and an optimizer at its first step."""
    model, optimizer = job.model, job.optimizer
    weights = copy.deepcopy(model.state_dict())

    def put_back(state: Any) -> tuple[str, ...]:
        return TaskProfiler(pipe, state=state).profile(BATCH, **QUICK).measurement.put_back

    assert put_back({"net": model}) == ("net (Sequential)",)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert put_back([model, optimizer]) == ("state[0] (Sequential)", "state[1] (Adam)")
    assert put_back(optimizer) == ("state (Adam)",)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert put_back(()) == ()
    assert torch.equal(weights["0.weight"], model[0].weight)


def test_copies_for_tasks_that_modify_the_batch() -> None:
    """The given batch is not modified."""
    batch = torch.zeros(1)

    def modify(ctx: IterContext) -> None:
        ctx.batch.add_(1)

    tasks = [PipelineTask("modify", modify)]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        TaskProfiler(pipe, copy=torch.clone).profile(batch, **QUICK)
    assert batch.item() == 0.0
