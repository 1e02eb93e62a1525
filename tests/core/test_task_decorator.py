"""``@task``: a task from a function."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swpipe import (
    DeclaredIO,
    IterContext,
    PipelineTask,
    task,
)

NOTE = DeclaredIO(state="log")


@task
def double(ctx: Any) -> None:
    """Set ``y`` to twice the batch."""
    ctx.y = 2 * ctx.batch


@task(io=[NOTE], random=True)
def noise(ctx: Any) -> None:
    """Set ``noise``."""
    ctx.noise = float(torch.rand(()))


def test_a_bare_decorator_makes_a_task_of_the_functions_name() -> None:
    """The other fields have their defaults, and the function is the task's."""
    assert isinstance(double, PipelineTask)
    assert (double.name, double.io, double.random) == ("double", (), False)
    assert double.fn.__doc__ == "Set ``y`` to twice the batch."


def test_a_decorator_with_arguments_sets_the_fields() -> None:
    """Each argument is a field of the task."""
    assert isinstance(noise, PipelineTask)
    assert (noise.name, noise.io, noise.random) == ("noise", (NOTE,), True)
    assert task(name="other")(double.fn) == PipelineTask("other", double.fn)


def test_every_field_of_a_task_is_an_argument() -> None:
    """A field that is added to ``PipelineTask`` is added to the decorator, with its default."""
    taken = inspect.signature(task).parameters
    assert list(taken) == ["fn", *(f.name for f in fields(PipelineTask) if f.name != "fn")]
    assert {n: p.default for n, p in taken.items() if n not in ("fn", "name")} == {
        f.name: f.default for f in fields(PipelineTask) if f.name not in ("fn", "name")
    }


def test_a_task_is_called_like_its_function() -> None:
    """In a plain loop a decorated function behaves as before."""
    ctx = IterContext(3, 0)
    assert double(ctx) is None  # type: ignore[func-returns-value]
    assert ctx.y == 6
    plain = SimpleNamespace(batch=4)
    double(plain)
    assert plain.y == 8


def test_a_method_is_refused_with_the_mend() -> None:
    """In the body of a class, the decorator would get a function without its object."""
    with pytest.raises(ValueError, match=r"Job\.read is a method.*PipelineTask\('read', obj\.read"):

        class Job:
            @task  # type: ignore[arg-type]
            def read(self, ctx: Any) -> None:
                """Do nothing."""


@pytest.mark.parametrize("given", ["forward", 3, [print]])
def test_what_cannot_be_called_is_refused(given: Any) -> None:
    """This includes a name in place of the function."""
    with pytest.raises(TypeError, match="a task is a function of the context, not .*name="):
        task(given)


def test_a_function_without_a_name_needs_one() -> None:
    """Partial functions have no ``__name__``; lambdas have one that no task may have."""
    for given in (partial(print, end=""), lambda ctx: None):
        with pytest.raises(TypeError, match=r"has no name for a task: PipelineTask\(name, fn\)"):
            task(given)
    assert task(name="show")(partial(print, end="")).name == "show"


def test_a_pure_task_may_read_a_state() -> None:
    """A pure task that writes a state would be a contradiction."""
    pure = PipelineTask("a", print, io=[DeclaredIO(state="log", mode="r")], pure=True)
    assert not pure.undeclared
    for mode in ("w", "rw"):
        io = [DeclaredIO(state="log", mode=mode)]
        with pytest.raises(ValueError, match=r"task 'a' is pure.*state 'log'.*Leave out pure=True"):
            PipelineTask("a", print, io=io, pure=True)


def test_a_task_that_says_nothing_is_undeclared() -> None:
    """Neither ``random`` nor a restored value says what else it uses."""
    restored = DeclaredIO(capture=lambda: None, restore=print)
    undeclared = [
        PipelineTask("a", print),
        PipelineTask("a", print, random=True),
        PipelineTask("a", print, io=[restored]),
    ]
    assert all(one.undeclared for one in undeclared)
    added = DeclaredIO(state="<a state of swpipe's own>")
    assert PipelineTask("a", print, io=[added]).undeclared
    assert not PipelineTask("a", print, io=[added, NOTE]).undeclared
    assert not PipelineTask("a", print, pure=True, random=True).undeclared
    assert not task(pure=True)(test_a_task_that_says_nothing_is_undeclared).undeclared
