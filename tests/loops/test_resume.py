"""A run that was stopped and resumed gives the numbers of one that was not."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SubsetRandomSampler

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.loops.overlapping import OverlappedLoop
from swpipe.plans import prefetch_plan
from tests.loops.ordinary_loops import NoisyRows, Rows, Training, batches
from tests.loops.resumable_jobs import (
    StatefulRows,
    torchdata,
    with_generator,
)
from tests.support.plans_for_tests import NOBODY_ELSE

# torchdata, when a loader is made
pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore:the loader draws from"
)

EPOCHS = 3


def _dropout() -> Training:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 1))
    return Training(model, torch.optim.Adam(model.parameters()))


def _batch_norm() -> Training:
    return Training(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)))


def _sampler() -> SubsetRandomSampler:
    return SubsetRandomSampler(range(22))


WORKER = "with a worker"
GENERATOR = "shuffled by a generator of its own"
TORCHDATA = "torchdata"
TORCHDATA_SAMPLER = "torchdata, with a sampler of torch's"
TORCHDATA_GIVEN = "torchdata, shuffled by a generator of its own"
TORCHDATA_AUGMENTED = "torchdata, augmented in the loader"
TORCHDATA_WORKER = "torchdata, with a worker"
LOOPS: dict[str, Any] = {
    "a list": lambda: (Training(), Rows().rows.split(4)),
    "shuffled, with dropout": lambda: (_dropout(), batches(shuffle=True)),
    "augmented in the loader": lambda: (Training(), batches(NoisyRows(), shuffle=True)),
    "batch norm": lambda: (_batch_norm(), batches(shuffle=True, drop_last=True)),
    WORKER: lambda: (_dropout(), batches(NoisyRows(), shuffle=True, num_workers=1)),
    "a loader with a state": lambda: (_dropout(), StatefulRows()),
    GENERATOR: lambda: (_dropout(), batches(shuffle=True, generator=with_generator())),
    TORCHDATA: lambda: (_dropout(), torchdata()),
    TORCHDATA_SAMPLER: lambda: (_dropout(), torchdata(sampler=_sampler(), shuffle=None)),
    TORCHDATA_GIVEN: lambda: (_dropout(), torchdata(generator=with_generator())),
    TORCHDATA_AUGMENTED: lambda: (Training(), torchdata(NoisyRows())),
    TORCHDATA_WORKER: lambda: (_dropout(), torchdata(num_workers=1)),
}
WORKERS = (WORKER, TORCHDATA_WORKER)


class Job:
    """Everything of one process that trains."""

    def __init__(self, name: str, seed: int = 7) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.parts, loader = LOOPS[name]()
        decode, *rest = self.parts.tasks()
        noise = PipelineTask("noise", self.noise, random=True)
        tasks = [decode, noise, *rest]
        self.loop = swpipe.overlap(loader, tasks, pull_ahead=True, device="cpu")
        self.epoch = 0

    def noise(self, ctx: Any) -> None:
        """Random numbers by the iteration's number."""
        ctx.x = ctx.x + 0.1 * torch.rand(4)

    def losses(self) -> Iterator[float]:
        """Train; a loss after each iteration, when a state may be saved."""
        for self.epoch in range(self.epoch, EPOCHS):  # noqa: B020
            for ctx in self.loop:
                yield ctx.loss.item()

    def save(self) -> Any:
        """A checkpoint, as it would be after it was written to a file and read."""
        parts = self.parts
        state = [parts.model.state_dict(), parts.optimizer.state_dict(), self.loop.state_dict()]
        return copy.deepcopy([*state, self.epoch])

    def load(self, saved: Any) -> None:
        """Go on from a checkpoint."""
        model, optimizer, loop, self.epoch = copy.deepcopy(saved)
        self.parts.model.load_state_dict(model)
        self.parts.optimizer.load_state_dict(optimizer)
        self.loop.load_state_dict(loop)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        *[
            pytest.param(name, 2 if name in WORKERS else 12, marks=pytest.mark.slow)
            for name in LOOPS
        ],
        *[(name, 3) for name in (GENERATOR, TORCHDATA_SAMPLER, TORCHDATA_GIVEN)],
    ],
)
def test_any_place_is_good_for_a_checkpoint(name: str, places: int) -> None:
    """Random places, in each pass in turn: later losses and all parameters are bit-equal."""
    job = Job(name)
    losses, saved = [], []
    for loss in job.losses():
        losses.append(loss)
        saved.append(job.save())
    job.loop.close()
    final = job.parts.model.state_dict()
    draws = random.Random(3)
    of_pass = len(losses) // EPOCHS
    for number in range(places):
        place = of_pass * (number % EPOCHS) + draws.randrange(of_pass)
        resumed = Job(name)
        torch.rand(draws.randrange(5))  # what else a new process does
        resumed.load(saved[place])
        assert list(resumed.losses()) == losses[place + 1 :]
        torch.testing.assert_close(resumed.parts.model.state_dict(), final, rtol=0, atol=0)
        resumed.loop.close()


