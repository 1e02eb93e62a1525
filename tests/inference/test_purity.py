"""A pure task that breaks its declaration stops the run, as far as torch's dispatch shows it.

A lie is a task that is wrongly declared ``pure=True``. Each lie runs ahead of a training loop,
under a plan and under ``overlap``, and must be stopped within two iterations, by an error that
names the task, what it touched, the rule, and the remedy. Honest tasks run undisturbed.
"""

from __future__ import annotations

import importlib
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import swpipe
from swpipe import PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.errors import PlanError
from swpipe.inference import states
from swpipe.inference.watched_modes import ModuleModes, something_is_compiled
from tests.support.plans_for_tests import NOBODY_ELSE

BATCHES = 12

AHEAD = PipelinePlan(
    {
        "decode": TaskSchedule(0, thread_group="io"),
        "train": TaskSchedule(1),
    },
    deps=[("train", "decode")],
)
"""A plan in which ``decode`` runs one iteration ahead, on a separate thread."""


def nothing(ctx: Any) -> None:
    """Do nothing."""


class Job:
    """The objects of a training loop: a model, a table, features, generators."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.table = nn.Embedding(8, 4).requires_grad_(False)
        self.features = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False).eval()
        self.norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
        self.counts = torch.zeros(8)
        self.array = np.zeros(4, dtype=np.float32)
        self.draws = torch.Generator().manual_seed(1)
        self.batches = [torch.randint(8, (3,)) for _ in range(BATCHES)]
        self.train_also: Callable[[Any], object] = nothing

    def looked_up(self, ctx: Any) -> Tensor:
        """Return the frozen table's rows for a batch."""
        return self.table(ctx.batch)  # type: ignore[no-any-return]

    def train(self, ctx: Any) -> None:
        """Train on ``ctx.x``."""
        ctx.loss = self.model(ctx.x.float()).square().sum()
        self.optimizer.zero_grad()
        ctx.loss.backward()
        self.optimizer.step()
        self.train_also(ctx)

    def tasks(self, decode: Callable[[Any], Any], **options: Any) -> list[PipelineTask]:
        """Return the loop's tasks; the first one is declared pure."""

        def decoded(ctx: Any) -> None:
            ctx.x = decode(ctx)

        return [
            PipelineTask("decode", decoded, pure=True, **options),
            PipelineTask("train", self.train),
        ]


Run = Callable[[Job, list[PipelineTask]], Iterator[Any]]


def under_a_plan(job: Job, tasks: list[PipelineTask]) -> Iterator[Any]:
    """Yield the contexts of a pipeline."""
    with SWPipeline(AHEAD, tasks, device="cpu") as pipe:
        yield from pipe.iterate(job.batches)


def under_overlap(job: Job, tasks: list[PipelineTask]) -> Iterator[Any]:
    """Yield the contexts of an overlapped loop."""
    with swpipe.overlap(job.batches, tasks, device="cpu", pull_ahead=True) as loop:
        ahead = () if tasks[0].random else ("decode",)  # the body may draw as well
        assert loop.overlap.ahead == ahead
        yield from loop


RUNS = (under_a_plan, under_overlap)


def plainly(job: Job, tasks: list[PipelineTask]) -> Iterator[Any]:
    """Yield the contexts of a plain loop."""
    for number, batch in enumerate(job.batches):
        ctx = swpipe.IterContext(batch, number)
        for task in tasks:
            task(ctx)
        yield ctx


# ------------------------------------------------------------------ lies

Lie = Callable[[Job], Callable[[Any], Any]]
LIES: dict[str, tuple[Lie, str]] = {
    "a trained parameter": (
        lambda job: lambda ctx: job.looked_up(ctx) * job.model.weight,
        "float32",
    ),
    "a trained parameter's data": (
        lambda job: lambda ctx: job.looked_up(ctx) + job.model.weight.data,
        "float32",
    ),
    "a draw": (lambda job: lambda ctx: job.looked_up(ctx) + torch.rand(3, 4), "generator"),
}
"""How ``decode`` is made, and what the error has to name, by name."""


