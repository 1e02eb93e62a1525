"""Replacements for a sharded module's forward while the model is attached to a pipeline.

A sharded module's forward exchanges ids, looks up embeddings and exchanges the embeddings. Earlier
tasks exchange the ids. The rest runs in one of these ways ("own" replaces nothing)::

                  EmbPrefetch                EmbForward               DenseForward
    pipelined     -                          model: wait, look up     -
    prefetch      wait for ids, fill caches  model: look up           -
    split         wait for ids, fill caches  look up                  model: wait for embeddings
    ahead         the same                   the same                 the same
    own           -                          the model, unmodified    -

A split pipeline gives a module the prefetch forward if DDP reduces parameters of it: its look-up
and its update are then part of DenseForward and DenseBackward.

The split forward also cuts the autograd graph at the embeddings (see ``seam``), so that the dense
part and the tables have a backward task each. "ahead" does not cut: without an exchange of
gradients, as on one rank, a separate backward of the tables hides nothing, and costs host time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

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
from swpipe.tasks.torchrec.rewriting.postproc import PostprocResults
from swpipe.tasks.torchrec.rewriting.seam import Seam
from swpipe.values import map_tensors

Kind: TypeAlias = Literal["own", "pipelined", "prefetch", "split", "ahead"]


@dataclass
class SparseDistContext(PrefetchTrainPipelineContext):  # type: ignore[misc]
    """The values that one batch carries between stages: TorchRec's context with further fields.

    Keys are module names.

    Attributes:
        version: 1 tells TorchRec's code that each batch has a context of its own.
        computed: The results of modules that ran ahead of the forward; None without any.
        inputs: The inputs of each module, which are exchanged.
        embeddings: Each module's embeddings, as awaitables.
        seams: The cut in the autograd graph at each module's embeddings.
    """

    version: int = 1
    computed: PostprocResults | None = None
    inputs: dict[str, CallInputs] = field(default_factory=dict)
    embeddings: dict[str, Any] = field(default_factory=dict)
    seams: dict[str, Seam] = field(default_factory=dict)

    def wait_for_sizes(self) -> None:
        """Wait for the sizes and start the exchange of ids."""
        for module_names, splits in self.fused_splits_awaitables:
            requests, _ = splits.wait_with_context()
            self.input_dist_tensors_requests.update(zip(module_names, requests, strict=True))
        # An awaitable can be waited for once; a second call finds nothing left to wait for.
        self.fused_splits_awaitables.clear()


class SparseForward(BaseForward):  # type: ignore[misc]
    """Base class of the replacements; the model runs on the batch of ``iteration``."""

    # Looks up in place of the module's own method, if it is not None.
    compute: Callable[[Any, Any], Any] | None = None
    # Whether EmbPrefetch waits for the module's ids, and whether EmbForward calls look_up().
    prefetches = False
    looks_up_ahead = False
    iteration = 0

    def __init__(self, name: str, args: Any, module: Any, device: Device) -> None:
        # The context is set for each batch, by Rewrite.use. TorchRec's initialiser sets _device to
        # "cuda" without a stream, so it is set again.
        BaseForward.__init__(self, name, args, module, context=None)
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look up the embeddings of the exchanged ids, and check the arguments against these."""
        embeddings = self._look_up(self._context)
        self._check(args, kwargs)
        return embeddings

    def _look_up(self, context: SparseDistContext) -> Any:
        """Return the embeddings of the exchanged ids, as awaitables."""
        raise NotImplementedError

    def _take(self, values: dict[str, Any]) -> Any:
        # Removed as it is taken, so that a second call within one forward is noticed.
        if self._name not in values:
            raise RuntimeError(
                f"module {self._name!r} is called "
                + (
                    "a second time in one forward, and its ids are exchanged once per batch: call "
                    "it once and share the result"
                    if self._name in self._context.inputs  # cleared after the model's forward
                    else "outside of its pipeline, which exchanges its ids ahead: detach() the "
                    "model first, attach() it after"
                )
            )
        return values.pop(self._name)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call with an input other than the exchanged one."""
        inputs = self._context.inputs.get(self._name)
        # A shortcut replays the context of an earlier iteration, which has another batch's inputs.
        own = self._context.index == self.iteration
        if inputs is not None and own and (why := inputs.mismatch(args, kwargs)):
            raise inputs.refusal(
                f"module {self._name!r}: its input {self._args} was exchanged between the "
                "ranks ahead of the forward",
                why,
            )


class WaitingForward(SparseForward, PipelinedForward):  # type: ignore[misc]
    """A forward that waits for the ids and looks up inside the model's forward."""

    def _look_up(self, context: SparseDistContext) -> Any:
        request = self._take(context.input_dist_tensors_requests)
        data, module_context = request.wait_with_context()
        del context.module_contexts[self._name]
        return self._module.compute_and_output_dist(module_context, data)


class PrefetchForward(SparseForward, PrefetchPipelinedForward):  # type: ignore[misc]
    """A forward that looks up inside the model's forward; EmbPrefetch has waited for the ids."""

    prefetches = True

    def _look_up(self, context: SparseDistContext) -> Any:
        data = self._take(context.module_input_post_prefetch)
        module_context = context.module_contexts_post_prefetch.pop(self._name)
        if self._device.has_streams:
            # These values leave the context here, so the engine cannot hold their memory when the
            # iteration retires: it is held for the stream now.
            self._device.hold([data, module_context], [self._device.current_stream()])
        compute = self.compute or self._module.compute_and_output_dist
        return compute(module_context, data)


class SplitForward(PrefetchForward):
    """A forward whose look-up is a task of its own, before the dense part."""

    looks_up_ahead = True
    # Whether the autograd graph is cut at the embeddings, so that the tables have a backward task.
    cuts = True

    def look_up(self) -> None:
        """Look the embeddings up and start their exchange."""
        context: SparseDistContext = self._context
        # Replayable, since a shortcut of EmbForward restores these awaitables in every iteration.
        context.embeddings[self._name] = _each(
            self._look_up(context),
            lambda awaitable: Replayable(awaitable, self._device, iteration=self.iteration),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings for the dense part, which are waited for on first use."""
        context: SparseDistContext = self._context
        embeddings = self._take(context.embeddings)
        self._check(args, kwargs)
        seam = None
        if self.cuts:
            seam = Seam(self.iteration)
            context.seams[self._name] = seam
        return _each(embeddings, lambda awaitable: _LookedUp(awaitable, self.iteration, seam))


class AheadForward(SplitForward):
    """A split forward without a cut: one backward for the dense part and the tables."""

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
        # Iterations other than the awaitable's own get a detached result: see Replayable.
        embeddings = self._inner.wait_in(self._iteration)
        return embeddings if self._seam is None else map_tensors(embeddings, self._seam.cut)


def _each(output: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply a function to each awaitable; managed collisions return several of them."""
    return tuple(map(fn, output)) if isinstance(output, tuple) else fn(output)
