"""A report's page contains all that it shows, needs nothing else, and works in a browser."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from swpipe.profiler.figures import IterationTimes, RankTimes
from swpipe.profiler.other_load import OtherLoad
from swpipe.profiler.spread import Estimate
from swpipe.reporting import StepReport
from tests.profiler.results import changed, measured, tasks_of
from tests.support.browser import DARK, LIGHT, needs_chromium, seen

SECTIONS = ("verdict", "next", "parts", "exposed", "timeline", "changes", "ranks", "about")

PROBE = """
    const box = id => document.getElementById(id).getBoundingClientRect();
    const texts = id => [...document.querySelectorAll(`#${id} svg text`)].map(e => e.textContent);
    const color = of => getComputedStyle(of).getPropertyValue("background-color");
    return {
        empty: SECTIONS.filter(id => box(id).height < 20 || box(id).width < 200),
        below: box("verdict").bottom, wide: document.body.scrollWidth,
        names: texts("timeline"),
        bars: [...document.querySelectorAll("#exposed th")].map(e => e.textContent),
        widths: [...document.querySelectorAll("#exposed i")].map(e => e.offsetWidth),
        resources: performance.getEntriesByType("resource").map(e => e.name),
        paper: color(document.body),
        plan: await (await fetch(document.querySelector("#next a").href)).json(),
        total: document.querySelector("tfoot").textContent,
    };
