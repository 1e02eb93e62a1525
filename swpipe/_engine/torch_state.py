"""The per-thread settings of torch: read from the caller, applied on worker threads, or refused.

Some of torch's settings belong to the process (default dtype, deterministic algorithms, the choice
of attention kernels, anomaly detection). The rest belong to a thread, and a new thread starts with
torch's defaults. The caller's settings are read at every ``progress()``. An iteration keeps the
settings under which it was admitted, and a worker thread applies them if they differ from its own.

    carried    the settings that ``_Settings`` lists
    refused    dispatch modes and function modes other than the default device, transforms of
               torch.func, disabled ``__torch_function__``: such a mode is an object, or a level, of
               one thread, and does not expect to be entered on several at once

Tasks of the caller's thread run under its current settings. If the caller switched gradients off
while iterations are in flight, these would be finished without gradients; if it set the model to
evaluation, batches to train on would be evaluated. So a call in another ``Mode`` is refused while
iterations are in flight.

The private functions of ``torch._C`` named here are those of torch 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from operator import call
from typing import Any, TypeAlias

import torch
from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled
from torch.utils._device import DeviceContext

from swpipe._engine.exclusive import only_watches
from swpipe.core.messages import shown

_Apply: TypeAlias = Callable[[ExitStack, Any], object]
"""A function that applies one setting to the thread; modes that must be left go on the stack."""

# Getters and setters in ``torch._C``. Older versions of torch lack some of them.
_FLAGS = (
    ("is_grad_enabled", "_set_grad_enabled"),
    ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
    ("_is_multithreading_enabled", "_set_multithreading_enabled"),
    ("_is_view_replay_enabled", "_set_view_replay_enabled"),
    ("_get_dtensor_allow_implicit_replication", "_set_dtensor_allow_implicit_replication"),
    ("_get_graph_exec_group", "_set_graph_exec_group"),
)

_DENORMAL = struct.unpack("<d", b"\1" + bytes(7))[0]
"""The smallest denormal number, which is 0.0 (False) on a thread that flushes denormals to zero.

torch has no function that returns this setting.
"""

# ``DeviceMesh`` contexts are kept per thread in the private ``_mesh_resources`` (torch 2.13).
_MESHES: Any = None
if torch.distributed.is_available():
    _MESHES = torch.distributed.device_mesh._mesh_resources


def _dispatch_modes() -> int:
    """Return the number of active dispatch modes, without modes on top that only watch."""
    count: int = torch._C._len_torch_dispatch_stack()
    while count and only_watches(count):
        count -= 1
    return count


# For each refused mode: its getter, the value of the getter outside the mode, and the mode's name.
# A dispatch mode has the name of its type.
_REFUSED: tuple[tuple[Callable[[], Any], Any, str], ...] = (
    (_dispatch_modes, 0, ""),
    (torch._C._is_torch_function_enabled, True, "DisableTorchFunctionSubclass"),
    (torch._C._functorch.maybe_current_level, None, "a transform of torch.func"),
)

TorchState: TypeAlias = tuple[Any, ...]
"""The settings of one thread that tasks can depend on.

