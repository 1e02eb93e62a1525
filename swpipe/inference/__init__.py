"""Infer dependences: run the tasks once or twice and record what each of them reads and writes."""

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
