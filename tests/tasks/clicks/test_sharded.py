"""The click job on several ranks: the same numbers under all exact plans, each row once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swpipe import SWPipeline, TaskProfiler
from swpipe.plans.torchrec.sharded_clicks import FEED, PLANS, TASKS
from swpipe.tasks.clicks import ClickConfig, ClickDataError, ClickJob, Evaluation
from swpipe.tasks.clicks.sharded import ShardedClickJob
from swpipe.tasks.job_run import JobRun, compare
from tests.support.ranks import Ranks
from tests.tasks.clicks.rows import SMALL, lines, row, write_log


@pytest.fixture
def config(tmp_path: Path) -> ClickConfig:
    """A small model on 60 rows in 5 batches, an odd number of them; 25 rows held out."""
    log = write_log(tmp_path / "log.tsv", 60)
    held_out = write_log(tmp_path / "held_out.tsv", 25, seed=1)
    return ClickConfig([log], [held_out], batch_size=12, model=SMALL)


def _run(name: str, config: ClickConfig, steps: int | None = None) -> JobRun:
    run = JobRun(name, ShardedClickJob(config), PLANS[name](), steps, config.device)
    run.advance(100)
    return run


def _plans_differ(config: ClickConfig) -> list[str]:
    """Plans under which once through the data does not end as it does serially."""
    with _run("serial", config) as serial:
        assert len(serial.losses) == 3
        assert serial.job.all_rows().lines == 60
        different = []
        for name in PLANS:
            with _run(name, config) as run:
                if not compare(serial, run).equal:
                    different.append(name)
    return different


def test_all_exact_plans_train_bit_equal(two_ranks: Ranks, config: ClickConfig) -> None:
    """Only the one with stale tables ends otherwise, and all ranks know."""
    assert two_ranks.run(_plans_differ, config) == [["semi_sync"]] * 2


def _addresses(config: ClickConfig, steps: int | None) -> list[tuple[int, int, int]]:
    """(step, epoch, first line) of this rank's batches; a batch without rows has line 0."""
    job = ShardedClickJob(config)
    assert len(job.log) == 5
    return [
        (spec.step, spec.epoch, spec.first_line if spec.rows else 0) for spec in job.batches(steps)
    ]


def test_each_row_is_read_once_by_one_rank(two_ranks: Ranks, config: ClickConfig) -> None:
    """Once through the data both have three batches, one of them without rows; steps go on."""
    zero, one = two_ranks.run(_addresses, config, None)
    assert zero == [(0, 0, 1), (1, 0, 25), (2, 0, 49)]
    assert one == [(0, 0, 13), (1, 0, 37), (0, 0, 0)]
    zero, one = two_ranks.run(_addresses, config, 4)
    assert zero == [(0, 0, 1), (1, 0, 25), (2, 0, 49), (3, 1, 13)]
    assert one == [(0, 0, 13), (1, 0, 37), (2, 1, 1), (3, 1, 25)]


def _trained(config: ClickConfig, steps: int) -> tuple[Evaluation, Evaluation, float, float]:
    job = ShardedClickJob(config)
    with JobRun("run", job, PLANS["sparse_dist"](), steps, config.device) as run:
        before = job.evaluate()
        run.advance(steps)
        losses = torch.stack(job.over_ranks(torch.tensor(run.losses)))
        return before, job.evaluate(), float(losses.mean()), job.auc_of_all()


def test_two_ranks_train_as_one_process_with_batches_twice_as_large(
    two_ranks: Ranks, config: ClickConfig
) -> None:
    """They begin with the same parameters, and average what one process would sum up."""
    zero, one = two_ranks.run(_trained, replace(config, batch_size=10), 6)
    assert zero == one
    before, after, loss, auc = zero
    alone = ClickJob(replace(config, batch_size=20))
    assert before.loss == pytest.approx(alone.evaluate().loss, rel=1e-6)
    assert before.auc == pytest.approx(alone.evaluate().auc, rel=1e-6)
    with SWPipeline(alone.plan("serial"), alone.tasks(), device="cpu") as pipe:
        losses = [ctx.loss.item() for ctx in pipe.iterate(alone.batches(6))]
    assert loss == pytest.approx(sum(losses) / 6, rel=1e-3)
    assert auc == pytest.approx(alone.auc.compute(), abs=5e-3)
    assert after.loss == pytest.approx(alone.evaluate().loss, rel=1e-3)
    assert after.rows == 25


