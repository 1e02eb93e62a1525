"""One report on a loop: what bounds its step, how much overlap can still gain, what to do next."""

from swpipe.reporting.loop_figures import LoopFigures, PromisedChange
from swpipe.reporting.measuring import report
from swpipe.reporting.step_parts import StepPart
from swpipe.reporting.step_report import StepReport
from swpipe.reporting.verdict import Ceiling, Verdict

__all__ = [
    "Ceiling",
    "LoopFigures",
    "PromisedChange",
    "StepPart",
    "StepReport",
    "Verdict",
    "report",
]
