"""A small GPT, whole or in chunks, and schedules that overlap its layers.

``GPTModel.build_schedule_plan`` gives the nodes of one microbatch;
``TransformerModelChunkSchedulePlan.run`` runs one microbatch's forward over another's backward, and
``training_pipeline`` trains on many.
"""

from swpipe.tasks.transformer.chunk_schedule import (
    AbstractSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from swpipe.tasks.transformer.gpt import GPTModel, mean_loss, token_losses
from swpipe.tasks.transformer.gpt_layers import MultiTokenPredictionLayer, TransformerLayer
from swpipe.tasks.transformer.layer_schedule import (
    ModelChunkState,
    PostProcessNode,
    PreProcessNode,
    TransformerLayerNode,
    TransformerLayerSchedulePlan,
)
from swpipe.tasks.transformer.layer_training import (
    training_pipeline,
    training_plan,
    training_tasks,
)
from swpipe.tasks.transformer.schedule_node import (
    NoopScheduleNode,
    ScheduleNode,
    get_comm_stream,
    get_comp_stream,
    set_streams,
)
from swpipe.tasks.transformer.transformer_config import TransformerConfig

__all__ = [
    "AbstractSchedulePlan",
    "GPTModel",
    "ModelChunkState",
    "MultiTokenPredictionLayer",
    "NoopScheduleNode",
    "PostProcessNode",
    "PreProcessNode",
    "ScheduleNode",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerNode",
    "TransformerLayerSchedulePlan",
    "TransformerModelChunkSchedulePlan",
    "get_comm_stream",
    "get_comp_stream",
    "mean_loss",
    "set_streams",
    "token_losses",
    "training_pipeline",
    "training_plan",
    "training_tasks",
]
