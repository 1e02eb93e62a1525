"""Loops of Accelerate and Fabric, as their documentation writes them, give their own numbers.

Each runs for two epochs of ten batches, accumulates four of them, lowers its rate and evaluates in
the middle of an epoch: overlapped, or under a plan of one's own. Accelerate steps at the end of an
epoch, whatever it has accumulated. A pipeline that pulled its loader ahead accumulated over other
iterations without a word: it stepped at [3, 7] where the plain loop steps at [3, 7, 9], and in the
second epoch at others, since the loader tells of the batch that was pulled last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import accelerate
import lightning
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import swpipe
from swpipe import IterContext, PipelinePlan, SWPipeline, TaskSchedule
from swpipe.errors import PlanError
from swpipe.plans import prefetch_plan

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning.*",
    "ignore::FutureWarning:lightning.*",
    "ignore::UserWarning:torch.optim.lr_scheduler",
    "ignore:the loop, a task or its body, draws",
)

ROWS = 38
EPOCHS = 2
MIDDLE = 4
STEPS = [3, 7, 9, 13, 17, 19]


def network() -> nn.Module:
    """Return a model that draws random numbers."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))


def loaders(rows: int = ROWS, **options: Any) -> list[DataLoader[Any]]:
    """Return loaders for training and for evaluation, whose last batches are smaller."""
    data = TensorDataset(torch.randn(rows, 4))
    return [DataLoader(data, batch_size=4, shuffle=True, **options), DataLoader(data, batch_size=8)]


@swpipe.task(pure=True)
def decode(ctx: Any) -> None:
    """Decode a batch; this needs no model."""
    ctx.x = ctx.batch[0] * 2


def declared(tasks: list[Any]) -> list[swpipe.PipelineTask]:
    """Return functions as tasks, and tasks unchanged."""
    return [one if isinstance(one, swpipe.PipelineTask) else swpipe.task(one) for one in tasks]


class OfAccelerate:
    """A loop as Accelerate's documentation writes it."""

    def __init__(self, rows: int = ROWS, **options: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.loader: Any
        if "gradient_accumulation_plugin" not in options:
            options["gradient_accumulation_steps"] = 4
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer, self.scheduler, self.loader, self.rows = (
            self.accelerator.prepare(model, optimizer, scheduler, *loaders(rows))
        )
        self.steps: list[int] = []
        self.tasks = [decode, self.forward, self.backward, self.step]

    def forward(self, ctx: Any) -> None:
        with self.accelerator.accumulate(self.model):
            ctx.loss = self.model(ctx.x).square().mean()

    def backward(self, ctx: Any) -> None:
        self.accelerator.backward(ctx.loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self, ctx: Any) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def body(self, ctx: Any) -> Any:
        """Return everything that the loop's body asks Accelerate for in an iteration."""
        if self.accelerator.sync_gradients:
            self.steps.append(ctx.iter_idx)
        state = self.accelerator.gradient_state
        return [
            *(state.in_dataloader, state.end_of_dataloader, state.remainder),
            self.accelerator.gather_for_metrics(ctx.x).clone(),
            self.optimizer.param_groups[0]["lr"],
        ]

    def evaluate(self) -> list[Tensor]:
        self.model.eval()
        with torch.no_grad():
            found = [self.accelerator.gather_for_metrics(self.model(b)) for (b,) in self.rows]
        self.model.train()
        return found


class OfFabric:
    """A loop with Fabric's wrappers of model, optimizer and loaders."""

    def __init__(self) -> None:
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1)
        self.fabric.launch()
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.loader, self.rows = self.fabric.setup_dataloaders(*loaders())  # type: ignore[misc]
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.tasks = [decode, self.forward_backward, self.step]

    def forward_backward(self, ctx: Any) -> None:
        with self.fabric.no_backward_sync(self.model, enabled=(ctx.iter_idx + 1) % 4 != 0):
            ctx.loss = self.model(ctx.x).square().mean()
            self.fabric.backward(ctx.loss / 4)

    def step(self, ctx: Any) -> None:
        if (ctx.iter_idx + 1) % 4 == 0:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def body(self, ctx: Any) -> Any:
        return self.optimizer.param_groups[0]["lr"]

    def evaluate(self) -> list[Tensor]:
        self.model.eval()
        with torch.no_grad():
            found = [self.model(batch) for (batch,) in self.rows]
        self.model.train()
        return found


def train(loop: Any, passes: Iterator[Any]) -> list[Any]:
    """Run the body for both ways; return all numbers that it sees."""
    seen = []
    for contexts in passes:
        for ctx in contexts:
            seen.append([ctx.loss.detach(), loop.body(ctx)])
            if ctx.iter_idx % 10 == MIDDLE:
                seen.append(loop.evaluate())
    return [seen, loop.model.state_dict(), loop.optimizer.state_dict(), torch.get_rng_state()]


