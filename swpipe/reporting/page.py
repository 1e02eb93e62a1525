"""The page of a report: HTML, with its style, its script and its plans within."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from swpipe.core.messages import listed
from swpipe.core.plan import PULL
from swpipe.profiler.rank_times import Ends, host_ends
from swpipe.profiler.spread import in_ms
from swpipe.reporting.account import BETWEEN, LOADER, capitalised
from swpipe.reporting.charts import SHOWN, exposed_chart, script, timeline_chart

if TYPE_CHECKING:
    from swpipe.reporting.step_report import PromisedChange, StepReport

_APART = 0.05  # of a step: smaller differences are not told


def page_of(report: StepReport) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    place = files("swpipe.reporting")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((place / "page.html").read_text(encoding="utf-8"))
    iterations = len({span.iteration for span in report.measured.spans})
    return template.render(
        report=report,
        style=(place / "page.css").read_text(encoding="utf-8"),
        script=script(),
        ms=in_ms,
        percent=_percent,
        under=_under(report),
        changes=[_change(number, one) for number, one in enumerate(report.changes, 1)],
        rows=list(_rows(report)),
        total_s=sum(part.seconds for part in report.parts),
        total=sum(part.share for part in report.parts),
        spent=", ".join(f"{c} {_percent(s)}" for c, s in report.verdict.shares.items()),
        reconciled=_reconciled(report),
        exposed=exposed_chart(report.profile),
        timeline=timeline_chart(_timelines(report)),
        shown=f"{min(SHOWN, iterations)} steady iterations of {iterations}.",
        ranks=_ranks(report),
        memory="" if report.memory is None else capitalised(report.memory.format()),
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _under(report: StepReport) -> str:
    groups = len(report.plan.thread_groups)
    if report.profile.mode == "serial":
        return "plain loop"
    return f"under a plan with {groups} thread groups, {report.plan.depth} iterations in flight"


def _change(number: int, one: PromisedChange) -> dict[str, str]:
    advice, data = one.advice, base64.b64encode(one.advice.plan.encode()).decode()
    return {
        "change": capitalised(advice.change),
        "promised": one.promised,
        "tried": one.gave,
        "limit": advice.limit,
        "not_moved": advice.not_moved,
        "file": f"plan-{number}.json",
        "href": f"data:application/json;base64,{data}" if advice.plan else "",
    }


def _rows(report: StepReport) -> Iterator[dict[str, str]]:
    """A row per task: its part of the step, beside what its removal saves."""
    profile = report.profile
    parts: dict[str, float] = defaultdict(float)
    causes: dict[str, list[str]] = defaultdict(list)  # in the order of CAUSES, as parts are
    for part in report.parts:
        name = PULL if part.task == LOADER else part.task
        parts[name] += part.seconds
        causes[name].append(part.cause)
    for name in dict.fromkeys([*profile.host_s, *parts]):
        exposed, seconds = profile.exposed(name), parts[name]
        takes_s = profile.host_s.get(name, 0.0) + profile.device_s.get(name, 0.0)
        yield {
            "task": LOADER if name == PULL else name,
            "part": in_ms(seconds),
            "share": _percent(seconds / profile.baseline_s),
            "cause": " and ".join(causes[name]) or "hidden",
            "removed": "" if exposed is None else exposed.text,
            "takes": in_ms(takes_s) if name in profile.host_s else "",
            "note": _note(report, name, seconds),
        }


def _note(report: StepReport, name: str, part_s: float) -> str:
    """Why a part of the step and what its removal saves differ; "" where they do not."""
    profile = report.profile
    exposed = profile.exposed(name)
    if exposed is None:
        return profile.not_measured.get(name, "")
    apart_s = exposed.value_s - part_s
    if abs(apart_s) <= exposed.spread_s + _APART * profile.baseline_s:
        return ""
    if apart_s < 0:
        return "removed, it saves less than its part: something else takes as long"
    others = profile.in_others_s.get(name)
    which = f" ({listed(others)})" if others else ""
    return f"removed, it saves more than its part: others{which} take less without it"


def _reconciled(report: StepReport) -> str:
    """How far the parts agree with what removing tasks saves."""
    tasks = report.profile.tasks
    noted = [row["task"] for row in _rows(report) if row["note"]]
    agree = len(tasks) - len([name for name in noted if name != BETWEEN])
    words = f"What removing a task saves agrees with its part for {agree} of {len(tasks)} tasks"
    return f"{words}; the table says why not for {listed(noted)}." if noted else f"{words}."


def _ranks(report: StepReport) -> list[dict[str, str]]:
    """A row for the step and one per task: the median, and the worst rank."""
    ranks = report.profile.ranks
    if len(ranks) < 2:
        return []
    ends = {"step": Ends.of(ranks, [of.baseline_s for of in ranks]), **host_ends(ranks)}
    return [
        {
            "task": LOADER if name == PULL else name,
            "median": in_ms(one.median_s),
            "worst": in_ms(one.worst_s),
            "rank": str(one.rank),
            "share": _percent(one.worst_s / one.median_s) if one.median_s else "",
        }
        for name, one in ends.items()
    ]


def _timelines(report: StepReport) -> dict[str, Any]:
    measured_s = report.measured.initiation_interval_s
    took = "" if measured_s is None else f": {in_ms(measured_s)} ms per iteration"
    found = {f"measured{took}": report.measured}
    if report.predicted is not None and report.predicted_s is not None:
        found[f"predicted: {in_ms(report.predicted_s)} ms per iteration"] = report.predicted
    return found
