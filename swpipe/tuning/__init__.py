"""Plans chosen by measurement: record, measure, plan, verify, try."""

from swpipe.tuning.autotuning import Tuned, autotune
from swpipe.tuning.offload_choice import OffloadChoice, choose_offload
from swpipe.tuning.tried_plans import Candidate

__all__ = ["Candidate", "OffloadChoice", "Tuned", "autotune", "choose_offload"]
