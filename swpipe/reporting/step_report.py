"""The report on a loop, as data, as text and as a page."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from swpipe.core.files import write_atomically
from swpipe.core.messages import listed
from swpipe.core.plan import PULL, PipelinePlan
from swpipe.core.records import first_lines
from swpipe.core.tables import wrapped
from swpipe.profiler import Advice, ProfileResult
from swpipe.profiler.rank_times import host_ends, step_ends
from swpipe.profiler.sampling import pattern_of
from swpipe.profiler.spread import Estimate, short_ms, within
from swpipe.reporting.account import LOADER, START, WORTH, StepAccount
from swpipe.reporting.charts import SHOWN, exposed_chart, is_known, shown_name, timeline_chart
from swpipe.reporting.finding import Finding
from swpipe.reporting.rank_forecast import RankForecast
from swpipe.trace import PeakMemory, Trace

_APART = 0.05  # fraction of a step; smaller differences are not reported


@dataclass(frozen=True, slots=True)
class PromisedChange:
    """A change that is advised, and the result of its trial.

    Attributes:
        advice: What to change, what it promises, and the plan to try.
        tried: How much shorter an iteration was under that plan, in seconds, with a 95% interval.
            None if the change is not just another plan, but needs another program.
    """

    advice: Advice
    tried: Estimate | None = None

    @property
    def promised(self) -> str:
        """The promised saving, in milliseconds."""
        return f"{short_ms(self.advice.saved_s)}{within(self.advice.spread_s)} ms"

    @property
    def gave(self) -> str:
        """The saving in the trial, in milliseconds; "" if the change was not tried."""
        if self.tried is None:
            return ""
        given = f"{short_ms(self.tried.value_s)}{within(self.tried.spread_s)} ms"
        return given + ("" if self.kept else ", not as promised")

    @property
    def kept(self) -> bool | None:
        """Whether promise and trial agree within their intervals; None if not tried."""
        if self.tried is None:
            return None
        apart_s = abs(self.tried.value_s - self.advice.saved_s)
        # Both intervals count, so the two may differ by their sum.
        return apart_s <= self.tried.spread_s + self.advice.spread_s


@dataclass(frozen=True, slots=True)
class StepReport(StepAccount):
    """A report: the account of a step, with its measurements, as text and as a page.

    On several ranks it is about the rank that the other ranks wait for, or else the slowest one.

    Attributes:
        name: The name of the loop.
        plan: The plan that the loop runs under.
        changes: At most three changes. Those that need only another plan come first; each of them
            saved something when it was tried. The one that promises most is the first.
        profile: Exposed times.
        measured: The timeline of the same loop.
        predicted: The timeline that the simulator predicts for the plan from the profile's costs;
            None if the plan is too large.
        predicted_s: The time of an iteration in ``predicted``, in seconds.
        findings: What keeps work from overlapping.
        rank: The rank that all else is about.
        machine: What it was measured on, in words: key to value.
        not_kept: What plans saved that were tried and are not advised: name to time.
        memory: What the iterations in flight hold at most, by the same simulation; None if nothing.
        in_vain: Where plans that were promised to save time saved nothing: what tasks share most
            likely, with the figures that tell; "" otherwise.
        forecast: On several ranks, what of the step is waiting for the slowest, and would be on
            many; None where no task meets other ranks.
    """

    name: str
    plan: PipelinePlan
    changes: tuple[PromisedChange, ...]
    profile: ProfileResult
    measured: Trace
    predicted: Trace | None = None
    predicted_s: float | None = None
    findings: tuple[Finding, ...] = ()
    rank: int = 0
    machine: Mapping[str, str] = field(default_factory=dict)
    not_kept: Mapping[str, Estimate] = field(default_factory=dict)
    memory: PeakMemory | None = None
    in_vain: str = ""
    forecast: RankForecast | None = None

    @property
    def busy(self) -> str:
        """A sentence if other processes disturbed the measurements; "" if not."""
        load = self.profile.other_load
        return f"{capitalised(load.text)}." if load is not None and load.is_busy else ""

    @property
    def cannot_tell(self) -> bool:
        """Whether other processes disturbed the measurements too much to conclude anything."""
        load = self.profile.other_load
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
            return "Measure longer, or say of more tasks what they touch."
        if len(busy := self.profile.limiting) > 1:
            return (
                f"Overlap can gain nothing more. Make tasks of all of these faster: {listed(busy)}."
            )
        longest = max(self.parts, key=lambda part: part.seconds)
        return f"Overlap can gain nothing more. Make {longest.task} take less time."

    @property
    def why_no_plan(self) -> str:
        """What the ceiling requires, and why no plan is advised that comes nearer; "" if one is."""
        if not self.ceiling.is_worth_it or any(one.advice.plan for one in self.changes):
            return ""
        said = [self.ceiling.needs]
        # The tasks that would have to move are the most relevant, so their reasons come first.
        reasons = {one.advice.task: one.advice.not_moved for one in self.changes}
        told = [task for task in (*self.ceiling.beside, *reasons) if reasons.get(task)]
        if told:
            said.append(f"{capitalised(told[0])} is not moved: {reasons[told[0]]}.")
        else:
            said.append("No change to the plan promises more than its uncertainty.")
        if self.not_kept:
            said.append(self._tried)
        return " ".join(said)

    @property
    def pattern(self) -> str:
        """How steps differ, in words; "" if they do not."""
        return pattern_of(self.profile.steps_s)

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

    @property
    def _tried(self) -> str:
        tried = ", ".join(f"{name} {saved.text} ms" for name, saved in self.not_kept.items())
        return f"Plans that were tried saved: {tried}."

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
        step = self.profile.step
        if self.busy:
            yield self.busy
        # Figures are still shown on a machine that is too busy, but nothing is concluded from them.
        if not self.cannot_tell:
            yield f"{self.verdict.bound}. {self.verdict.why}"
        yield f"step: {short_ms(step.value_s)}{within(step.spread_s)} ms"
        if self.pattern:
            yield f"steps differ: {self.pattern}"
        # A sample that covers the whole loop needs no remark.
        if self.profile.seen and not self.profile.seen.startswith("All"):
            yield f"seen: {self.profile.seen}"
        if self.cannot_tell:
            yield "Beside other processes, what bounds it and what to change cannot be told."
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
            yield f"tried in vain: {self._tried} {self.in_vain}"
        if self.why_no_plan:
            yield f"no plan: {self.why_no_plan}"
        yield f"next step: {self.next_step}"
        for change in self.changes[:1]:
            tried = f"; when it was tried, it saved {change.gave}" if change.gave else ""
            yield f"  promises {change.promised}{tried}"
        if self.memory is not None:
            yield self.memory.format()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for tools; times in milliseconds.

        Keys: ``version`` (1), ``name``, ``busy``, ``bound`` (None if the machine was too busy to
        tell), ``why``, ``step``, ``steps_differ``, ``seen``, ``parts``, ``ceiling``, ``in_vain``,
        ``next_step``, ``changes``, ``findings``, ``rank``, ``waits`` (of ranks), ``machine``. A
        time with an interval is ``ms`` and ``spread_ms``. Keys may be added. If a key changes its
        meaning, ``version`` changes.
        """
        ceiling = self.ceiling
        told = not self.cannot_tell
        return {
            "version": 1,
            "name": self.name,
            "busy": self.busy,
            "bound": self.verdict.bound if told else None,
            "why": self.verdict.why if told else "",
            "step": _estimate(self.profile.step),
            "steps_differ": self.pattern,
            "seen": self.profile.seen,
            "parts": [
                {"task": one.task, "cause": one.cause, "ms": _ms(one.seconds)} for one in self.parts
            ],
            "ceiling": {
                "saved": _ms(ceiling.saved_s),
                "worth_it": ceiling.is_worth_it,
                "limit": ceiling.limit,
            },
            "in_vain": self.in_vain,
            "next_step": self.next_step,
            "changes": [
                {
                    "change": one.advice.change,
                    "task": one.advice.task,
                    "promised": _estimate(Estimate(one.advice.saved_s, one.advice.spread_s)),
                    "tried": None if one.tried is None else _estimate(one.tried),
                    "plan": one.advice.plan and json.loads(one.advice.plan.to_json()),
                }
                for one in self.changes
            ],
            "findings": [asdict(one) for one in self.findings],
            "rank": self.rank,
            "waits": [
                {"rank": one.rank, "for": one.waits_for, "ms": _ms(one.seconds)}
                for one in self.profile.rank_waits
            ],
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


def _ms(seconds: float) -> float:
    # Nanoseconds are the finest that any clock here resolves.
    return round(1e3 * seconds, 6)


def _estimate(of: Estimate) -> dict[str, float]:
    return {"ms": _ms(of.value_s), "spread_ms": _ms(of.spread_s)}


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
    template = environment.from_string((place / "page.html").read_text(encoding="utf-8"))
    iterations = len({span.iteration for span in report.measured.spans})
    return template.render(
        report=report,
        style=(place / "page.css").read_text(encoding="utf-8"),
        ms=short_ms,
        within=within,
        percent=_percent,
        under=_under(report),
        changes=[_change(number, one) for number, one in enumerate(report.changes, 1)],
        rows=list(_rows(report)),
        total_s=sum(part.seconds for part in report.parts),
        total=sum(part.share for part in report.parts),
        spent=", ".join(f"{c} {_percent(s)}" for c, s in report.verdict.shares.items()),
        exposed=exposed_chart(report.profile),
        # Tasks whose exposed time may be 0 would be bars without a meaning, so the page lists their
        # names.
        hidden=[shown_name(n) for n in report.profile.tasks if not is_known(report.profile, n)],
        timeline=timeline_chart(_timelines(report)),
        shown=f"{min(SHOWN, iterations)} steady iterations of {iterations}.{_timed_apart(report)}",
        ranks=_ranks(report),
        memory=report.memory and capitalised(report.memory.format().removeprefix("memory: ")),
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _under(report: StepReport) -> str:
    groups = len(report.plan.thread_groups)
    if report.profile.mode == "serial":
        return "plain loop"
    return f"under a plan with {groups} thread groups, {report.plan.depth} iterations in flight"


def _change(number: int, one: PromisedChange) -> dict[str, str]:
    advice = one.advice
    # A change without a plan has no file to download.
    text = "" if advice.plan is None else advice.plan.to_json()
    # The plan is embedded as a data URL, so that the page is a single file.
    data = base64.b64encode(text.encode()).decode()
    return {
        "change": capitalised(advice.change),
        "promised": one.promised,
        "tried": one.gave,
        "limit": advice.limit,
        "not_moved": advice.not_moved,
        "file": f"plan-{number}.json",
        "href": f"data:application/json;base64,{data}" if text else "",
    }


def _rows(report: StepReport) -> Iterator[dict[str, str]]:
    """Yield a row per task: its part of the step, and what its removal saves."""
    profile = report.profile
    parts: dict[str, float] = defaultdict(float)
    causes: dict[str, list[str]] = defaultdict(list)  # in the order of CAUSES, like the parts
    for part in report.parts:
        # On the page, the loader is one row: its calls and the start of a pass belong to it.
        name = PULL if part.task in (LOADER, START) else part.task
        # A task has several parts if it both waits and computes; the row shows their sum.
        parts[name] += part.seconds
        if part.share >= WORTH:
            causes[name].append(part.cause)
    # Parts without a host time, such as the gaps, follow the tasks.
    for name in dict.fromkeys([*profile.host_s, *parts]):
        exposed = profile.exposed(name)
        seconds = parts[name]
        takes_s = profile.host_s.get(name, 0.0) + profile.device_s.get(name, 0.0)
        yield {
            "task": shown_name(name),
            "part": short_ms(seconds),
            "share": _percent(seconds / profile.baseline_s),
            # A task without a part is not on the critical path: other work hides it.
            "cause": ", ".join(dict.fromkeys(causes[name])) or ("" if seconds else "hidden"),
            "removed": "" if exposed is None else exposed.text,
            "takes": short_ms(takes_s) if name in profile.host_s else "",
            "note": _note(report, name, seconds),
        }


def _note(report: StepReport, name: str, part_s: float) -> str:
    """Return why a task's part and what its removal saves differ; "" if they agree."""
    profile = report.profile
    exposed = profile.exposed(name)
    if exposed is None:
        return profile.not_measured.get(name, "")
    # Exposed time and share of the critical path answer different questions, so large differences
    # need a remark.
    apart_s = exposed.value_s - part_s
    if abs(apart_s) <= exposed.spread_s + _APART * profile.baseline_s:
        return ""
    if apart_s < 0:
        return "removed, it saves less than its part: something else takes as long"
    others = profile.in_others_s.get(name)
    # The profile may know which tasks take less, or only that the step does.
    which = f" ({listed(others)})" if others else ""
    return f"removed, it saves more than its part: others{which} take less without it"


def _timed_apart(report: StepReport) -> str:
    """Return why the timelines' figures differ from the step's; "" if they agree."""
    pace = report.profile.loader
    step = report.profile.step
    start_s = 0.0 if pace is None else pace.start_s
    # Differences within the interval and a few percent of the step need no explanation.
    apart_s = step.spread_s + _APART * step.value_s
    said = [""]
    measured_s = report.measured.initiation_interval_s
    # The trace lies within one pass, so the start of a pass is not in it.
    if measured_s is not None and abs(measured_s + start_s - step.value_s) > apart_s:
        said.append("It was recorded at another time than the profile, and took another time.")
    elif start_s > apart_s:
        said.append("Without the start of a pass.")
    if report.predicted_s is not None and abs(report.predicted_s - step.value_s) > apart_s:
        said.append(
            "The prediction leaves out what tasks cost each other: cores, memory, the interpreter "
            "lock."
        )
    return " ".join(said)


def _ranks(report: StepReport) -> list[dict[str, str]]:
    """Return a row for the step and one per task: the median, and the worst rank."""
    ranks = report.profile.ranks
    if len(ranks) < 2:
        return []
    return [
        {
            "task": shown_name(name),
            "median": short_ms(one.median_s),
            "worst": Estimate(one.worst_s, one.spread_s).text,
            "rank": str(one.rank),
            # Relative to the median, since the ranks' times are compared with each other.
            "share": _percent(one.worst_s / one.median_s) if one.median_s else "",
        }
        for name, one in (("step", step_ends(ranks)), *host_ends(ranks).items())
    ]


def _timelines(report: StepReport) -> dict[str, Any]:
    measured_s = report.measured.initiation_interval_s
    took = "" if measured_s is None else f": {short_ms(measured_s)} ms per iteration"
    found = {f"measured{took}": report.measured}
    if report.predicted is not None and report.predicted_s is not None:
        found[f"predicted: {short_ms(report.predicted_s)} ms per iteration"] = report.predicted
    return found
