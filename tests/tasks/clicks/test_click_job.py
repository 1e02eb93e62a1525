"""The click job: its model and metrics, its tasks in a plain loop and under plans, shortcuts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from torchmetrics.classification import BinaryAUROC

from swpipe import IterContext, PipelineTask, SWPipeline
from swpipe._values.walk import tensors_in
from swpipe.plans.clicks import PLANS, TASKS
from swpipe.profiler.trial import trial_state
from swpipe.tasks.clicks import (
    ClickConfig,
    ClickDataError,
    ClickJob,
    ModelConfig,
)
from swpipe.tasks.clicks.decode import decode
from swpipe.tasks.clicks.encode import ClickBatch, encode
from swpipe.tasks.clicks.generate import click_logs
from swpipe.tasks.clicks.metrics import RunningAUC
from swpipe.tasks.clicks.model import ClickModel, click_loss, make_optimizer
from swpipe.tasks.job_run import JobRun
from tests.tasks.clicks.rows import SMALL, lines, row, write_log

CPU = torch.device("cpu")

PRODUCES: dict[str, tuple[str, ...]] = {
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


def plain_loop(job: ClickJob, steps: int) -> list[Tensor]:
    """The losses of training without any engine."""
    losses = []
    for spec in job.batches(steps):
        ctx = IterContext(spec, spec.step)
        for task in job.tasks():
            task.fn(ctx)
        losses.append(ctx.loss.detach())
    return losses


def under(plan: str, job: ClickJob, depth: int | None = None) -> SWPipeline[Any]:
    """A pipeline of the job under a ready-made plan."""
    made = job.plan(plan)
    return SWPipeline(replace(made, pipeline_depth=depth or made.depth), job.tasks(), device="cpu")


def gradients(job: ClickJob) -> list[Tensor]:
    """A copy of all gradients; each must be there."""
    found = [parameter.grad for parameter in job.model.parameters()]
    assert None not in found
    return [gradient.clone() for gradient in found if gradient is not None]


def state(job: ClickJob, task: str) -> list[Tensor]:
    """What a task did outside the context, copied."""
    if task == "backward":
        return gradients(job)
    if task == "step":
        return [parameter.detach().clone() for parameter in job.model.parameters()]
    return [job.auc.counts.clone()] if task == "auc" else []


def equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether they are the same tensors, bit for bit."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# --------------------------------------------------------------------------- model and metrics


@pytest.fixture
def batch(config: ClickConfig) -> ClickBatch:
    """50 rows."""
    (spec,) = ClickJob(replace(config, batch_size=50)).batches()
    return encode(decode(spec.read(), spec).frame, SMALL.buckets)


def test_the_seed_fixes_the_model() -> None:
    """Bit for bit; another seed gives other parameters; who draws sees nothing of it."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    a, b, c = ([*ClickModel(SMALL, seed).parameters()] for seed in (3, 3, 4))
    assert torch.equal(torch.rand(3), expected)
    assert equal(a, b)
    assert not equal(a, c)


