"""What a misspelt keyword is answered with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import swpipe
import swpipe.loops
from swpipe import PipelinePlan, PipelineTask, SWPipeline
from swpipe.core.keywords import suggests_keywords


def public_calls() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Each public function, constructor and method with keywords; and the last of these."""
    for module, name in [(m, n) for m in (swpipe, swpipe.loops) for n in m.__all__]:
        value = getattr(module, name)
        if isinstance(value, str):  # a word, such as HOST
            continue
        if inspect.isclass(value):
            if value.__module__.startswith("swpipe.core.context") or name in MADE_BY_US:
                continue
            yield from _of_class(name, value)
        else:
            yield from _keyword_of(name, value)


MADE_BY_US = {
    *("AheadLoop", "Overlap", "OverlappedLoop", "ProfileResult", "Resumable"),
    *("AccelerateLoader", "StopRequest", "WatchedLoop"),  # one argument, or two
    *("Feed", "FeedWorker", "OnCaller", "ThroughLoop"),
}
"""Classes that users do not make with keywords."""


def _of_class(name: str, kind: type) -> Iterator[tuple[str, Callable[..., Any], str]]:
    yield from _keyword_of(name, kind.__init__)  # type: ignore[misc]
    for method, member in vars(kind).items():
        if inspect.isfunction(member) and not method.startswith("_") and member.__kwdefaults__:
            yield from _keyword_of(f"{name}.{method}", member)


def _keyword_of(
    name: str, call: Callable[..., Any]
) -> Iterator[tuple[str, Callable[..., Any], str]]:
    keywords = [
        parameter.name
        for parameter in inspect.signature(call).parameters.values()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if keywords:
        yield name, call, keywords[-1]


def test_a_misspelt_keyword_is_answered_with_the_right_one() -> None:
    """Whatever is public; a call that is right in all else is not tried."""
    for name, call, keyword in public_calls():
        with pytest.raises(TypeError) as caught:
            call(**{f"{keyword}x": 1})
        said = str(caught.value)
        assert "unexpected" in said, name
        assert said.endswith(f"Did you mean '{keyword}'?"), name


def test_other_errors_are_left_alone() -> None:
    """Those of what the call runs, even where they are about a keyword; and a far one."""

    def inner(**given: Any) -> None:
        outer(**given)

    @suggests_keywords
    def outer(*, name: int = 0, fail: bool = False) -> None:
        if fail:
            inner(nam=1)

    with pytest.raises(TypeError, match="mean 'name'"):
        outer(nam=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'xyz'$"):
        outer(xyz=1)  # type: ignore[call-arg]

    @suggests_keywords
    def other(*, nam: int = 0, fail: bool = False) -> None:
        int(nam=1)  # type: ignore[call-overload]

    with pytest.raises(TypeError) as caught:
        other(nam=1)
    assert "Did you mean" not in str(caught.value)


def test_a_warning_names_the_line_of_the_call() -> None:
    """And not the line of what looks at its keywords."""
    task = PipelineTask("work", lambda ctx: None)
    with pytest.warns(RuntimeWarning, match="nothing runs ahead") as found:
        swpipe.overlap(iter([1]), [task])
    assert found[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="has no effect on") as found:
        SWPipeline(replace(PipelinePlan.serial([task]), run_ahead=1), device="cpu")
    assert found[0].filename == __file__


def test_pipelines_and_loops_show_what_they_are() -> None:
    """In a few lines, before, within and after a run; a notebook sees the plan, too."""
    task = PipelineTask("work", lambda ctx: None, pure=True)
    loop = swpipe.overlap([1, 2], [task])
    assert repr(loop).splitlines() == ["<OverlappedLoop over list>", "ahead: the loader, work"]
    assert "work [io]" in loop._repr_html_()
    assert repr(swpipe.ahead([1, 2])).splitlines() == ["<AheadLoop over list>", "ahead: the loader"]
    with SWPipeline(PipelinePlan.serial([task]), [task], device="cpu") as pipe:
        assert repr(pipe).splitlines() == [
            "<SWPipeline of work>",
            "  on cpu; threads: default; 0 of 1 in flight, next is 0",
        ]
        pipe.run([1, 2])
        assert "next is 2" in repr(pipe)
    assert "closed" in repr(pipe)
    assert repr(swpipe.loops.ResumableLoop(pipe, [1])).startswith("<ResumableLoop over list>\n<SWP")