""".replace("SECTIONS", str(list(SECTIONS)))


@pytest.fixture(scope="module")
def found(waiting: StepReport) -> StepReport:
    """The report on a loop that is bound by its input, with two invented ranks."""
    return replace(waiting, profile=replace(waiting.profile, ranks=tuple(map(_on, (0, 1)))))


def _on(rank: int) -> RankTimes:
    """Return the times of a rank: rank 1 decodes longer, and rank 0 waits for it in "train"."""
    host_s = {"decode": 0.012 + 0.004 * rank, "train": 0.007}
    zero = {"decode": 0.0, "train": 0.0}
    less = {"decode": {"train": 0.004 * (1 - rank)}}
    return RankTimes(
        rank=rank,
        iteration=IterationTimes(Estimate(0.02 + 0.005 * rank, 0.0), 0.02),
        tasks=tasks_of(raw_s=host_s, spread_s=zero, host_s=host_s, in_others_s=less),
    )


@needs_chromium
def test_the_page_works_in_a_browser(found: StepReport, tmp_path: Path) -> None:
    """There is no error, no request, and every element; the charts name the tasks."""
    value, errors = seen(found.to_html(), tmp_path, PROBE, *LIGHT, "--window-size=1100,900")
    assert errors == []
    assert "failed" not in value, value
    assert value["empty"] == []
    assert value["resources"] == []
    assert value["below"] < 400  # verdict, ceiling and next step are seen first
    assert value["wide"] <= 1100
    assert {"decode", "train"} <= {*value["names"]}
    assert value["bars"] == ["decode", "train", "log"]
    assert value["widths"] == sorted(value["widths"], reverse=True)
    assert value["widths"][-1] > 10  # log takes 1 of 20 ms
    assert value["plan"]["schedule"]["decode"] == {"thread_group": "worker 1"}
    assert "20.0" in value["total"]
    assert "100%" in value["total"]
    assert value["paper"] == "rgb(255, 255, 255)"


@needs_chromium
def test_the_page_can_be_read_in_the_dark(found: StepReport, tmp_path: Path) -> None:
    """The charts stay white in dark mode."""
    value, errors = seen(found.to_html(), tmp_path, PROBE, *DARK)
    assert errors == []
    assert _light(value["paper"]) < 60


def _light(color: str) -> float:
    """Return the lightness of a color, from 0 to 255."""
    levels = re.findall(r"\d+", color)[:3]
    return sum(map(int, levels)) / 3


def test_the_page_needs_nothing_else(found: StepReport) -> None:
    """The page contains all that it refers to, including pictures; plans can be downloaded."""
    page = found.to_html()
    markup = re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)
    refers = re.findall(r'(?:src|href)="([^"]*)"', markup)
    elsewhere = [each for each in refers if not each.startswith(("data:", "#"))]
    assert refers
    assert elsewhere == []
    assert 'download="plan-1.json"' in markup
    assert "Input-bound" in markup
    assert "Run decode on a thread of its own, one iteration ahead." in markup
    widths = re.findall(r'class="track"><i style="width:([\d.]+)%">', page)
    assert [float(width) for width in widths] == pytest.approx([60, 35, 5])
    assert "<script" not in page
    assert len(page) < 2**20
    if find_spec("matplotlib"):
        assert page.count("<svg") == 1


@pytest.fixture
def plain_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pictures by text, since they take most of the time to make a page."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("plain_charts")
def test_what_users_name_is_shown_as_it_is(found: StepReport) -> None:
    """A name is never markup; without matplotlib, charts are text."""
    assert "▌decode" in found.to_html()
    name = 'a<b>&"</script>'
    assert name not in replace(found, name=name).to_html()
    assert "a&lt;b&gt;&amp;" in replace(found, name=name).to_html()


@pytest.mark.usefixtures("plain_charts")
def test_findings_come_before_all_else(found: StepReport) -> None:
    """Each has its place and its fix."""

    class Finding:
        place, text, fix = "loop.py:7, train", ".item() waits for the device", "log every 100"

    page = replace(found, findings=(Finding(),)).to_html()
    assert page.index("loop.py:7") < page.index("Where the step goes")
    assert "log every 100" in page
    assert "What keeps work from overlapping" not in replace(found, findings=()).to_html()


@pytest.mark.usefixtures("plain_charts")
def test_a_page_says_which_rank_waits_for_which(found: StepReport) -> None:
    """It also says where the worst rank is; without other ranks there is no such section."""
    profile = replace(found.profile, collectives=("train",))
    page = replace(found, profile=profile).to_html()
    assert "Rank 0 waits for rank 1: 4.000" in page
    waiting = replace(found, profile=profile, rank=1)
    assert "ranks: 2. The others wait for rank 1." in str(waiting)
    assert "ranks: 2. No rank waits for another; rank 1 has the longest steps." in str(found)
    assert "No rank waits" in found.to_html()
    assert re.search("<th>step</th><td>22.5</td><td>25.0</td><td>1</td>", page)
    alone = replace(found, profile=replace(profile, ranks=())).to_html()
    assert 'id="ranks"' not in alone


@pytest.mark.usefixtures("plain_charts")
def test_a_busy_machine_comes_first(found: StepReport) -> None:
    """The measured times are too long then."""
    busy = replace(found, profile=measured(found.profile, other_load=OtherLoad(1.5, 2)))
    assert "The machine is busy: other processes use 1.5 of 2 cores" in busy.to_html()
    assert "Too busy to tell" in busy.to_html()
    assert str(busy).splitlines()[2:] == [
        "step: 20.0 ms",
        "Other processes are too busy to tell what bounds it and what to change.",
        "next step: Stop what else runs, or wait for it, and measure again.",
    ]
    assert busy.to_dict()["verdict"] is None
    idle = replace(found, profile=measured(found.profile, other_load=OtherLoad(0.1, 2)))
    assert "machine is busy" not in idle.to_html()


@pytest.mark.usefixtures("plain_charts")
def test_a_promise_that_was_not_kept_is_told(found: StepReport) -> None:
    """It is next to the result of the trial."""
    first = replace(found.changes[0], tried=Estimate(0.001, 0.0001))
    assert "1.00 ± 0.10 ms, not as promised" in replace(found, changes=(first,)).to_html()
    assert "not as promised" not in found.to_html()


@pytest.mark.usefixtures("plain_charts")
def test_a_difference_between_removal_and_part_is_explained(found: StepReport) -> None:
    """The row of the task says what hides it, or what it slows down."""

    def page(**raw_ms: float) -> str:
        raw_s = {name: ms / 1e3 for name, ms in raw_ms.items()}
        return replace(found, profile=changed(found.profile, raw_s=raw_s)).to_html()

    assert "removed, it saves" not in page()
    assert "something else takes as long" in page(decode=4)
    assert "others take less without it" in page(decode=18)
