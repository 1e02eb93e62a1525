"""The report on a loop: what bounds its step, how much overlap can gain, and what to do next."""

from swpipe.reporting.account import Ceiling, StepAccount, StepPart, StepVerdict
from swpipe.reporting.finding import Finding
from swpipe.reporting.measuring import report
from swpipe.reporting.step_report import PromisedChange, StepReport

__all__ = [
    "Ceiling",
    "Finding",
    "PromisedChange",
    "StepAccount",
    "StepPart",
    "StepReport",
    "StepVerdict",
    "report",
]
