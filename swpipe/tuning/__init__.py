"""Choose a plan by measuring: record, measure, plan, verify, try."""

from swpipe.tuning.autotuning import Candidate, Tuned, autotune

__all__ = ["Candidate", "Tuned", "autotune"]
