"""Wrong arguments of users are refused at the call, and the error says what to give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from swpipe import DeclaredIO, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from swpipe.inference import record
from swpipe.loops import ResumableLoop
from swpipe.plans import prefetch_plan
from swpipe.profiler import TaskProfiler
from swpipe.trace import Observer
from tests.support.plans_for_tests import piped, tasks


async def asynchronous(ctx: Any) -> None:
    """Do nothing; a call makes a coroutine, so a task cannot run it."""


def yielding(ctx: Any) -> Iterator[int]:
    """Do nothing; a call makes a generator, so a task cannot run it."""
    yield 1


async def both(ctx: Any) -> AsyncIterator[int]:
    """Do nothing; a call makes an asynchronous generator."""
    yield 1


def decode(ctx: Any) -> None:
    """Do nothing; a function is no task yet."""


def pipeline(**options: Any) -> SWPipeline[Any]:
    """Return a pipeline with nothing in flight, and so without threads."""
    return SWPipeline(piped(), tasks(), **{"device": "cpu", **options})


def planned(**changes: Any) -> SWPipeline[Any]:
    """Return a pipeline of a changed plan."""
    return SWPipeline(replace(piped(), **changes), tasks(), device="cpu")


def any_given(value: object) -> Any:
    """Return a value of a wrong type."""
    return value


any_io: Any = DeclaredIO(state="model")
any_decode: Any = decode

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "async task": (lambda: PipelineTask("a", asynchronous), "is asynchronous or has a yield"),  # type: ignore[arg-type]
    "generator task": (lambda: PipelineTask("a", yielding), "is asynchronous or has a yield"),  # type: ignore[arg-type]
    "async generator": (lambda: PipelineTask("a", both), "is asynchronous or has a yield"),  # type: ignore[arg-type]
    "one io": (
        lambda: PipelineTask("a", decode, io=any_io),
        r"io is one DeclaredIO: .*io=\[\.\.\.\]",
    ),
    "a name as io": (lambda: PipelineTask("a", decode, io=["model"]), "io has 'model': give"),  # type: ignore[list-item]
    "a pure task that writes": (
        lambda: PipelineTask("a", decode, io=[DeclaredIO(state="model")], pure=True),
        "is pure.*state 'model'",
    ),
    "record functions": (lambda: record([any_decode], 1), r"swpipe\.task\(fn\) makes one"),
    "record a function": (lambda: record(any_decode, 1), "in a list"),
    "record a name": (lambda: record("decode", 1), "tasks is 'decode': .* in a list"),  # type: ignore[arg-type]
    "plan a function": (
        lambda: prefetch_plan([any_decode], ["a"]),
        r"swpipe\.task\(fn\) makes one",
    ),
    "plan a name": (lambda: prefetch_plan("decode", ["a"]), "in a list"),
    "serial plan of a name": (lambda: PipelinePlan.serial("decode"), "in a list"),
    "shortcut a function": (lambda: pipeline().enable_shortcut(any_decode), "is no task: give a"),
    "seed": (lambda: pipeline(seed=1.5), "seed is 1.5: give an integer"),
    "mode": (lambda: pipeline(mode="train"), "mode is 'train': give a function"),
    "observer's class": (lambda: pipeline().observe(Observer), "is no Observer: give an object"),  # type: ignore[arg-type]
    "no observer": (lambda: pipeline().observe(None), "None is no Observer"),  # type: ignore[arg-type]
    "periods": (lambda: pipeline().format_schedule(-1), "periods is -1: give how many"),
    "no iterator": (lambda: pipeline().progress(any_given([1, 2])), r"not list: pass iter\(loader"),
    "None as iterator": (lambda: pipeline().progress(any_given(None)), "no iterator.*iter"),
    "an unknown task": (
        lambda: pipeline().enable_shortcut("fwd"),
        "no task 'fwd'; it has h2d, dist, forward",
    ),
    "a number of no device": (lambda: pipeline(device=3), "'cuda:3' is not on this machine"),
    "something else as a device": (
        lambda: pipeline(device=3.5),
        r"device is 3\.5: give a name such as 'cpu', or a torch\.device",
    ),
    "a device elsewhere": (lambda: pipeline(device="xpu"), "'xpu' is not on this machine"),
    "a plan after its tasks": (
        lambda: SWPipeline(any_given(tasks()), any_given(piped())),
        r"the plan is \[.*\]: give a PipelinePlan, then the tasks",
    ),
    **{
        f"device {device!r}": (
            partial(pipeline, device=device),
            f"device.*{device!r}.*give a name such as 'cpu'",
        )
        for device in ("gpu", "")
    },
    **{
        f"time {time_s!r}": (
            partial(pipeline, stall_timeout_s=time_s),
            f"stall_timeout_s is {time_s!r}: give seconds",
        )
        for time_s in (0, "600", True, float("nan"))
    },
    **{
        f"tasks {given!r:.20}": (
            partial(SWPipeline, piped(), given),
            "tasks is .*: give the tasks in a list",
        )
        for given in any_given((5, tasks()[0], print))
    },
    **{
        f"name {name!r}": (partial(PipelineTask, name, print), "name")
        for name in any_given(("", "<admit>", 3))
    },
    "no function": (partial(PipelineTask, "a", any_given(7)), "'a'.*callable"),
    **{
        f"order {order!r:.20}": (
            partial(PipelinePlan, {"a": TaskSchedule()}, order=order),
            "neither a task nor a task's name",
        )
        for order in any_given(([1], [None], ["a", print]))
    },
    **{
        f"{what} {shifts!r}": (
            partial(PipelinePlan, {"a": TaskSchedule()}, **any_given({what: shifts})),
            f"{what} entry",
        )
        for what in ("stale", "newer")
        for shifts in ({"x": 0}, {"x": True}, {1: 1}, {"x": "1"})
    },
    "loop without pipeline": (lambda: ResumableLoop([1], pipeline()), r"\[1\] is no pipeline"),  # type: ignore[arg-type]
    "loop of a plan": (lambda: ResumableLoop(piped(), [1]), "is no pipeline"),  # type: ignore[arg-type]
    "no state": (lambda: ResumableLoop(pipeline(), [1]).load_state_dict(None), "is not one that"),  # type: ignore[arg-type]
    "half a state": (
        lambda: ResumableLoop(pipeline(), [1]).load_state_dict({"at_start": 1}),
        "is not one that",
    ),
    **{
        f"keep {keep!r}": (
            partial(planned, keep=keep),
            r'write a list of names of attributes, such as \["loss"\]',
        )
        for keep in ("loss", [3])
    },
    "reads": (
        lambda: PipelineTask("a", decode, reads="batch"),
        "task 'a': reads is .*: give names of attributes in a list",
    ),
    "within calls": (partial(planned, within_calls=1), "within_calls is 1: write True or False"),
    "the caller's pull group": (partial(planned, pull_group="default"), "other than 'default'"),
    "no pull group": (partial(planned, pull_group=""), "pull_group is ''"),
    "a depth without the pull": (
        partial(planned, pull_group="loader"),
        "and pull_group 'loader' need 4 iterations in flight",
    ),
    "spread": (
        lambda: TaskProfiler(pipeline()).profile([1], target_spread_ms=0),
        "target_spread_ms is 0: give a number greater than 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_what_to_give(name: str) -> None:
    """Some did nothing, some failed far from the cause, and one looked like the end of data."""
    call, said = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_integers_of_other_libraries_are_seeds() -> None:
    """A state with the seed can be loaded again."""
    with pipeline(seed=np.int64(3)) as pipe:
        state = pipe.state_dict()
        assert (state["seed"], type(state["seed"])) == (3, int)
        pipe.load_state_dict(state)
