"""Loops of which nothing is declared train the plain loop's numbers, whatever they share.

    declared     overlap(loader, tasks)      plans that verify accepts
    nothing      serial, one warning         tasks in the last stage, in serial order, on one thread
    decode pure  decode and loader ahead     also those with decode ahead

Each loop shares a state between two of its parts, and a plan that runs one of them early, or on
another thread, changes the numbers of at least one of the loops. Nothing is found by looking at the
loops: so it does not matter what their state is, or how often it changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import swpipe
from swpipe import PipelinePlan, SWPipeline, TaskSchedule
from swpipe.analysis import verify
from swpipe.core.effects import EffectTable
from swpipe.core.loaders import is_apart
from swpipe.errors import PlanError, UnsavedStateError
from swpipe.inference import record
from tests.loops.undeclared_loops import LOOPS, Loop


def staged(*stages: int, group: str = "default", **options: Any) -> PipelinePlan:
    """The three tasks in these stages, ``decode`` in a thread group; a chain in each iteration."""
    options = {"deps": [("train", "decode"), ("step", "train")], **options}
    return PipelinePlan(
        {
            "decode": TaskSchedule(stages[0], thread_group=group),
            "train": TaskSchedule(stages[1]),
            "step": TaskSchedule(stages[2]),
        },
        **options,
    )


NEXT = [("train", "step")]
"""An iteration is trained after the step of the one before."""

ALWAYS = {
    "serial": PipelinePlan.serial(["decode", "train", "step"]),
    "depth 2": staged(0, 0, 0, pipeline_depth=2),
    "depth 3": staged(0, 0, 0, pipeline_depth=3),
    "one stage late": staged(1, 1, 1),
}
"""Plans that keep the tasks' order, and hand an iteration out when it is done."""

AHEAD = {
    "decode a stage ahead": staged(0, 1, 1, cross_iter_deps=NEXT),
    "decode two stages ahead": staged(0, 2, 2, cross_iter_deps=NEXT),
    "decode on a thread": staged(0, 0, 0, group="io", cross_iter_deps=NEXT),
    "decode ahead on a thread": staged(0, 1, 1, group="io", cross_iter_deps=NEXT),
    "decode ahead on a thread, depth 3": staged(
        0, 1, 1, group="io", cross_iter_deps=NEXT, pipeline_depth=3
    ),
    "decode and the loader ahead": staged(
        0, 1, 1, group="io", cross_iter_deps=NEXT, pull_group="io"
    ),
}
"""Plans for a ``decode`` that uses nothing that changes."""

PULLED_AHEAD = {
    "loader ahead": staged(0, 0, 0, pull_group="io"),
}
"""Plans for a loader of which something is known."""

NEVER = {
    "step late": staged(0, 0, 1),
    "swapped": staged(0, 0, 0, deps=[("train", "decode")], order=["decode", "step", "train"]),
}
"""Plans that never keep the order."""

PLANS = {**ALWAYS, **AHEAD, **PULLED_AHEAD, **NEVER}


