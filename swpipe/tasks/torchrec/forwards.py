"""Replacements for a sharded module's forward while the model is attached to a pipeline.

A sharded module's forward exchanges ids, looks up embeddings and exchanges the embeddings. Earlier
tasks exchange the ids. The rest runs in one of these ways ("own" replaces nothing)::

                  EmbPrefetch                EmbForward               DenseForward
    pipelined     -                          model: wait, look up     -
    prefetch      wait for ids, fill caches  model: look up           -
    split         wait for ids, fill caches  look up                  model: wait for embeddings
    ahead         the same                   the same                 the same
    own           -                          the model, as it is      -

A split pipeline gives a module the prefetch forward if DDP reduces parameters of it (see
``wrappers``): its look-up and its update are then part of DenseForward and DenseBackward.

The split forward also cuts the autograd graph at the embeddings (see ``seam``), so that the dense
part and the tables have a backward task each. "ahead" does not: without an exchange of gradients,
as on one rank, a backward of the tables' own hides nothing, and costs the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from swpipe._tensors.pytree import map_tensors
from swpipe.device import Device
from swpipe.tasks.torchrec._torchrec import (
    LazyAwaitable,
    LazyGetItemMixin,
    PrefetchPipelinedForward,
)
from swpipe.tasks.torchrec._torchrec import PipelinedForward as _TorchRecPipelinedForward
from swpipe.tasks.torchrec.awaitables import Replayable
from swpipe.tasks.torchrec.contexts import SparseDistContext
from swpipe.tasks.torchrec.exchanged import ExchangedInputs
from swpipe.tasks.torchrec.seam import Seam

Kind: TypeAlias = Literal["own", "pipelined", "prefetch", "split", "ahead"]


class PipelinedForward(_TorchRecPipelinedForward):  # type: ignore[misc]
    """Wait for the ids and look up inside the model's forward."""

    prefetches = False
    looks_up_ahead = False
    inputs: ExchangedInputs | None = None
    iteration = 0

    def __init__(self, name: str, args: Any, module: Any, device: Device) -> None:
        super().__init__(name, args, module, context=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings up; the input comes from the context, the arguments are checked."""
        context: SparseDistContext = self._context
        request = _take(context.input_dist_tensors_requests, self._name)
        _check(self, args, kwargs)
        data, module_context = request.wait_with_context()
        del context.module_contexts[self._name]
        return self._module.compute_and_output_dist(module_context, data)


class PrefetchForward(PrefetchPipelinedForward):  # type: ignore[misc]
    """Look up inside the model's forward, after EmbPrefetch has waited for the ids."""

    prefetches = True
    looks_up_ahead = False
    inputs: ExchangedInputs | None = None
    iteration = 0

    def __init__(self, name: str, args: Any, module: Any, device: Device) -> None:
        super().__init__(name, args, module, context=None)
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings up."""
        embeddings = self._look_up(self._context)
        _check(self, args, kwargs)
        return embeddings

    def _look_up(self, context: SparseDistContext) -> Any:
        data = _take(context.module_input_post_prefetch, self._name)
        module_context = context.module_contexts_post_prefetch.pop(self._name)
        if self._device.has_streams:
            # These values leave the context here, so the engine does not hold them at retirement.
            self._device.hold([data, module_context], [self._device.current_stream()])
        return self._module.compute_and_output_dist(module_context, data)


class SplitForward(PrefetchForward):
    """Look up in a task of its own, before the dense part."""

    looks_up_ahead = True
    cuts = True

    def get_embedding_result(self) -> Any:
        """What ``look_up`` left for the present batch: one awaitable, or several.

        Raises:
            KeyError: It has not run, or the dense part has taken it.
        """
        return self._context.embeddings[self._name]

    def set_embedding_result(self, result: Any) -> None:
        """Let the dense part of the present batch take this instead."""
        self._context.embeddings[self._name] = result

    def look_up(self) -> None:
        """Look the embeddings up and start their exchange."""
        context: SparseDistContext = self._context
        output = self._look_up(context)
        context.embeddings[self._name] = _each(
            output,
            lambda awaitable: Replayable(awaitable, self._device, iteration=self.iteration),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings for the dense part, waited for when they are used."""
        context: SparseDistContext = self._context
        embeddings = _take(context.embeddings, self._name)
        _check(self, args, kwargs)
        seam = None
        if self.cuts:
            seam = context.seams[self._name] = Seam(self.iteration)
        return _each(embeddings, lambda awaitable: _LookedUp(awaitable, self.iteration, seam))


class AheadForward(SplitForward):
    """The same, with one backward for the dense part and the tables."""

    cuts = False


FORWARDS: dict[Kind, type[PipelinedForward] | type[PrefetchForward]] = {
    "pipelined": PipelinedForward,
    "prefetch": PrefetchForward,
    "split": SplitForward,
    "ahead": AheadForward,
}


class _LookedUp(LazyGetItemMixin, LazyAwaitable):  # type: ignore[misc]
    """Embeddings of one iteration; with a seam, they become leaves of the dense part's graph."""

    def __init__(self, awaitable: Replayable, iteration: int, seam: Seam | None) -> None:
        super().__init__()
        self._inner = awaitable
        self._iteration = iteration
        self._seam = seam

    def _wait_impl(self) -> Any:
        embeddings = self._inner.wait_in(self._iteration)
        return embeddings if self._seam is None else map_tensors(embeddings, self._seam.cut)


def _each(output: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply to one awaitable, or to each: modules that manage collisions return several."""
    return tuple(map(fn, output)) if isinstance(output, tuple) else fn(output)


def _check(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if forward.inputs is not None:  # None for a replayed exchange, which was another batch's
        forward.inputs.check(forward, args, kwargs)


def _take(values: dict[str, Any], name: str) -> Any:
    if name not in values:
        raise RuntimeError(
            f"module {name!r} is called, but its input of this batch is not there or used up. "
            "Either the forward calls it twice: call it once and share the result. Or the model is "
            "called outside of its pipeline: detach() it first, attach() it after"
        )
    return values.pop(name)
