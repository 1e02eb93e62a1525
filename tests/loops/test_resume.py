"""A run that was stopped and resumed, under any plan, has the numbers of one that was not.

With most of these loaders, the library alone (torchdata 0.11 or datasets) continues with other
rows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torch.utils.data.distributed import DistributedSampler

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.loops import OverlappedLoop, ResumableLoop
from swpipe.loops.batch_memory import Contents
from swpipe.plans import prefetch_plan
from tests.contract.test_contract import Act, check
from tests.contract.training import ROWS, Failing
from tests.contract.training import Rows as ContractRows
from tests.contract.ways import Looped, Overlap, OverlapInTurn, Way
from tests.loops.ordinary_loops import StatefulRows, record_of, torchdata, with_generator
from tests.support.plans_for_tests import NOBODY_ELSE

# torchdata, when a loader is made
pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",
    "ignore:the loop, a task or its body, draws",
    "ignore:the state of the loader",
    "ignore:nothing runs ahead",
)


class Rows(ContractRows):
    """The rows of ``tests.contract``."""

    def __init__(self) -> None:
        super().__init__(Failing())


class Noisy(Rows):
    """Rows with noise from a given generator."""

    def __init__(self, draws: Any) -> None:
        super().__init__()
        self.draws = draws

    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row) + float(self.draws.random())


class NoisyInWorkers(Rows):
    """Rows with noise from Python's generator, of which each worker has its own."""

    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row) + random.random()


_UNKNOWN = [np.random.default_rng(3)]


class Unknown(Rows):
    """Rows with noise from a generator of this module."""

    def __getitem__(self, row: int) -> Tensor:
        return super().__getitem__(row) + float(_UNKNOWN[0].random())


