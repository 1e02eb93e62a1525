"""A DLRM-style click model on click logs in the Criteo TSV format: the project's main job.

Needs the extra ``swpipe[clicks]`` and TorchRec; the README says how to install it with and without
a GPU. The command line imports this package in any case, so names are loaded when asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swpipe.tasks.clicks.config import ClickConfig, ModelConfig
    from swpipe.tasks.clicks.decode import MalformedRowError, RejectedRow
    from swpipe.tasks.clicks.job import ClickJob, Evaluation
    from swpipe.tasks.clicks.log import BatchSpec, ClickDataError, ClickLog
    from swpipe.tasks.job_run import TrainingDivergedError

__all__ = [
    "BatchSpec",
    "ClickConfig",
    "ClickDataError",
    "ClickJob",
    "ClickLog",
    "Evaluation",
    "MalformedRowError",
    "ModelConfig",
    "RejectedRow",
    "TrainingDivergedError",
]

_MODULES = (
    *(f"swpipe.tasks.clicks.{name}" for name in ("config", "log", "decode", "job")),
    "swpipe.tasks.job_run",
)

if not TYPE_CHECKING:  # which would take each name for Any

    def __getattr__(name: str) -> Any:
        for module in _MODULES if name in __all__ else ():
            found = vars(import_module(module))
            if name in found:
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
