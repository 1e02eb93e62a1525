"""The copy of batches to a device, as a task: ahead of the loop on a stream of its own.

    copy stream       copy 1 ──┐ copy 2 ──┐ copy 3
    caller's stream            └ train 1  └ train 2     by the waits and holds of any two tasks

The task moves tensors, wherever ``swpipe._values.walk`` finds them (tuples, dicts, dataclasses),
and objects with a ``to`` method of their own, by calling it. All other values are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from swpipe._values.walk import map_tensors, tensors_held
from swpipe.core.loaders import is_apart, unprepared
from swpipe.core.messages import listed
from swpipe.core.task import PipelineTask
from swpipe.device.choose import resolve
from swpipe.device.cpu import on_cpu
from swpipe.device.pinned_pool import PinnedPool, Transfer
from swpipe.device.protocol import Device
from swpipe.errors import add_note

COPY = "copy"
"""The name of the task, and of its stream."""


class BatchCopy:
    """The function of a task that moves attributes of the context to a device.

    Args:
        device: The target. On the CPU, nothing is moved.
        attributes: Names of the attributes.
        buffers: The largest number of pinned buffers.
    """

    def __init__(self, device: Device, attributes: tuple[str, ...], buffers: int) -> None:
        self._device = device
        self._place = torch.device(device.name)
        self._attributes = () if on_cpu(self._place) else attributes
        self._pool = PinnedPool(device, buffers)

    def __call__(self, ctx: Any) -> None:
        for name in self._attributes:
            setattr(ctx, name, self._moved(getattr(ctx, name)))

    def _moved(self, value: Any) -> Any:
        """Return a value with its tensors and objects on the device."""
        pageable: list[Transfer] = []

        def move(tensor: Tensor) -> Any:
            if tensor.device == self._place:
                return tensor
            if self._goes_through_pool(tensor):
                pageable.append(Transfer(tensor, torch.empty_like(tensor, device=self._place)))
                # Copied below, all tensors of the value through one buffer.
                return pageable[-1].target
            return self._by_itself(tensor)

        moved = map_tensors(value, move, own=self._by_itself)
        if pageable:
            # The checks of pure tasks watch torch's dispatch. The pool reuses its buffers in each
            # iteration, which would look like a state, but nobody else has access to them. torch
            # 2.13: _DisableTorchDispatch is private, and ends when the object is deleted.
            unwatched = torch._C._DisableTorchDispatch()
            try:
                self._pool.copy(pageable)
            finally:
                del unwatched
        return moved

    def _goes_through_pool(self, tensor: Tensor) -> bool:
        """Return whether a value is an ordinary tensor in memory that is not pinned."""
        return (
            self._device.pins_memory
            and type(tensor) is Tensor
            and on_cpu(tensor)
            and tensor.layout is torch.strided
            and not (tensor.requires_grad or tensor.is_quantized)
            and tensor.numel() > 0
            and not tensor.is_pinned()
        )

    def _by_itself(self, value: Any) -> Any:
        """Return a tensor or an object, moved by its own ``to``.

        The value is pinned first if it can be.
        """
        kind: Any = type(value)
        try:
            if self._is_to_be_pinned(value):
                value = value.pin_memory()
            if _takes_non_blocking(kind):
                moved = value.to(self._place, non_blocking=True)
            else:
                moved = value.to(self._place)
            # A to() that moves the object in place and returns nothing would silently lose the
            # batch.
            if moved is None:
                raise TypeError(f"{kind.__name__}.to() or pin_memory() returned None")
        # The user's to() may raise anything, which goes on with the note.
        except Exception as error:
            add_note(
                error,
                f"swpipe: the copy of a {kind.__name__} to {self._place}. An object with a to() of "
                "its own is moved by it: to(device, non_blocking=True), or to(device), returns it "
                "on the device; pin_memory(), if there is one, returns it in pinned memory. Mend "
                "the two, or leave device= out and copy the batch in a task of yours",
            )
            raise
        return moved

    def _is_to_be_pinned(self, value: Any) -> bool:
        """Return whether a value is on the host and can be pinned."""
        if not (self._device.pins_memory and callable(getattr(value, "pin_memory", None))):
            return False
        if isinstance(value, Tensor):
            # Of tensors, only jagged ones are pinned here: ordinary strided ones go through the
            # pool.
            return value.layout is torch.jagged and on_cpu(value) and not value.requires_grad
        return all(map(on_cpu, tensors_held(value)))


@cache
def _takes_non_blocking(kind: Any) -> bool:
    """Return whether the ``to`` method of a class takes ``non_blocking``."""
    if issubclass(kind, Tensor):
        return True
    try:
        parameters = inspect.signature(kind.to).parameters.values()
    except ValueError:  # written in C
        return False
    # Also with **kwargs, which usually are passed on to a tensor's to().
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


def copy_task(
    device: Device | torch.device | str, *attributes: str, buffers: int = 4
) -> PipelineTask:
    """Return a task "copy" that moves attributes of the context to a device, from pinned memory.

    ``swpipe.overlap(device=)`` and ``swpipe.plans.prefetch_plan(device=)`` add it for the batch.
    Both give it a stream of its own if it runs ahead, also if you put it among their tasks:
    ``[decode, copy_task("cuda", "x", "y"), train]``.

    Tensors that are not pinned go through pinned buffers, which are used again when the copies from
    them have ended. A tensor that requires grad is copied within autograd's graph. An object that
    is on the device already stays the same object, and so does one without tensors.

    Args:
        device: The target. On "cpu" the task does nothing.
        attributes: Names of the attributes; "batch" if none is given.
        buffers: The largest number of pinned buffers, of one batch each: the depth of the plan.

    Raises:
        TypeError: An attribute is no string.
        ValueError: The device is not on this machine, or ``buffers`` is below 1.
    """
    if wrong := [repr(name) for name in attributes if not isinstance(name, str)]:
        raise TypeError(f"copy_task takes names of attributes, not {listed(wrong)}")
    if buffers < 1:
        raise ValueError(f"buffers is {buffers}: give 1 or more")
    reads = attributes or ("batch",)
    copy: Callable[[Any], None] = BatchCopy(resolve(device), reads, buffers)
    return PipelineTask(COPY, copy, pure=True, reads=reads)


def gives_pinned(loader: Any) -> bool:
    """Return whether a loader is apart and its batches are in pinned memory or on a device.

    A copy of these batches to a device has no work on the host.
    """
    if not is_apart(loader):
        return False
    # Asked of its settings and not of a batch, since taking one would begin a pass.
    if isinstance(inner := unprepared(loader), DataLoader):
        return inner.pin_memory
    batch = tensors_held(inner[0]) if inner else []
    return all(tensor.is_pinned() or not on_cpu(tensor) for tensor in batch)
