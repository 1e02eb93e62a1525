"""Replay the outputs of a task instead of running it.

A task runs in one of three modes::

    not enabled          enabled, first run              enabled, later runs
    (normal)             (caching)                       (replay)

    task.fn(ctx)         watch ctx                       check that the cache is unmodified
                         task.fn(ctx)                    delete what the task deleted
                         cache what changed, and         restore what it produced, connected to
                         what each io captures           the autograd graph; restore each io

Guarantees
    - A replay leaves the context as the cached run did: attributes added, rebound, deleted or
      modified in place (as ``swpipe.shortcut.changes`` detects it), with tensors in any nesting
      (``swpipe._tensors.pytree``), and the captures of each ``DeclaredIO``. Objects that were
      shared among them are shared again. Changes that other tasks make meanwhile are not included.
    - No tensor is copied: restored tensors share memory with the cache. If the cache is modified
      in place, the next replay raises and names the attribute. Only ``.grad`` is copied, since
      autograd accumulates into it in place.
    - Containers are built anew each time. Parameters and non-tensors are the same objects.
    - A tensor computed by autograd is restored with a graph (``swpipe.shortcut.graft``) that gives
      zero gradients to the upstream attributes it was computed from. A leaf that required grad is
      restored as such a leaf. Grad mode on and off have separate caches.
    - Only the task's function is skipped. Order, streams and events stay as they are.

Assumptions
    - Two runs of one task never overlap. Runs of different tasks may, and tasks may be enabled and
      disabled meanwhile: runs only look up a set and a dict, which is atomic in Python, also
      without the interpreter lock.
    - No code relies on one produced tensor being a view of another, or being the same object as an
      upstream attribute: each tensor is cached separately.
    - What a task changes outside the context, and in leaves of ``swpipe._tensors.pytree``, is
      declared as its io.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe._tensors.pytree import grad_or_none, map_tensors, tensors_in
from swpipe.core.errors import add_note
from swpipe.core.task import PipelineTask
from swpipe.device import CpuDevice, Device
from swpipe.shortcut.changes import ContextWatch
from swpipe.shortcut.graft import ZeroGradients, connect, gradient_edges, nearest_attributes


class Shortcuts:
    """The tasks to run through ``run``, in ``names`` (always the same set), and their caches."""

    def __init__(self, device: Device | None = None) -> None:
        self.names: set[str] = set()
        self._device: Device = CpuDevice() if device is None else device
        # Task to grad mode to cache. Each ``enable`` creates a new inner dict: a run that started
        # before ``disable`` stores its cache in the old one, where it is never read.
        self._caches: dict[str, dict[bool, _Cache]] = {}
        self._lock = threading.Lock()  # names and caches change together

    def enable(self, task_names: Iterable[str]) -> None:
        """Cache tasks on their next run and replay them afterwards; existing caches stay."""
        with self._lock:
            for name in task_names:
                self._caches.setdefault(name, {})
                self.names.add(name)

    def disable(self, task_names: Iterable[str]) -> None:
        """Run tasks normally from their next run on, and drop their caches."""
        with self._lock:
            for name in task_names:
                self.names.discard(name)
                self._caches.pop(name, None)

    def run(self, task: PipelineTask, ctx: Any) -> None:
        """Run a task and cache what it produces, or replay its cache.

        Args:
            task: The task. If it was disabled in the meantime, it runs normally.
            ctx: The iteration's context: any object with a ``__dict__``.

        Raises:
            RuntimeError: The cache was modified in place, or an output cannot be cached.
        """
        caches = self._caches.get(task.name)
        if caches is None:
            task.fn(ctx)
            return
        grad_mode = torch.is_grad_enabled()
        cache = caches.get(grad_mode)
        if cache is None:
            caches[grad_mode] = _run_and_cache(task, ctx, self._device)
        else:
            cache.replay(task, ctx)


class _Cached(NamedTuple):
    """A cached tensor. Entries are found by the identity of the clone, never by value.

    Attributes:
        clone: A detached clone, which stands for the tensor in the cached values.
        leaf: The tensor was a leaf that required grad.
        computed: The tensor required grad and was computed by autograd.
        place: The attribute or io that contained it, for messages.
    """

    clone: Tensor
    version: int
    leaf: bool
    computed: bool
    grad: Tensor | None
    retains_grad: bool
    place: str

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> _Cached:
        leaf = tensor.requires_grad and tensor.is_leaf
        computed = tensor.requires_grad and not tensor.is_leaf
        grad = grad_or_none(tensor)
        # Outside inference mode, so that the clone has a version counter.
        with torch.inference_mode(False), torch.no_grad():
            clone = tensor.detach().clone()
            grad = None if grad is None else grad.detach().clone()
        return cls(clone, clone._version, leaf, computed, grad, tensor.retains_grad, place)


class _Values(NamedTuple):
    """What a task produced: attributes by name, and what each of its io captured, in order."""

    attributes: dict[str, Any]
    states: list[Any]

    def places(self) -> Iterator[tuple[str, Any]]:
        """Each value, with its place in words."""
        for name, value in self.attributes.items():
            yield f"ctx.{name}", value
        for index, state in enumerate(self.states):
            yield f"the state of io[{index}]", state


def _run_and_cache(task: PipelineTask, ctx: Any, device: Device) -> _Cache:
    with ContextWatch(ctx) as watch:
        edges = gradient_edges(watch.before) if torch.is_grad_enabled() else {}
        task.fn(ctx)
    produced, deleted = watch.changes
    states = [_call_io(task, index, "capture", io.capture) for index, io in enumerate(task.io)]
    values = _Values({name: vars(ctx)[name] for name in produced}, states)
    inputs = nearest_attributes((t for t in tensors_in(values) if not t.is_leaf), edges)
    return _Cache(task.name, values, deleted, inputs, device)


def _call_io(
    task: PipelineTask, index: int, name: str, fn: Callable[..., Any] | None, *args: Any
) -> Any:
    """Call the capture or restore of one io, if it has one."""
    try:
        return None if fn is None else fn(*args)
    except Exception as error:
        add_note(error, f"swpipe: in the {name} of io[{index}] of task {task.name!r}")
        raise


class _Cache:
    """The outputs of one run of a task, computed from the attributes ``inputs``."""

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
        self._zeros = ZeroGradients()
        self._cached: dict[int, _Cached] = {}
        places = {id(t): place for place, value in live.places() for t in tensors_in(value)}

        def cache(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Parameter):
                return tensor
            cached = _Cached.of(tensor, places.get(id(tensor), ""))
            self._cached[id(cached.clone)] = cached
            return cached.clone

        self._values = map_tensors(live, cache)
        self._check_replayable(task)
        self._stream = device.current_stream()
        self._ready = device.new_event()
        self._ready.record(self._stream)

    def replay(self, task: PipelineTask, ctx: Any) -> None:
        """Leave ``ctx`` as the cached run did."""
        self._check_unmodified(task.name)
        stream = self._device.current_stream()
        if stream != self._stream:
            self._ready.wait(stream)  # the cache was made under another plan, on another stream
        fresh = self._new_tensors(vars(ctx), stream)
        values = map_tensors(self._values, lambda tensor: fresh.get(id(tensor), tensor))
        for name in self._deleted:
            if name in vars(ctx):
                delattr(ctx, name)
        for name, value in values.attributes.items():
            setattr(ctx, name, value)
        for index, (io, state) in enumerate(zip(task.io, values.states, strict=True)):
            _call_io(task, index, "restore", io.restore, state)

    def _new_tensors(self, attributes: dict[str, Any], stream: Any) -> dict[int, Tensor]:
        """The tensor to restore for each clone, by the id of the clone."""
        fresh = {key: cached.clone.detach() for key, cached in self._cached.items()}
        computed = [key for key, cached in self._cached.items() if cached.computed]
        if computed:  # with grad mode off there are no inputs, and autograd ignores the graph
            inputs = [attributes.get(name) for name in self._inputs]
            upstream = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            outputs = connect(
                [fresh[key] for key in computed], upstream, self._zeros.like(upstream, stream)
            )
            fresh |= zip(computed, outputs, strict=True)
        for key, cached in self._cached.items():
            tensor = fresh[key]
            if cached.leaf:
                tensor.requires_grad_()
            if cached.retains_grad and tensor.requires_grad:
                tensor.retain_grad()
            if cached.grad is not None:
                tensor.grad = cached.grad.clone()
        return fresh

    def _check_replayable(self, task: str) -> None:
        """Every clone must be in the cached values, or it could not be restored."""
        for place, value in self._values.places():
            for tensor in tensors_in(value):
                if id(tensor) not in self._cached and not isinstance(tensor, Parameter):
                    raise RuntimeError(
                        f"task {task!r} cannot be replayed: {place} holds a container that creates "
                        "its own tensors when it is rebuilt, so the cached tensors are lost. "
                        "Use a dataclass, or keep it out of the context and declare it as io"
                    )

    def _check_unmodified(self, task: str) -> None:
        for cached in self._cached.values():
            if cached.clone._version != cached.version:
                raise RuntimeError(
                    f"task {task!r} cannot be replayed: {cached.place} was modified in place after "
                    "it was restored, and it shares memory with the cache. Clone it before "
                    "modifying it, or shortcut the task that modifies it too; "
                    f"disable_shortcut({task!r}) drops the cache"
                )