@pytest.fixture(autouse=True)
def _needs_pandas(request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else ""
    if name in ("pandas .at", "rows of a DataFrame") and not find_spec("pandas"):
        pytest.skip("pandas is not installed")


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Losses, parameters, what the body saw and the state: all bits."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def overlapped(loop: Loop) -> tuple[list[Any], list[str], Any]:
    """What the loop gives with one call more, the warnings of the call, and what runs ahead."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        passes = swpipe.overlap(loop.loader, loop.tasks, device="cpu")
    with passes:
        found = loop.run(passes)
    told = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    return found, told, passes.overlap


def piped(loop: Loop, plan: PipelinePlan) -> list[Any]:
    """What the loop gives under a plan."""
    with SWPipeline(plan, loop.tasks, device="cpu") as pipe:
        return loop.run(pipe.iterate(loop.loader))


def same_piped(loop: Loop, name: str, plan: str, expected: Sequence[Any]) -> None:
    """A plan gives the expected numbers."""
    if name == "gradient mode" and PLANS[plan].depth > 1:
        with pytest.raises(RuntimeError, match="an iteration keeps its mode"):
            piped(loop, PLANS[plan])  # loud, and not what this file is about
    else:
        same(piped(loop, PLANS[plan]), expected)


def accepted(loop: Loop, effects: EffectTable | None = None) -> Iterator[str]:
    """The plans that ``verify`` accepts."""
    for name, plan in PLANS.items():
        try:
            verify(plan, loop.tasks, effects, loader=loop.loader)
        except PlanError:
            continue
        yield name


def recorded(loop: Loop) -> EffectTable | None:
    """Effects as recorded; the trial is a step more, so the loop is of no use afterwards.

    What no trial can put back is refused, and there is nothing to verify.
    """
    try:
        return record(loop.tasks, torch.ones(4), loader=loop.loader, iterations=1).effects
    except UnsavedStateError:
        return None
    finally:
        loop.state.close()


REFUSED = {
    "gradient mode": "an iteration keeps its mode",
    "list that the body changes": "the loop has changed the list",
}
"""Loops over loaders that are known to be apart, which stop: with what they say."""


def loops(*, gaps: set[str]) -> list[Any]:
    """The names of all loops, of which some are known to fail."""
    fails = pytest.mark.xfail(strict=True, reason="the loop reaches into a loader that is ahead")
    return [pytest.param(name, marks=[fails] * (name in gaps)) for name in LOOPS]


@pytest.mark.parametrize("name", LOOPS)
def test_overlapped_numbers_are_those_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    """Nothing is declared: the tasks keep their order, and so does the loader with the body."""
    expected = Loop(LOOPS[name], tmp_path).plain()
    loop = Loop(LOOPS[name], tmp_path)
    if name in REFUSED:
        with pytest.raises(RuntimeError, match=REFUSED[name]):
            overlapped(loop)
        return
    apart = is_apart(loop.loader, draws_watched=True)
    found, told, choice = overlapped(loop)
    same(found, expected)
    assert choice.ahead == ()
    assert choice.loader_ahead == apart
    if not apart:
        (warning,) = told
        for mend in ("so it is pulled in turn. ", "pull_ahead=True", "pure=True"):
            assert mend in warning


@pytest.mark.parametrize("name", loops(gaps={"list that the body changes"}))
def test_plans_that_are_accepted_give_the_numbers_of_the_plain_loop(
    name: str, tmp_path: Path
) -> None:
    """By what is declared, which is nothing, and by what was recorded besides."""
    kind = LOOPS[name]
    expected = Loop(kind, tmp_path).plain()
    used = Loop(kind, tmp_path)
    plans = {*accepted(used)}
    plans |= {*accepted(used, recorded(used))}
    assert "serial" in plans
    assert plans <= {*ALWAYS, *PULLED_AHEAD}
    for plan in sorted(plans):
        same_piped(Loop(kind, tmp_path), name, plan, expected)


@pytest.mark.parametrize("name", [name for name, kind in LOOPS.items() if not kind.own_loader])
def test_a_decode_that_uses_nothing_that_changes_runs_ahead_if_it_says_so(
    name: str, tmp_path: Path
) -> None:
    """The other tasks and the body use the state as before."""
    kind = LOOPS[name]
    honest = Loop(kind, tmp_path, pure=True)
    expected = honest.plain()
    assert {*accepted(honest)} == {*ALWAYS, *AHEAD, *PULLED_AHEAD}
    for plan in {**ALWAYS, **AHEAD, **PULLED_AHEAD}:
        same_piped(Loop(kind, tmp_path, pure=True), name, plan, expected)
    if name != "gradient mode":
        found, told, choice = overlapped(Loop(kind, tmp_path, pure=True))
        same(found, expected)
        assert choice.ahead == ("decode",)
        assert not told


@pytest.mark.parametrize(
    "name",
    [name for name, kind in LOOPS.items() if (kind.reader, kind.writer) == ("loader", "body")],
)
def test_a_loader_of_which_nothing_is_known_stays_with_the_body(name: str, tmp_path: Path) -> None:
    """Also where all tasks are declared, and none of them shares anything with the loader."""
    kind = LOOPS[name]
    expected = Loop(kind, tmp_path).plain()
    loop = Loop(kind, tmp_path, declared=True)
    plans = {*accepted(loop)}
    loop.state.close()
    assert plans == {"serial", "decode on a thread"}
    for plan in sorted(plans):
        same(piped(Loop(kind, tmp_path, declared=True), PLANS[plan]), expected)
    found, _, _ = overlapped(Loop(kind, tmp_path, declared=True))
    same(found, expected)
