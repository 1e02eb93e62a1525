"""Worker threads see the caller's torch."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from swpipe import IterContext, SWPipeline
from swpipe._engine.torch_state import ThreadTorchState, TorchState
from tests.support.plans_for_tests import piped, tasks

USER_SETTING: contextvars.ContextVar[str] = contextvars.ContextVar("user_setting", default="none")


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Set torch's intra-op threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask for deterministic algorithms within the block."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def user_setting(value: str) -> Iterator[None]:
    """Set a context variable within the block."""
    token = USER_SETTING.set(value)
    try:
        yield
    finally:
        USER_SETTING.reset(token)


def what_a_task_sees() -> dict[str, Any]:
    """All settings of torch on its thread that a task can depend on."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "device of a new tensor": torch.empty(1).device,
        "dtype of a new tensor": torch.empty(1).dtype,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "context variable": USER_SETTING.get(),
    }


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as they come": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
    "intra-op threads": lambda: intra_op_threads(2),
    "context variable": lambda: user_setting("set by the caller"),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_worker_sees_what_the_caller_sees(
    setting: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Whatever the caller has set, tasks on another thread run under it."""
    seen: list[dict[str, Any]] = []
    with (
        SWPipeline(piped(), tasks(h2d=lambda _: seen.append(what_a_task_sees()))) as pipe,
        setting(),
    ):
        pipe.run(range(4))
        expected = what_a_task_sees()
    assert seen == [expected] * 4


def test_an_iteration_keeps_the_settings_under_which_it_was_admitted() -> None:
    """A switch in mid-flight concerns the batches pulled after it."""
    seen: dict[int, bool] = {}

    def note(ctx: IterContext) -> None:
        seen[ctx.batch] = torch.is_grad_enabled()

    data = iter(range(6))
    with SWPipeline(piped(), tasks(dist=note)) as pipe:
        pipe.fill_pipeline(data)
        with torch.no_grad():
            for _ in range(2):
                pipe.progress(data)
        for _ in range(4):
            pipe.progress(data)
    assert seen == {0: True, 1: True, 2: False, 3: False, 4: True, 5: True}


def test_an_iteration_keeps_the_context_variables_under_which_it_was_admitted() -> None:
    """They were once those of the fill, for as long as the run went on."""
    seen: dict[int, str] = {}

    def note(ctx: IterContext) -> None:
        seen[ctx.batch] = USER_SETTING.get()
        USER_SETTING.set("changed by a task")  # which ends with the task

    data = iter(range(4))
    with SWPipeline(piped(), tasks(h2d=note)) as pipe:
        with user_setting("fill"):
            pipe.fill_pipeline(data)
        for value in ("one", "two"):
            with user_setting(value):
                pipe.progress(data)
    assert seen == {0: "fill", 1: "fill", 2: "one", 3: "two"}


def test_a_worker_casts_weights_again_under_autocast() -> None:
    """Torch clears its cache of casts when the caller leaves autocast; a worker never does."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    seen: list[float] = []

    def forward(_: IterContext) -> None:
        seen.append(float((torch.ones(1, 4) @ weight).sum().detach()))
        with torch.no_grad():
            weight.add_(1)

    data = iter(range(4))
    with SWPipeline(piped(), tasks(dist=forward)) as pipe, torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            pipe.progress(data)
    assert seen == [16, 32, 48, 64]


def test_a_worker_leaves_inference_mode_again() -> None:
    """Modes that are entered are left when the caller has left them."""
    seen: list[bool] = []
    note = tasks(h2d=lambda _: seen.append(torch.is_inference_mode_enabled()))
    data = iter(range(4))
    with SWPipeline(piped(), note) as pipe:
        with torch.inference_mode():
            pipe.fill_pipeline(data)
        pipe.progress(data)
    assert seen == [True, True, False]


def test_applying_the_same_settings_again_does_nothing() -> None:
    """An equal snapshot changes nothing on the thread."""
    state = TorchState.of_this_thread(("cpu",))
    thread = ThreadTorchState()
    thread.apply(state)
    with torch.no_grad():
        thread.apply(state)
        thread.apply(state._replace())
        assert not torch.is_grad_enabled()
    thread.reset()
