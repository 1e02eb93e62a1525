"""Everything imported from TorchRec. Much of it is private, so the version is checked first.

Deprecation warnings from importing TorchRec and fbgemm are suppressed.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings
from importlib import metadata
from typing import Any

FIRST, LAST = (1, 5), (1, 8)
"""The first and the last supported series of TorchRec releases; both are tested."""

SUPPORTED = "{}.{} to {}.{}".format(*FIRST, *LAST)
NEWEST = "torchrec=={}.{}.*".format(*LAST)

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
        ImportError: TorchRec is missing, or its series is not supported and ``any_version`` is not
            given.
    """
    if found is None:
        raise ImportError(
            f"swpipe.tasks.torchrec needs torchrec {SUPPORTED}, and none is installed: see the "
            "install guide, which also says how to get it without CUDA"
        )
    series = re.match(r"(\d+)\.(\d+)", found)
    supported = series is not None and FIRST <= tuple(map(int, series.groups())) <= LAST
    if not (any_version or supported):
        raise ImportError(
            f"torchrec {found} is installed, but swpipe.tasks.torchrec uses its private parts "
            f"and supports {SUPPORTED}: install {NEWEST}, or set {ANY_VERSION}=1 to try this one"
        )


VERSION = installed_version("torchrec")
check_version(VERSION, any_version=os.environ.get(ANY_VERSION) == "1")

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
        from torchrec.distributed import comm_ops
        from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
        from torchrec.distributed.embedding import (
            EmbeddingCollectionSharder,
            ShardedEmbeddingCollection,
        )
        from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
        from torchrec.distributed.model_parallel import DMPCollection, get_unwrapped_module
        from torchrec.distributed.train_pipeline import train_pipelines as torchrec_pipelines
        from torchrec.distributed.train_pipeline.pipeline_context import (
            PrefetchTrainPipelineContext,
            TrainPipelineContext,
        )
        from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
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
            ScalarArgInfoStep,
            Tracer,
            _get_leaf_module_names,
        )
        from torchrec.distributed.train_pipeline.types import ArgInfo, CallArgs
        from torchrec.distributed.train_pipeline.utils import (
            _fuse_input_dist_splits,
            _override_input_dist_forwards,
        )
        from torchrec.distributed.types import (
            Awaitable,
            LazyAwaitable,
            LazyGetItemMixin,
            ShardedModule,
        )
        from torchrec.optim.fused import FusedOptimizer
        from torchrec.streamable import Pipelineable
except ImportError as error:
    raise ImportError(
        f"torchrec {VERSION} does not have what swpipe.tasks.torchrec imports ({error}): "
        f"install {NEWEST}"
    ) from error

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        _experimental: Any = importlib.import_module(
            "torchrec.distributed.train_pipeline.experimental_pipelines"
        )
except ImportError:
    _experimental = None  # before TorchRec 1.7

get_leaf_module_names = _get_leaf_module_names
override_input_dist_forwards = _override_input_dist_forwards
fuse_input_dist_splits = _fuse_input_dist_splits

EXCHANGES = (
    comm_ops.All2All_Pooled_Req, comm_ops.All2All_Seq_Req, comm_ops.ReduceScatter_Req,
    comm_ops.ReduceScatterBase_Req, comm_ops.ReduceScatterV_Req,
    comm_ops.Variable_Batch_All2All_Pooled_Req,
)  # fmt: skip
"""Autograd functions that start an exchange of embeddings; backward waits for the gradients'."""

PLAIN_TABLES = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
"""Sharded modules that an exchange of ids and a look-up leave as they were."""


def torchrec_class(name: str) -> Any:
    """A pipeline class of the TorchRec that is installed; None if it has none of that name."""
    return getattr(torchrec_pipelines, name, None) or getattr(_experimental, name, None)


def describe() -> str:
    """The installed versions, in one line."""
    found = {name: installed_version(name) for name in ("fbgemm-gpu", "fbgemm-gpu-cpu")}
    fbgemm = [f"{name} {version}" for name, version in found.items() if version]
    return f"torchrec {VERSION} (supported: {SUPPORTED}), {(fbgemm or ['no fbgemm'])[0]}"


__all__ = [
    "EXCHANGES",
    "PLAIN_TABLES",
    "ArgInfo",
    "ArgInfoStepFactory",
    "Awaitable",
    "BaseForward",
    "CallArgs",
    "DMPCollection",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingConfig",
    "FusedOptimizer",
    "GetAttrArgInfoStep",
    "GetItemArgInfoStep",
    "JaggedTensor",
    "KJTAllToAllTensorsAwaitable",
    "KeyedJaggedTensor",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "NodeArgsHelper",
    "PipelineStage",
    "Pipelineable",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "ScalarArgInfoStep",
    "ShardedModule",
    "Tracer",
    "TrainPipelineContext",
    "check_version",
    "describe",
    "fuse_input_dist_splits",
    "get_leaf_module_names",
    "get_unwrapped_module",
    "override_input_dist_forwards",
    "torchrec_class",
    "torchrec_pipelines",
]  # fmt: skip