def plainly(loop: Any) -> list[Any]:
    """Run the plain loop of the framework's users."""
    numbers = count()

    def contexts() -> Iterator[Any]:
        for batch in loop.loader:
            ctx = IterContext(batch, next(numbers))
            for function in loop.tasks:
                function(ctx)
            yield ctx

    return train(loop, (contexts() for _ in range(EPOCHS)))


# ------------------------------------------------------------------------------ overlapped


def overlapped(loop: Any) -> list[Any]:
    """Run the loop with ``swpipe.overlap``."""
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        assert contexts.overlap.loader_ahead
        assert "decode" in contexts.overlap.ahead
        return train(loop, (contexts for _ in range(EPOCHS)))


@pytest.mark.parametrize("make", [OfAccelerate, OfFabric])
def test_an_overlapped_loop_equals_the_tools_own(make: Any) -> None:
    """Losses, rates, flags, gathered rows, evaluations, states and random numbers are equal."""
    torch.manual_seed(3)
    expected = plainly(make())
    torch.manual_seed(3)
    found = overlapped(make())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_prepared_loader_with_workers_runs_ahead_without_a_word() -> None:
    """Accelerate's samplers are known, also the one that seeds itself in each pass."""

    def made() -> OfAccelerate:
        torch.manual_seed(3)
        config = DataLoaderConfiguration(use_seedable_sampler=True)
        loop = OfAccelerate(dataloader_config=config)
        loop.loader = loop.accelerator.prepare(loaders(num_workers=1)[0])
        return loop

    expected, loop = plainly(made()), made()
    with swpipe.overlap(loop.loader, loop.tasks, device="cpu") as contexts:
        assert contexts.overlap.ahead == ("unpack batch", "decode")
        found = train(loop, (contexts for _ in range(EPOCHS)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_loop_over_a_prepared_loader_that_is_left_begins_anew() -> None:
    """Accelerate forgets the pass that was left."""
    loop = OfAccelerate()
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        for ctx in contexts:
            if ctx.iter_idx == 2:
                break
        assert not GradientState().in_dataloader
        ends = [GradientState().end_of_dataloader for _ in contexts]
    assert ends == [False] * 9 + [True]
    assert isinstance(loop.loader.gradient_state, GradientState)
    assert [type(batch) for batch in loop.loader] == [list] * 10


@pytest.mark.parametrize("stopped", [6, 9, 12])
def test_a_loop_of_accelerate_goes_on_where_it_was_stopped(stopped: int) -> None:
    """It stops in the middle of an accumulation, at the end of an epoch, or in the second one."""

    def train_from(loop: OfAccelerate, contexts: Any, epoch: int) -> list[Any]:
        return [
            (ctx.iter_idx, ctx.loss.item(), loop.body(ctx), save(loop, contexts, ctx, number))
            for number in range(epoch, EPOCHS)
            for ctx in contexts
        ]

    def save(loop: OfAccelerate, contexts: Any, ctx: Any, epoch: int) -> None:
        if ctx.iter_idx == stopped:
            parts = (loop.model, loop.optimizer, loop.scheduler, contexts)
            states = [copy.deepcopy(part.state_dict()) for part in parts]
            gradients = [copy.deepcopy(each.grad) for each in loop.model.parameters()]
            saved.append((epoch, loop.accelerator.step, gradients, states))

    saved: list[Any] = []
    torch.manual_seed(3)
    loop = OfAccelerate()
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        expected = train_from(loop, contexts, 0)
    epoch, step, gradients, states = saved.pop()
    torch.manual_seed(3)
    loop = OfAccelerate()  # the same rows
    torch.manual_seed(4)
    with swpipe.overlap(loop.loader, loop.tasks, pull_ahead=True, device="cpu") as contexts:
        loop.loader.set_epoch(epoch)
        loop.accelerator.step = step
        for parameter, gradient in zip(loop.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        parts = (loop.model, loop.optimizer, loop.scheduler, contexts)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        found = train_from(loop, contexts, epoch)
    torch.testing.assert_close(found, expected[stopped + 1 :], rtol=0, atol=0, equal_nan=True)


def test_a_loader_that_sends_batches_to_other_processes_is_refused() -> None:
    """Its collectives would overlap with those of tasks."""
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(8, 4))))
    with pytest.raises(ValueError, match=r"DataLoaderDispatcher.*dispatch_batches=False"):
        swpipe.overlap(loader, [decode], pull_ahead=True, device="cpu")


