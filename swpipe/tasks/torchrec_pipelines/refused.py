"""Arguments of TorchRec's pipelines that have no counterpart here: refused unless at their default.

Each entry says why, and what to do instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from swpipe.tasks.sparse_dist._torchrec import TrainPipelineContext

_MEMORY = (
    "it saves device memory in TorchRec's own copies and contexts, which are not used here, and "
    "changes no result: leave it out"
)


class Refusal(NamedTuple):
    """The default of an argument, and why other values are refused."""

    default: Any
    why: str


REASONS: dict[str, Refusal] = {
    "apply_jit": Refusal(
        False,
        "modules are not scripted here: apply torch.jit.script to them before you shard the model",
    ),
    "context_type": Refusal(
        TrainPipelineContext,
        "each batch has a context of swpipe's: keep what you need in the batch, or write a task",
    ),
    "debug_mode": Refusal(
        False, "it logs: use pipe.trace(), pipe.observe() and pipe.format_schedule()"
    ),
    "embedding_lookup_stream": Refusal(
        None,
        "rows would be looked up before the batch ahead updates them: use TrainPipelineSemiSync, "
        "which is stale by design, or TrainPipelineFusedSparseDist, which is exact",
    ),
    "enable_inplace_copy_batch": Refusal(False, _MEMORY),
    "free_features_storage_early": Refusal(False, _MEMORY),
    "clear_data_dist_inputs": Refusal(False, _MEMORY),
}


def refuse(owner: object, **given: Any) -> None:
    """Raise for each argument that is not at its default.

    Raises:
        NotImplementedError: One line for each.
    """
    lines = [
        f"{type(owner).__name__}({name}={value!r}): {REASONS[name].why}"
        for name, value in given.items()
        if value is not REASONS[name].default
    ]
    if lines:
        raise NotImplementedError("\n".join(lines))


def no_internal(owner: object, name: str, underneath: str) -> AttributeError:
    """The error for an attribute that only TorchRec's class has."""
    return AttributeError(
        f"{type(owner).__name__} has no {name!r}: swpipe's pipelines have the constructors and "
        "methods of TorchRec's, and not their queues, contexts and streams. The pipeline "
        f"underneath is {underneath}"
    )


def refuse_overrides(kind: type, original: type) -> None:
    """Refuse a subclass that overrides a method of TorchRec's which is never called here.

    Raises:
        TypeError: It would be ignored.
    """
    ours = kind.__mro__[1]
    ignored = [
        name
        for name, value in vars(kind).items()
        if callable(value)
        and not name.startswith("__")
        and (name == "sync_embeddings" or (hasattr(original, name) and not hasattr(ours, name)))
    ]
    if ignored:
        raise TypeError(
            f"{kind.__name__} overrides {', '.join(ignored)} of TorchRec's {original.__name__}, "
            "which are not called here: put what they do into a task or a TrainStep "
            "(swpipe.tasks.sparse_dist), or keep TorchRec's class"
        )
