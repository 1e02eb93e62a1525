"""A recommender's training step on TorchRec's sharded modules, divided into eleven tasks.

TorchRec's own train pipelines are available under their names and with their arguments::

    from swpipe.tasks.torchrec import TrainPipelineSparseDist

replaces ``from torchrec.distributed.train_pipeline import TrainPipelineSparseDist``. An argument
without a counterpart in swpipe is refused, with the reason, unless it has its default value. A
class without a counterpart raises at construction and names an alternative. All other names of
TorchRec's package, such as ``GradientAccumulationWrapper``, are TorchRec's own objects.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# For type checkers, to which ``__getattr__`` would give each name the type Any.
if TYPE_CHECKING:
    from swpipe.tasks.torchrec._torchrec import PipelineStage
    from swpipe.tasks.torchrec.embedding_tables.released import MemoryOptions
    from swpipe.tasks.torchrec.pipelines.drop_in import SparseDistPipeline
    from swpipe.tasks.torchrec.pipelines.named import (
        EvalPipelineFusedSparseDist,
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainEvalHybridPipelineBase,
        TrainPipelineBase,
        TrainPipelineFusedSparseDist,
        TrainPipelineSparseDist,
        TrainPipelineSparseDistLite,
        TrainPipelineSparseDistT,
    )
    from swpipe.tasks.torchrec.pipelines.pec_pipeline import TrainPipelinePEC
    from swpipe.tasks.torchrec.pipelines.pipeline_factory import PipelineFactory
    from swpipe.tasks.torchrec.pipelines.semi_sync import TrainPipelineSemiSync
    from swpipe.tasks.torchrec.pipelines.staged import SparseDataDistUtil, StagedTrainPipeline
    from swpipe.tasks.torchrec.pipelines.stashed import (
        TrainPipelinePrefetchEMS,
        TrainPipelineSparseDistEmbStash,
        TrainPipelineSparseDistOptStash,
    )
    from swpipe.tasks.torchrec.rewriting.inputs import RewriteError
    from swpipe.tasks.torchrec.rewriting.rewrite import RewriteReport
    from swpipe.tasks.torchrec.shuffling.shuffle import (
        IdentityShuffler,
        KarmarkarKarpShuffler,
        Shuffler,
    )
    from swpipe.tasks.torchrec.step.per_token import PerToken
    from swpipe.tasks.torchrec.step.task_options import TaskOptions
    from swpipe.tasks.torchrec.step.task_set import SparseDistTasks
    from swpipe.tasks.torchrec.step.train_step import TrainStep

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "IdentityShuffler",
    "KarmarkarKarpShuffler",
    "MemoryOptions",
    "PerToken",
    "PipelineFactory",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "RewriteError",
    "RewriteReport",
    "Shuffler",
    "SparseDataDistUtil",
    "SparseDistPipeline",
    "SparseDistTasks",
    "StagedTrainPipeline",
    "TaskOptions",
    "TrainEvalHybridPipelineBase",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePEC",
    "TrainPipelinePrefetchEMS",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistEmbStash",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistOptStash",
    "TrainPipelineSparseDistT",
    "TrainStep",
]

# TorchRec is imported only when a name that needs it is first used: importing this package must
# succeed, and quickly, where TorchRec is not installed.
_WHERE = {
    "IdentityShuffler": ".shuffling.shuffle",
    "KarmarkarKarpShuffler": ".shuffling.shuffle",
    "MemoryOptions": ".embedding_tables.released",
    "PerToken": ".step.per_token",
    # Loading `drop_in` registers the ready-made pipelines, so a factory from here has them.
    "PipelineFactory": ".pipelines.drop_in",
    "PipelineStage": "._torchrec",
    "RewriteError": ".rewriting.inputs",
    "RewriteReport": ".rewriting.rewrite",
    "Shuffler": ".shuffling.shuffle",
    "SparseDataDistUtil": ".pipelines.staged",
    "SparseDistPipeline": ".pipelines.drop_in",
    "SparseDistTasks": ".step.task_set",
    "StagedTrainPipeline": ".pipelines.staged",
    "TaskOptions": ".step.task_options",
    "TrainPipelinePEC": ".pipelines.pec_pipeline",
    "TrainPipelinePrefetchEMS": ".pipelines.stashed",
    "TrainPipelineSemiSync": ".pipelines.semi_sync",
    "TrainPipelineSparseDistEmbStash": ".pipelines.stashed",
    "TrainPipelineSparseDistOptStash": ".pipelines.stashed",
    "TrainStep": ".step.train_step",
}
"""Name to its module; every other name of ``__all__`` is in ``pipelines.named``."""


def __getattr__(name: str) -> Any:
    """Return a name of this package, loaded on first use, or TorchRec's object of that name."""
    if name in __all__:
        return getattr(import_module(_WHERE.get(name, ".pipelines.named"), __name__), name)
    # The import system asks for a submodule by this function too, and must get an AttributeError.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        refused = import_module(".pipelines.refused_arguments", __name__).ELSEWHERE
        theirs = vars(import_module("torchrec.distributed.train_pipeline"))
        # Refused classes hide TorchRec's, so that a script learns what to use instead.
        known = {**theirs, **refused}
        if name in known:
            return known[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has TorchRec's")


# Completion in a shell would otherwise offer only the names that have been loaded.
def __dir__() -> list[str]:
    return [*globals(), *__all__]
