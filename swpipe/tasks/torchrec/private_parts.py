"""The parts of TorchRec that swpipe uses beyond its documentation, and a check of each.

Importing ``swpipe.tasks.torchrec`` checks for these parts rather than for a version number: any
TorchRec that has them is accepted. ``.ci/torchrec_release.py`` compares them with a new release.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A class or function of TorchRec that swpipe uses.

    Parameters are written as ``"a, b"``. A callable must take these parameters first, in this
    order. Any further parameter must have a default.

    Attributes:
        module: The module that it is imported from.
        name: Its name in this module.
        takes: The parameters that it is called with; None if it is not called.
        calls: Its methods that swpipe calls, with their parameters.
        replaces: Its methods that TorchRec calls and swpipe replaces, with all their parameters.
        has: Its attributes that are read or set, of the class or of its objects.
    """

    module: str
    name: str
    takes: str | None = None
    calls: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)
    has: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def _parts(module: str, *names: str, **parts: Mapping[str, Any]) -> Iterator[Part]:
    yield from (Part(module=module, name=name) for name in names)
    yield from (Part(module=module, name=name, **uses) for name, uses in parts.items())


# The table: one entry per class or function, grouped by module. Private names are unstable: a new
# release that renames one is found here, at import, and not in the middle of a step.
_DISTRIBUTED = "torchrec.distributed"
_PIPELINE = f"{_DISTRIBUTED}.train_pipeline"
# The attributes of collections of tables that are read.
_READ = "_input_dists create_context input_dist"

PARTS: tuple[Part, ...] = (
    *_parts(
        f"{_PIPELINE}.utils",
        _fuse_input_dist_splits={"takes": "context"},
        _override_input_dist_forwards={"takes": "pipelined_modules"},
    ),
    *_parts(
        f"{_PIPELINE}.tracing",
        _get_leaf_module_names={"takes": "model"},
        Tracer={"takes": "leaf_modules", "calls": {"is_leaf_module": "m, module_qualified_name"},
                "has": "_leaf_modules"},
        ArgInfoStepFactory={"calls": {"get_attr": "name"}},
        ScalarArgInfoStep={"has": "value"},
        GetAttrArgInfoStep={"has": "attr_name"},
        GetItemArgInfoStep={"takes": "item_index", "has": "item_index"},
        NodeArgsHelper={
            "takes": "model, context, pipeline_postproc",
            "calls": {"get_node_args": "node, for_postproc_module"},
            "replaces": {
                "_get_node_args_helper_inner": "arg, for_postproc_module",
                "_handle_placeholder": "child_node, arg_info",
                "_handle_module": "child_node, arg_info",
                "_handle_constant": "arg, arg_info, for_postproc_module",
                "_handle_collection_element": "arg, for_postproc_module",
            },
            "has": "_model _pipeline_postproc",
        },
    ),
    *_parts(
        f"{_PIPELINE}.types",
        ArgInfo={"takes": "steps", "calls": {"add_step": "step"}, "has": "steps"},
        CallArgs={"takes": "args, kwargs", "calls": {"build_args_kwargs": "initial_input"}},
    ),
    *_parts(
        f"{_PIPELINE}.runtime_forwards",
        "PipelinedForward",
        "PrefetchPipelinedForward",
        BaseForward={"takes": "name, args, module, context", "calls": {"set_context": "context"},
                     "has": "name args _name _args _module _context"},
    ),
    *_parts(
        f"{_PIPELINE}.pipeline_context",
        TrainPipelineContext={
            "has": "index version module_contexts input_dist_splits_requests "
                   "input_dist_tensors_requests fused_splits_awaitables",
        },
        PrefetchTrainPipelineContext={
            "has": "module_input_post_prefetch module_contexts_post_prefetch",
        },
    ),
    *_parts(
        f"{_PIPELINE}.pipeline_stage",
        PipelineStage={"takes": "name, runnable, stream, fill_callback, data_exhausted_callback"},
    ),
    *_parts(_PIPELINE, "train_pipelines"),
    *_parts(
        f"{_DISTRIBUTED}.types",
        Awaitable={"replaces": {"_wait_impl": ""}},
        LazyAwaitable={"takes": ""},
        LazyGetItemMixin={},
        ShardedModule={
            "calls": {
                "create_context": "",
                "preprocess_input": "args, kwargs",
                "input_dist": "ctx",
                "prefetch": "dist_input, forward_stream, ctx",
                "compute_and_output_dist": "ctx, input",
            },
        },
    ),
    *_parts(
        f"{_DISTRIBUTED}.dist_data",
        KJTAllToAllTensorsAwaitable={"has": "_workers _awaitables _input"},
    ),
    *_parts(
        f"{_DISTRIBUTED}.comm_ops",
        "All2All_Pooled_Req", "All2All_Seq_Req", "ReduceScatter_Req", "ReduceScatterBase_Req",
        "ReduceScatterV_Req", "Variable_Batch_All2All_Pooled_Req",
    ),
    *_parts(
        f"{_DISTRIBUTED}.model_parallel",
        get_unwrapped_module={"takes": "module"},
        DMPCollection={},
    ),
    *_parts(f"{_DISTRIBUTED}.embeddingbag", ShardedEmbeddingBagCollection={"has": _READ}),
    *_parts(f"{_DISTRIBUTED}.embedding", ShardedEmbeddingCollection={"has": _READ}),
    *_parts("torchrec.optim.fused", "FusedOptimizer"),
    *_parts(
        "torchrec",
        "JaggedTensor",
        KeyedJaggedTensor={"has": "_values _weights _lengths _offsets _jt_dict"},
    ),
)  # fmt: skip

