"""``shortcut("task", with_=...)``: outputs come from a function or from given values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swpipe import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.core.task import DeclaredIO
from swpipe.pipeline import borrowed
from swpipe.shortcut import Shortcuts, control


class Job:
    """A loop of embed, norm, loss and backward; ``norm`` is wrong, and counts its runs."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(3))
        self.norms = 0
        self.tasks = [
            PipelineTask("embed", self.embed),
            PipelineTask("norm", self.norm, io=[DeclaredIO(self.refuse, lambda state: None)]),
            PipelineTask("loss", self.loss),
            PipelineTask("backward", self.backward),
        ]

    def embed(self, ctx: Any) -> None:
        ctx.x = self.weight * ctx.batch

    def norm(self, ctx: Any) -> None:
        self.norms += 1
        ctx.y = ctx.x * 100

    def refuse(self) -> None:
        raise AssertionError("a task with a substitute is not cached")

    def loss(self, ctx: Any) -> None:
        ctx.y += 1  # in place
        ctx.loss = ctx.y.sum()

    def backward(self, ctx: Any) -> None:
        ctx.loss.backward()


BATCHES = [torch.full((3,), float(k)) for k in range(1, 5)]


def losses(pipe: SWPipeline[Any]) -> list[float]:
    return [ctx.loss.item() for ctx in pipe.iterate(BATCHES)]


def halve(ctx: Any) -> None:
    ctx.y = ctx.x / 2


def ahead(job: Job) -> PipelinePlan:
    """Return a plan with three iterations in flight, on two threads."""
    schedule = {
        "embed": TaskSchedule(0, thread_group="io"),
        "norm": TaskSchedule(1, thread_group="io"),
        "loss": TaskSchedule(2),
        "backward": TaskSchedule(2),
    }
    return PipelinePlan(schedule, deps=[("norm", "embed"), ("loss", "norm"), ("backward", "loss")])


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_function_takes_the_place_of_a_task(overlapped: bool) -> None:
    """It runs in every iteration, with gradients of its results; the task never runs."""
    job = Job()
    plan = ahead(job) if overlapped else PipelinePlan.serial(job.tasks)
    with SWPipeline(plan, job.tasks, check_effects=False) as pipe:
        with pipe.shortcut("norm", with_=halve):
            assert losses(pipe) == [3 * (k / 2 + 1) for k in range(1, 5)]
        assert job.norms == 0
        assert job.weight.grad is not None
        assert job.weight.grad.tolist() == [5.0] * 3  # (1 + 2 + 3 + 4) / 2
        assert losses(pipe) == [3 * (100 * k + 1) for k in range(1, 5)]


def test_serial_runs_and_whoever_borrows_the_pipeline_use_it_too() -> None:
    """They run on the caller's thread, and name the task or its name."""
    job = Job()
    with (
        SWPipeline(PipelinePlan.serial(job.tasks), job.tasks) as pipe,
        pipe.shortcut(job.tasks[1], with_=PipelineTask("reference", halve)),
    ):
        assert pipe.run_one_serial_iter(BATCHES[1]).loss.item() == 6.0
        with borrowed(pipe):  # as in a profile
            assert losses(pipe)[0] == 4.5


@pytest.mark.parametrize("values", [{"y": torch.ones(3)}, lambda ctx: {"y": torch.ones(3)}])
def test_given_values_keep_the_graph_connected(values: Any) -> None:
    """Parameters upstream get zeros, not None; a later task may change its copy in place."""

    class Typed(IterContext):
        pass

    job = Job()
    with (
        SWPipeline(PipelinePlan.serial(job.tasks), job.tasks, context=Typed) as pipe,
        pipe.shortcut("norm", with_=values),
    ):
        assert losses(pipe) == [6.0] * 4
    assert job.weight.grad is not None
    assert job.weight.grad.tolist() == [0.0] * 3


def test_a_value_that_requires_grad_is_connected_by_its_giver() -> None:
    """Its gradient exists afterwards."""
    job, given = Job(), torch.ones(3, requires_grad=True)
    with (
        SWPipeline(PipelinePlan.serial(job.tasks), job.tasks) as pipe,
        pipe.shortcut("norm", with_=lambda ctx: {"y": given * 2}),
    ):
        losses(pipe)
    assert given.grad is not None
    assert given.grad.tolist() == [8.0] * 3
    assert job.weight.grad is None


def test_values_of_any_kind_are_copied_for_each_iteration() -> None:
    """Ids, arrays, and what lies in containers; without gradients there is no graph."""
    given = {"ids": [torch.tensor([1, 2])], "rows": np.zeros(2)}
    seen = []

    def use(ctx: Any) -> None:
        seen.append((ctx.ids[0].tolist(), ctx.rows.tolist()))
        ctx.ids[0] += 1
        ctx.rows += 1

    tasks = [PipelineTask("make", lambda ctx: None), PipelineTask("use", use)]
    with (
        SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe,
        pipe.shortcut("make", with_=given),
    ):
        pipe.run(range(2))
    assert seen == [([1, 2], [0.0, 0.0])] * 2
    assert given["ids"][0].tolist() == [1, 2]