@pytest.mark.parametrize("wrap", [lambda loader: (batch for batch in loader), iter])
def test_a_prepared_loader_in_a_generator_is_refused(wrap: Any) -> None:
    """Its flags would be a later batch's. Accelerate forgets it; the error says what to give."""
    loop = OfAccelerate()
    with swpipe.overlap(wrap(loop.loader), loop.tasks, pull_ahead=True, device="cpu") as contexts:
        with pytest.raises(RuntimeError, match="Accelerate prepared.*or ahead the loader itself"):
            list(contexts)
    assert not GradientState().in_dataloader


# ------------------------------------------------------------------------------ plans of one's own


UNPACK, SHOW = "unpack batch", "show end_of_dataloader"


def not_at_ends() -> OfAccelerate:
    """Return a loop that accumulates gradients over the end of an epoch."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    return OfAccelerate(gradient_accumulation_plugin=plugin)


class Skipping(OfAccelerate):
    """A loop whose first pass begins in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = self.accelerator.skip_first_batches(self.loader, 3)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (OfAccelerate, STEPS),
        (lambda: OfAccelerate(rows=4), [0, 1]),
        (not_at_ends, [3, 7, 11, 15, 19]),
        (Skipping, [3, 6, 10, 13]),
    ],
)
def test_each_kind_of_prepared_loader_in_a_plan_of_ones_own(make: Any, steps: list[int]) -> None:
    """Losses, rates, flags, gathered rows and evaluations by another loader are equal."""
    torch.manual_seed(3)
    expected = plainly(make())
    torch.manual_seed(3)
    loop = make()
    loader = swpipe.loops.AccelerateLoader(loop.loader)
    tasks = loader.tasks(declared(loop.tasks))
    names = [task.name for task in tasks]
    plan = prefetch_plan([UNPACK, "decode"], [SHOW, *names[3:]], depth=5)
    with SWPipeline(plan, tasks, device="cpu") as pipe:
        contexts = swpipe.loops.ResumableLoop(pipe, loader)
        found = train(loop, (contexts for _ in range(EPOCHS)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not GradientState().in_dataloader
    assert loop.steps == steps


# ------------------------------------------------------------------------------------- refused


def through_a_generator(loader: Any) -> Iterator[Any]:
    """Wrap a loader in a generator."""
    yield from loader


def used(ctx: Any) -> None:
    """Do nothing."""


def made(pull_group: str | None = None) -> SWPipeline[Any]:
    """Return a pipeline that pulls a batch ahead."""
    plan = PipelinePlan({"used": TaskSchedule(0)}, pipeline_depth=2, pull_group=pull_group)
    return SWPipeline(plan, [swpipe.task(used)], device="cpu")


@pytest.mark.parametrize("wrap", [lambda loader: loader, enumerate, through_a_generator])
def test_a_prepared_loader_that_is_pulled_ahead_is_refused(wrap: Callable[[Any], Any]) -> None:
    """Any wrapper of it is refused; Accelerate forgets the pass, and accepts other loaders then."""
    loader = OfAccelerate().loader
    with made("loader") as pipe:
        for call in (pipe.run, lambda given: pipe.fill_pipeline(iter(given))):
            with pytest.raises(RuntimeError, match=r"Accelerate prepared.*AccelerateLoader\("):
                call(wrap(loader))
            assert not GradientState().in_dataloader
        assert pipe.run(range(5)).iterations == 5


def test_an_iterator_that_has_begun_is_refused() -> None:
    """Its generator shows it: Accelerate knows it already. A pushed batch is refused, too."""
    batches = iter(OfAccelerate().loader)
    batch = next(batches)
    for call in (lambda: pipe.progress(batches), lambda: pipe.push(batch)):
        with made() as pipe, pytest.raises(RuntimeError, match="Accelerate prepared"):
            call()


def test_the_adapter_is_iterated_over_by_a_loop() -> None:
    """The loop makes Accelerate forget the pass; an unprepared loader needs no adapter."""
    loader = swpipe.loops.AccelerateLoader(OfAccelerate().loader)
    with made() as pipe, pytest.raises(RuntimeError, match="swpipe.loops.ResumableLoop"):
        pipe.run(loader)
    with pytest.raises(TypeError, match="a loader that Accelerator.prepare returned, not a Data"):
        swpipe.loops.AccelerateLoader(loaders()[0])


def test_tasks_that_ask_before_the_flags_are_shown_are_refused() -> None:
    """The plan is verified for the flags: an undeclared task may read them."""
    loop = OfAccelerate()
    tasks = swpipe.loops.AccelerateLoader(loop.loader).tasks(declared(loop.tasks))
    plan = prefetch_plan([UNPACK, "decode", "forward"], [SHOW, "backward", "step"])
    with pytest.raises(PlanError, match="'forward'.*Accelerate's GradientState"):
        SWPipeline(plan, tasks, device="cpu")
