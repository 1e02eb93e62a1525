"""Unknown is not safe: what a task was not seen to do in a recording, it may do later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from swpipe import PipelinePlan, PipelineTask, PlanError, SWPipeline, TaskSchedule
from swpipe.analysis import verify
from swpipe.inference import Recording, observation, record, record_tasks
from tests.inference.loops import LOOPS, Loop

ITERATIONS = 13


def batches() -> list[torch.Tensor]:
    """Thirteen small ones."""
    draws = torch.Generator().manual_seed(1)
    return [torch.rand(3, 4, generator=draws) for _ in range(ITERATIONS)]


def results(loop: Loop, plan: PipelinePlan) -> list[Any]:
    """What all tasks leave in the contexts, and outside of them."""
    torch.manual_seed(7)
    with SWPipeline(plan, loop.tasks, device="cpu") as pipe:
        left = [dict(vars(ctx)) for ctx in pipe.iterate(batches())]
    return [left, loop.state()]


def plan_of(recording: Recording, stages: dict[str, int]) -> PipelinePlan:
    """Each task on a thread of its own, at these stages, with the dependences that these allow."""
    found = recording.dependences()
    wanted = [*((*pair, 0) for pair in found.deps), *found.cross_iter_deps]
    kept = [one for one in wanted if stages[one[0]] - stages[one[1]] + one[2] >= 0]
    return PipelinePlan(
        {name: TaskSchedule(stage, thread_group=name) for name, stage in stages.items()},
        deps=[one[:2] for one in kept if not one[2]],
        cross_iter_deps=[one for one in kept if one[2]],
    )


def passes(plan: PipelinePlan, recording: Recording) -> bool:
    """Whether ``verify`` passes it."""
    try:
        verify(plan, recording.tasks, recording.effects, streams=False)
    except PlanError:
        return False
    return True


def worst_plans(recording: Recording) -> Iterator[PipelinePlan]:
    """Plans that pass, with tasks as far ahead of the others, or behind them, as they may be."""
    names = list(recording.effects)
    for moves in (names, names[::-1]):
        for ahead in (0, 2):
            stages = dict.fromkeys(names, 1)
            for name in moves:
                if passes(plan_of(recording, moved := {**stages, name: ahead}), recording):
                    stages = moved
            yield plan_of(recording, stages)


@pytest.mark.parametrize("name", LOOPS)
def test_a_verified_plan_gives_the_numbers_of_a_serial_run(name: str) -> None:
    """Also one with each task on its own thread, ahead of or behind the others."""
    expected = results(make := LOOPS[name](), PipelinePlan.serial(make.tasks))
    recording = record(LOOPS[name]().tasks, batches()[0], device="cpu")
    for plan in worst_plans(recording):
        torch.testing.assert_close(results(LOOPS[name](), plan), expected, rtol=0, atol=0)


def test_what_was_assumed_is_named() -> None:
    """By ``verify``, in the effects, and in the report, which says how to know better."""
    recording = record(LOOPS["accumulation by 4"]().tasks, batches()[0], device="cpu")
    assumed = {str(place) for place in recording.effects["step"].assumed}
    assert {"state 'optimizer options'", "state 'model parameters'"} <= assumed
    verified = verify(recording.plan(), recording.tasks, recording.effects)
    assert set(verified.assumed) == {"step"}
    assert {str(place) for place in verified.assumed["step"]} == assumed
    (note,) = [one for one in recording.notes if "assumed" in one]
    assert "'step' was seen to touch nothing" in note
    assert "Record more iterations, or declare" in note


def test_a_refusal_says_that_a_task_was_not_seen_to_touch_something() -> None:
    """So that its reader does not look for the access in vain."""
    recording = record(LOOPS["accumulation by 4"]().tasks, batches()[0], device="cpu")
    plan = PipelinePlan({name: TaskSchedule(thread_group=name) for name in recording.effects})
    plan = replace(plan, deps=[("forward", "load"), ("backward", "forward")])
    with pytest.raises(PlanError, match="'step' was not seen to touch"):
        verify(plan, recording.tasks, recording.effects)


@pytest.mark.parametrize(
    ("name", "task", "least"),
    [("accumulation by 4", "step", 4), ("scheduler", "lower", 10), ("checkpoint", "save", 5)],
)
def test_a_recording_of_no_given_length_sees_what_is_rare(
    name: str, task: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on until every task has been seen to touch something, and two more."""
    runs = _counted(monkeypatch)
    recording = record(LOOPS[name]().tasks, batches()[0], device="cpu", iterations=None)
    assert least < len(runs) <= least + 4
    assert not [one for one in recording.notes if f"{task!r} was seen to touch nothing" in one]


def test_a_recording_of_no_given_length_is_short_where_nothing_is_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And it ends in any case."""
    runs = _counted(monkeypatch)
    record(LOOPS["mode"]().tasks, batches()[0], device="cpu", iterations=None)
    assert 3 <= len(runs) <= 5
    runs.clear()
    monkeypatch.setattr(record_tasks, "MAX_ITERATIONS", 9)
    idle = [PipelineTask("idle", lambda ctx: None)]
    record(idle, batches()[0], device="cpu", iterations=None)
    assert len(runs) == 9


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the iterations that are observed from now on."""
    runs: list[int] = []
    run = observation.Observer.run

    def counting(self: observation.Observer, batch: Any, number: int) -> Any:
        runs.append(number)
        return run(self, batch, number)

    monkeypatch.setattr(observation.Observer, "run", counting)
    return runs


def test_a_seeded_task_keeps_its_order_beside_one_that_draws_without() -> None:
    """While it runs, the generators have its states: the other would draw other numbers."""
    tasks = [
        PipelineTask("noise", lambda ctx: setattr(ctx, "x", torch.rand(2)), random=True),
        PipelineTask("drop", lambda ctx: setattr(ctx, "y", torch.rand(2))),
    ]
    recording = record(tasks, None, device="cpu")
    assert ("drop", "noise") in recording.dependences().deps
    assert ("noise", "drop", 1) in recording.dependences().cross_iter_deps
    alone = record(tasks[:1], None, device="cpu")
    assert not any(place.persistent for place in alone.effects["noise"].writes)


def test_an_evaluation_keeps_its_order_with_whoever_runs_the_model() -> None:
    """It switches the mode and switches it back: a forward beside it would not drop anything."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())

    def forward(ctx: Any) -> None:
        ctx.y = model(ctx.batch)

    def evaluate(ctx: Any) -> None:
        model.eval()
        ctx.score = model(ctx.batch).sum()
        model.train()

    tasks = [PipelineTask(fn.__name__, fn) for fn in (forward, evaluate)]
    needed = record(tasks, batches()[0], device="cpu").dependences()
    assert ("evaluate", "forward") in needed.deps
    assert ("forward", "evaluate", 1) in needed.cross_iter_deps