def test_the_last_word_counts() -> None:
    """A substitute may replace another one, and a plain shortcut a substitute."""
    job = Job()
    tasks = [*job.tasks[:1], PipelineTask("norm", job.norm), *job.tasks[2:]]
    with SWPipeline(PipelinePlan.serial(tasks), tasks) as pipe:
        pipe.enable_shortcut("norm", with_={"y": torch.zeros(3)})
        pipe.enable_shortcut("norm", with_=halve)
        assert losses(pipe)[0] == 4.5
        pipe.enable_shortcut("norm")
        assert losses(pipe)[1] == 303.0
        assert job.norms == 1
        pipe.disable_shortcut()
        assert losses(pipe)[1] == 603.0


def test_a_task_that_is_disabled_just_before_it_runs_runs_itself() -> None:
    """A worker may have asked just before whether it is shortcut: its substitute is gone."""
    job, shortcuts = Job(), Shortcuts()
    shortcuts.enable(["norm"], halve)
    shortcuts.disable(["norm"])
    ctx = IterContext(torch.ones(3), 0)
    job.embed(ctx)
    shortcuts.run(job.tasks[1], ctx)
    assert ctx.y.tolist() == [100.0] * 3


def test_a_pure_task_s_substitute_is_watched_like_the_task() -> None:
    """A plan that runs it ahead relies on it."""
    counter = torch.zeros(1)

    def use(ctx: Any) -> None:
        ctx.seen = counter.add_(1)

    tasks = [
        PipelineTask("decode", lambda ctx: setattr(ctx, "x", ctx.batch), pure=True),
        PipelineTask("use", use),
    ]
    plan = PipelinePlan(
        {"decode": TaskSchedule(0), "use": TaskSchedule(1)}, deps=[("use", "decode")]
    )
    with (
        SWPipeline(plan, tasks) as pipe,
        pipe.shortcut("decode", with_=lambda ctx: counter.add_(1) and None),
        pytest.raises((RuntimeError, ValueError), match="'decode'"),
    ):
        pipe.run(BATCHES)


@pytest.mark.parametrize(
    ("names", "given", "kind", "said"),
    [
        ([], halve, ValueError, r"with_ replaces one task, and 0 are given \(none\)"),
        (["norm", "loss"], halve, ValueError, r"2 are given \(norm, loss\)"),
        (["norm"], 3, TypeError, r"task 'norm': with_ is 3: give a function"),
        (["norm"], {"a b": 4}, TypeError, r"the key 'a b', which is not an attribute"),
        (["norm"], {"iter_idx": 4}, TypeError, r"the values have the key 'iter_idx'"),
        (["no"], halve, ValueError, r"no task 'no'; it has embed, norm"),
    ],
)
def test_what_cannot_stand_for_a_task_is_refused(
    names: list[str], given: Any, kind: type[Exception], said: str
) -> None:
    """It is refused before anything runs."""
    job = Job()
    with (
        SWPipeline(PipelinePlan.serial(job.tasks), job.tasks) as pipe,
        pytest.raises(kind, match=said),
        pipe.shortcut(*names, with_=given),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (lambda ctx: 3, TypeError, r"'norm': the function given as with_ returned 3\. It must set"),
        (lambda ctx: {3: 4}, TypeError, r"'norm': the values have the key 3, which is not"),
        (lambda ctx: {"z": 4}, AttributeError, r"has no attribute 'y'"),
        (lambda ctx: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_substitute_that_fails_is_named(given: Any, kind: type[Exception], said: str) -> None:
    """The note of the failure names it, as it would name the task."""
    job = Job()
    with (
        SWPipeline(PipelinePlan.serial(job.tasks), job.tasks) as pipe,
        pipe.shortcut("norm", with_=given),
        pytest.raises(kind, match=said) as caught,
    ):
        pipe.run(BATCHES)
    task = "loss" if kind is AttributeError else "norm"
    assert any(f"task {task!r}, iteration 0" in note for note in caught.value.__notes__)


def test_ranks_compare_substitutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that replays a task, and one that has a function for it, may wait forever."""
    compared: list[set[str]] = []
    monkeypatch.setattr(
        control, "check_same_shortcuts", lambda digest, act, names, limit: compared.append({*names})
    )
    job = Job()
    with SWPipeline(PipelinePlan.serial(job.tasks), job.tasks) as pipe:
        pipe.enable_shortcut("norm", with_=halve)
        pipe.enable_shortcut("loss")
        pipe.enable_shortcut("norm")
        pipe.disable_shortcut("loss")
    assert compared == [{"norm (with_)"}, {"norm (with_)", "loss"}, {"norm", "loss"}, {"norm"}]
