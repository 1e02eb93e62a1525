"""Random endings: how the data of ranks ends, fails and is left, and the results of a plain loop.

A rank's data is a list of events for each pass: a batch, or an error of the loader in its place. An
``Ending`` has these events, the plan of the ranks, whether the script catches errors and continues,
and the steps after which it drains the pipeline and begins a new one. ``right`` derives the results
of a plain loop on its own; it uses no ranks, plans or pipelines.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.loops import OutOfStepError, RankDataError, UnevenDataError

PLANS = ("serial", "two stages", "three stages", "pulled by a group")
SOURCES = ("list", "DataLoader", "iterator")
_PRIME = 1009


class Planned(Exception):
    """An error that a loader raises on purpose."""


@dataclass(frozen=True)
class Ending:
    """A test case; ``passes[p][r]`` has the events of rank r in pass p: True for a batch."""

    plan: str
    source: str
    passes: tuple[tuple[tuple[bool, ...], ...], ...]
    dies: bool  # a loader has no further batch after its error
    catches: bool
    lies: int  # rank 0's DataLoader says that it has so many batches more
    drains: frozenset[tuple[int, int]] = field(default_factory=frozenset)  # pass, steps before it

    @property
    def good(self) -> list[list[list[int]]]:
        """The values of the batches that each rank trains on in a plain loop, by pass."""
        found = []
        for number, ranks in enumerate(self.passes):
            of_ranks = []
            for rank, events in enumerate(ranks):
                known = [value(number, rank, k) for k, is_batch in enumerate(events) if is_batch]
                if self.dies and False in events:
                    known = known[: events.index(False)]
                of_ranks.append(known)
            found.append(of_ranks)
        return found

    @property
    def errors(self) -> int:
        return sum(events.count(False) for ranks in self.passes for events in ranks)


def value(number: int, rank: int, index: int) -> int:
    """Return the value of a batch of a pass."""
    return 1 + 7 * index + 1000 * rank + 100_000 * number


def drawn(seed: int, size: int) -> Ending:
    """Return a random ending on so many ranks; half of them have even data."""
    draws = random.Random(f"{seed} {size}")
    source = draws.choice(SOURCES)
    passes = []
    for _ in range(draws.choice((1, 1, 2))):
        length = draws.choice((0, 1, 2, 3, 5, 9, 20, 40))
        fails = draws.choice((0, 0, 1, 2)) if source != "list" else 0
        everywhere = draws.random() < 0.5
        uneven = draws.random() < 0.4
        places = [draws.randrange(length + fails) for _ in range(fails)]
        ranks = []
        failing = draws.randrange(size)
        for rank in range(size):
            own = max(0, length + (draws.randint(-2, 2) if uneven else 0))
            events = [True] * own
            if everywhere or rank == failing:
                for place in places:
                    events.insert(min(place, len(events)), False)
            ranks.append(tuple(events))
        passes.append(tuple(ranks))
    least = [min(map(sum, ranks)) for ranks in passes]
    drains = {
        (p, draws.choice((1, max(1, steps), draws.randint(1, max(1, steps)))))
        for p, steps in enumerate(least)
        if draws.random() < 0.4
    }
    return Ending(
        plan=draws.choice(PLANS),
        source=source,
        passes=tuple(passes),
        dies=draws.random() < 0.2,
        catches=draws.random() < 0.7,
        lies=draws.choice((0, 0, 0, 5)) if source == "DataLoader" else 0,
        drains=frozenset(drains),
    )


# ----------------------------------------------------------------------------------- on one rank


class _Rows(Dataset[int]):
    def __init__(self, events: tuple[bool, ...], values: list[int]) -> None:
        self._events, self._values = events, values

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: int) -> int:
        if not self._events[index]:
            raise Planned(f"row {index} is corrupt")
        return self._values[index]


class _Lying(Sampler[int]):
    """A sampler of the rows in order that reports a wrong length."""

    def __init__(self, rows: _Rows, more: int) -> None:
        self._rows, self._more = rows, more

    def __len__(self) -> int:
        return len(self._rows) + self._more

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._rows)))


class _Going:
    """An iterator without a length that continues after its error."""

    def __init__(self, rows: _Rows, *, dies: bool) -> None:
        self._rows, self._dies, self._next = rows, dies, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next >= len(self._rows):
            raise StopIteration
        self._next += 1
        try:
            return self._rows[self._next - 1]
        except Planned:
            if self._dies:
                self._next = len(self._rows)
            raise


def _source(ending: Ending, number: int, rank: int) -> Iterator[int]:
    events = ending.passes[number][rank]
    values = [value(number, rank, index) for index in range(len(events))]
    rows = _Rows(events, values)
    if ending.source == "list":
        return iter(values)
    if ending.source == "DataLoader" and not ending.dies:
        more = ending.lies if rank == 0 else 0
        return iter(DataLoader(rows, batch_size=None, sampler=_Lying(rows, more)))
    return _Going(rows, dies=ending.dies)


def _plan(kind: str, tasks: list[PipelineTask]) -> PipelinePlan:
    if kind == "serial":
        return PipelinePlan.serial(tasks)
    group = "default" if kind == "three stages" else "comm"
    last = 2 if kind == "three stages" else 1
    return PipelinePlan(
        {
            "exchange": TaskSchedule(0, thread_group=group, globally_ordered=True),
            "train": TaskSchedule(last, globally_ordered=True),
        },
        deps=[("train", "exchange")],
        pull_group="loader" if kind == "pulled by a group" else None,
    )


class Training:
    """A training step of two tasks with collectives of equal shape, and a state that it changes."""

    def __init__(self) -> None:
        self.state = 0.0

    def tasks(self) -> list[PipelineTask]:
        def exchange(ctx: IterContext) -> None:
            ctx.x = torch.full((2,), float(ctx.batch), dtype=torch.float64)
            dist.all_reduce(ctx.x)

        def train(ctx: IterContext) -> None:
            y = ctx.x * (dist.get_rank() + 1) + self.state
            dist.all_reduce(y)
            self.state = ctx.y = float(y[0]) % _PRIME

        return [PipelineTask("exchange", exchange, pure=True), PipelineTask("train", train)]


class _Script:
    """The script of a rank, as a user writes it.

    Attributes:
        outputs: The results of the steps.
        told: The errors that the script has seen.
    """

    def __init__(self, ending: Ending) -> None:
        self.outputs: list[float] = []
        self.told: list[str] = []
        self._ending, self._training = ending, Training()
        self._pipe = pipeline_of(ending.plan, self._training)

    def run(self) -> None:
        for number in range(len(self._ending.passes)):
            source, begun = _source(self._ending, number, dist.get_rank()), len(self.outputs)
            while self._step(source):
                if (number, len(self.outputs) - begun) in self._ending.drains:
                    self._drain()
                    if self._ending.source == "list":
                        values = [*_source(self._ending, number, dist.get_rank())]
                        source = iter(values[len(self.outputs) - begun :])
        self._pipe.close()

    def _step(self, source: Iterator[int]) -> bool:
        """Run one step; return False if the data has ended."""
        try:
            self.outputs.append(self._pipe.progress(source).y)
        except StopIteration:
            return False
        except (Planned, RankDataError) as error:
            self.told.append(type(error).__name__)
            if not self._ending.catches or isinstance(error, UnevenDataError | OutOfStepError):
                raise
        return True

    def _drain(self) -> None:
        self.outputs += [ctx.y for ctx in self._pipe.drain()]
        if self._ending.source == "list":  # a new pipeline goes on where this one was
            state = self._pipe.state_dict()
            self._pipe.close()
            self._pipe = pipeline_of(self._ending.plan, self._training)
            self._pipe.load_state_dict(state)


def run(ending: Ending, folder: str) -> None:
    """Run a rank's part, and write its outputs, its errors and the way it ended to a file.

    A rank that ends by an error that the other ranks may not get ends its process, as a script
    would.
    """
    script, end = _Script(ending), "well"
    try:
        script.run()
    except BaseException as error:  # noqa: BLE001 - it is what the test looks at
        end = type(error).__name__
    went = {"outputs": script.outputs, "errors": script.told, "end": end}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(went))
    if end not in ("well", "UnevenDataError"):
        os._exit(1)


def pipeline_of(
    plan: str, training: Training, *, check_data: bool | None = True
) -> SWPipeline[Any]:
    """Return a pipeline of the tasks under a plan, by its name, with nothing in flight."""
    tasks = training.tasks()
    return SWPipeline(
        _plan(plan, tasks),
        tasks,
        device="cpu",
        stall_timeout_s=20.0,
        check_data=check_data,
        check_effects=False,
    )


# ----------------------------------------------------------------------------- what is right


def right(ending: Ending) -> list[float]:
    """Return what every rank of a plain loop computes, as far as all ranks have batches."""
    state, found = 0.0, []
    for ranks in ending.good:
        size = len(ranks)
        for batches in zip(*ranks, strict=False):
            x = float(sum(batches))
            state = (x * (size * (size + 1) // 2) + size * state) % _PRIME
            found.append(state)
        if len({len(batches) for batches in ranks}) > 1:
            break  # some ranks wait for the others
    return found


def faults(ending: Ending, folder: str) -> list[str]:
    """Return the errors in the files that the ranks have left in ``folder``."""
    wanted = right(ending)
    even = all(len({len(batches) for batches in ranks}) == 1 for ranks in ending.good)
    found = []
    for rank in range(len(ending.passes[0])):
        path = Path(folder, f"{rank}.json")
        went = json.loads(path.read_text()) if path.exists() else None
        outputs = [] if went is None else went["outputs"]
        end = "died" if went is None else went["end"]
        if outputs != wanted[: len(outputs)]:
            found.append(f"rank {rank} computed {outputs}, right is {wanted}")
        if end == "well" and (outputs != wanted or not even):
            found.append(f"rank {rank} ended well with {len(outputs)} of {len(wanted)} steps")
        honest = not (ending.dies or ending.lies)
        if end != "well" and even and honest and (ending.catches or not ending.errors):
            found.append(f"rank {rank} ended by {end}, and a plain loop ends well")
        if end in ("StallError", "died") and honest and (ending.catches or not ending.errors):
            found.append(f"rank {rank} ended by {end}")
    return found
