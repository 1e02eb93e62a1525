"""The page of a report: HTML, with its style, its charts and its plans within."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.resources import files
from statistics import median
from typing import Any

from swpipe.core.messages import listed
from swpipe.core.plan import PULL
from swpipe.profiler.rank_times import RankTimes
from swpipe.reporting.charts import SHOWN, exposed_chart, timeline_chart
from swpipe.reporting.loop_figures import LoopFigures, PromisedChange, capitalised, in_ms, interval
from swpipe.reporting.step_parts import BETWEEN, LOADER

_APART = 0.05  # of a step: smaller differences are not told


def page_of(report: LoopFigures) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    place = files("swpipe.reporting")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((place / "page.html").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        style=(place / "page.css").read_text(encoding="utf-8"),
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
        shown=_shown(report),
        measured=_measured(report),
        ranks=list(_ranks(report.profile.ranks)),
        memory="" if report.memory is None else capitalised(report.memory.format()),
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _under(report: LoopFigures) -> str:
    groups = len(report.plan.thread_groups)
    if report.profile.mode == "serial":
        return "plain loop"
    return f"under a plan with {groups} thread groups, {report.plan.depth} iterations in flight"


def _change(number: int, one: PromisedChange) -> dict[str, str]:
    advice, data = one.advice, base64.b64encode(one.advice.plan.encode()).decode()
    tried = "" if one.tried is None else "{} ± {} ms".format(*map(in_ms, one.tried))
    return {
        "change": capitalised(advice.change),
        "promised": f"{in_ms(advice.saved_s)} ± {in_ms(advice.spread_s)} ms",
        "tried": tried + ("" if one.kept is not False else ", not as promised"),
        "limit": advice.limit,
        "not_moved": advice.not_moved,
        "file": f"plan-{number}.json",
        "href": f"data:application/json;base64,{data}" if advice.plan else "",
    }


# ------------------------------------------------------------------------------ parts and removal


def _rows(report: LoopFigures) -> Iterator[dict[str, str]]:
    """A row per task: its part of the step, beside what its removal saves."""
    profile = report.profile
    parts: dict[str, float] = defaultdict(float)
    causes: dict[str, list[str]] = defaultdict(list)  # in the order of CAUSES, as parts are
    for part in report.parts:
        parts[part.task] += part.seconds
        causes[part.task].append(part.cause)
    tasks = [LOADER if name == PULL else name for name in profile.host_s]
    for task in dict.fromkeys([*tasks, *parts]):
        name = PULL if task == LOADER else task
        exposed = profile.raw_s.get(name)
        seconds = parts.get(task, 0.0)
        takes_s = profile.host_s.get(name, 0.0) + profile.device_s.get(name, 0.0)
        known = name in profile.host_s
        yield {
            "task": task,
            "part": in_ms(seconds),
            "share": _percent(seconds / profile.baseline_s),
            "cause": " and ".join(causes[task]) or "hidden",
            "removed": "" if exposed is None else interval(exposed, profile.spread_s[name]),
            "takes": in_ms(takes_s) if known else "",
            "note": _note(report, name, seconds),
        }


def _note(report: LoopFigures, name: str, part_s: float) -> str:
    """Why a part of the step and what its removal saves differ; "" where they do not."""
    profile = report.profile
    if name not in profile.raw_s:
        return profile.not_measured.get(name, "")
    apart_s = profile.raw_s[name] - part_s
    if abs(apart_s) <= profile.spread_s[name] + _APART * profile.baseline_s:
        return ""
    if apart_s < 0:
        return "removed, it saves less than its part: something else takes as long"
    others = profile.in_others_s.get(name)
    which = f" ({listed(others)})" if others else ""
    return f"removed, it saves more than its part: others{which} take less without it"


def _reconciled(report: LoopFigures) -> str:
    """How far the parts agree with what removing tasks saves."""
    tasks = list(report.profile.raw_s)
    noted = [row["task"] for row in _rows(report) if row["note"]]
    agree = len(tasks) - len([name for name in noted if name != BETWEEN])
    words = f"What removing a task saves agrees with its part for {agree} of {len(tasks)} tasks"
    return f"{words}; the table says why not for {listed(noted)}." if noted else f"{words}."


# ------------------------------------------------------------------------------------------ ranks


def _ranks(ranks: Sequence[RankTimes]) -> Iterator[dict[str, str]]:
    """A row for the step and one per task: the median, and the worst rank."""
    if len(ranks) < 2:
        return
    times = {"step": [of.baseline_s for of in ranks]}
    times |= {name: [of.host_s[name] for of in ranks] for name in ranks[0].host_s}
    for name, seconds in times.items():
        middle_s, worst_s = median(seconds), max(seconds)
        yield {
            "task": LOADER if name == PULL else name,
            "median": in_ms(middle_s),
            "worst": in_ms(worst_s),
            "rank": str(ranks[seconds.index(worst_s)].rank),
            "share": _percent(worst_s / middle_s) if middle_s else "",
        }


# -------------------------------------------------------------------------------------- timelines


def _timelines(report: LoopFigures) -> dict[str, Any]:
    measured_s = report.measured.initiation_interval_s
    measured = (
        "measured" if measured_s is None else f"measured: {in_ms(measured_s)} ms per iteration"
    )
    found = {measured: report.measured}
    if report.predicted is not None and report.predicted_s is not None:
        found[f"predicted: {in_ms(report.predicted_s)} ms per iteration"] = report.predicted
    return found


def _shown(report: LoopFigures) -> str:
    iterations = len({span.iteration for span in report.measured.spans})
    return f"{min(SHOWN, iterations)} steady iterations of {iterations}."


def _measured(report: LoopFigures) -> str:
    profile = report.profile
    return (
        f"Measured in {profile.num_rounds} rounds of {profile.num_measure} iterations per visit. "
        "A value with ± is a 95% interval. The ceiling is a lower bound of every plan's step, from "
        "what the tasks take, the dependences between them and the cores there are."
    )
