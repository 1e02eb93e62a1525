"""The click job's tasks: in a plain loop, under plans, and shortcut one at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe._values.walk import tensors_in
from swpipe.plans.clicks import TASKS
from swpipe.tasks.clicks import ClickConfig, ClickJob, ModelConfig, TrainingDivergedError
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import encode
from swpipe.tasks.clicks.log import ClickDataError
from tests.tasks.rows import lines, row, write_log

SMALL = ModelConfig(buckets=64, embedding_dim=4, bottom_layers=(8,), cross_rank=3, top_layers=(8,))

PRODUCES = {
    "read": ("raw",),
    "decode": ("frame", "rejected"),
    "hash": ("host",),
    "copy": ("inputs",),
    "embed": ("embedded",),
    "forward": ("logits", "loss"),
    "backward": (),
    "step": (),
    "auc": (),
}
"""The attributes that each task sets."""

CONSUMES = {"decode": {"raw"}, "hash": {"frame"}, "copy": {"host"}}
"""The attributes that each task deletes."""


@pytest.fixture
def config(small_log: Path, tmp_path: Path) -> ClickConfig:
    """A small model on 50 rows, in batches of 8."""
    held_out = write_log(tmp_path / "held-out.tsv", 30, seed=1)
    return ClickConfig([small_log], [held_out], batch_size=8, model=SMALL)


def plain_loop(job: ClickJob, steps: int) -> list[torch.Tensor]:
    """The losses of training without any engine."""
    losses = []
    for spec in job.batches(steps):
        ctx = IterContext(spec, spec.step)
        for task in job.tasks():
            task.fn(ctx)
        losses.append(ctx.loss.detach())
    return losses


def under(plan: str, job: ClickJob, **changes: Any) -> SWPipeline:
    """A pipeline of the job under a ready-made plan, with some of the plan's values changed."""
    return SWPipeline(_changed(job, plan, changes), job.tasks(), device="cpu")


def _changed(job: ClickJob, name: str, changes: dict[str, Any]) -> Any:
    plan = job.plan(name)
    return type(plan)(**{**{key: getattr(plan, key) for key in _PLAN_KEYS}, **changes})


_PLAN_KEYS = ("schedule", "deps", "cross_iter_deps", "order", "streams", "pipeline_depth")


def same_bits(a: Any, b: Any) -> bool:
    """Whether two outputs of a task are equal, bit for bit."""
    if isinstance(a, pl.DataFrame):
        return a.equals(b)
    ours, theirs = list(tensors_in(a)), list(tensors_in(b))
    if ours:
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    return bool(a == b)


def gradients(job: ClickJob) -> list[torch.Tensor]:
    """A copy of all gradients; each must be there."""
    found = [parameter.grad for parameter in job.model.parameters()]
    assert None not in found
    return [gradient.clone() for gradient in found if gradient is not None]


def state(job: ClickJob, task: str) -> list[torch.Tensor]:
    """What a task did outside the context, copied."""
    if task == "backward":
        return gradients(job)
    if task == "step":
        return [parameter.detach().clone() for parameter in job.model.parameters()]
    return [job.auc.counts.clone()] if task == "auc" else []


def noting(job: ClickJob, seen: dict[int, dict[str, Any]]) -> list[PipelineTask]:
    """The job's tasks; each notes, before it runs, what the context of its iteration holds."""

    def noted(task: PipelineTask) -> PipelineTask:
        def fn(ctx: IterContext) -> None:
            seen[ctx.iter_idx].update(vars(ctx))
            task.fn(ctx)

        return replace(task, fn=fn)

    return [noted(task) for task in job.tasks()]


def spoil(job: ClickJob, task: str) -> None:
    """Undo what a task did outside the context, so that only its replay can bring it back."""
    if task == "backward":
        job.optimizer.zero_grad()
    if task == "auc":
        job.auc.counts = torch.zeros_like(job.auc.counts)


def test_the_tasks_are_those_of_the_plans(config: ClickConfig) -> None:
    """By name and in order."""
    assert tuple(task.name for task in ClickJob(config).tasks()) == TASKS == tuple(PRODUCES)


def test_each_task_sets_what_the_module_says(config: ClickConfig) -> None:
    """The drawing in the module's head holds: these attributes come and go with these tasks."""
    job = ClickJob(config)
    (spec,) = job.batches(1)
    ctx = IterContext(spec, 0)
    for task in job.tasks():
        before = set(vars(ctx))
        task.fn(ctx)
        assert set(vars(ctx)) - before == set(PRODUCES[task.name])
        assert before - set(vars(ctx)) == CONSUMES.get(task.name, set())


