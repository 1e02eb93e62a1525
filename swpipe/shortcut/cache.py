"""The cache of one task: the products of a run, and how a replay restores them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from swpipe._values.context_log import ContextWatch
from swpipe._values.fingerprint import TensorState
from swpipe._values.walk import grad_or_none, leaves_in, map_tensors, tensors_in
from swpipe.core.task import PipelineTask
from swpipe.device import Device
from swpipe.errors import ShortcutError, add_note
from swpipe.shortcut.graft import connect
from swpipe.shortcut.handed_out import HandedOut, LaterUses
from swpipe.shortcut.leaf_gradients import LeafGradients, OwnLeaf, find_sources, gradient_edges
from swpipe.shortcut.objects import KeptObjects


class ReplayedValues(NamedTuple):
    """The products of a task: attributes by name, and what each of its io captured, in order."""

    attributes: dict[str, Any]
    states: list[Any]

    def places(self) -> Iterator[tuple[str, Any]]:
        """Yield each value with a description of its place."""
        for name, value in self.attributes.items():
            yield f"ctx.{name}", value
        for index, state in enumerate(self.states):
            yield f"the state of io[{index}]", state


def call_io(
    task: PipelineTask, index: int, name: str, fn: Callable[..., Any] | None, *args: Any
) -> Any:
    """Call the capture or restore function of one io, if it has one."""
    try:
        return None if fn is None else fn(*args)
    # The user's function may raise anything, which goes on with the note.
    except Exception as error:
        add_note(error, f"swpipe: in the {name} of io[{index}] of task {task.name!r}")
        raise


class _Cached(NamedTuple):
    """A cached tensor. Entries are found by the identity of the clone, never by value.

    Attributes:
        clone: A detached clone, which takes the tensor's place in the cached values.
        state: The clone's state, to find out whether it was modified.
        leaf: Whether the tensor was a leaf that required grad.
        computed: Whether the tensor required grad and was computed by autograd.
        grad: A copy of the tensor's gradient, if it had one.
        retains_grad: Whether the tensor retained its gradient.
        place: The attribute or io that contained the tensor, for messages.
    """

    clone: Tensor
    state: TensorState
    leaf: bool
    computed: bool
    grad: Tensor | None
    retains_grad: bool
    place: str

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> _Cached:
        """Return a tensor's entry, with clones of the tensor and its gradient."""
        leaf = tensor.requires_grad and tensor.is_leaf
        computed = tensor.requires_grad and not tensor.is_leaf
        grad = grad_or_none(tensor)
        # Outside inference mode, so that the clone has a version counter.
        with torch.inference_mode(False), torch.no_grad():
            clone = tensor.detach().clone()
            grad = None if grad is None else grad.detach().clone()
        return cls(clone, TensorState(clone), leaf, computed, grad, tensor.retains_grad, place)


