"""Everything imported from TorchRec. Much of it is private, so the version is checked first.

Deprecation warnings from importing TorchRec and fbgemm are suppressed.
"""

from __future__ import annotations

import logging
import os
import warnings
from importlib import metadata

TESTED = "1.8"
"""The tested series of TorchRec releases."""

ANY_VERSION = "SWPIPE_ANY_TORCHREC"
"""Set this environment variable to 1 to allow another version."""


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_version(found: str | None, *, any_version: bool = False) -> None:
    """Refuse an untested TorchRec.

    Raises:
        ImportError: TorchRec is missing, or its series is not ``TESTED`` without ``any_version``.
    """
    if found is None:
        raise ImportError(
            f"swpipe.tasks.sparse_dist needs torchrec {TESTED}.x, and none is installed: see the "
            "install guide, which also says how to get it without CUDA"
        )
    if not any_version and found.split(".")[:2] != TESTED.split("."):
        raise ImportError(
            f"torchrec {found} is installed, but swpipe.tasks.sparse_dist uses its private parts "
            f"and is tested with {TESTED}.x only: install torchrec=={TESTED}.*, or set "
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
        from torchrec.distributed.model_parallel import get_unwrapped_module as get_unwrapped_module
        from torchrec.distributed.train_pipeline.pipeline_context import (
            PrefetchTrainPipelineContext as PrefetchTrainPipelineContext,
        )
        from torchrec.distributed.train_pipeline.runtime_forwards import (
            BaseForward as BaseForward,
            PipelinedForward as PipelinedForward,
            PrefetchPipelinedForward as PrefetchPipelinedForward,
        )
        from torchrec.distributed.train_pipeline.tracing import (
            ArgInfoStepFactory as ArgInfoStepFactory,
            GetAttrArgInfoStep as GetAttrArgInfoStep,
            GetItemArgInfoStep as GetItemArgInfoStep,
            NodeArgsHelper as NodeArgsHelper,
            Tracer as Tracer,
            _get_leaf_module_names,
        )
        from torchrec.distributed.train_pipeline.types import (
            ArgInfo as ArgInfo,
            CallArgs as CallArgs,
        )
        from torchrec.distributed.train_pipeline.utils import (
            _override_input_dist_forwards,
            _start_data_dist,
        )
        from torchrec.distributed.types import (
            Awaitable as Awaitable,
            LazyAwaitable as LazyAwaitable,
            LazyGetItemMixin as LazyGetItemMixin,
            ShardedModule as ShardedModule,
        )
except ImportError as error:
    raise ImportError(
        f"torchrec {VERSION} does not have what swpipe.tasks.sparse_dist imports ({error}): "
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
"""Autograd functions that start an exchange of embeddings; backward waits for the gradients'."""


def describe() -> str:
    """The installed versions, in one line."""
    found = {name: installed_version(name) for name in ("fbgemm-gpu", "fbgemm-gpu-cpu")}
    fbgemm = [f"{name} {version}" for name, version in found.items() if version]
    return f"torchrec {VERSION} (tested: {TESTED}.x), {(fbgemm or ['no fbgemm'])[0]}"