def lie(name: str, names: str) -> Callable[[Lie], Lie]:
    """Register a lie."""

    def enter(make: Lie) -> Lie:
        LIES[name] = make, names
        return make

    return enter


@lie("a write to a buffer", "float32")
def buffer(job: Job) -> Callable[[Any], Any]:
    def decode(ctx: Any) -> Tensor:
        job.norm.running_mean.add_(1.0)  # type: ignore[operator, union-attr]
        return job.looked_up(ctx)

    return decode


@lie("a write through out=", "float32")
def written_out(job: Job) -> Callable[[Any], Any]:
    kept = torch.zeros(3, 4)
    # Not "kept" itself: autograd could find before the check does that it has changed.
    return lambda ctx: torch.mul(job.looked_up(ctx), 2.0, out=kept).clone()


@lie("a draw from a generator that others use", "generator")
def given_generator(job: Job) -> Callable[[Any], Any]:
    job.train_also = lambda ctx: torch.rand(1, generator=job.draws)
    return lambda ctx: job.looked_up(ctx) + torch.rand(3, 4, generator=job.draws)


@lie("a tensor that another task changes in place", "unnamed memory")
def changed(job: Job) -> Callable[[Any], Any]:
    job.train_also = lambda ctx: job.counts.index_add_(0, ctx.batch, torch.ones(3))
    return lambda ctx: job.looked_up(ctx) * job.counts[ctx.batch, None]


@lie("a table that is unfrozen by another task", "float32")
def unfrozen(job: Job) -> Callable[[Any], Any]:
    def unfreeze(ctx: Any) -> None:
        if ctx.iter_idx == 0:
            job.table.requires_grad_(True)

    job.train_also = unfreeze
    return job.looked_up


def _follow_by_data(own: Tensor, new: Tensor) -> None:
    own.data.mul_(0.9).add_(new.data, alpha=0.1)


