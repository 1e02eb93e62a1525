"""Every import from TorchRec, with private functions under names without an underscore.

Deprecation warnings from importing TorchRec and fbgemm are suppressed.
"""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from contextlib import suppress
from importlib import metadata
from typing import Any

FIRST = (1, 5)
LAST = (1, 9)
"""The first and the last release series of TorchRec that the tests run on."""

TESTED = "{}.{} to {}.{}".format(*FIRST, *LAST)
NEWEST = "torchrec=={}.{}.*".format(*LAST)


def check_version(version: str | None) -> None:
    """Raise ImportError for a missing TorchRec; warn if the tests do not run on its version."""
    if version is None:
        raise ImportError(
            f"swpipe.tasks.torchrec needs torchrec, tested with {TESTED}, and none is installed: "
            "see the install guide, which also says how to get it without CUDA"
        )
    series = re.match(r"(\d+)\.(\d+)", version)
    # Only a warning: a part that is gone is an error of the imports below.
    if series is None or not FIRST <= tuple(map(int, series.groups())) <= LAST:
        warnings.warn(
            f"torchrec {version} is installed, and swpipe is tested with {TESTED}. It has the "
            "private parts that swpipe uses; compare a few losses with those of TorchRec's own "
            f"pipeline, or install {NEWEST}",
            stacklevel=2,
        )


# Before the imports, so that a missing TorchRec gives the message above and not that of import.
VERSION: str | None = None
with suppress(metadata.PackageNotFoundError):
    VERSION = metadata.version("torchrec")
if VERSION is None:
    check_version(VERSION)

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        # torch.fx logs warnings while TorchRec is imported, about which a user can do nothing.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        from torchrec import JaggedTensor, KeyedJaggedTensor
        from torchrec.distributed import train_pipeline
        from torchrec.distributed.comm_ops import (
            All2All_Pooled_Req,
            All2All_Seq_Req,
            ReduceScatter_Req,
            ReduceScatterBase_Req,
            ReduceScatterV_Req,
            Variable_Batch_All2All_Pooled_Req,
        )
        from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
        from torchrec.distributed.embedding import ShardedEmbeddingCollection
        from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
        from torchrec.distributed.model_parallel import DMPCollection, get_unwrapped_module
        from torchrec.distributed.train_pipeline import train_pipelines as torchrec_pipelines
        from torchrec.distributed.train_pipeline.pipeline_context import (
            PrefetchTrainPipelineContext,
        )
        from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
        from torchrec.distributed.train_pipeline.runtime_forwards import (
            BaseForward,
            PipelinedForward,
            PrefetchPipelinedForward,
        )
        from torchrec.distributed.train_pipeline.tracing import Tracer
        from torchrec.distributed.train_pipeline.tracing import (
            _get_leaf_module_names as get_leaf_module_names,
        )
        from torchrec.distributed.train_pipeline.utils import (
            _fuse_input_dist_splits as fuse_input_dist_splits,
        )
        from torchrec.distributed.train_pipeline.utils import (
            _override_input_dist_forwards as override_input_dist_forwards,
        )
        from torchrec.distributed.types import (
            Awaitable,
            LazyAwaitable,
            LazyGetItemMixin,
            ShardedModule,
        )
        from torchrec.optim.fused import FusedOptimizer

        pipeline_modules: list[Any] = [torchrec_pipelines]
        # TorchRec before 1.7 lacks the first of these modules, and before 1.9 the second.
        for name in ("experimental_pipelines", "pec_train_pipeline"):
            with suppress(ModuleNotFoundError):
                module = importlib.import_module(f"{train_pipeline.__name__}.{name}")
                pipeline_modules.append(module)
except ImportError as error:
    raise ImportError(
        f"torchrec {VERSION} is not as swpipe.tasks.torchrec uses it: {error}\ninstall {NEWEST}, "
        "with the torch and fbgemm that it goes with (see the install guide), or a newer swpipe"
    ) from error
check_version(VERSION)

__all__ = [
    "Awaitable",
    "BaseForward",
    "DMPCollection",
    "FusedOptimizer",
    "JaggedTensor",
    "KJTAllToAllTensorsAwaitable",
    "KeyedJaggedTensor",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "PipelineStage",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "ShardedModule",
    "Tracer",
    "fuse_input_dist_splits",
    "get_leaf_module_names",
    "get_unwrapped_module",
    "override_input_dist_forwards",
    "torchrec_pipelines",
    "train_pipeline",
]

EXCHANGES = (
    All2All_Pooled_Req,
    All2All_Seq_Req,
    ReduceScatter_Req,
    ReduceScatterBase_Req,
    ReduceScatterV_Req,
    Variable_Batch_All2All_Pooled_Req,
)
"""Autograd functions that start an exchange of embeddings; backward waits for gradients in them."""

PLAIN_TABLES = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
"""Sharded modules whose state an exchange of ids and a look-up leave unchanged."""


def torchrec_class(name: str) -> Any:
    """Return a pipeline class of the installed TorchRec, or None if there is none of that name."""
    known = (vars(module) for module in pipeline_modules)
    return next((names[name] for names in known if name in names), None)
