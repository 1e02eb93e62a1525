"""The gain that a report promises for a plan, and the gain of training under that plan.

The workloads are those of the guide, a loop over compressed files, and twelve loops of known tasks
on a real clock, half of them with batches that differ. Training runs as a plain loop and under the
advised plan alternately, apart from the report; fill and drain are not timed. In each of three
reports, promise and gain must agree within the sum of their 95% intervals. A report on a step of
100 ms must take a minute at most.

``python -m bench.promises [LOOP ...]`` measures the named loops once.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import gains
from bench.data_bound import files, loop_tasks
from bench.measure import Row, Spread, sharpen_timers, tolerated
from bench.measure import report as print_rows
from bench.verdicts import CLOCK, TOO_BUSY, loader_of
from swpipe import PipelinePlan, SWPipeline, report
from swpipe.profiler.spread import Estimate, mean_of
from swpipe.reporting.measuring import report_on
from swpipe.tuning.autotuning import Loop
from tests.reporting.known_loops import CASES, Case, tasks_of
from tests.support.click_example import HAS_POLARS

OWN, FILES = "my_loop:loop", "a data-bound loop"
KNOWN = (
    *("a decode", "two that feed", "a task that waits", "a loader in turn"),
    *("a loader in turn and a decode", "a fast one and a decode"),
    *("two kinds of batches", "two tasks that take turns", "lengths of which few are long"),
    *("a checkpoint in every tenth step", "a loader that reads sixteen batches at once"),
    "a fetch that is slower than the body",
)
RUNS, ROUNDS, TURN_S = 3, 6, 1.0
SLOW, MOST_S = Case({}, ("in turn", 10), 100, "", ""), 60
_BATCHES = 8  # of a job, over and over
_WHOLE = 48  # of known loops whose batches differ: passes, and chunks of a loader


class Kept(NamedTuple):
    """The promised and the obtained gain; None if no plan was advised, for the reason ``said``."""

    said: str
    step: Estimate
    promise: Estimate | None = None
    gain: Estimate | None = None

    def row(self, name: str) -> Row:
        if self.promise is None or self.gain is None:
            return Row(name, self.said, bar=1.0 if self.said == TOO_BUSY else None)
        within_s = self.promise.spread_s + self.gain.spread_s
        return Row(
            name,
            f"promised {self.promise.text} ms",
            f"got {self.gain.text} of {self.step.text} ms",
            Spread.of([abs(self.promise.value_s - self.gain.value_s) / within_s]),
            1.0,
        )


@contextmanager
def opened(name: str, cache: Path) -> Iterator[Loop]:
    """Yield a loop by its name, as the command line opens it."""
    if name in CASES:
        case = CASES[name]
        tasks = tasks_of(CLOCK, case.tasks)
        yield Loop(tasks, range(case.batches), "cpu", loader=loader_of(case))
    elif name == OWN:
        tasks, batches = importlib.import_module("docs.examples.my_loop").loop()
        yield Loop(tasks, batches[:_BATCHES], "cpu")
    elif name == FILES:
        feeding = {"read", "inflate", "features"}
        tasks = [replace(one, pure=one.name in feeding) for one in loop_tasks()]
        yield Loop(tasks, files(cache), "cpu")
    else:
        job = gains.opened(name, cache)
        like = gains.plans_of(name)["pipelined"]
        batches = [*islice(cycle(job.batches), _BATCHES)]
        yield Loop(job.tasks, batches, "cpu", like)


def kept(name: str, cache: Path) -> Kept:
    """Report on a loop, and train under the plan that the report advises."""
    with opened(name, cache) as loop:
        found = report_on(loop, None, name=name)
        step, advice = found.profile.step, [c.advice for c in found.changes if c.advice.plan]
        if found.cannot_tell or not advice:
            return Kept(TOO_BUSY if found.cannot_tell else found.next_step[:60], step)
        gain = gained(loop, found.plan, advice[0].plan)
        return Kept("", step, advice[0].saved, gain)


def gained(loop: Loop, now: PipelinePlan, then: PipelinePlan) -> Estimate:
    """Return by how much a training step is shorter under another plan."""

    def pulled() -> Iterator[Any]:
        while True:
            yield from loop.batches if loop.loader is None else loop.loader

    said: Any = {"context": loop.context, "check_effects": False}
    with SWPipeline(now, loop.tasks, **said) as one, SWPipeline(then, loop.tasks, **said) as other:
        pipes = (one, other)
        step_s = max(_turn_s(pipe, pulled(), 8) for pipe in pipes)
        steps = -(-max(16, round(TURN_S / step_s)) // _WHOLE) * _WHOLE
        saved_s = []
        for turn in range(ROUNDS):
            order = pipes if turn % 2 else pipes[::-1]
            took_s = {id(pipe): _turn_s(pipe, pulled(), steps) for pipe in order}
            saved_s.append(took_s[id(one)] - took_s[id(other)])
    return mean_of(saved_s)


def _turn_s(pipe: SWPipeline[Any], batches: Iterator[Any], steps: int) -> float:
    """Return the time per step between two retirements, both while the pipeline is full."""
    depth = pipe.plan.depth
    contexts = pipe.iterate(islice(batches, steps + 3 * depth + 2))
    ends_s = [time.perf_counter() for _ in contexts]
    first, last = 2 * depth + 1, len(ends_s) - depth - 1
    return (ends_s[last] - ends_s[first]) / (last - first)


def measured(name: str, cache: Path) -> Row:
    """Return the row of a loop, and print a line of progress."""
    begin_s = time.monotonic()
    row = kept(name, cache).row(name)
    took = f"{time.monotonic() - begin_s:.0f} s"
    print(f"{took}, {name}: {row.ours}, {row.beside} {row.verdict}", file=sys.stderr, flush=True)
    return row


def rows(names: Iterable[str] = (), runs: int = RUNS) -> list[Row]:
    """Return a row per loop and report."""
    there = ["images", *(["clicks"] if HAS_POLARS else [])]
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as cache:
        wanted = [*names] or [*there, OWN, FILES, *KNOWN]
        found = [measured(name, Path(cache)) for name in wanted for _ in range(runs)]
    torch.set_num_threads(threads)
    return found if names else [*found, _duration()]


def _duration() -> Row:
    """Return the time of a default report on a step of 100 ms with six tasks and a loader."""
    tasks_ms = {
        "read": -10.0,
        "copy": -10.0,
        "decode": 20.0,
        "mix": 10.0,
        "log": -10.0,
        "train": 30,
    }
    begin_s = time.monotonic()
    report(tasks_of(CLOCK, tasks_ms), range(_BATCHES), loader=loader_of(SLOW))
    seconds = time.monotonic() - begin_s
    return tolerated("a report on a step of 100 ms", seconds, MOST_S, "s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sharpen_timers()
    sys.exit(print_rows(rows(sys.argv[1:], 1)))
