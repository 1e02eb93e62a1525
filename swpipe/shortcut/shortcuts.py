"""Replay what a task produced instead of running it.

A task runs in one of three modes::

    not enabled          enabled, first run              enabled, from then on
    (normal)             (caching)                       (replay)

    task.fn(ctx)         watch ctx                       check that the cache is whole
                         task.fn(ctx)                    delete what the task deleted
                         keep what changed, and          put back what it produced,
                         what each io captures           grafted into autograd; restore each io

Guarantees
    - A replay leaves the context as the cached run left it: attributes added, rebound, deleted or
      modified in place (``swpipe.shortcut.changes`` tells how that is seen), with tensors in any
      nesting (``swpipe._tensors.pytree``), and what each ``DeclaredIO`` captured. What they shared
      is shared
      again. What other tasks do to the context in the meantime stays theirs.
    - It copies no tensor: what it puts back shares memory with the cache. Should someone modify
      that in place, the next replay refuses and names the attribute. Only ``.grad`` is copied,
      since autograd itself adds to it in place.
    - Containers are built anew each time. Parameters, and all that is no tensor, come back as the
      very objects that they were.
    - A tensor that was the result of a graph comes back as one (``swpipe.shortcut.graft``): the
      upstream attributes that it was computed from get zero gradients. One that was a leaf and
      required grad comes back as such a leaf. Grad mode on and off have caches of their own; with
      it off, nothing is grafted.
    - Only the task's function is skipped. Order, streams and events are the engine's affair.

Assumptions
    - Two runs of one task never overlap. Runs of different tasks may, and tasks may be enabled and
      disabled meanwhile: runs look up a set and a dict, which Python keeps whole with its lock and
      without.
    - Nobody relies on one tensor being a view of another, or the very one that an upstream
      attribute holds: each tensor that a task produced is kept by itself.
    - What a task changes outside the context, and in objects that ``swpipe._tensors.pytree`` takes
    for leaves,
      is declared as its io.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe._tensors.pytree import map_tensors, tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import CpuDevice, Device
from swpipe.shortcut.changes import Watch, grad_of
from swpipe.shortcut.graft import Zeros, edges_of, graft, reached


class Shortcuts:
    """Which tasks are replayed, and what each of them has in its cache.

    Attributes:
        names: Tasks that are to go through ``run``; the same set object throughout.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.names: set[str] = set()
        self._device: Device = CpuDevice() if device is None else device
        # Task name to its caches, one for each grad mode. Each enabling has a dict of its own: a
        # run that began before the task was disabled leaves its cache in the old one, and is lost.
        self._caches: dict[str, dict[bool, _Cache]] = {}
        self._lock = threading.Lock()  # names and caches change together

    def enable(self, task_names: Iterable[str]) -> None:
        """Let tasks be cached on their next run and replayed after it; existing caches stay."""
        with self._lock:
            for name in task_names:
                self._caches.setdefault(name, {})
                self.names.add(name)

    def disable(self, task_names: Iterable[str]) -> None:
        """Let tasks run as usual again from their next run on, and drop their caches."""
        with self._lock:
            for name in task_names:
                self.names.discard(name)
                self._caches.pop(name, None)

    def run(self, task: PipelineTask, ctx: Any) -> None:
        """Run a task and keep what it produces, or put back what it produced before.

        Args:
            task: The task; one that has been disabled meanwhile just runs.
            ctx: The iteration's context: anything with a ``__dict__``.

        Raises:
            RuntimeError: Someone modified the cache in place, or something cannot be kept.
        """
        caches = self._caches.get(task.name)
        if caches is None:
            task.fn(ctx)
            return
        grad_mode = torch.is_grad_enabled()
        cache = caches.get(grad_mode)
        if cache is None:
            caches[grad_mode] = _run_and_keep(task, ctx, self._device)
        else:
            cache.replay(task, ctx)


class _Role(Enum):
    """What a kept tensor was to autograd."""

    PLAIN = auto()
    LEAF = auto()
    GRAFTED = auto()


class _Kept(NamedTuple):
    """What is remembered of a tensor, beside the cached values that hold its clone.

    That a tensor is replayed is told by its clone's identity alone, so no value of a user's can be
    mistaken for an entry of the cache.

    Attributes:
        tensor: The detached clone.
        version: The clone's version counter when it was made.
        role: What the tensor was to autograd.
        grad: A clone of the tensor's ``.grad``.
        retains_grad: The tensor was told to keep its gradient though it is no leaf.
        where: The attribute or io that it was found in, for messages.
    """

    tensor: Tensor
    version: int
    role: _Role
    grad: Tensor | None
    retains_grad: bool
    where: str

    @classmethod
    def of(cls, tensor: Tensor, where: str) -> _Kept:
        """A tensor as it is now."""
        role = _Role.PLAIN
        if tensor.requires_grad:
            role = _Role.LEAF if tensor.is_leaf else _Role.GRAFTED
        grad = grad_of(tensor)
        # Outside of inference mode, so that the clone has a version counter.
        with torch.inference_mode(False), torch.no_grad():
            clone = tensor.detach().clone()
            grad = None if grad is None else grad.detach().clone()
        return cls(clone, clone._version, role, grad, tensor.retains_grad, where)