Its ``_Settings``, the values of their getters, then the default device and the current
``DeviceMesh`` if the thread has set one of them. A plain tuple, because one is made and compared at
every ``progress()``.
"""


def torch_state(autocast_types: tuple[str, ...], last: TorchState | None = None) -> TorchState:
    """Return the settings of the calling thread; ``last`` itself if they are equal to it.

    Args:
        autocast_types: The device types for which autocast is read.
        last: The state that the last call returned.

    Raises:
        RuntimeError: The thread is in a mode that cannot be carried to another thread.
    """
    settings = _settings(autocast_types)
    state: TorchState = (settings, *map(call, settings.getters))
    # The first value tells whether function modes are active; nearly always there are none.
    if state[1] or (_MESHES is not None and _MESHES.mesh_stack):
        state += _device_and_mesh()
    if state == last:
        return last
    for value, (_, outside, name) in zip(state[2:], _REFUSED, strict=False):
        if value != outside:
            raise _refusal(name or type(torch._C._get_dispatch_stack_at(value - 1)).__name__)
    return state


class _Settings:
    """The functions that read and apply each setting.

    Attributes:
        getters: Functions that return whether function modes are active, a value for each of
            ``_REFUSED``, and a value for each of ``appliers``.
        appliers: The function that applies each value, in the order of the values.
    """

    def __init__(self, autocast_types: tuple[str, ...]) -> None:
        hooks = torch._C._autograd
        settings: list[tuple[Callable[[], Any], _Apply]] = [
            # Inference mode carries a grad mode of its own, so it goes first.
            (torch.is_inference_mode_enabled, _mode(lambda _: torch.inference_mode())),
            *(
                (getattr(torch._C, getter), _plain(getattr(torch._C, setter)))
                for getter, setter in _FLAGS
                if hasattr(torch._C, getter)
            ),
            # The OpenMP runtime keeps the count per thread, so each thread has to set it.
            (torch.get_num_threads, _plain(torch.set_num_threads)),
            (_DENORMAL.__bool__, _plain(lambda denormals: torch.set_flush_denormal(not denormals))),
            # torch calls the innermost hooks only.
            (
                partial(hooks._top_saved_tensors_default_hooks, False),
                _mode(lambda pair: torch.autograd.graph.saved_tensors_hooks(*pair)),
            ),
            (
                hooks._saved_tensors_hooks_get_disabled_error_message,
                _mode(torch.autograd.graph.disable_saved_tensors_hooks),
            ),
        ]
        for kind in autocast_types:
            settings += [
                (
                    partial(torch.is_autocast_enabled, kind),
                    _plain(partial(torch.set_autocast_enabled, kind)),
                ),
                (
                    partial(torch.get_autocast_dtype, kind),
                    _plain(partial(torch.set_autocast_dtype, kind)),
                ),
            ]
        self.getters = (
            torch._C._is_torch_function_mode_enabled,
            *(getter for getter, _, _ in _REFUSED),
            *(getter for getter, _ in settings),
        )
        self.appliers = tuple(apply for _, apply in settings)


_settings = cache(_Settings)


def _plain(setter: Callable[[Any], object]) -> _Apply:
    return lambda stack, value: setter(value)


def _mode(make: Callable[[Any], AbstractContextManager[Any]]) -> _Apply:
    """Return a function that enters a mode made from the value, unless that is None or False."""
    return lambda stack, value: value and stack.enter_context(make(value))


def _device_and_mesh() -> tuple[Any, ...]:
    count = torch._C._len_torch_function_stack()
    for i in range(count):
        mode = torch._C._get_function_stack_at(i)
        # A mode of swpipe that only watches its own thread, as a loop does at a pull, is not
        # carried.
        if not (isinstance(mode, DeviceContext) or getattr(mode, "only_looks", False)):
            raise _refusal(type(mode).__name__)
    device = torch.get_default_device() if count else None
    return device, (_MESHES.mesh_stack[-1] if _MESHES is not None and _MESHES.mesh_stack else None)


def _refusal(mode: str) -> RuntimeError:
    return RuntimeError(
        f"{mode} is active on the calling thread, and tasks on worker threads would run without "
        "it: leave it before calling the pipeline and enter it inside the tasks, or use "
        "run_one_serial_iter(), or a plan with the default thread group only"
    )


class ThreadTorchState:
    """The settings applied to one thread; call ``reset`` before the thread ends."""

    def __init__(self) -> None:
        # The state applied last; None for the thread's own settings.
        self.applied: TorchState | None = None
        self._entered = ExitStack()

    def apply(self, state: TorchState) -> None:
        """Set the thread's settings to those of ``state``, unless they are equal."""
        if state == self.applied:
            self.applied = state
            return
        self.reset()
        # Not the caller's setting: torch clears its cache of casts when a thread leaves autocast,
        # and a worker never leaves it. The next forward would use the weights of the step before.
        torch.set_autocast_cache_enabled(False)
        appliers = state[0].appliers
        values = state[2 + len(_REFUSED) :]
        for apply, value in zip(appliers, values, strict=False):
            apply(self._entered, value)
        for mode in values[len(appliers) :]:
            if mode is not None:
                self._entered.enter_context(mode)
        self.applied = state

    def reset(self) -> None:
        """Leave the modes that were entered, innermost first."""
        self._entered.close()
        self.applied = None


def checked_mode(mode: object) -> Callable[[], object]:
    """Return ``mode``; raise TypeError if it cannot be called."""
    if callable(mode):
        return mode
    raise TypeError(f"mode is {shown(mode)}: give a function, such as lambda: model.training")


Mode: TypeAlias = tuple[bool, bool, torch.dtype, object]
"""What must not change while iterations are in flight.

Whether gradients are on, whether inference mode is, the default dtype, and the value of the
pipeline's ``mode`` function. The default dtype belongs to the whole process. It is compared as
well, because a batch that was pulled ahead was made under an earlier default dtype.
"""


def current_mode(other: object) -> Mode:
    """Return the mode of the calling thread; ``other`` is the value of the ``mode`` function."""
    return is_grad_enabled(), is_inference_mode_enabled(), get_default_dtype(), other


def mode_in_words(mode: Mode) -> str:
    """Return a mode for a message, such as "gradients on, inference mode"."""
    gradients, inference, dtype, other = mode
    parts = [f"gradients {'on' if gradients else 'off'}"]
    if inference:
        parts.append("inference mode")
    if dtype is not torch.float32:
        parts.append(f"default dtype {dtype}")
    return ", ".join([*parts, *([str(other)] if other else [])])
