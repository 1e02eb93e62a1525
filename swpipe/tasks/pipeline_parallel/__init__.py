"""Pipeline-parallel training of a model whose chunks are on several ranks, on torch's runtime.

Each public name is imported on first access: every swpipe command imports this package, and most
commands do not need torch.distributed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swpipe.tasks.pipeline_parallel.measured_costs import measure_costs, measure_hop
    from swpipe.tasks.pipeline_parallel.pipeline_runtime import (
        PipelineRuntime,
        SerialRuntime,
        StepResult,
    )
    from swpipe.tasks.pipeline_parallel.train_tasks import PipelineTrainTasks

__all__ = [
    "PipelineRuntime",
    "PipelineTrainTasks",
    "SerialRuntime",
    "StepResult",
    "measure_costs",
    "measure_hop",
]

_MODULES = ("measured_costs", "pipeline_runtime", "train_tasks")

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes each public name for Any

    def __getattr__(name: str) -> Any:
        for module in _MODULES if name in __all__ else ():
            members = vars(import_module(f"{__name__}.{module}"))
            if name in members:
                return members[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