def test_the_tasks_do_what_a_hand_written_loop_does(config: ClickConfig) -> None:
    """Gradients are those of one step alone, the step uses them, each row is counted once."""
    job, other = ClickJob(config), ClickJob(config)
    losses = []
    for spec in other.batches(10):
        data = b"".join(part.read() for part in spec.ranges)
        batch = encode(decode(data, spec.ranges).frame, SMALL.buckets)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            other.model(batch), batch.labels
        )
        other.optimizer.zero_grad()
        loss.backward()
        other.optimizer.step()
        losses.append(loss.detach())
    assert torch.allclose(torch.stack(plain_loop(job, 10)), torch.stack(losses), rtol=1e-5)
    for mine, theirs in zip(job.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert int(job.auc.counts.sum()) == sum(spec.rows for spec in job.batches(10))


def test_a_plain_loop_learns(config: ClickConfig) -> None:
    """The loss over the same rows goes down."""
    losses = plain_loop(ClickJob(config), 70)
    assert torch.stack(losses[-7:]).mean() < 0.8 * torch.stack(losses[:7]).mean()


@pytest.mark.parametrize("plan", ["serial", "pipelined"])
def test_a_plan_changes_no_bit(config: ClickConfig, plan: str) -> None:
    """Losses, parameters, gradients and the running AUC equal those of a plain loop."""
    plain, job = ClickJob(config), ClickJob(config)
    expected = plain_loop(plain, 20)
    with under(plan, job) as pipe:
        losses = [ctx.loss.detach() for ctx in pipe.iterate(job.batches(20))]
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, job.model.parameters(), plain.model.parameters()))
    assert all(map(torch.equal, gradients(job), gradients(plain)))
    assert torch.equal(job.auc.counts, plain.auc.counts)


@pytest.mark.parametrize("depth", [2, 5])
def test_depth_changes_no_bit(config: ClickConfig, depth: int) -> None:
    """However far reading runs ahead."""
    plain, job = ClickJob(config), ClickJob(config)
    expected = plain_loop(plain, 15)
    with under("pipelined", job, pipeline_depth=depth) as pipe:
        losses = [ctx.loss.detach() for ctx in pipe.iterate(job.batches(15))]
    assert all(map(torch.equal, losses, expected))


@pytest.mark.parametrize("plan", ["serial", "pipelined"])
@pytest.mark.parametrize("task", TASKS)
def test_a_replay_equals_the_cached_run(config: ClickConfig, task: str, plan: str) -> None:
    """What each task, alone, puts into the context and does outside it comes back bit for bit."""
    job = ClickJob(config)
    seen: dict[int, dict[str, Any]] = defaultdict(dict)
    with SWPipeline(job.plan(plan), noting(job, seen), device="cpu") as pipe:
        pipe.enable_shortcut(task)
        batches = job.batches(5)
        pipe.progress(batches)
        kept = state(job, task)
        for later in range(1, 5):
            spoil(job, task)
            pipe.progress(batches)
            assert seen[later]["batch"] != seen[0]["batch"]
            for name in PRODUCES[task]:
                assert same_bits(seen[later][name], seen[0][name])
            assert all(map(torch.equal, state(job, task), kept))


@pytest.mark.parametrize("plan", ["serial", "pipelined"])
def test_gradients_behind_a_replayed_forward_are_zeros(config: ClickConfig, plan: str) -> None:
    """The embedding tables stay in the graph: zeros, not None, and a step that changes nothing."""
    job = ClickJob(config)
    tables = [p for name, p in job.model.named_parameters() if "embedding_bags" in name]
    with under(plan, job) as pipe:
        pipe.enable_shortcut("forward")
        batches = job.batches(4)
        pipe.progress(batches)
        assert all(table.grad is not None and table.grad.any() for table in tables)
        before = state(job, "step")
        for _ in range(3):
            pipe.progress(batches)
            assert all(table.grad is not None and not table.grad.any() for table in tables)
        assert all(map(torch.equal, state(job, "step"), before))


def test_training_goes_on_after_a_shortcut(config: ClickConfig) -> None:
    """With everything enabled again, the next step is the one a plain loop takes from there."""
    job = ClickJob(config)
    with under("serial", job) as pipe:
        with pipe.shortcut(*TASKS):
            list(pipe.iterate(job.batches(3)))
        reference = ClickJob(config)
        reference.model.load_state_dict(job.model.state_dict())
        reference.optimizer.load_state_dict(deepcopy(job.optimizer.state_dict()))
        (ctx,) = pipe.iterate(job.batches(1))
    (expected,) = plain_loop(reference, 1)
    assert torch.equal(ctx.loss.detach(), expected)
    assert all(map(torch.equal, job.model.parameters(), reference.model.parameters()))