class Cache:
    """The products of one run of a task: its changes to the context, and what each io captures.

    The task runs when the cache is made.

    Attributes:
        in_backward_s: The seconds that replays have cost in each backward of other tasks.

    Args:
        task: The task.
        ctx: The run's context.
        device: The device on which the task works.

    Raises:
        ShortcutError: An output cannot be cached.
    """

    def __init__(self, task: PipelineTask, ctx: Any, device: Device) -> None:
        # The watch does not cover the captures: they are the user's functions and not the task's.
        with ContextWatch(ctx) as watch:
            edges = gradient_edges(watch.before) if torch.is_grad_enabled() else {}
            gradients = LeafGradients(watch.before)
            task.fn(ctx)
        states = [call_io(task, index, "capture", io.capture) for index, io in enumerate(task.io)]
        values = ReplayedValues({name: vars(ctx)[name] for name in watch.produced}, states)
        made = list(tensors_in(values))
        sources = find_sources((tensor for tensor in made if not tensor.is_leaf), edges)
        self._task = task.name
        self._deleted = watch.deleted
        self._gradients = gradients.changed()
        self._inputs = sources.attributes
        # Leaves that the task made itself are no inputs.
        own = [leaf for leaf in sources.leaves if all(leaf is not tensor for tensor in made)]
        self._leaves = [OwnLeaf(leaf) for leaf in own]
        self._device = device
        self.in_backward_s: list[float] = []
        self._cached: dict[int, _Cached] = {}
        self._objects = KeptObjects(task.name)
        self._checking = threading.Lock()
        self._refused = ""  # why replays are wrong, once this is known
        self._uses = LaterUses(self._keep(ctx, values))
        self._check_complete()
        # The clones are made on this stream; a replay on another one waits for the event.
        self._stream = device.current_stream()
        self._ready = device.new_event()
        self._ready.record(self._stream)

    def replay(self, task: PipelineTask, ctx: Any) -> None:
        """Leave ``ctx`` as the cached run did.

        Raises:
            ShortcutError: See ``check``.
        """
        self.check()
        stream = self._device.current_stream()
        if stream != self._stream:
            self._ready.wait(stream)  # the cache was made under another plan, on another stream
        values = self._new_values(ctx, self._new_tensors(vars(ctx)))
        # Values were made before anything is deleted: their sources may be among the deleted
        # attributes.
        for name in self._deleted:
            if name in vars(ctx):
                delattr(ctx, name)
        for name, value in values.attributes.items():
            setattr(ctx, name, value)
        for gradient in self._gradients:
            gradient.restore()
        for index, (io, state) in enumerate(zip(task.io, values.states, strict=True)):
            call_io(task, index, "restore", io.restore, state)

    def check(self) -> None:
        """Check that the replays until now were right.

        Raises:
            ShortcutError: The cache was modified in place, or outputs were modified in a way that a
                replay does not repeat.
        """
        with self._checking:  # a replay may be running on another thread
            if self._uses.become_known():
                self._refused = self._reason_to_refuse()
        if self._refused:
            raise ShortcutError(self._task, self._refused)
        for cached in self._cached.values():
            if cached.state.changed():
                raise ShortcutError(
                    self._task,
                    f"{cached.place} was modified in place after it was restored, and it shares "
                    "memory with the cache, since the first iterations did not modify it. Clone it "
                    "before modifying it, or shortcut the task that modifies it too; "
                    f"disable_shortcut({self._task!r}) drops the cache",
                )
        self._objects.check()

    def accept(self, ctx: Any) -> None:
        """Accept the changes on ``ctx`` by another task that is shortcut too."""
        self._uses.accept(ctx)

    def close(self) -> None:
        """Remove the hooks on parameters."""
        for leaf in self._leaves:
            leaf.close()

    def _keep(self, ctx: Any, live: ReplayedValues) -> HandedOut:
        """Copy what the task produced into the cache."""
        places = {
            id(part): place
            for place, value in live.places()
            for part in (*leaves_in(value), *tensors_in(value))
        }
        outputs: dict[int, Any] = {}
        memo: dict[int, Any] = {}  # for tensors within objects

        # Parameters are kept themselves: they belong to the model, and replays must see their
        # training.
        def keep_tensor(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, Parameter) else memo[id(tensor)]

        def keep_object(value: Any) -> Any:
            kept = self._objects.keep(value, places.get(id(value), "its output"), memo)
            if self._objects.copies(kept):
                outputs[id(kept)] = value
            return kept

        for tensor in tensors_in(live):
            # Cloned once: tensors that several attributes share stay one tensor.
            if not isinstance(tensor, Parameter):
                cached = _Cached.of(tensor, places.get(id(tensor), ""))
                memo[id(tensor)] = cached.clone
                self._cached[id(cached.clone)] = cached
                # Keyed by the clone, so that outputs of the cached run and of replays have the same
                # keys.
                outputs[id(cached.clone)] = tensor
        self._values = map_tensors(live, keep_tensor, keep_object)
        return HandedOut(ctx, outputs)

    def _new_values(self, ctx: Any, fresh: dict[int, Tensor]) -> ReplayedValues:
        """Return the values to restore; the first replays are watched."""
        objects: dict[int, Any] = {}
        memo: dict[int, Any] = dict(fresh)

        def hand_out(value: Any) -> Any:
            if not self._objects.copies(value):
                return value
            # One memo per replay, so that parts shared among objects and tensors stay shared.
            objects[id(value)] = self._objects.hand_out(value, memo)
            return objects[id(value)]

        values = map_tensors(self._values, lambda tensor: fresh.get(id(tensor), tensor), hand_out)
        if not self._uses.known:
            self._uses.add(HandedOut(ctx, fresh | objects))
        return values

    def _new_tensors(self, attributes: dict[str, Any]) -> dict[int, Tensor]:
        """Return the tensor to restore for each clone, by the id of the clone."""
        fresh = {key: self._memory_of(key, cached) for key, cached in self._cached.items()}
        computed = [key for key, cached in self._cached.items() if cached.computed]
        if computed:  # with grad mode off there are no inputs, and autograd ignores the graph
            inputs = [attributes.get(name) for name in self._inputs]
            upstream = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
            restored = [fresh[key] for key in computed]
            outputs = connect(restored, upstream, self._leaves, self._task, self.in_backward_s)
            fresh |= zip(computed, outputs, strict=True)
        # After the graft: its outputs are the tensors that later tasks see.
        for key, cached in self._cached.items():
            tensor = fresh[key]
            if cached.leaf:
                tensor.requires_grad_()
            if cached.retains_grad and tensor.requires_grad:
                tensor.retain_grad()
            if cached.grad is not None:
                tensor.grad = cached.grad.clone()
        return fresh

    def _memory_of(self, key: int, cached: _Cached) -> Tensor:
        """Return the clone itself if no later task modifies the tensor; otherwise, a copy of it."""
        if self._uses.known and self._uses.only_read(key):
            return cached.clone.detach()
        with torch.no_grad():
            return cached.clone.clone()

    def _reason_to_refuse(self) -> str:
        """Return why replays are wrong, or "", once the uses of the outputs are known."""
        for name, value in self._values.attributes.items():
            for part in (*leaves_in(value), *tensors_in(value)):
                if self._uses.modified_through_another(id(part)):
                    return (
                        f"ctx.{name} was modified after the task through another object that "
                        "shares its memory, such as the base of a view. A replay does not repeat "
                        "this. Clone it in the task, or shortcut the task that modifies it too"
                    )
        return ""

    def _check_complete(self) -> None:
        """Raise an error if a clone is not in the cached values: it could not be restored."""
        for place, value in self._values.places():
            for tensor in tensors_in(value):
                # A registered pytree node may make its tensors when it is unflattened.
                if id(tensor) not in self._cached and not isinstance(tensor, Parameter):
                    raise ShortcutError(
                        self._task,
                        f"{place} holds a container that creates its own tensors when it is "
                        "rebuilt, so the cached tensors are lost. Use a dataclass, or keep it out "
                        "of the context and declare it as io",
                    )
