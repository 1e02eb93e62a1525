"""Worker threads use the caller's torch settings."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from swpipe import IterContext, PipelinePlan, SWPipeline
from swpipe._engine.torch_state import ThreadTorchState, torch_state
from tests.support.plans_for_tests import piped, tasks

USER_SETTING: contextvars.ContextVar[str] = contextvars.ContextVar("user_setting", default="none")


@contextmanager
def setting(setter: Callable[[Any], object], value: object, default: object) -> Iterator[None]:
    """Set a value within the block."""
    setter(value)
    try:
        yield
    finally:
        setter(default)


def gradient() -> float:
    """Return the gradient of x * x at 1."""
    x = torch.ones(1, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return float(x.grad)


def hooks_refused() -> str:
    """Return the error of entering saved-tensor hooks, or "nothing"."""
    try:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            return "nothing"
    except RuntimeError as error:
        return str(error)


class CurrentMesh:
    """A stand-in for a ``DeviceMesh`` that becomes the thread's current mesh, without groups."""

    def __enter__(self) -> None:
        torch.distributed.device_mesh._mesh_resources.mesh_stack.append(self)  # type: ignore[arg-type]

    def __exit__(self, *failure: object) -> None:
        torch.distributed.device_mesh._mesh_resources.mesh_stack.pop()


CARRIED: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], object]]] = {
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "default device": (lambda: torch.device("meta"), lambda: torch.empty(1).device),
    "intra-op threads": (
        lambda: setting(torch.set_num_threads, 2, 1),
        torch.get_num_threads,
    ),
    "context variable": (
        lambda: setting(USER_SETTING.set, "set by the caller", "none"),
        USER_SETTING.get,
    ),
    "saved tensors hooks": (
        lambda: saved_tensors_hooks(lambda x: x, lambda x: 10 * x),
        gradient,
    ),
    "no saved tensors hooks": (lambda: disable_saved_tensors_hooks("not here"), hooks_refused),
    "flush denormal": (
        lambda: setting(torch.set_flush_denormal, True, False),
        lambda: float(torch.tensor([1e-40]) * 1),
    ),
    "autograd multithreading": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "forward AD": (
        lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
        torch._C._is_fwd_grad_enabled,
    ),
    "view tracking": (
        lambda: torch.autograd._force_original_view_tracking(True),
        torch._C._is_view_replay_enabled,
    ),
    "current mesh": (
        lambda: CurrentMesh(),
        lambda: len(torch.distributed.device_mesh._mesh_resources.mesh_stack),
    ),
}
"""How to set a state, and how a task reads it. The state of the process needs no carrying."""

if hasattr(torch._C, "_set_dtensor_allow_implicit_replication"):
    CARRIED["implicit replication"] = (
        lambda: setting(torch._C._set_dtensor_allow_implicit_replication, True, False),
        torch._C._get_dtensor_allow_implicit_replication,
    )
if hasattr(torch._C, "_get_graph_exec_group"):
    CARRIED["group of checkpoints"] = (
        lambda: torch.utils.checkpoint.GraphExecGroup(),
        lambda: torch._C._get_graph_exec_group() is not None,
    )


@pytest.mark.parametrize(("mode", "look"), CARRIED.values(), ids=CARRIED.keys())
def test_a_worker_is_in_the_callers_mode_and_leaves_it_again(
    mode: Callable[[], AbstractContextManager[Any]], look: Callable[[], object]
) -> None:
    """This concerns the batches that were pulled within the mode, and no others."""
    seen: list[object] = []
    data = iter(range(5))
    outside = look()
    with SWPipeline(piped(), tasks(h2d=lambda _: seen.append(look()))) as pipe:
        with mode():
            within = look()
            pipe.fill_pipeline(data)
        pipe.progress(data)
        for _ in pipe.iterate(data):
            pass
    assert seen == [within, within, outside, outside, outside]
    assert within != outside


@pytest.mark.parametrize(
    ("mode", "look"),
    [
        (torch.no_grad, torch.is_grad_enabled),
        (torch.inference_mode, torch.is_inference_mode_enabled),
    ],
)
def test_a_worker_takes_gradients_where_the_caller_does(
    mode: Callable[[], AbstractContextManager[Any]], look: Callable[[], bool]
) -> None:
    """The mode may change while nothing is in flight."""
    seen: list[bool] = []
    with SWPipeline(piped(), tasks(h2d=lambda _: seen.append(look()))) as pipe:
        with mode():
            pipe.run(range(3))
            within = look()
        pipe.run(range(1))
    assert seen == [within] * 3 + [not within]


def test_an_iteration_keeps_the_settings_under_which_it_was_admitted() -> None:
    """A later switch concerns only the batches that are pulled after it."""
    seen: dict[int, bool] = {}

    def note(ctx: IterContext) -> None:
        seen[ctx.batch] = torch.is_autocast_enabled("cpu")
        assert USER_SETTING.get() == "none"
        USER_SETTING.set("changed by a task")  # which ends with the task

    data = iter(range(6))
    with SWPipeline(piped(), tasks(dist=note)) as pipe:
        pipe.fill_pipeline(data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                pipe.progress(data)
        for _ in range(4):
            pipe.progress(data)
    assert seen == {0: False, 1: False, 2: True, 3: True, 4: False, 5: False}


def test_a_worker_casts_weights_again_under_autocast() -> None:
    """Torch clears its cache of casts when the caller leaves autocast, but not on a worker."""
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


def test_settings_that_are_equal_to_the_last_are_the_last() -> None:
    """A worker then has nothing to compare, and changes nothing on its thread."""
    state = torch_state(("cpu",))
    assert torch_state(("cpu",), state) is state
    thread = ThreadTorchState()
    thread.apply(state)
    with torch.no_grad():
        assert torch_state(("cpu",), state) is not state
        thread.apply(state)
        thread.apply((*state,))
        assert not torch.is_grad_enabled()
    thread.reset()


# -------------------------------------------------------------------------------------- refused


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class _WithinVmap:
    """A context manager that enters a level of ``torch.func.vmap``."""

    def __enter__(self) -> None:
        torch._C._functorch._vmap_increment_nesting(2, "error")

    def __exit__(self, *failure: object) -> None:
        torch._C._functorch._vmap_decrement_nesting()


REFUSED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "_Dispatch": _Dispatch,
    "_Function": _Function,
    "_CloneArgBeforeMutateMode": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "DisableTorchFunctionSubclass": torch._C.DisableTorchFunctionSubclass,
    "torch.func": lambda: _WithinVmap(),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mode_that_a_worker_cannot_be_in_is_refused_by_name(name: str) -> None:
    """Flops were once counted on the caller's thread only; the refusal loses nothing."""
    data = iter(range(5))
    with SWPipeline(piped(), tasks()) as pipe:
        first = pipe.progress(data)
        with REFUSED[name](), pytest.raises(RuntimeError, match=f"{name}.*is active.*leave it"):
            pipe.progress(data)
        assert [first.batch, *(ctx.batch for ctx in pipe.iterate(data))] == list(range(5))


@pytest.mark.parametrize("name", ["_Dispatch", "_Function", "torch.func"])
def test_any_mode_may_be_active_where_there_are_no_workers(name: str) -> None:
    """All tasks then run on the thread that has entered the mode."""
    mine = tasks()
    with SWPipeline(PipelinePlan.serial(mine), mine) as pipe, REFUSED[name]():
        assert [ctx.batch for ctx in pipe.iterate(range(3))] == [0, 1, 2]