class _Values(NamedTuple):
    """What a task produced.

    Attributes:
        attributes: Name to value.
        states: What each io captured, in the order of the task's io.
    """

    attributes: dict[str, Any]
    states: list[Any]

    def places(self) -> Iterator[tuple[str, Any]]:
        """Each value, with the words for where it is."""
        for name, value in self.attributes.items():
            yield f"ctx.{name}", value
        for index, state in enumerate(self.states):
            yield f"the state of io[{index}]", state


def _run_and_keep(task: PipelineTask, ctx: Any, device: Device) -> _Cache:
    with Watch(ctx) as watch:
        edges = edges_of(watch.before) if torch.is_grad_enabled() else {}
        task.fn(ctx)
    produced, deleted = watch.changes
    values = _Values({name: vars(ctx)[name] for name in produced}, _capture(task))
    inputs = reached((t for t in tensors_in(values) if not t.is_leaf), edges)
    return _Cache(task.name, values, deleted, inputs, device)


def _capture(task: PipelineTask) -> list[Any]:
    states = []
    for index, io in enumerate(task.io):
        try:
            states.append(None if io.capture is None else io.capture())
        except Exception as error:
            error.add_note(f"swpipe: in the capture of io[{index}] of task {task.name!r}")
            raise
    return states


def _restore(task: PipelineTask, states: list[Any]) -> None:
    for index, (io, state) in enumerate(zip(task.io, states, strict=True)):
        if io.restore is None:
            continue
        try:
            io.restore(state)
        except Exception as error:
            error.add_note(f"swpipe: in the restore of io[{index}] of task {task.name!r}")
            raise


class _Cache:
    """What one run of a task produced, ready to be put back.

    Args:
        task: The task's name.
        live: What it produced; nothing of it is kept but parameters and what is no tensor.
        deleted: Names of attributes that it deleted.
        inputs: Names of attributes whose tensors the outputs were computed from.
        device: Where streams come from.
    """

    def __init__(
        self,
        task: str,
        live: _Values,
        deleted: tuple[str, ...],
        inputs: frozenset[str],
        device: Device,
    ) -> None:
        self._deleted = deleted
        self._inputs = sorted(inputs)
        self._device = device
        self._zeros = Zeros()
        self._kept: dict[int, _Kept] = {}
        where = {id(t): place for place, value in live.places() for t in tensors_in(value)}

        def keep(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Parameter):
                return tensor
            kept = _Kept.of(tensor, where.get(id(tensor), ""))
            self._kept[id(kept.tensor)] = kept
            return kept.tensor

        self._values = map_tensors(live, keep)
        self._check_found(task)
        self._stream = device.current_stream()
        self._ready = device.new_event() if device.has_streams else None
        if self._ready is not None:
            self._ready.record(self._stream)

    def replay(self, task: PipelineTask, ctx: Any) -> None:
        """Put everything back."""
        self._check_whole(task.name)
        stream = self._device.current_stream()
        if self._ready is not None and stream != self._stream:
            self._ready.wait(stream)  # a run under another plan made the cache on another stream
        fresh = self._fresh(vars(ctx), stream)
        values = map_tensors(self._values, lambda tensor: fresh.get(id(tensor), tensor))
        for name in self._deleted:
            if name in vars(ctx):
                delattr(ctx, name)
        for name, value in values.attributes.items():
            setattr(ctx, name, value)
        _restore(task, values.states)

    def _fresh(self, attributes: dict[str, Any], stream: Any) -> dict[int, Tensor]:
        """For each clone, by id, the tensor to put back."""
        fresh = {key: kept.tensor.detach() for key, kept in self._kept.items()}
        grafted = [key for key, kept in self._kept.items() if kept.role is _Role.GRAFTED]
        if grafted:  # with grad mode off there are no inputs, and autograd lets them pass plain
            inputs = [attributes.get(name) for name in self._inputs]
            upstream = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            outputs = graft(
                [fresh[key] for key in grafted], upstream, self._zeros.like(upstream, stream)
            )
            fresh |= zip(grafted, outputs, strict=True)
        for key, kept in self._kept.items():
            tensor = fresh[key]
            if kept.role is _Role.LEAF:
                tensor.requires_grad_()
            if kept.retains_grad and tensor.requires_grad:
                tensor.retain_grad()
            if kept.grad is not None:
                tensor.grad = kept.grad.clone()
        return fresh

    def _check_found(self, task: str) -> None:
        """Every clone must be found again in the cached values, or it could not be put back."""
        for place, value in self._values.places():
            for tensor in tensors_in(value):
                if id(tensor) not in self._kept and not isinstance(tensor, Parameter):
                    raise RuntimeError(
                        f"task {task!r} cannot be replayed: {place} holds a container that makes "
                        "tensors of its own when it is built anew, so those put into it are lost. "
                        "Use a dataclass, or keep it out of the context and declare it as io"
                    )

    def _check_whole(self, task: str) -> None:
        for kept in self._kept.values():
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    f"task {task!r} cannot be replayed: {kept.where} was modified in place after "
                    "it was put back, and what is put back shares memory with the cache. Clone it "
                    "before modifying it, or shortcut the task that modifies it too; "
                    f"disable_shortcut({task!r}) drops the cache"
                )