TASKS = [
    PipelineTask(
        "x",
        lambda ctx: setattr(ctx, "x", ctx.batch + torch.rand(2)),
        random=True,
        pure=True,
        io=[NOBODY_ELSE],
    ),
    PipelineTask("y", lambda ctx: setattr(ctx, "y", 2 * ctx.x)),
]
SERIAL = PipelinePlan.serial(TASKS)
PLANS = {
    "serial": SERIAL,
    "pulled ahead": replace(SERIAL, pull_group="loader", pipeline_depth=None),
    "prefetched": prefetch_plan(["x"], ["y"], depth=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_pipeline_knows_its_next_iteration_and_what_it_has_pulled(name: str) -> None:
    """A loader is set back by what is in flight; random tasks draw what they would have."""
    with SWPipeline(PLANS[name], TASKS, device="cpu", seed=5) as pipe:
        expected = [ctx.y for ctx in pipe.iterate(range(9))]
    for stop in range(1, 9):
        pulled = iter(range(9))
        with SWPipeline(PLANS[name], TASKS, device="cpu", seed=5) as pipe:
            for _ in range(stop):
                pipe.progress(pulled)
            state = pipe.state_dict()
        assert state["next_iteration"] == stop
        begin = next(pulled, 9) - state["in_flight"]
        assert begin == stop
        with SWPipeline(PLANS[name], TASKS, device="cpu") as pipe:
            pipe.load_state_dict(state)
            rest = [ctx.y for ctx in pipe.iterate(range(begin, 9))]
            assert pipe.state_dict() == {"next_iteration": 9, "in_flight": 0, "seed": 5}
        assert torch.equal(torch.stack([*expected[:stop], *rest]), torch.stack(expected))


@pytest.mark.parametrize("name", PLANS)
def test_a_run_may_begin_with_any_number(name: str) -> None:
    """As if a state with that number were loaded, also serially."""

    def made(start: int = 0) -> SWPipeline[Any]:
        return SWPipeline(PLANS[name], TASKS, device="cpu", seed=5, start_iteration=start)

    with made() as loaded, made(6) as given, made(6) as serial:
        loaded.load_state_dict({"next_iteration": 6, "seed": 5})
        assert given.state_dict() == loaded.state_dict()
        results = [
            [(ctx.iter_idx, ctx.y) for ctx in pipe.iterate(range(3))] for pipe in (loaded, given)
        ]
        one_by_one = [serial.run_one_serial_iter(batch) for batch in range(3)]
    results.append([(ctx.iter_idx, ctx.y) for ctx in one_by_one])
    torch.testing.assert_close(results[1:], results[:1] * 2, rtol=0, atol=0)
    assert [number for number, _ in results[1]] == [6, 7, 8]


def test_an_overlapped_loop_may_begin_with_any_number() -> None:
    """Random tasks draw what they would have drawn for these batches."""

    def drawn(start: int) -> list[tuple[int, torch.Tensor]]:
        data = range(start, 9)
        with swpipe.overlap(data, TASKS, device="cpu", seed=5, start_iteration=start) as loop:
            return [(ctx.iter_idx, ctx.y) for ctx in loop]

    torch.testing.assert_close(drawn(4), drawn(0)[4:], rtol=0, atol=0)


@pytest.mark.parametrize("number", [-1, 1.0, True, None])
def test_a_number_that_no_iteration_has_is_refused(number: Any) -> None:
    """With the rule."""
    said = f"start_iteration is {number}: give the number of the first iteration, an integer from 0"
    with pytest.raises(ValueError, match=said):
        SWPipeline(SERIAL, TASKS, device="cpu", start_iteration=number)
    with pytest.raises(ValueError, match=said):
        swpipe.overlap(
            Rows().rows.split(4), Training().functions(), device="cpu", start_iteration=number
        )


def test_a_state_is_not_loaded_in_mid_flight() -> None:
    """Nor one that is none."""
    with SWPipeline(PLANS["prefetched"], TASKS, device="cpu") as pipe:
        data = iter(range(9))
        pipe.progress(data)
        with pytest.raises(RuntimeError, match="before loading a state"):
            pipe.load_state_dict(pipe.state_dict())
        pipe.drop()
        assert pipe.next_iteration == 1
        with pytest.raises(ValueError, match="next_iteration is -1"):
            pipe.load_state_dict({"next_iteration": -1, "seed": 0})


def test_a_loader_that_cannot_go_back_is_refused() -> None:
    """An iterator has no beginning; a shorter loader lacks what was handed out."""

    def loop(loader: Any) -> OverlappedLoop:
        return swpipe.overlap(loader, Training().tasks(), pull_ahead=True, device="cpu")

    with loop(Rows().rows.split(4)) as first:
        states = [first.state_dict() for _ in first]
    with loop(part for part in Rows().rows.split(4)) as other:
        with pytest.raises(ValueError, match=r"the loader is an iterator \(generator\)"):
            other.load_state_dict(states[2])
    with loop(Rows().rows.split(4)[:2]) as other:
        with pytest.raises(ValueError, match="the loader has 2 batches, but 3 were handed out"):
            other.load_state_dict(states[2])


def test_a_stateful_loader_of_torchdata_is_set_back() -> None:
    """It is asked for its state after each batch, and what it draws goes on from there."""

    def loop() -> OverlappedLoop:
        torch.manual_seed(7)
        random.seed(7)
        tasks = Training().tasks()
        return swpipe.overlap(torchdata(NoisyRows()), tasks, pull_ahead=True, device="cpu")

    with loop() as first:
        seen = [(ctx.batch, first.state_dict()) for ctx in first]
    for place in range(len(seen)):
        with loop() as other:
            other.load_state_dict(seen[place][1])
            rest = [ctx.batch for ctx in other]
        expected = [batch for batch, _ in seen[place + 1 :]]
        torch.testing.assert_close(rest, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    ["shuffled, with dropout", GENERATOR, "a loader with a state", TORCHDATA, TORCHDATA_AUGMENTED],
)
def test_a_state_from_between_passes_leads_to_a_new_pass(name: str) -> None:
    """Not to the rest of the one that has ended, which has none."""

    def job() -> Job:
        return Job(name)

    first = job()
    for _ in first.loop:
        pass
    saved = first.save()
    expected = [ctx.loss.item() for ctx in first.loop]
    second = job()
    second.load(saved)
    assert [ctx.loss.item() for ctx in second.loop] == expected
    assert len(expected) == 6
    first.loop.close()
    second.loop.close()


@pytest.mark.parametrize(
    "name",
    [
        "augmented in the loader",
        GENERATOR,
        TORCHDATA_GIVEN,
        "a loader with a state",
        TORCHDATA,
        TORCHDATA_SAMPLER,
        TORCHDATA_AUGMENTED,
    ],
)
def test_a_state_from_before_the_first_iteration_leads_to_it(name: str) -> None:
    """Whatever the new process has drawn."""
    first = Job(name)
    saved = first.save()
    expected = list(first.losses())
    second = Job(name, seed=8)
    second.load(saved)
    assert list(second.losses()) == expected
    first.loop.close()
    second.loop.close()
