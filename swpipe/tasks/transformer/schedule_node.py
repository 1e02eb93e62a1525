"""A piece of a model whose forward and backward are run apart from those of its neighbours.

    outputs of the piece before ── detach ──> leaves ── forward_func ──> outputs
    gradients for it <───────────────────── leaves' .grad <── autograd <── gradients of outputs

Each node has an autograd graph of its own, from its leaves to its outputs, so that a schedule
decides when which node's backward runs. There are two streams: one for computation, one for
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
"""A tensor, or a tuple of tensors and others."""

BackwardFunc: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...]], object]

LayerStream: TypeAlias = torch.Stream | Callable[[], torch.Stream | None] | None
"""A stream, a function that returns one, or None for the caller's current stream."""

_given: dict[str, torch.Stream | None] = {"comp": None, "comm": None}


def set_streams(
    comp_stream: torch.Stream | None = None, comm_stream: torch.Stream | None = None
) -> None:
    """Set the streams of schedules that are made from now on; None for the defaults."""
    _given.update(comp=comp_stream, comm=comm_stream)


def get_comp_stream() -> torch.Stream | None:
    """The stream of computation; None for the current stream of whoever runs the schedule."""
    return _given["comp"]


def get_comm_stream() -> torch.Stream | None:
    """The stream of exchanges, made when first asked for; None on a machine without streams."""
    if _given["comm"] is None and (device := resolve(None)).has_streams:
        _given["comm"] = device.new_stream(StreamSpec(priority=-1))
    return _given["comm"]


def device_of(model: Any) -> Device:
    """Where the first parameter of a model is; the machine's own device if it has none."""
    first = next(model.parameters(), None)
    return resolve(None if first is None else first.device)


class ScheduleNode:
    """Runs a function forward, and later backward.

    ``forward``, ``backward`` and ``backward_dw`` run on the node's stream, in the order that its
    event gives them. A schedule that orders streams itself calls ``run_forward``, ``run_backward``
    and ``run_backward_dw``, which submit to the current stream.

    Args:
        forward_func: From inputs to a tensor, or a tuple.
        stream: A stream, a function that returns one, or None for the current one.
        event: Waited for before, and recorded after, each piece of work on ``stream``; nodes that
            share it run one after the other, on whatever stream. None for no such order.
        backward_func: Called with outputs and their gradients instead of autograd's backward.
        free_input: Release the memory of inputs after forward: nobody else must use them, nor
            backward.
        name: For messages.
    """

    def __init__(
        self,
        forward_func: Callable[..., Values],
        stream: LayerStream,
        event: Any,
        backward_func: BackwardFunc | None = None,
        free_input: bool = False,
        name: str = "schedule_node",
    ) -> None:
        self.forward_func = forward_func
        self.stream, self.event = stream, event
        self.backward_func = backward_func
        self.free_input, self.name = free_input, name
        self._inputs: tuple[Any, ...] = ()
        self._outputs: tuple[Any, ...] | None = None

    @property
    def inputs(self) -> tuple[Any, ...] | None:
        """The detached inputs of a forward whose backward has not run; else None."""
        return None if self._outputs is None else self._inputs

    @property
    def output(self) -> Values:
        """What that forward returned: a value, or a tuple; else None."""
        return None if self._outputs is None else _single(self._outputs)

    def get_output(self) -> Values:
        """``output``."""
        return self.output

    def get_grad(self) -> Values:
        """The gradients of ``inputs`` so far, for a ``backward_func``; as ``backward`` returns."""
        return _single([one.grad if isinstance(one, Tensor) else None for one in self._inputs])

    def forward(self, inputs: Values = ()) -> Values:
        """Run the function on detached inputs, a tensor or a tuple; what it returns.

        Raises:
            RuntimeError: Its backward of the forward before has not run.
        """
        with self._on_stream():
            return self.run_forward(inputs)

    def backward(self, output_grad: Values) -> Values:
        """Gradients of the inputs, given those of the outputs; lets go of everything.

        Parameters get theirs as in any backward. Where an output has no gradient, None; the
        gradient of an input that needs none is None.

        Raises:
            RuntimeError: There was no forward, or its backward has run.
            ValueError: There are more or fewer gradients than outputs.
        """
        with self._on_stream():
            return self.run_backward(output_grad)

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``backward`` has left; a plain node leaves none."""
        with self._on_stream():
            self.run_backward_dw()

    def run_forward(self, inputs: Values = ()) -> Values:
        """``forward`` on the current stream."""
        self._refuse_again()
        given = _tuple_of(inputs)
        leaves = tuple(map(as_leaf, given))
        outputs = self._compute(*leaves)
        self._inputs, self._outputs = leaves, _tuple_of(outputs)
        if self.free_input:
            for tensor in given:
                if isinstance(tensor, Tensor):
                    tensor.untyped_storage().resize_(0)
        return outputs

    def run_backward(self, output_grad: Values) -> Values:
        """``backward`` on the current stream."""
        outputs, grads = self._outputs, _tuple_of(output_grad)
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
        for grad in grads:
            used_here(grad)
        self._outputs = None
        # Bound methods are not kept on the node: a cycle would outlive the last reference to it.
        try:
            (self.backward_func or self.default_backward_func)(outputs, grads)
            return self.get_grad()
        finally:
            self._inputs = ()

    def run_backward_dw(self) -> None:
        """``backward_dw`` on the current stream."""

    def default_backward_func(
        self, outputs: Sequence[Any], output_grad: Sequence[Any]
    ) -> Sequence[Any]:
        """Autograd's backward from those outputs that have a gradient; returns the gradients."""
        roots = [
            (output, grad)
            for output, grad in zip(outputs, output_grad, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        if roots:
            torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        return output_grad

    def release(self) -> None:
        """Let go of everything, without a backward."""
        self._inputs, self._outputs = (), None

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
        if stream is None and self.event is None:
            yield
            return
        if stream is None:  # the current one takes part in the event's order as any other
            stream = torch.accelerator.current_stream(self.event.device)
        with resolve(stream.device).on(stream):
            if self.event is not None:
                self.event.wait(stream)
            yield
            if self.event is not None:
                self.event.record(stream)


class NoopScheduleNode:
    """Stands where a layer has nothing to do."""

    def forward(self, inputs: Values = ()) -> Values:
        """The inputs, or gradients."""
        return inputs

    def release(self) -> None:
        """Nothing."""

    backward_dw = run_backward_dw = release
    backward = run_forward = run_backward = forward


def as_leaf(value: Values) -> Values:
    """A tensor detached from its graph, requiring a gradient as before; others as they are."""
    if not isinstance(value, Tensor):
        return value
    used_here(value)
    return value.detach().requires_grad_(value.requires_grad)


def used_here(value: Values) -> None:
    """Keep a tensor's memory until the current stream is done with it."""
    if isinstance(value, Tensor) and (device := resolve(value.device)).has_streams:
        device.hold([value], [device.current_stream()])


def _single(values: Sequence[Any]) -> Values:
    return values[0] if len(values) == 1 else tuple(values)


def _tuple_of(values: Values) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)
