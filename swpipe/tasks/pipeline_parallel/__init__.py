"""Pipeline-parallel training: a schedule over the ranks' chunks of a model, on torch's runtime."""

from swpipe.tasks.pipeline_parallel.measured_costs import measure_costs, measure_hop
from swpipe.tasks.pipeline_parallel.pipeline_runtime import PipelineRuntime, StepResult
from swpipe.tasks.pipeline_parallel.serial_runtime import SerialRuntime
from swpipe.tasks.pipeline_parallel.train_tasks import PipelineTrainTasks

__all__ = [
    "PipelineRuntime",
    "PipelineTrainTasks",
    "SerialRuntime",
    "StepResult",
    "measure_costs",
    "measure_hop",
]
