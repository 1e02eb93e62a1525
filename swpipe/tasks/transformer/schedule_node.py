"""A part of a model whose forward and backward run separately from those of other parts.

    outputs of the previous node ── detach ──> leaves ── forward_func ──> outputs
    gradients for them <────────────── leaves' .grad <── autograd <── gradients of outputs

Each node has an autograd graph of its own, from its leaves to its outputs, so that a schedule
chooses when each node's backward runs. There are two streams: one for computation, one for
exchanges. Source: seed "model_chunk_schedule_plan".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from swpipe.core.plan import StreamSpec
from swpipe.device import Device, resolve

Values: TypeAlias = Any
"""A tensor, or a tuple of tensors and other values."""

LayerStream: TypeAlias = torch.Stream | Callable[[], torch.Stream | None] | None
"""A stream, a function that returns one, or None for the caller's current stream."""

_given: dict[str, torch.Stream | None] = {"comp": None, "comm": None}


def set_streams(
    comp_stream: torch.Stream | None = None, comm_stream: torch.Stream | None = None
) -> None:
    """Set the streams of schedules that are made from now on; None for the defaults."""
    _given.update(comp=comp_stream, comm=comm_stream)


def get_comp_stream() -> torch.Stream | None:
    """Return the stream of computation; None for the current stream of the caller of a schedule."""
    return _given["comp"]


def get_comm_stream() -> torch.Stream | None:
    """Return the stream of exchanges, made at the first call; None on a device without streams."""
    # A higher priority (-1): a short exchange should not wait for queued computation.
    if _given["comm"] is None and (device := resolve(None)).has_streams:
        _given["comm"] = device.new_stream(StreamSpec(priority=-1))
    return _given["comm"]


def device_of(model: Any) -> Device:
    """Return the device of a model's first parameter; of the machine if it has no parameter."""
    first = next(model.parameters(), None)
    return resolve(None if first is None else first.device)


class ScheduleNode:
    """A function with a forward and a later, separate backward.

    ``forward``, ``backward`` and ``backward_dw`` run on the node's stream, in the order of its
    event. A schedule that orders streams itself calls ``run_forward``, ``run_backward``
    and ``run_backward_dw``, which submit to the current stream.

    Args:
        forward_func: Maps the inputs to a tensor or a tuple.
        stream: A stream, a function that returns one, or None for the current one.
        event: The stream waits for it before each piece of work, and records it after. Nodes that
            share an event run one after the other, on any streams. None for no such order.
        name: The node's name in messages.
    """

    def __init__(
        self,
        forward_func: Callable[..., Values],
        stream: LayerStream,
        event: Any,
        name: str = "schedule_node",
    ) -> None:
        self.forward_func = forward_func
        self.stream = stream
        self.event = event
        self.name = name
        self._inputs: tuple[Any, ...] = ()
        self._outputs: tuple[Any, ...] | None = None

    def forward(self, inputs: Values = ()) -> Values:
        """Run the function on the detached inputs, a tensor or a tuple, and return its result.

        Raises:
            RuntimeError: The backward of the previous forward has not run.
        """
        with self._on_stream():
            return self.run_forward(inputs)

    def backward(self, output_grad: Values) -> Values:
        """Run backward from the gradients of the outputs; return those of the inputs.

        Gradients of parameters are added to ``.grad`` as usual. Give None for an output without a
        gradient; the gradient of an input that requires none is None. Afterwards the node holds no
        tensors.

        Raises:
            RuntimeError: No forward was run, or its backward was run already.
            ValueError: The number of gradients is not the number of outputs.
        """
        with self._on_stream():
            return self.run_backward(output_grad)

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``backward`` has delayed; a plain node delays none."""
        with self._on_stream():
            self.run_backward_dw()

    def run_forward(self, inputs: Values = ()) -> Values:
        """Run ``forward`` on the current stream."""
        self._refuse_again()
        # The leaves cut the graph here, so that this node's backward can run on its own.
        leaves = tuple(map(as_leaf, _tuple_of(inputs)))
        outputs = self._compute(*leaves)
        self._inputs = leaves
        self._outputs = _tuple_of(outputs)
        return outputs

    def run_backward(self, output_grad: Values) -> Values:
        """Run ``backward`` on the current stream."""
        outputs = self._outputs
        grads = _tuple_of(output_grad)
        if outputs is None:
            raise RuntimeError(
                f"node {self.name!r} has no forward to run backward: it was not run, or was run "
                "backward or released since. Make a plan for each microbatch, and run it once"
            )
        if len(grads) != len(outputs):
            raise ValueError(
                f"node {self.name!r} has {len(outputs)} outputs, and {len(grads)} gradients were "
                "given: give one for each, or None for an output without"
            )
        # They may come from a node on the other stream.
        for grad in grads:
            used_here(grad)
        self._outputs = None
        try:
            self._run_autograd(outputs, grads)
            # Before ``finally`` drops the leaves.
            of_inputs = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in self._inputs]
            return of_inputs[0] if len(of_inputs) == 1 else tuple(of_inputs)
        finally:
            self._inputs = ()

    def run_backward_dw(self) -> None:
        """Run ``backward_dw`` on the current stream."""

    def _run_autograd(self, outputs: Sequence[Any], grads: Sequence[Any]) -> None:
        """Run autograd's backward from the outputs with a gradient."""
        # Autograd rejects roots that need no gradient; an output without one contributes nothing.
        roots = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])

    def release(self) -> None:
        """Drop inputs and outputs without a backward."""
        self._inputs = ()
        self._outputs = None

    def _compute(self, *inputs: Any) -> Values:
        return self.forward_func(*inputs)

    def _refuse_again(self) -> None:
        if self._outputs is not None:
            raise RuntimeError(
                f"node {self.name!r} was run forward, and not backward since: a node holds one "
                "microbatch. Run its backward, or make another plan for the next microbatch"
            )

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        stream = self.stream() if callable(self.stream) else self.stream
        # Without a stream and an event there is nothing to order: a device without streams.
        if stream is None and self.event is None:
            yield
            return
        if stream is None:  # the event orders work on the current stream as well
            stream = torch.accelerator.current_stream(self.event.device)
        with resolve(stream.device).on(stream):
            if self.event is not None:
                # Waits for the node before, on whatever stream it ran.
                self.event.wait(stream)
            yield
            if self.event is not None:
                self.event.record(stream)


class NoopScheduleNode:
    """A node that does nothing, for a part that a layer does not have."""

    def forward(self, inputs: Values = ()) -> Values:
        """Return the argument, inputs or gradients, unchanged."""
        return inputs

    def release(self) -> None:
        """Do nothing."""

    backward_dw = release
    run_backward_dw = release
    backward = forward
    run_forward = forward
    run_backward = forward


def as_leaf(value: Values) -> Values:
    """Return a tensor without its graph, as a leaf if it requires a gradient; others unchanged."""
    # ``detach`` shares the memory, so a leaf costs no copy.
    if not isinstance(value, Tensor):
        return value
    used_here(value)
    return value.detach().requires_grad_(value.requires_grad)


def used_here(value: Values) -> None:
    """Keep a tensor's memory until the current stream has done its work."""
    if isinstance(value, Tensor) and (device := resolve(value.device)).has_streams:
        device.hold([value], [device.current_stream()])


def _tuple_of(values: Values) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)
