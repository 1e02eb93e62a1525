"""Dependences inferred: what tasks touch, learned by running them once or twice, watched."""

from swpipe.inference.comparison import Comparison, Needed, Needless
from swpipe.inference.record_tasks import record
from swpipe.inference.recording import Dependences, InferenceReport, Recording

__all__ = [
    "Comparison",
    "Dependences",
    "InferenceReport",
    "Needed",
    "Needless",
    "Recording",
    "record",
]
