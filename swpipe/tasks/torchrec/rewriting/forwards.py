"""Replacements for a sharded module's forward while the model is attached to a pipeline.

A sharded module's forward exchanges ids, looks up embeddings and exchanges the embeddings. Earlier
tasks exchange the ids. The rest runs in one of these ways ("own" replaces nothing)::

                  EmbPrefetch                EmbForward               DenseForward
    pipelined     -                          model: wait, look up     -
    prefetch      wait for ids, fill caches  model: look up           -
    split         wait for ids, fill caches  look up                  model: wait for embeddings
    ahead         the same                   the same                 the same
    own           -                          the model, as it is      -

A split pipeline gives a module the prefetch forward if DDP reduces parameters of it: its look-up
and its update are then part of DenseForward and DenseBackward.

The split forward also cuts the autograd graph at the embeddings (see ``seam``), so that the dense
part and the tables have a backward task each. "ahead" does not: without an exchange of gradients,
as on one rank, a backward of the tables' own hides nothing, and costs the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from swpipe._values.walk import map_tensors
from swpipe.device import Device
from swpipe.tasks.torchrec._torchrec import (
    BaseForward,
    LazyAwaitable,
    LazyGetItemMixin,
    PipelinedForward,
    PrefetchPipelinedForward,
    PrefetchTrainPipelineContext,
)
from swpipe.tasks.torchrec.rewriting.awaitables import Replayable
from swpipe.tasks.torchrec.rewriting.exchanged import CallInputs
from swpipe.tasks.torchrec.rewriting.inputs import Found
from swpipe.tasks.torchrec.rewriting.postproc import PostprocResults
from swpipe.tasks.torchrec.rewriting.seam import Seam

Kind: TypeAlias = Literal["own", "pipelined", "prefetch", "split", "ahead"]


@dataclass
class SparseDistContext(PrefetchTrainPipelineContext):  # type: ignore[misc]
    """What one batch carries between the stages: TorchRec's context, and fields of our own.

    TorchRec's own pipelines reuse one context (version 0) or keep a queue of them (version 1). Here
    each iteration has its own, of version 1. Keys are module names.

    Attributes:
        computed: What modules have computed of the batch ahead of the forward; None without any.
        inputs: The inputs of each module, which are exchanged.
        embeddings: Each module's embeddings, as awaitables.
        seams: The cut in the autograd graph at each module's embeddings.
    """

    computed: PostprocResults | None = None
    inputs: dict[str, CallInputs] = field(default_factory=dict)
    embeddings: dict[str, Any] = field(default_factory=dict)
    seams: dict[str, Seam] = field(default_factory=dict)

    def wait_for_sizes(self) -> None:
        """Wait for the sizes; start the exchange of ids."""
        for module_names, splits in self.fused_splits_awaitables:
            requests, _ = splits.wait_with_context()
            self.input_dist_tensors_requests.update(zip(module_names, requests, strict=True))
        self.fused_splits_awaitables.clear()


class SparseForward(BaseForward):  # type: ignore[misc]
    """What the replacements have in common; ``replayed`` says that the exchange was another's."""

    prefetches = False
    looks_up_ahead = False
    iteration = 0
    replayed = False

    def __init__(self, name: str, args: Any, module: Any, device: Device) -> None:
        BaseForward.__init__(self, name, args, module, context=None)
        self._device = device

    def _take(self, values: dict[str, Any]) -> Any:
        if self._name not in values:
            raise RuntimeError(
                f"module {self._name!r} is called "
                + (
                    "a second time in one forward, and its ids are exchanged once per batch: call "
                    "it once and share the result"
                    if self._name in self._context.inputs  # until the model has run
                    else "outside of its pipeline, which exchanges its ids ahead: detach() the "
                    "model first, attach() it after"
                )
            )
        return values.pop(self._name)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call with anything but the exchanged input."""
        inputs = self._context.inputs.get(self._name)
        if inputs is not None and not self.replayed and (why := inputs.mismatch(args, kwargs)):
            raise inputs.refusal(
                f"module {self._name!r}: its input {Found(self._args)} was exchanged between the "
                "ranks ahead of the forward",
                why,
            )


class WaitingForward(SparseForward, PipelinedForward):  # type: ignore[misc]
    """Wait for the ids and look up inside the model's forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings up; the input comes from the context, the arguments are checked."""
        context: SparseDistContext = self._context
        request = self._take(context.input_dist_tensors_requests)
        self._check(args, kwargs)
        data, module_context = request.wait_with_context()
        del context.module_contexts[self._name]
        return self._module.compute_and_output_dist(module_context, data)


class PrefetchForward(SparseForward, PrefetchPipelinedForward):  # type: ignore[misc]
    """Look up inside the model's forward, after EmbPrefetch has waited for the ids."""

    prefetches = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings up."""
        embeddings = self._look_up(self._context)
        self._check(args, kwargs)
        return embeddings

    def _look_up(self, context: SparseDistContext) -> Any:
        data = self._take(context.module_input_post_prefetch)
        module_context = context.module_contexts_post_prefetch.pop(self._name)
        if self._device.has_streams:
            # These values leave the context here, so the engine does not hold them at retirement.
            self._device.hold([data, module_context], [self._device.current_stream()])
        return self._module.compute_and_output_dist(module_context, data)


class SplitForward(PrefetchForward):
    """Look up in a task of its own, before the dense part."""

    looks_up_ahead = True
    cuts = True

    def look_up(self) -> None:
        """Look the embeddings up and start their exchange."""
        context: SparseDistContext = self._context
        context.embeddings[self._name] = _each(
            self._look_up(context),
            lambda awaitable: Replayable(awaitable, self._device, iteration=self.iteration),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings for the dense part, waited for when they are used."""
        context: SparseDistContext = self._context
        embeddings = self._take(context.embeddings)
        self._check(args, kwargs)
        seam = None
        if self.cuts:
            seam = context.seams[self._name] = Seam(self.iteration)
        return _each(embeddings, lambda awaitable: _LookedUp(awaitable, self.iteration, seam))


class AheadForward(SplitForward):
    """The same, with one backward for the dense part and the tables."""

    cuts = False


FORWARDS: dict[Kind, type[SparseForward]] = {
    "pipelined": WaitingForward,
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
