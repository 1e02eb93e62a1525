"""Pipeline-parallel training: a schedule over the ranks' chunks of a model, on torch's runtime."""

from swpipe.tasks.pipeline_parallel.pipeline_runtime import PipelineRuntime, StepResult
from swpipe.tasks.pipeline_parallel.serial_runtime import SerialRuntime

__all__ = ["PipelineRuntime", "SerialRuntime", "StepResult"]
