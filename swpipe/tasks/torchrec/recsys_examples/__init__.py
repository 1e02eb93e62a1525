"""The pipelines of NVIDIA's recsys-examples by their names, arguments and results, run by swpipe.

    from swpipe.tasks.torchrec.recsys_examples import TrainPipelineFactory

replaces ``from commons.pipeline import TrainPipelineFactory``. Neither recsys-examples nor Megatron
is imported.
"""

from swpipe.tasks.torchrec.recsys_examples.jagged import (
    JaggedMegatronPrefetchTrainPipelineSparseDist,
    JaggedMegatronSemiSyncTrainPipelineSparseDist,
    JaggedMegatronSplitTrainPipelineSparseDist,
    JaggedMegatronTrainNonePipeline,
    JaggedMegatronTrainPipelineSparseDist,
    SWSerialTrainPipeline,
    TrainPipelineFactory,
    register_train_pipeline,
)
from swpipe.tasks.torchrec.step.per_token import collective_assert

__all__ = [
    "JaggedMegatronPrefetchTrainPipelineSparseDist",
    "JaggedMegatronSemiSyncTrainPipelineSparseDist",
    "JaggedMegatronSplitTrainPipelineSparseDist",
    "JaggedMegatronTrainNonePipeline",
    "JaggedMegatronTrainPipelineSparseDist",
    "SWSerialTrainPipeline",
    "TrainPipelineFactory",
    "collective_assert",
    "register_train_pipeline",
]
