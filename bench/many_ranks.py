"""Steps that ``simulate(ranks=)`` predicts, and steps on 2 and 4 ranks with slow reads.

    thread loader   read i+2 ......... | read i+3 ....       a sleep; 4 times as long at times
    stream net      exchange i+1 ..|                         a sleep, then all ranks meet by gloo
    caller's stream train i .................|               the same

Times are sleeps, of which all of a rank's in an iteration are multiplied by one random factor. A
stream is a thread, so that ranks meet there, and the host launches ahead as on a device. Nothing
computes: 2 cores suffice for 4 ranks, if nothing else runs.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import Row, Spread, off_by, sharpen_timers
from swpipe import HOST, IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.costs import CostModel, TaskCost
from swpipe.core.plan import StreamSpec
from swpipe.planning import Ranks, simulate
from tests.support.stream_device import StreamDevice

READ_MS, EXCHANGE_MS, TRAIN_MS = 14.0, 3.0, 20.0
JITTER = 0.05
SLOW = (0.1, 4.0)
"""The share of slow reads, and how many times as long they take."""

SLACK, RUN_AHEAD = (0, 1, 2, 4), (0, 2, 4)
WARM_UP, STEPS = 20, 150

LIMIT = 0.1
"""The limit for the error of a prediction."""

APART = 0.1
"""Two plans whose predicted steps differ by more than this must be measured in this order."""


class ThreadStream:
    """A stream: a thread that runs its work in order."""

    def __init__(self) -> None:
        self.works: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        sharpen_timers()
        while True:
            self.works.get()()


class ThreadEvent:
    """A point in the work of a ``ThreadStream``."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream: ThreadStream) -> None:
        self._reached = threading.Event()
        stream.works.put(self._reached.set)

    def wait(self, stream: ThreadStream) -> None:
        stream.works.put(self._reached.wait)

    def query(self) -> bool:
        return self._reached.is_set()


class ThreadDevice(StreamDevice[ThreadStream]):
    """A device whose streams are threads."""

    def __init__(self) -> None:
        super().__init__(ThreadStream())

    def new_stream(self, spec: StreamSpec | torch.Stream) -> ThreadStream:
        return ThreadStream()

    def new_event(self, *, timing: bool = False) -> ThreadEvent:
        return ThreadEvent()


def plan(slack: int, run_ahead: int) -> PipelinePlan:
    """Return a plan whose reads are ``slack`` stages ahead of the first exchange."""
    return PipelinePlan(
        schedule={
            "read": TaskSchedule(0, HOST, "loader"),
            "exchange": TaskSchedule(slack, "net", "io", globally_ordered=True),
            "train": TaskSchedule(slack + 1, globally_ordered=True),
        },
        deps=[("exchange", "read"), ("train", "exchange")],
        cross_iter_deps=[("train", "train"), ("read", "read"), ("exchange", "exchange")],
        run_ahead=run_ahead,
    )


def predicted_ms(n_ranks: int, slack: int, run_ahead: int) -> float:
    """Return the mean step that the simulation predicts."""
    costs = CostModel(
        {
            "read": TaskCost(host_us=1e3 * READ_MS),
            "exchange": TaskCost(device_us=1e3 * EXCHANGE_MS),
            "train": TaskCost(device_us=1e3 * TRAIN_MS),
        }
    )
    found = simulate(plan(slack, run_ahead), costs, ranks=Ranks(n_ranks, JITTER, {"read": SLOW}))
    assert found.ranks is not None
    return found.ranks.step_us / 1e3


def _sleep_ms(iteration: int, ms: float, *, slow: bool = False) -> None:
    """Sleep as long as this rank's factor of the iteration says."""
    rng = random.Random(1_000 * iteration + dist.get_rank())
    sigma = math.sqrt(math.log1p(JITTER**2))
    factor = rng.lognormvariate(-(sigma**2) / 2, sigma)
    share, longer = SLOW
    time.sleep(ms * factor * (longer if slow and rng.random() < share else 1.0) / 1e3)


def _meet(iteration: int, ms: float, group: Any) -> None:
    _sleep_ms(iteration, ms)
    dist.all_reduce(torch.zeros(1), group=group)


def on_rank() -> dict[tuple[int, int], float]:
    """Return the measured step of each plan, in ms."""
    sharpen_timers()
    # A stream submits its collectives in order, and each of the two has a group of its own.
    groups = {name: dist.new_group() for name in ("exchange", "train")}
    found = {}
    for slack in SLACK:
        for run_ahead in RUN_AHEAD:
            device = ThreadDevice()

            def launch(ctx: IterContext, name: str, ms: float, device: Any = device) -> None:
                meet = partial(_meet, ctx.iter_idx, ms, groups[name])
                device.current_stream().works.put(meet)

            tasks = [
                PipelineTask("read", lambda ctx: _sleep_ms(ctx.iter_idx, READ_MS, slow=True)),
                PipelineTask("exchange", partial(launch, name="exchange", ms=EXCHANGE_MS)),
                PipelineTask("train", partial(launch, name="train", ms=TRAIN_MS)),
            ]
            made = plan(slack, run_ahead)
            with SWPipeline(
                made, tasks, device=device, check_effects=False, check_data=False
            ) as pipe:
                begin = 0.0
                for ctx in pipe.iterate(range(WARM_UP + STEPS + 1)):
                    if ctx.iter_idx == WARM_UP:
                        begin = time.perf_counter()
                end = time.perf_counter()
            done = threading.Event()
            device.callers.works.put(done.set)
            done.wait()
            found[slack, run_ahead] = 1e3 * (end - begin) / STEPS
    return found


def rows() -> list[Row]:
    """Return measured over predicted, by plan and number of ranks, and whether the orders agree."""
    from tests.support.ranks import Ranks as Processes

    told = []
    for n_ranks in (2, 4):
        with Processes(n_ranks, deadline_s=400.0) as processes:
            measured = processes.run(on_rank)[0]
        predicted = {of: predicted_ms(n_ranks, *of) for of in measured}
        for (slack, run_ahead), ms in measured.items():
            ahead_ms = predicted[slack, run_ahead]
            told.append(
                Row(
                    f"step of {n_ranks} ranks, slack {slack}, run_ahead {run_ahead}",
                    f"{ms:.1f} ms",
                    f"predicted {ahead_ms:.1f} ms",
                    off_by([ahead_ms], [ms]),
                    1 + LIMIT,
                )
            )
        pairs = [
            (a, b)
            for a, b in combinations(predicted, 2)
            if abs(predicted[a] / predicted[b] - 1) > APART
        ]
        wrong = sum((predicted[a] < predicted[b]) != (measured[a] < measured[b]) for a, b in pairs)
        told.append(
            Row(
                f"pairs of plans in another order than predicted, {n_ranks} ranks",
                f"{wrong}",
                f"of {len(pairs)}",
                Spread.of([float(wrong)]),
                0.0,
            )
        )
    return told
