"""The report on a loop, as data, as text and as a page."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from swpipe.core.files import write_atomically
from swpipe.core.messages import listed
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.records import first_lines
from swpipe.core.tables import wrapped
from swpipe.profiler import Advice, ProfileResult
from swpipe.profiler.rank_times import host_ends, step_ends
from swpipe.profiler.sampling import pattern_of
from swpipe.profiler.spread import Estimate, short_ms
from swpipe.reporting.account import LOADER, START, WORTH, StepAccount
from swpipe.reporting.charts import SHOWN, shown_name, timeline_chart
from swpipe.reporting.finding import Finding
from swpipe.reporting.rank_forecast import RankForecast
from swpipe.trace import PeakMemory, Trace

_APART = 0.05  # fraction of a step; smaller differences are not reported


@dataclass(frozen=True, slots=True)
class PromisedChange:
    """A change that is advised, and the result of its trial.

    Attributes:
        advice: The change, what it promises, and the plan to try.
        tried: How much shorter an iteration was under that plan, in seconds, with a 95% interval.
            None if the change is not just another plan, but needs another program.
    """

    advice: Advice
    tried: Estimate | None = None

    @property
    def gave(self) -> str:
        """The saving in the trial, in milliseconds; "" if the change was not tried."""
        if self.tried is None:
            return ""
        return f"{self.tried.text} ms" + ("" if self.kept else ", not as promised")

    @property
    def kept(self) -> bool | None:
        """Whether promise and trial agree within their intervals; None if not tried."""
        if self.tried is None:
            return None
        promised = self.advice.saved
        # Both intervals count, so the two may differ by their sum.
        apart_s = abs(self.tried.value_s - promised.value_s)
        return apart_s <= self.tried.spread_s + promised.spread_s


@dataclass(frozen=True, slots=True)
class StepReport(StepAccount):
    """A report: the account of a step, with its measurements, as text and as a page.

    On several ranks it is about the rank that the other ranks wait for, or else the slowest one.

    Attributes:
        name: The name of the loop.
        plan: The plan that the loop runs under.
        profile: Exposed times.
        measured: The timeline of the same loop.
        changes: At most three changes. Another plan comes first; it saved time when it was tried.
        findings: The causes that keep work from overlapping.
        rank: The rank that all else is about.
        machine: The machine that it was measured on, in words: key to value.
        memory: The most that iterations in flight hold, by a simulation; None if nothing.
        in_vain: The plan that was promised to save time and saved nothing, what it saved, and what
            tasks share most likely, with the figures that tell; "" if there is none.
        forecast: On several ranks, the part of the step that waits for the slowest rank, here and
            on many ranks; None if no task meets other ranks.
    """

    name: str
    plan: PipelinePlan
    profile: ProfileResult
    measured: Trace
    changes: tuple[PromisedChange, ...] = ()
    findings: tuple[Finding, ...] = ()
    rank: int = 0
    machine: Mapping[str, str] = field(default_factory=dict)
    memory: PeakMemory | None = None
    in_vain: str = ""
    forecast: RankForecast | None = None

    @property
    def busy(self) -> str:
        """A sentence if other processes disturbed the measurements; "" if not."""
        clause = self.profile.measurement.disturbance
        return f"{capitalised(clause)}." if clause else ""

    @property
    def cannot_tell(self) -> bool:
        """Whether other processes disturbed the measurements too much to conclude anything."""
        load = self.profile.measurement.other_load
        return load is not None and load.is_too_busy

    @property
    def next_step(self) -> str:
        """What to do next, in one or two sentences."""
        if self.cannot_tell:
            return "Stop what else runs, or wait for it, and measure again."
        # The order is that of certainty: tried or simulated changes first, then what could still be
        # gained, and only then making tasks faster.
        if self.changes:
            return f"{capitalised(self.changes[0].advice.change)}."
        if self.ceiling.is_worth_it:
            return (
                "Measure longer (rounds=20), declare what more of the tasks use, or let autotune "
                "try plans (swpipe plan auto)."
            )
        if len(busy := self.profile.limiting) > 1:
            return (
                f"Overlap can gain nothing more. Make tasks of all of these faster: {listed(busy)}."
            )
        # A loop whose tasks take no measurable time has no parts.
        if not self.parts:
            return "Overlap can gain nothing more."
        longest = max(self.parts, key=lambda part: part.seconds)
        return f"Overlap can gain nothing more. Make {longest.task} take less time."

    @property
    def why_no_plan(self) -> str:
        """Why no plan is advised that comes nearer to the ceiling; "" if one is."""
        if not self.ceiling.is_worth_it or any(change.advice.plan for change in self.changes):
            return ""
        # The first change is to the task that saves most. Others would have to overlap with it, so
        # the reasons why these stay come first.
        ordered = (*self.changes[1:], *self.changes[:1])
        reasons = [change.advice.not_moved for change in ordered if change.advice.not_moved]
        uncertain = "no change to the plan promises more than its uncertainty"
        return f"{capitalised(reasons[0] if reasons else uncertain)}."

    @property
    def pattern(self) -> str:
        """How steps differ, in words; "" if they do not."""
        return pattern_of(self.profile.iteration.each_s)

    @property
    def straggler(self) -> str:
        """Which of several ranks is slow, and what that costs many; "" on one rank."""
        ranks = self.profile.ranks
        if len(ranks) < 2:
            return ""
        many = "" if self.forecast is None else f" {self.forecast.text}"
        if self.profile.rank_waits:
            return f"The others wait for rank {self.rank}.{many}"
        longest = step_ends(ranks).rank
        return f"No rank waits for another; rank {longest} has the longest steps.{many}"

    def format(self) -> str:
        """Return the verdict, the ceiling, the next step, and what keeps work from overlapping."""
        findings = (f"finding {n}: {finding}" for n, finding in enumerate(self.findings, 1))
        return "\n".join(map(wrapped, (*self._lines(), *findings)))

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        return first_lines(self, self.format())

    def _lines(self) -> Iterator[str]:
        ceiling = self.ceiling
        uncovered = self.profile.measurement.uncovered
        if self.busy:
            yield self.busy
        # Figures are still shown on a machine that is too busy, but nothing is concluded from them.
        if not self.cannot_tell:
            yield f"{self.verdict.bound}. {self.verdict.why}"
        yield f"step: {self.profile.step.text} ms"
        if self.pattern:
            yield f"steps differ: {self.pattern}"
        # A sample that covers the whole loop needs no remark.
        if uncovered:
            yield f"coverage: {uncovered}"
        if self.cannot_tell:
            yield "Other processes are too busy to tell what bounds it and what to change."
            yield f"next step: {self.next_step}"
            return
        if self.straggler:
            yield f"ranks: {len(self.profile.ranks)}. {self.straggler}"
        if ceiling.is_worth_it:
            yield (
                f"ceiling: any overlap can save {short_ms(ceiling.saved_s)} ms at most "
                f"({ceiling.share:.0%}); then limited by {ceiling.limit}"
            )
        else:
            yield f"ceiling: overlap can save nothing more; limited by {ceiling.limit}"
        if self.in_vain:
            yield f"tried in vain: {self.in_vain}"
        if self.why_no_plan:
            yield f"no plan: {self.why_no_plan}"
        yield f"next step: {self.next_step}"
        for change in self.changes[:1]:
            tried = f"; when it was tried, it saved {change.gave}" if change.gave else ""
            yield f"  promises {change.advice.saved.text} ms{tried}"
        if self.memory is not None:
            yield self.memory.format()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for tools; times in seconds.

        Keys: ``version`` (1), ``name``, ``busy``, ``verdict`` (None if the machine was too busy to
        tell), ``step``, ``steps_differ``, ``coverage``, ``parts``, ``ceiling``, ``in_vain``,
        ``next_step``, ``changes``, ``findings``, ``rank``, ``waits`` (of ranks), ``machine``. Their
        values have the attributes of the objects of the same names. Keys may be added. If a key
        changes its meaning, ``version`` changes.
        """
        return {
            "version": 1,
            "name": self.name,
            "busy": self.busy,
            "verdict": None if self.cannot_tell else asdict(self.verdict),
            "step": asdict(self.profile.step),
            "steps_differ": self.pattern,
            "coverage": self.profile.measurement.coverage,
            "parts": [asdict(part) for part in self.parts],
            "ceiling": {**asdict(self.ceiling), "is_worth_it": self.ceiling.is_worth_it},
            "in_vain": self.in_vain,
            "next_step": self.next_step,
            "changes": [
                {"advice": change.advice.to_dict(), "tried": change.tried and asdict(change.tried)}
                for change in self.changes
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "rank": self.rank,
            "waits": [asdict(wait) for wait in self.profile.rank_waits],
            "machine": dict(self.machine),
        }

    def to_html(self) -> str:
        """Return the report as one page, which needs no network and no other file."""
        return page_of(self)

    def save(self, path: str | Path) -> None:
        """Write the page to a file."""
        write_atomically(path, self.to_html())

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, so that its style does not affect the notebook."""
        return f'<iframe srcdoc="{escape(self.to_html())}" width="100%" height="900"></iframe>'


def capitalised(text: str) -> str:
    """Return the text with an initial capital."""
    return text[:1].upper() + text[1:]


# --------------------------------------------------------------------------------------- the page


def page_of(report: StepReport) -> str:
    """Return the HTML page of a report."""
    # jinja2 is needed for the page only, so it is imported here.
    from jinja2 import Environment, StrictUndefined

    place = files("swpipe.reporting")
    # Names in the page come from the user, so they are escaped. A misspelled variable of the
    # template is an error.
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"ms": short_ms, "percent": _percent, "sentence": capitalised}
    environment.filters |= {"name": shown_name, "href": _data_url}
    template = environment.from_string((place / "page.html").read_text(encoding="utf-8"))
    iterations = len({span.iteration for span in report.measured.spans})
    ranks = report.profile.ranks
    return template.render(
        report=report,
        style=(place / "page.css").read_text(encoding="utf-8"),
        rows=list(_rows(report)),
        timeline=timeline_chart(report.measured),
        shown=f"{min(SHOWN, iterations)} steady iterations of {iterations}",
        ranks=[("step", step_ends(ranks)), *host_ends(ranks).items()] if len(ranks) > 1 else [],
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _data_url(plan: PipelinePlan) -> str:
    # A plan is embedded in the page, so that the page is a single file.
    return f"data:application/json;base64,{base64.b64encode(plan.to_json().encode()).decode()}"


class _Row(NamedTuple):
    """A row of the page's table of tasks: its part of the step, and what it is spent on."""

    task: str
    part_s: float
    causes: str
    note: str


def _rows(report: StepReport) -> Iterator[_Row]:
    """Yield a row per task; parts without a host time, such as the gaps, follow the tasks."""
    parts: dict[str, float] = defaultdict(float)
    causes: dict[str, dict[str, None]] = defaultdict(dict)  # in the order of CAUSES, like the parts
    for part in report.parts:
        # On the page, the loader is one row: its calls and the start of a pass belong to it.
        name = PULL if part.task in (LOADER, START) else part.task
        # A task has several parts if it both waits and computes; the row shows their sum.
        parts[name] += part.seconds
        if part.share >= WORTH:
            causes[name][part.cause] = None
    for name in dict.fromkeys([*report.profile.tasks, *parts]):
        part_s = parts[name]
        # A task without a part is not on the critical path: other work hides it.
        spent = ", ".join(causes[name]) or ("" if part_s else "hidden")
        yield _Row(name, part_s, spent, _note(report, name, part_s))


def _note(report: StepReport, name: str, part_s: float) -> str:
    """Return why a task's part and what its removal saves differ; "" if they agree."""
    profile = report.profile
    exposed = profile.exposed(name)
    if exposed is None:
        return profile.tasks[name].not_measured if name in profile.tasks else ""
    # Exposed time and share of the critical path answer different questions, so large differences
    # need a remark.
    apart_s = exposed.value_s - part_s
    if abs(apart_s) <= exposed.spread_s + _APART * profile.baseline_s:
        return ""
    if apart_s < 0:
        return "removed, it saves less than its part: something else takes as long"
    others = profile.tasks[name].in_others_s
    # The profile may know which tasks take less, or only that the step does.
    which = f" ({listed(others)})" if others else ""
    return f"removed, it saves more than its part: others{which} take less without it"
