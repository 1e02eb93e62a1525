"""Schedules that overlap the layers of a transformer, for any model that is a ``ChunkModel``.

A ``TransformerModelChunkSchedulePlan`` holds the nodes of one microbatch. Its ``run`` overlaps one
microbatch's forward with another's backward, and ``training_pipeline`` trains on many microbatches.
"""

from swpipe.tasks.transformer.chunk_schedule import (
    AbstractSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
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
from swpipe.tasks.transformer.model_interface import (
    ChunkModel,
    DecoderLayer,
    Exchange,
    MoeLayer,
    PredictionLayer,
    Routed,
    Routing,
)
from swpipe.tasks.transformer.schedule_node import (
    NoopScheduleNode,
    ScheduleNode,
    get_comm_stream,
    get_comp_stream,
    set_streams,
)
from swpipe.tasks.transformer.weight_gradients import Linear

__all__ = [
    "AbstractSchedulePlan",
    "ChunkModel",
    "DecoderLayer",
    "Exchange",
    "Linear",
    "ModelChunkState",
    "MoeLayer",
    "NoopScheduleNode",
    "PostProcessNode",
    "PreProcessNode",
    "PredictionLayer",
    "Routed",
    "Routing",
    "ScheduleNode",
    "TransformerLayerNode",
    "TransformerLayerSchedulePlan",
    "TransformerModelChunkSchedulePlan",
    "get_comm_stream",
    "get_comp_stream",
    "set_streams",
    "training_pipeline",
    "training_plan",
    "training_tasks",
]