class Permuted(Sampler[int]):
    """A sampler that permutes by a generator of numpy of its own."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.permutation(ROWS).tolist())

    def __len__(self) -> int:
        return ROWS


class Buffered(IterableDataset[Tensor]):
    """A dataset that shuffles in a buffer of four rows, and refills it when a state is loaded."""

    def __init__(self) -> None:
        self.epoch, self.at, self.draws = -1, 0, random.Random()

    def __iter__(self) -> Iterator[Tensor]:
        if not self.at:
            self.epoch += 1
            self.draws.seed(self.epoch)
        rows = Rows()
        buffer: list[Tensor] = []
        while self.at < ROWS or buffer:
            while len(buffer) < 4 and self.at < ROWS:
                buffer.append(rows[self.at])
                self.at += 1
            yield buffer.pop(self.draws.randrange(len(buffer)))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch, "draws": self.draws.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]
        self.draws.setstate(state["draws"])


class BeginsWhereItWasSet(IterableDataset[float]):
    """A dataset that begins all passes at its loaded state, like Hugging Face's in a worker."""

    def __init__(self) -> None:
        self.begin = self.at = 0

    def __iter__(self) -> Iterator[float]:
        for self.at in range(self.begin, ROWS):  # noqa: B020
            yield float(self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def nodes() -> Any:
    """Return a loader of torchdata's nodes."""
    from torchdata.nodes import Batcher, Loader, Mapper, MapStyleWrapper

    sampler = RandomSampler(Rows(), generator=with_generator())
    batches = Batcher(MapStyleWrapper(Rows(), sampler), 1)
    return Loader(Mapper(batches, torch.stack))


def stateful(rows: Any = None, **options: Any) -> Any:
    """Return a ``StatefulDataLoader`` of torchdata."""
    return torchdata(rows or Rows(), **{"batch_size": 1, "shuffle": None, **options})


def plain(rows: Any = None, **options: Any) -> DataLoader[Tensor]:
    """Return a loader without a state."""
    return DataLoader(rows or Rows(), **{"batch_size": 1, **options})


class PermutedByDefault(Permuted):
    """A sampler that permutes by numpy's default generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(ROWS).tolist())


LOADERS: dict[str, Callable[[], Any]] = {
    "torchdata, numpy's generator": lambda: stateful(sampler=PermutedByDefault()),
    "torchdata, a buffer": lambda: stateful(Buffered()),
    "nodes of torchdata": nodes,
    "numpy's in the sampler": lambda: plain(sampler=Permuted()),
    "numpy's in the dataset": lambda: plain(Noisy(np.random.default_rng(3))),
    "an older numpy's in the dataset": lambda: plain(Noisy(np.random.RandomState(3))),
    "Python's in the dataset": lambda: plain(Noisy(random.Random(3)), shuffle=True),
    "a state of the user's": StatefulRows,
    "Python's default generator": lambda: plain(NoisyInWorkers(), shuffle=True),
    "torchdata": lambda: stateful(shuffle=True),
    "torchdata, a given generator": lambda: stateful(shuffle=True, generator=with_generator()),
    "a worker": lambda: plain(NoisyInWorkers(), shuffle=True, num_workers=1),
}


KNOWN_BEFORE = [one for one in LOADERS if "default" in one or "given" in one or "user" in one]
"""Loaders for which a state from before the first pass leads to it; others have begun then."""


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(name: str) -> None:
    """Losses and parameters are equal, after stops within and between passes.

    One stop is at the last batch, where a loader that is ahead knows that it is the last. Each run
    is continued in another way, in a process that has drawn other numbers.
    """
    draws = random.Random(name)
    others: list[type[Way]] = [OverlapInTurn, Looped]
    kinds: list[tuple[type[Way], type[Way]]] = [(Overlap, Looped), (draws.choice(others), Overlap)]
    for kind, then in kinds:
        first, second = draws.randrange(1, ROWS), draws.randrange(ROWS + 2, 2 * ROWS)
        # Begun from the end of a pass, torchdata's nodes go on giving that as their state.
        between = [] if name == "nodes of torchdata" else [ROWS + 1]  # the passes
        stops = [0, first, ROWS, *between, second]
        ends = [*stops[1:], 2 * ROWS + 2]
        program = [Act("resume")] if name in KNOWN_BEFORE else []
        for begin, end in zip(stops, ends, strict=True):
            program += [Act("steps", end - begin), Act("resume")]
        check(kind, lambda _: LOADERS[name](), program[:-1], then)


def use(ctx: Any) -> None:
    """Do nothing."""


def over(loader: Any) -> OverlappedLoop[Any]:
    """Return a loop whose body looks at the rows."""
    return swpipe.overlap(loader, [use], pull_ahead=False, device="cpu")


def test_rows_come_from_workers_that_draw() -> None:
    """Their generators are in no state: the pass begins again, and a warning says so."""
    with over(stateful(NoisyInWorkers(), num_workers=2)) as loop:
        seen = [(ctx.batch, copy.deepcopy(loop.state_dict())) for ctx in loop]
    with over(stateful(NoisyInWorkers(), num_workers=2)) as loop:
        loop.load_state_dict(seen[12][1])
        with pytest.warns(RuntimeWarning, match="13 batches of the pass are read again"):
            rest = [ctx.batch for ctx in loop]
    torch.testing.assert_close(rest, [batch for batch, _ in seen[13:]], rtol=0, atol=0)


def living(rows: Any) -> Any:
    """Return a loader with one worker for all passes."""
    return stateful(rows, num_workers=1, persistent_workers=True)


def state_at(loop: ResumableLoop[Any], number: int, **options: Any) -> Any:
    """Return a checkpoint from the body of an iteration."""
    return next(copy.deepcopy(loop.state_dict(**options)) for c in loop if c.iter_idx == number)


@pytest.mark.filterwarnings("ignore:the loader's workers will live on")
def test_later_passes_have_all_rows_where_workers_live_on() -> None:
    """A worker that was restored began all its passes there: they had as few rows as the first."""
    with over(living(BeginsWhereItWasSet())) as loop:
        state = [copy.deepcopy(loop.state_dict()) for _ in loop][11]
    with over(living(BeginsWhereItWasSet())) as loop:
        loop.load_state_dict(state)
        assert [sum(1 for _ in loop) for _ in range(2)] == [8, 20]


REFUSED = "does not lead to the batches|begun again, does not give the batches"


def unknown(make: Callable[[], Any], **options: Any) -> Any:
    """Return a state from the third pass over a loader with an unknown generator."""
    _UNKNOWN[0] = np.random.default_rng(3)
    with over(make()) as loop:
        assert len([*loop, *loop]) == 40
        state = state_at(loop, 52, **options)
    _UNKNOWN[0] = np.random.default_rng(3)  # as in a new process
    return state


@pytest.mark.parametrize("make", [lambda: plain(Unknown()), lambda: stateful(Unknown())])
def test_other_rows_are_refused_when_the_pass_begins(make: Callable[[], Any]) -> None:
    """The loader's own state does not matter; another pass is refused, too."""
    state = unknown(make)
    with over(make()) as loop:
        loop.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"({REFUSED}).*up to batch 13.*check=False"):
                iter(loop)


def test_other_rows_are_taken_where_they_do_not_matter() -> None:
    """The user declares this when saving or loading."""
    for saves, loads in ((True, False), (False, True)):
        state = unknown(plain_unknown, check=saves)
        with over(plain_unknown()) as loop:
            loop.load_state_dict(state, check=loads)
            assert len(list(loop)) == 7


def plain_unknown() -> DataLoader[float]:
    """Return a loader that draws from a generator of this module."""
    return plain(Unknown())


def test_other_data_and_another_epoch_are_refused() -> None:
    """Rows in another order are refused, and a sampler whose epoch is not set."""
    with over(plain()) as loop:
        state = state_at(loop, 4)
    with over(plain(sampler=range(ROWS)[::-1])) as loop:
        loop.load_state_dict(state)
        with pytest.raises(ValueError, match=REFUSED):
            iter(loop)
    samplers: list[Any] = [DistributedSampler(Rows(), num_replicas=2, rank=1) for _ in range(2)]
    samplers[0].set_epoch(3)
    with over(plain(sampler=samplers[0])) as loop:
        state, rest = state_at(loop, 1), 8
    with over(plain(sampler=samplers[1])) as loop:
        loop.load_state_dict(state)
        with pytest.raises(ValueError, match="set_epoch"):
            iter(loop)
        samplers[1].set_epoch(3)
        assert len(list(loop)) == rest


