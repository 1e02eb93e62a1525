"""What a report says of a loop: the verdict, and the figures behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swpipe.core.plan import PipelinePlan
from swpipe.doctor import Finding
from swpipe.profiler import Advice, ProfileResult
from swpipe.profiler.spread import Estimate
from swpipe.reporting.step_parts import StepPart
from swpipe.reporting.verdict import Ceiling, Verdict
from swpipe.trace import PeakMemory, Trace


@dataclass(frozen=True, slots=True)
class PromisedChange:
    """A change that is advised, and what it gave when it was tried.

    Attributes:
        advice: What to change, what it promises, and the plan to try.
        tried: How much shorter an iteration was under that plan, in seconds, with a 95% interval;
            None where the change needs another program, and not only another plan.
    """

    advice: Advice
    tried: Estimate | None = None

    @property
    def kept(self) -> bool | None:
        """Whether the promise and what was measured are the same, within their intervals."""
        if self.tried is None:
            return None
        apart_s = abs(self.tried.value_s - self.advice.saved_s)
        return apart_s <= self.tried.spread_s + self.advice.spread_s


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """What was measured of a loop, and what follows. On several ranks: of the slowest one.

    Attributes:
        name: Of the loop.
        plan: What it runs under.
        verdict: What bounds its step.
        ceiling: How much any overlap can still gain.
        parts: The step, split into parts that add up to it.
        changes: At most three: those that need no more than another plan first, if it saved
            something when it was tried; of these the one that promises most.
        profile: Exposed times.
        measured: The timeline of the same loop.
        predicted: The timeline that the simulator predicts for the plan from the profile's costs;
            None where it is too large.
        predicted_s: The time of an iteration in it, in seconds.
        memory: What the iterations in flight hold at most, by the same simulation; None if nothing.
        findings: What keeps work from overlapping.
        rank: The rank that all else is about.
        machine: What it was measured on, in words: key to value.
        ready_made: What each ready-made plan saved when it was tried; empty where another plan is
            advised, or none is for these tasks.
    """

    name: str
    plan: PipelinePlan
    verdict: Verdict
    ceiling: Ceiling
    parts: tuple[StepPart, ...]
    changes: tuple[PromisedChange, ...]
    profile: ProfileResult
    measured: Trace
    predicted: Trace | None
    predicted_s: float | None
    findings: tuple[Finding, ...] = ()
    rank: int = 0
    machine: Mapping[str, str] = field(default_factory=dict)
    ready_made: Mapping[str, Estimate] = field(default_factory=dict)
    memory: PeakMemory | None = None

    @property
    def busy(self) -> str:
        """Whether other work disturbed what was measured, in a sentence; "" if not."""
        load = self.profile.other_load
        return f"{capitalised(load.text)}." if load is not None and load.is_busy else ""

    @property
    def next_step(self) -> str:
        """What to do next, in a sentence or two."""
        if self.changes:
            return f"{capitalised(self.changes[0].advice.change)}."
        if self.ceiling.is_worth_it:
            return "Measure longer, or say of more tasks what they touch."
        longest = max(self.parts, key=lambda part: part.seconds)
        return f"Overlap can gain nothing more. Make {longest.task} take less time."

    @property
    def why_no_plan(self) -> str:
        """What the ceiling takes, and why no plan is advised that comes nearer; "" if one is."""
        if not self.ceiling.is_worth_it or any(one.advice.plan for one in self.changes):
            return ""
        said = [self.ceiling.needs]
        reasons = {one.advice.task: one.advice.not_moved for one in self.changes}
        told = [task for task in (*self.ceiling.beside, *reasons) if reasons.get(task)]
        if told:
            said.append(f"{capitalised(told[0])} is not moved: {reasons[told[0]]}.")
        else:
            said.append("No change to the plan promises more than its uncertainty.")
        if self.ready_made:
            tried = ", ".join(f"{n} {interval(*saved)} ms" for n, saved in self.ready_made.items())
            said.append(f"Ready-made plans saved, when they were tried: {tried}.")
        return " ".join(said)


def in_ms(seconds: float) -> str:
    """Milliseconds, with three digits that count, such as "1.25", "12.5" and "125"."""
    ms = 1e3 * seconds
    return f"{ms:.{2 if abs(ms) < 10 else 1 if abs(ms) < 100 else 0}f}"


def interval(value_s: float, spread_s: float) -> str:
    """Milliseconds with their interval; "< x" for what is not told apart from 0."""
    if 0 < spread_s >= value_s:
        return f"< {in_ms(max(0.0, value_s) + spread_s)}"
    return f"{in_ms(value_s)} ± {in_ms(spread_s)}"


def capitalised(text: str) -> str:
    """The text, with a capital at the beginning."""
    return text[:1].upper() + text[1:]
