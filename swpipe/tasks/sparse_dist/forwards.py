"""What stands in for a sharded module's forward while a pipeline holds the model.

A sharded module's forward exchanges ids, looks embeddings up and exchanges those. The first part is
done ahead, by tasks of its own; what is left happens in one of three ways::

                  EmbPrefetch                EmbForward               DenseForward
    pipelined     -                          model: wait, look up     -
    prefetch      wait for ids, warm caches  model: look up           -
    split         wait for ids, warm caches  look up                  model: wait for embeddings

Under the split forward the graph is cut where the dense half takes an embedding (see ``seam``): the
dense half's backward ends there, and the embedding half's backward starts from there. So each half
has a backward task, and the exchange of embeddings has until the model asks for them.

All three run on the CPU as well as on a device: which stream waits for which is the awaitables'
affair. They are TorchRec's classes, so that TorchRec's functions take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from swpipe._tensors.pytree import map_tensors
from swpipe.device import Device
from swpipe.tasks.sparse_dist._torchrec import (
    Awaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    PrefetchPipelinedForward,
)
from swpipe.tasks.sparse_dist._torchrec import PipelinedForward as _TorchRecPipelinedForward
from swpipe.tasks.sparse_dist.awaitables import Replayable
from swpipe.tasks.sparse_dist.contexts import SparseDistContext
from swpipe.tasks.sparse_dist.seam import Seam

Kind: TypeAlias = Literal["pipelined", "prefetch", "split"]


class PipelinedForward(_TorchRecPipelinedForward):  # type: ignore[misc]
    """Waits for the ids inside the model's forward."""

    prefetches = False

    def __init__(self, name: str, args: Any, module: Any, device: Device) -> None:
        super().__init__(name, args, module, context=None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings up; the arguments are those of the batch in flight already."""
        context: SparseDistContext = self._context
        request = _take(context.input_dist_tensors_requests, self._name)
        data, module_context = request.wait_with_context()
        del context.module_contexts[self._name]
        return self._module.compute_and_output_dist(module_context, data)


class PrefetchForward(PrefetchPipelinedForward):  # type: ignore[misc]
    """Finds the ids waited for, and the caches warm."""

    prefetches = True

    def __init__(self, name: str, args: Any, module: Any, device: Device) -> None:
        super().__init__(name, args, module, context=None)
        self._where = device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look the embeddings up."""
        return self._look_up(self._context)

    def _look_up(self, context: SparseDistContext) -> Any:
        data = _take(context.module_input_post_prefetch, self._name)
        module_context = context.module_contexts_post_prefetch.pop(self._name)
        if self._where.has_streams:
            # What is taken out of the context here, the engine does not see at retirement.
            self._where.hold([data, module_context], [self._where.current_stream()])
        return self._module.compute_and_output_dist(module_context, data)


class SplitForward(PrefetchForward):
    """The embedding half apart from the dense one."""

    def look_up(self) -> None:
        """The embedding half: look up, and begin the exchange of embeddings."""
        context: SparseDistContext = self._context
        output = self._look_up(context)
        context.embeddings[self._name] = _each(
            output, lambda awaitable: Replayable(awaitable, self._where)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """For the dense half: the embeddings, waited for when they are used."""
        context: SparseDistContext = self._context
        embeddings = _take(context.embeddings, self._name)
        seam = context.seams[self._name] = Seam()
        return _each(embeddings, lambda awaitable: _CutOff(awaitable, seam))


FORWARDS: dict[Kind, type[PipelinedForward] | type[PrefetchForward]] = {
    "pipelined": PipelinedForward,
    "prefetch": PrefetchForward,
    "split": SplitForward,
}


class _CutOff(LazyGetItemMixin, LazyAwaitable):  # type: ignore[misc]
    """Embeddings as leaves of a new graph."""

    def __init__(self, awaitable: Awaitable, seam: Seam) -> None:
        super().__init__()
        self._inner = awaitable
        self._seam = seam

    def _wait_impl(self) -> Any:
        return map_tensors(self._inner.wait(), self._seam.cut)


def _each(output: Any, fn: Callable[[Any], Any]) -> Any:
    """Modules that manage collisions return several awaitables; all others, one."""
    return tuple(map(fn, output)) if isinstance(output, tuple) else fn(output)


def _take(values: dict[str, Any], name: str) -> Any:
    if name not in values:
        raise RuntimeError(
            f"module {name!r} is called, but its input of this batch is not there or used up. "
            "Either the forward calls it twice: call it once and share the result. Or the model is "
            "called outside of its pipeline: detach() it first, attach() it after"
        )
    return values.pop(name)