# Apart from PARTS, since TorchRec before 1.8 lacks them: they are checked where PEC is used.
PEC_PARTS: tuple[Part, ...] = (
    *_parts(
        f"{_DISTRIBUTED}.pec_embedding",
        ShardedPECEmbeddingCollection={
            "calls": {"overlap_dist": "ctx, dist_input, prev_ctx, prev_dist_input"},
            "has": "_embedding_collection _env",
        },
    ),
    *_parts(
        f"{_DISTRIBUTED}.embedding",
        ShardedEmbeddingCollection={
            "calls": {"_embedding_dim_for_sharding_type": "sharding_type"},
            "has": "_lookups _output_dists _sharding_type_to_sharding _need_indices "
                   "_embedding_names_per_sharding _features_to_permute_indices",
        },
    ),
)  # fmt: skip
"""The parts that the exchange in two parts (PEC) uses; TorchRec has them since 1.8."""


def problems(parts: tuple[Part, ...] = PARTS) -> list[str]:
    """Return how the imported TorchRec differs from the parts, one line per difference."""
    return [line for part in parts for line in _of_part(part)]


def _of_part(part: Part) -> Iterator[str]:
    whole = find(part)
    if whole is None:
        yield f"{part} is gone{_moved(part.name)}"
        return
    if part.takes is not None:
        yield from _of_call(str(part), whole, part.takes)
    # Methods: their leading parameters must be these, since they are called by position or name.
    # What we replace is called by TorchRec, so there all parameters must be the same.
    for name, takes in {**part.calls, **part.replaces}.items():
        if not _has(whole, name):
            yield f"{part}.{name} is gone"
            continue
        # Static lookup, since a bound method would hide whether the first parameter is self.
        member = inspect.getattr_static(whole, name)
        bound = getattr(whole, name) if isinstance(member, classmethod) else member
        bare = not isinstance(member, classmethod | staticmethod)
        exactly = name in part.replaces
        yield from _of_call(f"{part}.{name}", bound, takes, skip=bare, exactly=exactly)
    for name in part.has.split():
        if not _has(whole, name):
            yield f"{part} has no {name!r}"


def _of_call(
    name: str, called: Any, takes: str, *, skip: bool = False, exactly: bool = False
) -> Iterator[str]:
    given = takes.split(", ") if takes else []
    parameters = list(inspect.signature(called).parameters.values())[skip:]
    # A parameter of *args or **kwargs accepts anything, so it does not count.
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in plain]
    needed = [p.name for p in plain[len(given) :] if p.default is p.empty]
    # Wrong are other leading names, a further parameter without a default, and, where we replace a
    # method, any other parameter.
    if names[: len(given)] != given or needed or (exactly and names != given):
        bare = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        yield f"{name} takes ({bare}), and was ({takes})"


def find(part: Part) -> Any:
    """Return the class, function or module, or None if it is gone."""
    try:
        module = importlib.import_module(part.module)
    except ModuleNotFoundError:
        return None
    return getattr(module, part.name, None)


# Most parts that are gone have moved to another module, which the message then names.
def _moved(name: str) -> str:
    """Return where else in the imported TorchRec the name is defined, as the end of a message."""
    places = [
        place
        for place, module in sorted(sys.modules.items())
        if place.startswith("torchrec.") and getattr(module, name, None) is not None
        # A module that only imports the name is not where it is defined.
        if getattr(getattr(module, name), "__module__", place) == place
    ]
    return f"; {' and '.join(places)} has that name" if places else ""


def _has(kind: Any, name: str) -> bool:
    """Return whether a class or its objects have an attribute."""
    if hasattr(kind, name):
        return True
    # Attributes of objects are found in annotations and slots, or as self.name in the text of an
    # initialiser: making an object would need a process group.
    for base in inspect.getmro(kind):
        if name in (*vars(base).get("__annotations__", ()), *vars(base).get("__slots__", ())):
            return True
        if re.search(rf"\bself\.{name}\b", source_of(vars(base).get("__init__"))):
            return True
    return False


def source_of(member: Any) -> str:
    """Return a function's source; "" for anything else, and for methods made by a dataclass."""
    member = inspect.unwrap(member)
    if not (inspect.isfunction(member) or inspect.ismethod(member)):
        return ""
    file = inspect.getsourcefile(member)
    return inspect.getsource(member) if file is not None and Path(file).exists() else ""