def test_every_parameter_learns(batch: ClickBatch) -> None:
    """Two steps move each of them; the loss is the mean over rows."""
    model = ClickModel(SMALL, seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = make_optimizer(list(model.parameters()), SMALL.learning_rate)
    for _ in range(2):  # a cross layer that begins at zero moves its partner from the second on
        optimizer.zero_grad()
        logits = model(batch)
        loss = click_loss(logits, batch.labels)
        loss.backward()
        optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    assert logits.shape == (50,)
    exact = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    assert torch.allclose(loss, exact)


def test_sizes_are_checked() -> None:
    """All that is wrong is named."""
    for sizes, told in [
        ({"embedding_dim": -1, "cross_rank": 0}, "embedding_dim -1, cross_rank 0"),
        ({"top_layers": (8, 0)}, "top_layers 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
    ]:
        with pytest.raises(ValueError, match=told):
            ModelConfig(**sizes)  # type: ignore[arg-type]


def test_running_auc_is_the_auc() -> None:
    """It agrees with torchmetrics' exact one, but for ties; old counts stay as they are."""
    running, exact = RunningAUC(CPU), BinaryAUROC(thresholds=None)
    assert math.isnan(running.compute())
    generator, kept = torch.Generator().manual_seed(0), running.counts
    for _ in range(4):
        labels = (torch.rand(500, generator=generator) < 0.3).float()
        logits = torch.randn(500, generator=generator) + labels
        running.update(logits, labels)
        exact.update(logits.sigmoid(), labels.long())
    assert running.compute() == pytest.approx(float(exact.compute()), abs=5e-4)
    assert (int(kept.sum()), int(running.counts.sum())) == (0, 2000)


def test_running_auc_of_plain_cases() -> None:
    """All wrong, ties, probabilities of 0 and 1, NaN and infinity; NaN for labels of one kind."""
    for logits, labels, auc in (
        ([-2.0, -1.0, 1.0, 2.0], [1, 1, 0, 0], 0.0),
        ([0.5, 0.5, 0.5, 0.5], [0, 1, 0, 1], 0.5),
        ([-100.0, 100.0, 0.0], [0, 1, 1], 1.0),
        ([math.nan, math.inf], [0, 1], 1.0),  # a run tells of these
        ([0.0, 0.0], [0, 0], math.nan),
    ):
        running = RunningAUC(CPU)
        running.update(torch.tensor(logits), torch.tensor(labels, dtype=torch.float32))
        assert int(running.counts.sum()) == len(logits)
        assert running.compute() == pytest.approx(auc, nan_ok=True)


# --------------------------------------------------------------------------------------- tasks


def test_each_task_sets_what_the_module_says(config: ClickConfig) -> None:
    """The drawing in the module's head holds: these attributes come and go with these tasks."""
    job = ClickJob(config)
    assert tuple(task.name for task in job.tasks()) == TASKS == tuple(PRODUCES)
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
        batch = encode(decode(spec.read(), spec).frame, SMALL.buckets)
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


def test_a_plan_changes_no_bit(config: ClickConfig) -> None:
    """Losses, parameters, gradients and the running AUC equal those of a plain loop."""
    plain = ClickJob(config)
    expected = plain_loop(plain, 15)
    for plan, depth in (("serial", None), ("pipelined", None), ("pipelined", 5)):
        job = ClickJob(config)
        with under(plan, job, depth) as pipe:
            losses = [ctx.loss.detach() for ctx in pipe.iterate(job.batches(15))]
        assert equal(losses, expected)
        assert all(equal(state(job, t), state(plain, t)) for t in ("backward", "step", "auc"))


def test_malformed_rows_make_a_batch_shorter(tmp_path: Path, config: ClickConfig) -> None:
    """They are dropped and named; even a batch without a good row passes, unless strict."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row(), "x", row({0: "1"}), row({3: "?"}), "y", "z"))
    config = replace(config, data=[path], batch_size=2)
    job = ClickJob(config)
    with under("pipelined", job) as pipe:
        found = [
            (len(ctx.inputs.labels), [bad.line for bad in ctx.rejected], float(ctx.loss.detach()))
            for ctx in pipe.iterate(job.batches())
        ]
    assert [(rows, bad) for rows, bad, _ in found] == [(1, [2]), (1, [4]), (0, [5, 6])]
    assert found[2][2] == 0.0
    assert int(job.auc.counts.sum()) == 2
    strict = ClickJob(replace(config, strict=True))
    with (
        under("pipelined", strict) as pipe,
        pytest.raises(ClickDataError, match=r"odd\.tsv:2: 1 fields"),
    ):
        list(pipe.iterate(strict.batches()))


def test_rows_are_counted_once(tmp_path: Path, config: ClickConfig) -> None:
    """Later epochs meet the same malformed rows; the first few are shown."""
    path = tmp_path / "odd.tsv"
    path.write_bytes(lines(row(), *["bad"] * 7, row()))
    job = ClickJob(replace(config, data=[path], held_out=(), batch_size=4))
    with JobRun("run", job, PLANS["serial"](), 9) as run:
        run.advance(9)
    (told,) = job.notes()
    assert told.startswith("data: 9 rows, 7 of them malformed and dropped:\n")
    assert [f":{line}: 1 fields" in told for line in range(2, 8)] == [True] * 5 + [False]
    assert told.endswith("\n  ... and 2 more")


# ----------------------------------------------------------------------------------- shortcuts


def same_bits(a: Any, b: Any) -> bool:
    """Whether two outputs of a task are equal, bit for bit."""
    if isinstance(a, pl.DataFrame):
        return a.equals(b)
    ours, theirs = list(tensors_in(a)), list(tensors_in(b))
    return equal(ours, theirs) if ours else bool(a == b)


def noting(job: ClickJob, seen: dict[int, dict[str, Any]]) -> list[PipelineTask]:
    """The job's tasks; each notes, before it runs, what the context of its iteration holds."""

    def noted(task: PipelineTask) -> PipelineTask:
        def fn(ctx: IterContext) -> None:
            seen[ctx.iter_idx].update(vars(ctx))
            task.fn(ctx)

        return replace(task, fn=fn)

    return [noted(task) for task in job.tasks()]


def test_a_replay_equals_the_cached_run(config: ClickConfig) -> None:
    """What each task, alone, puts into the context and does outside it comes back bit for bit."""
    for task in TASKS:
        job = ClickJob(config)
        seen: dict[int, dict[str, Any]] = defaultdict(dict)
        with SWPipeline(job.plan(), noting(job, seen), device="cpu") as pipe:
            pipe.enable_shortcut(task)
            batches = job.batches(2)
            pipe.progress(batches)
            kept = state(job, task)
            if task == "backward":  # only its replay can bring them back
                job.optimizer.zero_grad()
            if task == "auc":
                job.auc.counts = torch.zeros_like(job.auc.counts)
            pipe.progress(batches)
            assert seen[1]["batch"] != seen[0]["batch"]
            assert all(same_bits(seen[1][n], seen[0][n]) for n in PRODUCES[task])
            assert equal(state(job, task), kept)


def test_a_trial_trains_nothing(config: ClickConfig) -> None:
    """Whatever is shortcut in it, training and the running AUC go on as if it had not been."""

    def trained(*names: str) -> list[Tensor]:
        job = ClickJob(config)
        batches = list(job.batches(4))
        with under("pipelined", job) as pipe:
            pipe.run(iter(batches[:2]))
            if names:
                with trial_state(pipe, batches[2], None).trial(), pipe.shortcut(*names):
                    pipe.run(repeat(batches[2], 3))
            pipe.run(iter(batches[2:]))
        values = [value for each in job.optimizer.state.values() for value in each.values()]
        return [*state(job, "step"), *state(job, "auc"), *values]

    expected = trained()
    for names in (("forward", "backward"), ("step", "auc")):
        assert equal(trained(*names), expected)


# ---------------------------------------------------------------------------------- evaluation


def test_evaluation_is_exact_and_changes_nothing(config: ClickConfig, tmp_path: Path) -> None:
    """However held-out rows are cut into batches; NaN without two kinds of rows."""
    job = ClickJob(config)
    whole = ClickJob(replace(config, batch_size=1000)).evaluate()
    assert (job.evaluate().auc, job.evaluate().rows) == (whole.auc, 30)
    assert job.evaluate().loss == pytest.approx(whole.loss)
    plain_loop(job, 5)
    before = [value for task in ("step", "auc", "backward") for value in state(job, task)]
    assert job.evaluate() == job.evaluate()
    after = [value for task in ("step", "auc", "backward") for value in state(job, task)]
    assert equal(before, after)
    for name, rows in (("alike", [row()] * 3), ("bad", ["bad"])):
        path = tmp_path / name
        path.write_bytes(lines(*rows))
        assert math.isnan(ClickJob(replace(config, held_out=[path])).evaluate().auc)
    with pytest.raises(RuntimeError, match=r"ClickConfig\.held_out"):
        ClickJob(replace(config, held_out=())).evaluate()


def test_a_generated_log_can_be_learned(tmp_path: Path) -> None:
    """After a few passes over a few rows the model tells held-out clicks from others."""
    logs = click_logs(tmp_path, train_rows=12_000, held_out_rows=3_000)
    job = ClickJob(ClickConfig([logs.train], [logs.held_out], batch_size=512))
    with under("pipelined", job) as pipe:
        pipe.run(job.batches(40))
    assert job.evaluate().auc > 0.65