def _evaluated_on_the_way(config: ClickConfig) -> list[bool]:
    """Whether the model is attached afterwards, and the run goes on as without an evaluation."""
    job = ShardedClickJob(config)
    evaluated = JobRun("evaluated", job, PLANS["serial"](), 4, config.device)
    with _run("serial", config, 4) as plain, evaluated as run:
        run.advance(2)
        job.evaluate()
        attached = job.step_tasks.rewrite.attached
        run.advance(2)
        return [attached, compare(plain, run).equal]


def test_training_goes_on_after_an_evaluation(two_ranks: Ranks, config: ClickConfig) -> None:
    """The model, which was its own meanwhile, is attached again, and the numbers are the same."""
    assert two_ranks.run(_evaluated_on_the_way, config) == [[True, True]] * 2


def _with_bad_rows(config: ClickConfig) -> tuple[float, int, int, list[int]]:
    with _run("sparse_dist", config) as run:
        assert all(math.isfinite(loss) for loss in run.losses)
        rows = run.job.all_rows()
        return float(run.losses[1]), rows.lines, rows.malformed, [r.line for r in rows.examples]


def test_a_rank_without_a_good_row_keeps_up(
    two_ranks: Ranks, config: ClickConfig, tmp_path: Path
) -> None:
    """Its batch counts for nothing; what is reported is of all ranks together."""
    bad = tmp_path / "bad.tsv"
    good = Path(config.data[0]).read_bytes().splitlines(keepends=True)
    bad.write_bytes(b"".join(good[:6]) + lines(*[row({0: "7"})] * 2) + b"".join(good[6:10]))
    zero, one = two_ranks.run(_with_bad_rows, replace(config, data=[bad], batch_size=2))
    assert zero[1:] == one[1:] == (12, 2, [7, 8])
    assert zero[0] != 0.0
    assert one[0] == 0.0


def test_without_one_good_row_all_ranks_say_so(
    two_ranks: Ranks, config: ClickConfig, tmp_path: Path
) -> None:
    """The first malformed row is named."""
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(lines(*[row({0: "7"})] * 6))
    with pytest.raises(ClickDataError, match=r"not one good row among 6; the first: .*bad.tsv:1:"):
        two_ranks.run(_with_bad_rows, replace(config, data=[bad], batch_size=2))


def _profiled(config: ClickConfig) -> tuple[list[str], float, list[bool]]:
    job = ShardedClickJob(config)
    before = {name: value.clone() for name, value in job.model.named_parameters()}
    with SWPipeline(PLANS["sparse_dist"](), job.tasks(), device="cpu") as pipe:
        (result,) = TaskProfiler(pipe).profile_many(
            list(job.batches(1)), 1, 1, 2, True, tasks=TASKS[8::6]
        )
    after: dict[str, Any] = dict(job.model.named_parameters())
    return (
        list(result.exposed_s),
        result.baseline_s,
        [torch.equal(before[name], after[name]) for name in before],
    )


def test_tasks_can_be_profiled(two_ranks: Ranks, config: ClickConfig) -> None:
    """Each is shortcut alone, on both ranks; what was trained meanwhile is put back."""
    for names, baseline_s, put_back in two_ranks.run(_profiled, config):
        assert set(names) == set(TASKS[8::6])
        assert baseline_s > 0
        assert all(put_back)


def test_what_feeds_has_a_thread_of_its_own_a_stage_ahead() -> None:
    """In every plan but the serial one."""
    for name, make in PLANS.items():
        plan = make()
        assert list(plan.schedule) == list(TASKS)
        feeding = {plan.schedule[task] for task in FEED}
        assert {entry.thread_group for entry in feeding} == {
            "default" if name == "serial" else "io"
        }
        assert {entry.stage for entry in feeding} == {0}
        others = {plan.schedule[task].stage for task in TASKS if task not in FEED}
        assert min(others) == (0 if name == "serial" else 1)
