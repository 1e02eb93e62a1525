"""All that we take from TorchRec, much of it private, in one place that checks what it found.

Importing TorchRec and fbgemm warns of parts of theirs that have moved; nothing of that concerns our
user. Private names may move with any release, so the version is checked before anything is taken.
"""

from __future__ import annotations

import logging
import os
import warnings
from importlib import metadata

TESTED = "1.8"
"""The series of TorchRec releases that this was written for and tested with."""

ANY_VERSION = "SWPIPE_ANY_TORCHREC"
"""Set this environment variable to 1 to try another version."""


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_version(found: str | None, *, any_version: bool = False) -> None:
    """Refuse a TorchRec that this was not written for.

    Raises:
        ImportError: There is none, or another series than ``TESTED``, and ``any_version`` is not
            set.
    """
    if found is None:
        raise ImportError(
            f"swpipe.tasks.sparse_dist needs torchrec {TESTED}.x, and none is installed: see the "
            "install guide, which also says how to get it without CUDA"
        )
    if not any_version and found.split(".")[:2] != TESTED.split("."):
        raise ImportError(
            f"torchrec {found} is installed, but swpipe.tasks.sparse_dist leans on its private "
            f"parts and was tested with {TESTED}.x only: install torchrec=={TESTED}.*, or set "
            f"{ANY_VERSION}=1 to try this one"
        )


VERSION = installed_version("torchrec")
check_version(VERSION, any_version=os.environ.get(ANY_VERSION) == "1")

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        from torchrec.distributed.comm_ops import (
            All2All_Pooled_Req,
            All2All_Seq_Req,
            ReduceScatter_Req,
            ReduceScatterBase_Req,
            ReduceScatterV_Req,
            Variable_Batch_All2All_Pooled_Req,
        )
        from torchrec.distributed.model_parallel import get_unwrapped_module
        from torchrec.distributed.train_pipeline.pipeline_context import (
            PrefetchTrainPipelineContext,
        )
        from torchrec.distributed.train_pipeline.runtime_forwards import (
            BaseForward,
            PipelinedForward,
            PrefetchPipelinedForward,
        )
        from torchrec.distributed.train_pipeline.tracing import (
            ArgInfoStepFactory,
            GetAttrArgInfoStep,
            GetItemArgInfoStep,
            NodeArgsHelper,
            Tracer,
            _get_leaf_module_names,
        )
        from torchrec.distributed.train_pipeline.types import ArgInfo, CallArgs
        from torchrec.distributed.train_pipeline.utils import (
            _override_input_dist_forwards,
            _start_data_dist,
        )
        from torchrec.distributed.types import (
            Awaitable,
            LazyAwaitable,
            LazyGetItemMixin,
            ShardedModule,
        )
except ImportError as error:
    raise ImportError(
        f"torchrec {VERSION} does not have what swpipe.tasks.sparse_dist takes from it ({error}): "
        f"install torchrec=={TESTED}.*"
    ) from error

get_leaf_module_names = _get_leaf_module_names
override_input_dist_forwards = _override_input_dist_forwards
start_data_dist = _start_data_dist

EXCHANGES = (
    All2All_Pooled_Req,
    All2All_Seq_Req,
    ReduceScatter_Req,
    ReduceScatterBase_Req,
    ReduceScatterV_Req,
    Variable_Batch_All2All_Pooled_Req,
)
"""The autograd functions that begin an exchange of embeddings, and wait for that of gradients."""


def describe() -> str:
    """What was found, in one line."""
    fbgemm = next(
        (
            f"{name} {v}"
            for name in ("fbgemm-gpu", "fbgemm-gpu-cpu")
            if (v := installed_version(name))
        ),
        "no fbgemm",
    )
    return f"torchrec {VERSION} (tested: {TESTED}.x), {fbgemm}"


__all__ = [
    "EXCHANGES",
    "ArgInfo",
    "ArgInfoStepFactory",
    "Awaitable",
    "BaseForward",
    "CallArgs",
    "GetAttrArgInfoStep",
    "GetItemArgInfoStep",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "NodeArgsHelper",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "ShardedModule",
    "Tracer",
    "check_version",
    "describe",
    "get_leaf_module_names",
    "get_unwrapped_module",
    "override_input_dist_forwards",
    "start_data_dist",
]