def _follow_by_set(own: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        own.set_(own * 0.9 + new * 0.1)  # type: ignore[call-overload]


def _enter_teacher_that_follows(how: Callable[[Tensor, Tensor], None]) -> None:
    @lie(f"a teacher that follows the model{how.__name__.replace('_', ' ')}", "teacher|unnamed")
    def teacher(job: Job) -> Callable[[Any], Any]:
        teacher = nn.Linear(4, 1).requires_grad_(False)

        def follow(ctx: Any) -> None:
            for own, new in zip(teacher.parameters(), job.model.parameters(), strict=True):
                how(own, new)

        job.train_also = follow
        return lambda ctx: job.looked_up(ctx) + teacher(job.looked_up(ctx))


for how in (_follow_by_data, _follow_by_set):
    _enter_teacher_that_follows(how)


@lie("a teacher in inference mode, which has no versions", "unnamed memory")
def inference_teacher(job: Job) -> Callable[[Any], Any]:
    with torch.inference_mode():
        teacher = torch.ones(4)

    def follow(ctx: Any) -> None:
        with torch.inference_mode():
            teacher.add_(1.0)

    job.train_also = follow
    return lambda ctx: job.looked_up(ctx) + teacher.clone()


@lie("a switch to eval and back", "Sequential|Linear|Tanh")
def evaluated(job: Job) -> Callable[[Any], Any]:
    def decode(ctx: Any) -> Tensor:
        job.features.eval()
        found: Tensor = job.features(job.looked_up(ctx))
        job.features.train()
        return found

    return decode


@lie("a module that is switched by another task", "Sequential|Linear|Tanh")
def switched(job: Job) -> Callable[[Any], Any]:
    job.train_also = lambda ctx: job.features.train(ctx.iter_idx > 0)
    return lambda ctx: job.features(job.looked_up(ctx))


@lie("memory that it kept from the iteration before", "memory")
def kept(job: Job) -> Callable[[Any], Any]:
    last: list[Tensor] = []

    def decode(ctx: Any) -> Tensor:
        for one in last:
            one.add_(1.0)  # which the body may still look at
        ctx.seen = job.looked_up(ctx).clone()
        last[:] = [ctx.seen]
        return job.looked_up(ctx)

    return decode


@lie("writes to slices that overlap, and are never the same", "writes state .unnamed memory")
def sliced(job: Job) -> Callable[[Any], Any]:
    def decode(ctx: Any) -> Tensor:
        job.counts[ctx.iter_idx : ctx.iter_idx + 2].add_(1.0)
        return job.looked_up(ctx)

    return decode


@pytest.mark.parametrize(("name", "run"), [*zip(LIES, cycle(RUNS))])
def test_a_lie_stops_within_two_iterations(name: str, run: Run) -> None:
    """The error names the task and what it accessed, and says what pure means.

    What others change shows only after the change, when the task is some iterations ahead.
    """
    make, names = LIES[name]
    job = Job()
    tasks = job.tasks(make(job))
    done: list[int] = []
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()  # what other tests have compiled
    with pytest.raises(PlanError) as caught:
        done.extend(ctx.iter_idx for ctx in run(job, tasks))
    text = str(caught.value)
    most = 2 if job.train_also is nothing else 4
    if most == 4 and run is under_overlap:
        most += 1  # it has one more in flight, the one that the body has
    assert len(done) <= most
    assert "'decode'" in text
    assert re.search(names, text), text
    if run is under_overlap and "it returns a buffer that it fills again" in text:
        # The loop checks what the tasks ahead return, and on a busy machine its check comes first.
        assert "Let it make a new tensor or array for each batch" in text
        return
    assert "pure" in text
    assert re.search(r"requires_grad_\(False\)|random=True|ake pure=True away", text), text


# ------------------------------------------------------------------ honest tasks

Honest = Callable[[Job], list[PipelineTask]]
HONEST: dict[str, Honest] = {
    "a frozen model": lambda job: job.tasks(lambda ctx: job.norm(job.features(job.looked_up(ctx)))),
    "draws of a random task": lambda job: job.tasks(
        lambda ctx: job.looked_up(ctx) + torch.rand(3, 4), random=True, io=[NOBODY_ELSE]
    ),
    "a module that it has in eval mode each time": lambda job: job.tasks(
        lambda ctx: job.features.eval()(job.looked_up(ctx))
    ),
}


def honest(name: str) -> Callable[[Honest], Honest]:
    """Register an honest task."""

    def enter(make: Honest) -> Honest:
        HONEST[name] = make
        return make

    return enter


@honest("a cache of its own")
def cached(job: Job) -> list[PipelineTask]:
    known: dict[int, Tensor] = {}

    @lru_cache
    def factor(number: int) -> float:
        return 1.0 / (1 + number)

    def decode(ctx: Any) -> Tensor:
        rows = [
            known.setdefault(int(number), job.table.weight[int(number)] * factor(int(number)))
            for number in ctx.batch
        ]
        return torch.stack(rows)

    return job.tasks(decode)


@honest("tensors of its own that require gradients")
def own_gradients(job: Job) -> list[PipelineTask]:
    def decode(ctx: Any) -> Tensor:
        with torch.enable_grad():
            x = job.looked_up(ctx).requires_grad_()
            (slope,) = torch.autograd.grad(job.features(x).sum(), x)
        return x.detach() + slope

    return job.tasks(decode)


@honest("a batch of the loader that it modifies in place")
def loaders_batch(job: Job) -> list[PipelineTask]:
    def decode(ctx: Any) -> Tensor:
        ctx.batch.add_(1).remainder_(8)
        return job.looked_up(ctx)

    return job.tasks(decode)


@honest("a generator of its own")
def own_generator(job: Job) -> list[PipelineTask]:
    def decode(ctx: Any) -> Tensor:
        draws = torch.Generator().manual_seed(ctx.iter_idx)
        return job.looked_up(ctx) + torch.rand(3, 4, generator=draws)

    return job.tasks(decode)


@honest("a scale on a copy of a parameter's first values")
def copied(job: Job) -> list[PipelineTask]:
    first = job.model.weight.detach().clone()
    return job.tasks(lambda ctx: job.looked_up(ctx) * first)


@honest("a module that another task has in train mode")
def other_module_in_training(job: Job) -> list[PipelineTask]:
    job.train_also = lambda ctx: job.model.eval()(ctx.x) + job.model.train()(ctx.x)
    return job.tasks(lambda ctx: job.features(job.looked_up(ctx)))


@honest("a frozen model that it moves")
def moved(job: Job) -> list[PipelineTask]:
    """Move the parameters to new memory, as an offload to the host does."""

    def decode(ctx: Any) -> Tensor:
        for parameter in job.features.parameters():
            parameter.data = parameter.data.clone()
        return job.features(job.looked_up(ctx))  # type: ignore[no-any-return]

    return job.tasks(decode)


@honest("a frozen table with values that are no numbers")
def not_numbers(job: Job) -> list[PipelineTask]:
    job.table.weight[0] = torch.nan
    return job.tasks(lambda ctx: job.looked_up(ctx).nan_to_num())


@honest("batches in buffers of a loader that fills them anew")
def buffers_of_the_loader(job: Job) -> list[PipelineTask]:
    """Fill enough buffers, without torch, that no task sees another iteration's batch."""
    filled = [np.zeros(3, dtype=np.int64) for _ in range(6)]
    buffers = [torch.from_numpy(each) for each in filled]

    class Filling(list):  # type: ignore[type-arg]
        """A loader that is not known to be apart from the loop."""

        def __iter__(self) -> Iterator[Tensor]:
            for number in range(BATCHES):
                filled[number % 6][:] = (number % 8, (number + 1) % 8, 2 * number % 8)
                yield buffers[number % 6]

    job.batches = Filling(job.batches)
    return job.tasks(job.looked_up)


@honest("gradients through a pure task's inputs")
def trained_by_others(job: Job) -> list[PipelineTask]:
    """Let the next task make the context's tensor require gradients, and read them."""

    def train(ctx: Any) -> None:
        ctx.x.requires_grad_()
        job.train(ctx)
        ctx.slope = ctx.x.grad.clone()

    return [job.tasks(job.looked_up)[0], PipelineTask("train", train)]


@pytest.mark.parametrize(("name", "run"), [*zip(HONEST, cycle(RUNS))])
def test_honest_tasks_run_to_the_end(name: str, run: Run) -> None:
    """The numbers are the plain loop's; those of random tasks are the pipeline's."""
    job = Job()
    losses = [ctx.loss.detach() for ctx in run(job, HONEST[name](job))]
    assert len(losses) == BATCHES
    if name != "draws of a random task":
        plain = Job()
        expected = [ctx.loss.detach() for ctx in plainly(plain, HONEST[name](plain))]
        torch.testing.assert_close(losses, expected, rtol=0, atol=0)
        torch.testing.assert_close(job.model.weight, plain.model.weight, rtol=0, atol=0)


def test_batches_of_a_list_may_be_read_in_many_epochs() -> None:
    """Other tasks have read them, too, and the model has been trained since."""
    job = Job()
    tasks = job.tasks(job.looked_up)
    tasks.append(PipelineTask("look", lambda ctx: setattr(ctx, "most", ctx.batch.max())))
    for _ in range(3):
        assert len([*under_overlap(job, tasks)]) == BATCHES


@pytest.mark.parametrize(("who", "run"), [("decode", under_a_plan), ("train", under_overlap)])
def test_what_is_compiled_stays_compiled(who: str, run: Run) -> None:
    """A watched pure task and the training next to it do not fall back to eager code."""
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return call

    job = Job()
    if who == "decode":
        features = torch.compile(job.features, backend=backend)
        tasks = job.tasks(lambda ctx: features(job.looked_up(ctx)))
    else:
        tasks = job.tasks(job.looked_up)
        job.model = torch.compile(job.model, backend=backend)  # type: ignore[assignment]
    assert len([*run(job, tasks)]) == BATCHES
    assert len(calls) == BATCHES
    torch.compiler.reset()


def test_what_a_lie_touched_is_named_without_a_look_at_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If ``parameter.grad`` is read while another thread trains, torch 2.13 may crash."""
    looked: list[object] = []
    monkeypatch.setattr(states, "grad_or_none", looked.append)
    job = Job()
    with pytest.raises(PlanError, match=r"'decode' is pure"):
        for _ in under_overlap(job, job.tasks(LIES["a trained parameter"][0](job))):
            pass
    assert looked == []


def test_what_a_task_drops_is_freed_while_it_is_watched() -> None:
    """Its memory is the same as unwatched: intermediate results do not live to its end."""
    alive: list[int] = []

    def decode(ctx: Any) -> Tensor:
        x, seen = job.looked_up(ctx), []
        for _ in range(5):
            x = x * 2.0 + 1.0
            seen.append(weakref.ref(x))
        alive.append(sum(one() is not None for one in seen))
        return x

    job = Job()
    assert len([*under_a_plan(job, job.tasks(decode))]) == BATCHES
    assert alive == [1] * BATCHES


def test_lies_are_let_go_where_nobody_looks() -> None:
    """``check_effects=False`` is the user's own choice."""
    job = Job()
    tasks = job.tasks(LIES["a trained parameter"][0](job))
    with SWPipeline(AHEAD, tasks, device="cpu", check_effects=False) as pipe:
        assert len([*pipe.iterate(job.batches)]) == BATCHES


# -------------------------------------------------------------------- hand-written plans


@pytest.mark.parametrize("how", ["deletes", "rebinds"])
def test_a_pure_task_without_the_order_of_what_an_undeclared_one_made(how: str) -> None:
    """The plan has the two in reverse order; what each does to the context is watched."""

    def make(ctx: Any) -> None:
        ctx.batch.add_(1.0)
        ctx.total = ctx.batch.sum()

    def finish(ctx: Any) -> None:
        before = ctx.batch
        if how == "deletes":
            del ctx.batch
            ctx.batch = torch.zeros(2)
        else:
            ctx.batch = before * 2.0

    tasks = [PipelineTask("make", make), PipelineTask("finish", finish, pure=True)]
    plan = PipelinePlan(
        {"make": TaskSchedule(1), "finish": TaskSchedule(0, thread_group="io")},
        same_period_deps=[("make", "finish")],  # of the next iteration
    )
    batches = [torch.ones(2) * number for number in range(6)]
    said = r"touched ctx\.batch.*'finish' on iteration i must come after 'make' on iteration i"
    with SWPipeline(plan, tasks, device="cpu") as pipe, pytest.raises(PlanError, match=said):
        list(pipe.iterate(batches))


def test_modes_are_watched_where_nothing_is_compiled_and_only_there() -> None:
    """An optimizer marks functions as not to be compiled, in any process that trains."""
    compiler = importlib.import_module("torch._dynamo")
    compiler.reset()
    compiler.disable(lambda: None)
    assert not something_is_compiled()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert something_is_compiled()
    compiler.reset()


def test_a_mode_that_differs_from_that_of_the_run_before_is_switched() -> None:
    """Other code has switched it between the runs: within each run it was the same."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    modes = ModuleModes(eager=True)
    for training in (True, True, False):
        model.train(training)
        assert not modes.switched
        with modes:
            model(torch.ones(1))
            other(torch.ones(1))
    assert [*modes.switched] == [model]