@pytest.mark.parametrize("plan", ["serial", "pipelined"])
def test_a_loss_that_is_no_number_stops_training(config: ClickConfig, plan: str) -> None:
    """The error names the step, and the step is not taken."""
    job = ClickJob(config)
    with under(plan, job) as pipe:
        batches = job.batches(9)
        for _ in range(3):
            pipe.progress(batches)
        bias = dict(job.model.named_parameters())["net.over_arch.model.1.bias"]
        with torch.no_grad():
            bias.fill_(torch.nan)
        before = state(job, "step")
        with pytest.raises(TrainingDivergedError, match="at step 3 ") as caught:
            pipe.progress(batches)
        assert "task 'forward'" in "".join(caught.value.__notes__)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(before, state(job, "step"), strict=True)
    )


def test_malformed_rows_make_a_batch_shorter(tmp_path: Path, config: ClickConfig) -> None:
    """They are dropped and named; even a batch without any good row passes."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row(), "x", row({0: "1"}), row({3: "?"}), "y", "z"))
    job = ClickJob(replace(config, data=[path], batch_size=2))
    with under("pipelined", job) as pipe:
        found = [
            (len(ctx.inputs.labels), [bad.line for bad in ctx.rejected], float(ctx.loss.detach()))
            for ctx in pipe.iterate(job.batches())
        ]
    assert [(rows, bad) for rows, bad, _ in found] == [(1, [2]), (1, [4]), (0, [5, 6])]
    assert found[2][2] == 0.0
    assert int(job.auc.counts.sum()) == 2


@pytest.mark.parametrize("plan", ["serial", "pipelined"])
def test_strict_stops_at_a_malformed_row(tmp_path: Path, config: ClickConfig, plan: str) -> None:
    """From whichever thread decodes."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(*[row()] * 9, "x"))
    job = ClickJob(replace(config, data=[path], batch_size=2, strict=True))
    with under(plan, job) as pipe, pytest.raises(ClickDataError, match=r"odd\.tsv:10: 1 fields"):
        list(pipe.iterate(job.batches()))


def test_evaluation_is_exact_and_changes_nothing(config: ClickConfig) -> None:
    """Rows of the held-out log only, without a trace in model or metric."""
    job = ClickJob(config)
    plain_loop(job, 5)
    before = [*state(job, "step"), *state(job, "auc"), *gradients(job)]
    result = job.evaluate()
    assert result.rows == 30
    assert 0.0 <= result.auc <= 1.0
    assert all(map(torch.equal, before, [*state(job, "step"), *state(job, "auc"), *gradients(job)]))
    assert job.evaluate() == result


def test_evaluation_equals_one_over_all_rows_at_once(config: ClickConfig) -> None:
    """Cutting the held-out rows into batches makes no difference."""
    small, large = ClickJob(config), ClickJob(replace(config, batch_size=1000))
    assert small.evaluate().auc == large.evaluate().auc
    assert small.evaluate().loss == pytest.approx(large.evaluate().loss)


def test_evaluation_of_rows_of_one_kind_has_no_auc(tmp_path: Path, config: ClickConfig) -> None:
    """Without a click, or without good rows at all, there is nothing to rank."""
    for name, rows in (("alike", [row()] * 3), ("bad", ["bad"])):
        path = tmp_path / name
        path.write_bytes(lines(*rows))
        assert math.isnan(ClickJob(replace(config, held_out=[path])).evaluate().auc)


def test_evaluation_needs_rows_held_out(config: ClickConfig) -> None:
    """The error says where to name them."""
    job = ClickJob(replace(config, held_out=()))
    with pytest.raises(RuntimeError, match=r"ClickConfig\.held_out"):
        job.evaluate()


def test_a_made_up_log_can_be_learned(tmp_path: Path) -> None:
    """After a few passes over a few rows the model tells held-out clicks from others."""
    from swpipe.tasks.clicks.generate import click_logs

    logs = click_logs(tmp_path, train_rows=20_000, held_out_rows=5_000)
    job = ClickJob(ClickConfig([logs.train], [logs.held_out], batch_size=512))
    with under("pipelined", job) as pipe:
        pipe.run(job.batches(60))
    assert job.evaluate().auc > 0.65


SAMPLE = Path(__file__).parents[2].parent / "shared" / "data" / "criteo_sample.tsv"


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample of real rows is not here")
def test_real_rows_train_alike_under_both_plans(config: ClickConfig) -> None:
    """200 rows of a real log, none malformed: losses and parameters are bit-equal."""
    config = replace(config, data=[SAMPLE], batch_size=16)
    serial, pipelined = ClickJob(config), ClickJob(config)
    with under("serial", serial) as one, under("pipelined", pipelined) as two:
        ones, twos = list(one.iterate(serial.batches(20))), list(two.iterate(pipelined.batches(20)))
    assert [ctx.rejected for ctx in twos] == [()] * 20
    assert all(torch.equal(a.loss, b.loss) for a, b in zip(ones, twos, strict=True))
    assert all(map(torch.equal, serial.model.parameters(), pipelined.model.parameters()))