def test_accelerates_loader_with_a_state_is_refused() -> None:
    """It begins a pass when prepared; its state leads elsewhere on two ranks and on one."""
    accelerate = pytest.importorskip("accelerate")
    config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    with over(accelerator.prepare(plain(shuffle=True))) as loop:
        for _ in loop:
            with pytest.raises(RuntimeError, match="Accelerate.*use_stateful_dataloader.*leave it"):
                loop.state_dict()
            assert loop.state_dict(check=False)["loader"] is None
        with pytest.raises(RuntimeError, match="use_stateful_dataloader"):
            loop.state_dict()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 6 worker processes")
def test_each_worker_is_compared() -> None:
    """At least one batch of each is compared."""
    record = record_of(plain(num_workers=6))
    for number in range(1, 17):
        record.add(number, record.entry(number, torch.ones(number), {}), [], number - 1)
    again = record.state_dict(16, check=True)["again"]
    assert len(again) == len({checksum for _, checksum in again}) == 6


class Anything:
    """An object without known contents."""


def test_batches_are_told_apart_by_what_is_in_them() -> None:
    """Objects, addresses and memory with gaps do not count."""
    rows = np.arange(4.0)
    pairs: list[tuple[Any, Any, bool]] = [
        (torch.arange(9000.0), torch.arange(9000.0), True),
        (torch.arange(9000.0), torch.arange(9000.0).roll(2000), False),
        ({"x": torch.ones(3), "name": "a"}, {"x": torch.ones(3), "name": "b"}, False),
        ((rows, 1), (rows.copy(), 1), True),
        ((rows, 1), (rows + 1, 1), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (np.array([Anything()], object), np.array([Anything()], object), True),
        ([Anything()], [Anything()], True),
        (b"one", b"two", False),
        ([[1], [2]], [[1, 2], []], False),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, False),
    ]
    for one, other, same in pairs:
        assert (Contents(one).checksum == Contents(other).checksum) is same, (one, other)


# ------------------------------------------------------------------- a pipeline alone


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
PREFETCHED = prefetch_plan(["x"], ["y"], depth=4)


@pytest.mark.parametrize("plan", [replace(PREFETCHED, pull_group=None), PREFETCHED])
def test_a_pipeline_knows_its_next_iteration_and_what_it_has_pulled(plan: PipelinePlan) -> None:
    """A loader is restored to what is in flight; random tasks draw the same numbers."""
    with SWPipeline(plan, TASKS, device="cpu", seed=5) as pipe:
        expected = [ctx.y for ctx in pipe.iterate(range(9))]
    for stop in (1, 4, 8):
        pulled = iter(range(9))
        with SWPipeline(plan, TASKS, device="cpu", seed=5) as pipe:
            for _ in range(stop):
                pipe.progress(pulled)
            state = pipe.state_dict()
        assert state["next_iteration"] == stop
        begin = next(pulled, 9) - state["in_flight"]
        assert begin == stop
        with SWPipeline(plan, TASKS, device="cpu") as pipe:
            pipe.load_state_dict(state)
            rest = [ctx.y for ctx in pipe.iterate(range(begin, 9))]
            assert pipe.state_dict() == {"next_iteration": 9, "in_flight": 0, "seed": 5}
        assert torch.equal(torch.stack([*expected[:stop], *rest]), torch.stack(expected))


def test_a_run_may_begin_with_any_number() -> None:
    """It is like a loaded state with that number, also for serial runs."""

    def made(start: int = 0) -> SWPipeline[Any]:
        return SWPipeline(PREFETCHED, TASKS, device="cpu", seed=5, start_iteration=start)

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


def test_a_state_is_not_loaded_in_mid_flight() -> None:
    """This also holds for a value that is no state."""
    with SWPipeline(PREFETCHED, TASKS, device="cpu") as pipe:
        data = iter(range(9))
        pipe.progress(data)
        with pytest.raises(RuntimeError, match="before loading a state"):
            pipe.load_state_dict(pipe.state_dict())
        pipe.drop()
        assert pipe.next_iteration == 1
        with pytest.raises(ValueError, match="next_iteration is -1"):
            pipe.load_state_dict({"next_iteration": -1, "seed": 0})


class ByChance(Sequence[float]):
    """Batches of another pass, except for the last one before the stop."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: Any) -> Any:
        if number >= 9:
            raise IndexError(number)
        return float(self.first + number if number < 3 else number)


def test_a_buffer_that_gives_one_batch_by_chance_is_refused() -> None:
    """Four batches are compared."""
    with over(ByChance(0)) as loop:
        checked = next(loop.state_dict() for ctx in loop if ctx.iter_idx == 3)
    assert len(checked["again"]) == 4
    with over(ByChance(5)) as loop:
        loop.load_state_dict(checked)
        with pytest.raises(ValueError, match="does not give the batches that were handed out last"):
            iter(loop)
