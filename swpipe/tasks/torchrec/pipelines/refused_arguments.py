"""Arguments and classes of TorchRec without a counterpart here: refused, with an alternative.

Arguments are bound as TorchRec's class binds them, and refused unless they have their default
value. Classes without a counterpart raise when they are constructed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, Self

from swpipe.tasks.torchrec._torchrec import torchrec_pipelines

REASONS = {
    "apply_jit": "modules are not scripted here: apply torch.jit.script to them before you shard "
    "the model",
    "context_type": "each batch has a context of swpipe's: keep what you need in the batch, or "
    "write a task",
    "debug_mode": "it logs: use pipe.trace(), pipe.observe() and pipe.format_schedule()",
    "embedding_lookup_stream": "rows would be looked up before the batch ahead updates them: use "
    "TrainPipelineSemiSync, which is stale by design, or TrainPipelineFusedSparseDist, which is "
    "exact",
}
"""Argument to the reason why a value other than its default is refused."""

UNKNOWN = (
    "this argument of the TorchRec that is installed is unknown to swpipe: leave it out, or keep "
    "TorchRec's class"
)

TAKEN = frozenset(
    {
        "model", "optimizer", "device", "custom_model_fwd", "execute_all_batches",
        "pipeline_postproc", "dmp_collection_sync_interval_batches", "enqueue_batch_after_forward",
        "strict", "emb_lookup_stream", "embedding_lookup_after_data_dist", "start_batch",
        "stash_gradients", "enable_embedding_lookup_prefetch",
        "enable_inplace_copy_batch", "free_features_storage_early", "clear_data_dist_inputs",
        "inplace_copy_batch_to_gpu", "async_inplace_copy",  # in TorchRec 1.5; since 1.9
        "site_fqn", "sharding_type", "delay_stash", "stash_site_fqn",  # the plan says when
    }
)  # fmt: skip
"""The arguments of TorchRec's pipelines that are accepted with any value."""


def bound(
    owner: Any, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a pipeline by name.

    Raises:
        NotImplementedError: An argument is refused (see ``refuse``), or only the installed TorchRec
            has it.
        TypeError: The class does not take these arguments.
    """
    name = type(owner).__name__
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise TypeError(f"{name}() {error}; it takes {takes}, run_ahead") from None
    call.apply_defaults()
    given: dict[str, Any] = call.arguments
    # A newer TorchRec may have arguments that swpipe has never seen. They pass at their default,
    # whose behaviour they do not change. A signature of swpipe's own has known arguments only.
    known = (TAKEN if owner.arguments is None else given.keys()) - REASONS.keys()
    # By identity: comparing with == may run code of the argument, or fail for tensors.
    changed = {
        key: value
        for key, value in given.items()
        if key not in known and value is not signature.parameters[key].default
    }
    refuse(owner, changed)
    return given


def arguments(by_position: Mapping[str, Any], by_keyword: Mapping[str, Any]) -> Signature:
    """Return a signature of model, optimizer and device, then of these arguments with defaults."""
    required = dict.fromkeys(("model", "optimizer", "device"), Parameter.empty)
    kinds = {
        Parameter.POSITIONAL_OR_KEYWORD: {**required, **by_position},
        Parameter.KEYWORD_ONLY: by_keyword,
    }
    return Signature(
        [
            Parameter(name, kind, default=default)
            for kind, defaults in kinds.items()
            for name, default in defaults.items()
        ]
    )


def signature_of(kind: type) -> Signature:
    """Return a class's signature, with ``*args, **kwargs`` replaced by its base's parameters."""
    signature = inspect.signature(kind)
    several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    own = [p for p in signature.parameters.values() if p.kind not in several]
    if len(own) == len(signature.parameters):
        return signature
    # Pipelines of TorchRec forward *args and **kwargs to the class that they extend, which is next
    # in the resolution order.
    inherited = signature_of(kind.__mro__[1]).parameters.values()
    return Signature([*inherited, *own])


def refuse(owner: object, given: Mapping[str, Any]) -> None:
    """Raise NotImplementedError with one line per argument that is not at its default."""
    kind = type(owner).__name__
    lines = [
        f"{kind}({key}={value!r}): {REASONS.get(key, UNKNOWN)}" for key, value in given.items()
    ]
    if lines:
        raise NotImplementedError("\n".join(lines))


def no_internal(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that only TorchRec's class has."""
    return AttributeError(
        f"{type(owner).__name__} has no {name!r}: swpipe's pipelines have the constructors and "
        "methods of TorchRec's, and not their queues, contexts and streams. The pipeline "
        "underneath is .pipe, its plan .pipe.plan"
    )


INSTEAD = {
    "EvalPipelineCPUSparse": "it looks tables up on the CPU for a dense part on a GPU: shard the "
    "tables on the GPU and use EvalPipelineSparseDist, or keep TorchRec's class",
    "TrainPipelinePT2": "it compiles the model in its fourth batch and overlaps nothing: call "
    "model.compile() yourself, and use TrainPipelineBase, which copies batches ahead",
    "TrainPipelineSparseDistBwdOpt": "it steps the optimizer within backward, with the gradients "
    "that are there by then: TrainPipelineFusedSparseDist steps with all of them, while the next "
    "batch's embeddings are exchanged, where the optimizer has no tables",
    "TrainPipelineSparseDistCompAutograd": "it compiles backward: call progress() of "
    "TrainPipelineSparseDist under torch._dynamo.compiled_autograd, or keep TorchRec's class",
}
"""Class without a counterpart to a sentence that says what it does and what to use instead."""


class Elsewhere(torchrec_pipelines.TrainPipeline):  # type: ignore[misc]
    """Base class of the classes in ``INSTEAD``, which cannot be constructed."""

    # Not __init__, which is called for classes without abstract methods only.
    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Raise NotImplementedError."""
        name = cls.__name__
        raise NotImplementedError(f"{name} has no counterpart in swpipe: {INSTEAD[name]}")


# Classes, so that scripts can import each name and use it in annotations and isinstance().
ELSEWHERE = {name: type(name, (Elsewhere,), {}) for name in INSTEAD}
