"""The click job at the command line: train, measure, and say what came out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swpipe.cli.inputs import job_class
from swpipe.cli.user_errors import about_plan
from swpipe.core.plan import PipelinePlan
from swpipe.pipeline import SWPipeline
from swpipe.trace import Trace

if TYPE_CHECKING:
    from swpipe.cli.plan_work import Planned
    from swpipe.profiler import ProfileResults
    from swpipe.tasks.clicks import ClickConfig
    from swpipe.tasks.clicks.train import TrainRun

_TRACED = 12  # steps in a timeline
_TURN = 100  # steps under one plan, before the next one has its turn
_TIMED = 50  # steps that a statement about speed takes


@contextmanager
def open_runs(
    config: ClickConfig,
    plans: Mapping[str, PipelinePlan],
    steps: int | None,
    *,
    ranked: bool = False,
) -> Iterator[list[TrainRun]]:
    """One run per plan, of the same config; ``ranked`` on all ranks of the process group."""
    from swpipe.tasks.clicks.train import TrainRun

    job = job_class(ranked)

    with ExitStack() as stack:
        runs = []
        for name, plan in plans.items():
            with about_plan(name):
                runs.append(stack.enter_context(TrainRun(name, config, plan, steps, job)))
        yield runs


def train_runs(runs: Sequence[TrainRun]) -> Trace:
    """Run all steps of all runs, by turns, and record the end of the last run."""
    from tqdm import tqdm

    from swpipe.tasks.clicks.compare import alternate

    steps = runs[0].steps
    traced = min(steps, _TRACED)
    with tqdm(total=steps * len(runs), desc="training", unit="step") as bar:
        alternate(runs, steps - traced, chunk=_TURN, on_step=bar.update)
        for run in runs:
            with run.pipe.trace() as recorded:
                run.advance(traced, bar.update, timed=False)
    return recorded


def format_training(runs: Sequence[TrainRun]) -> str:
    """Speed, loss and AUC of each run, how the others differ from the first, and the data."""
    from swpipe.tasks.clicks import training_tables as report
    from swpipe.tasks.clicks.compare import compare, speed

    first = runs[0]
    told = [report.format_runs(runs)]
    for other in runs[1:]:
        if first.timed_steps >= _TIMED:
            told.append(report.format_speed(first, other, speed(first, other)))
        told.append(report.format_comparison(first, other, compare(first, other)))
    if first.job.held_out is not None:
        told.append(report.format_evaluation(first.job.evaluate()))
    told.append(f"data: {report.format_rows(first.all_rows())}")
    return "\n".join(told)


def format_outcome(planned: Planned, run: TrainRun) -> str:
    """What was expected of a plan that was made for this job, what its trial took, what it did."""
    got_us = 1e6 / run.steps_per_s
    told = f"auto: expected {_off(planned.choice.ii_us, got_us)}"
    if planned.tried_us is not None:
        told += f", tried {_off(planned.tried_us, got_us)}"
    return f"{told}, got {got_us / 1e3:.3f}"


def _off(before_us: float, got_us: float) -> str:
    """A time per step, and by how much it came out otherwise."""
    return f"{before_us / 1e3:.3f} ms per step ({got_us / before_us - 1:+.1%})"


def profile_job(
    config: ClickConfig,
    plan: PipelinePlan,
    batches: int,
    rounds: int,
    *,
    pipelined: bool,
    labels: Sequence[str] | None = None,
    ranked: bool = False,
) -> ProfileResults:
    """Measure the tasks of a fresh job under a plan, or in a plain loop."""
    from swpipe.profiler import TaskProfiler

    job = job_class(ranked)(config)
    with closing(job), SWPipeline(plan, job.tasks(), device=config.device) as pipe:
        return TaskProfiler(pipe).profile_many(
            list(job.batches(batches)),
            num_warmup=3,
            num_measure=10,
            num_rounds=rounds,
            pipelined=pipelined,
            verbose=True,
            labels=labels,
        )


def format_breakdown(results: ProfileResults) -> str:
    """One batch with all there is to say of it, or several side by side."""
    return results[0].format_report() if len(results) == 1 else results.format_report()


def save_results(
    directory: Path, recorded: Trace, breakdown: Sequence[ProfileResults]
) -> list[Path]:
    """Save timeline and figures in ``directory``; draw them where matplotlib is installed."""
    from swpipe.profiler import ProfileResults

    timeline = directory / "timeline.json"
    recorded.save(timeline)
    files = [timeline]
    for results in breakdown:
        files.append(directory / f"breakdown-{results[0].mode}.json")
        results.save(files[-1])
    if find_spec("matplotlib"):
        files += [timeline.with_suffix(".png"), directory / "breakdown.png"]
        recorded.plot(files[-2])
        ProfileResults(results[0] for results in breakdown).plot(files[-1])
    return files
